"""AITER's ``dtypes.fp8``, which depends on the device."""

from __future__ import annotations

from typing import Any

from tunedgemm.integrations import fp8_of
from tunedgemm.tools.launching import torch_dtype


def __getattr__(name: str) -> Any:
    """Return ``fp8`` of the present device; see `tunedgemm.dtype.fp8_of`."""
    if name != "fp8":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return torch_dtype(fp8_of())

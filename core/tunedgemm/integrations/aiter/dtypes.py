"""AITER's ``dtypes.fp8``, which depends on the device."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return ``fp8`` of this device's matrix cores: e4m3fnuz on MI300 (gfx940 to gfx942), else e4m3fn."""
    if name != "fp8":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    from tunedgemm.device import current_device

    return torch.float8_e4m3fnuz if current_device().gfx.startswith("gfx94") else torch.float8_e4m3fn

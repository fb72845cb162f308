"""Backends over the fake libraries in ``FAKE_LT_FOLDER``, for processes that tests start."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import attrs
from tunedgemm.plugin import Device
from tunedgemm_hipblaslt import backend_of
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT, Abi
from tunedgemm_hipblaslt.library import Library, bind_functions


@functools.cache
def _load(abi: Abi) -> Library:
    [path] = Path(os.environ["FAKE_LT_FOLDER"]).rglob(f"libfake_{abi.prefix.lower()}.so")
    return bind_functions(abi, str(path))


hip = backend_of(attrs.evolve(HIPBLASLT, libtype="fakehip"), load=_load, host=Device("gfx942", 304, "amd-instinct-mi300x"))
cu = backend_of(attrs.evolve(CUBLASLT, libtype="fakecu"), load=_load, host=Device("sm_90", 132, "nvidia-h200"))

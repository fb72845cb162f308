"""Tune every GEMM of a workload over every installed backend, and dispatch each call to its winner.

The names below load what they need when they are first used: ``import tunedgemm`` itself loads neither torch nor a plugin.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "TunedGemm": "tunedgemm.dispatch",
    "gemm_a16w16": "tunedgemm.dispatch",
    "tgemm": "tunedgemm.dispatch",
    "explain": "tunedgemm.dispatch",
    "is_tuned": "tunedgemm.dispatch",
    "prewarm": "tunedgemm.dispatch",
    "reload": "tunedgemm.dispatch",
    "fingerprint": "tunedgemm.dispatch",
    "linear": "tunedgemm.integrations.linear",
    "patched": "tunedgemm.integrations.linear",
    "tune": "tunedgemm.tuner",
}

__all__ = [
    "TunedGemm",
    "explain",
    "fingerprint",
    "gemm_a16w16",
    "is_tuned",
    "linear",
    "patched",
    "prewarm",
    "reload",
    "tgemm",
    "tune",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tunedgemm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

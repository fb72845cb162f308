"""Tune every GEMM of a workload over every installed backend, and dispatch each call to its winner.

Names load what they need when they are first used: ``import tunedgemm`` itself loads neither torch nor a plugin. The menu
is `_HOME` and the public functions that the installed ops state, AITER's names among them.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__version__ = "0.1.0"

_INSTANCE, _GRAPHS = "tunedgemm.dispatch.tuned_gemm", "tunedgemm.integrations.graph_ops"
_HOME = {
    **dict.fromkeys(("TunedGemm", "call", "dispatcher", "reload", "tgemm"), _INSTANCE),
    **dict.fromkeys(("explain", "fingerprint", "is_tuned"), "tunedgemm.dispatch.explain"),
    **dict.fromkeys(("prewarm", "unbound"), "tunedgemm.dispatch.prewarm"),
    "convert": "tunedgemm.integrations.convert",
    **dict.fromkeys(("ShuffledWeight", "as_shuffled", "shuffle_weight", "unshuffle_weight"), "tunedgemm.ops.formats.shuffle"),
    **dict.fromkeys(
        (
            "as_fp4", "dequant_blocks", "dequant_fp4", "dequant_rows", "per_1x128_quant", "per_1x32_f4_quant", "per_block_quant",
            "per_tensor_quant", "pertoken_quant", "shuffle_scale", "unshuffle_scale",
        ),
        "tunedgemm.ops.formats.quant",
    ),
    **dict.fromkeys(("transposed_scale", "untransposed_scale"), "tunedgemm.ops.scaled_blocks"),
    **dict.fromkeys(("ActivationType", "QuantType"), "tunedgemm.ops.fmoe"),
    "linear": "tunedgemm.integrations.linear",
    **dict.fromkeys(("patch", "patched", "unpatch"), "tunedgemm.integrations.patching"),
    "tune": "tunedgemm.tuner",
}  # fmt: skip


def _functions() -> Any:
    """The ops' public functions by name; torch is not loaded for it."""
    return importlib.import_module("tunedgemm.ops").functions()


def _instance() -> Any:
    """The module of the default instance; its functions may be compiled, so what stands for them in graphs is loaded, too."""
    importlib.import_module(_GRAPHS)
    return importlib.import_module(_INSTANCE)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if _HOME.get(name) == _INSTANCE:
        value = getattr(_instance(), name)
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    # A module of ours is asked for as an attribute before it is imported; ops need not be known for that.
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is None and name in _functions():
        value = getattr(_instance().tgemm, name)
    else:
        raise AttributeError(f"module 'tunedgemm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_HOME, *_functions(), "__version__"})

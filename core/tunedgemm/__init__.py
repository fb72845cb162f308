"""Tune every GEMM of a workload over every installed backend, and dispatch each call to its winner.

Names are loaded at first use: ``import tunedgemm`` imports neither torch nor a plugin. The public
functions of ops have AITER's names.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from tunedgemm.version import __version__ as __version__

if TYPE_CHECKING:  # what `__getattr__` returns, for type checkers and editors
    from tunedgemm.dispatch.counters import metrics as metrics
    from tunedgemm.dispatch.explain import explain as explain
    from tunedgemm.dispatch.explain import fingerprint as fingerprint
    from tunedgemm.dispatch.explain import is_tuned as is_tuned
    from tunedgemm.dispatch.prewarm import prewarm as prewarm
    from tunedgemm.dispatch.prewarm import unbound as unbound
    from tunedgemm.dispatch.tuned_gemm import TunedGemm as TunedGemm
    from tunedgemm.dispatch.tuned_gemm import call as call
    from tunedgemm.dispatch.tuned_gemm import dispatcher as dispatcher
    from tunedgemm.dispatch.tuned_gemm import reload as reload
    from tunedgemm.dispatch.tuned_gemm import set_batch_invariant as set_batch_invariant
    from tunedgemm.dispatch.tuned_gemm import tgemm as tgemm
    from tunedgemm.integrations.conversion import convert as convert
    from tunedgemm.integrations.conversion import refresh as refresh
    from tunedgemm.integrations.linear import linear as linear
    from tunedgemm.integrations.patching import patch as patch
    from tunedgemm.integrations.patching import patched as patched
    from tunedgemm.integrations.patching import unpatch as unpatch
    from tunedgemm.ops.a4w4_blockscale import gemm_a4w4 as gemm_a4w4
    from tunedgemm.ops.a8w8 import gemm_a8w8 as gemm_a8w8
    from tunedgemm.ops.a8w8 import gemm_a8w8_bpreshuffle as gemm_a8w8_bpreshuffle
    from tunedgemm.ops.a8w8_blockscale import gemm_a8w8_blockscale as gemm_a8w8_blockscale
    from tunedgemm.ops.a8w8_blockscale import gemm_a8w8_blockscale_bpreshuffle as gemm_a8w8_blockscale_bpreshuffle
    from tunedgemm.ops.a16w4_blockscale import gemm_a16wfp4 as gemm_a16wfp4
    from tunedgemm.ops.a16w16 import gemm_a16w16 as gemm_a16w16
    from tunedgemm.ops.a16wn import gemm_a16wn as gemm_a16wn
    from tunedgemm.ops.batched import batched_gemm_a8w8 as batched_gemm_a8w8
    from tunedgemm.ops.batched import batched_gemm_bf16 as batched_gemm_bf16
    from tunedgemm.ops.fmoe import ActivationType as ActivationType
    from tunedgemm.ops.fmoe import QuantType as QuantType
    from tunedgemm.ops.formats.mxfp4 import as_fp4 as as_fp4
    from tunedgemm.ops.formats.mxfp4 import dequant_fp4 as dequant_fp4
    from tunedgemm.ops.formats.mxfp4 import per_1x32_f4_quant as per_1x32_f4_quant
    from tunedgemm.ops.formats.mxfp8 import per_1x32_f8_quant as per_1x32_f8_quant
    from tunedgemm.ops.formats.nvfp4 import per_1x16_f4_quant as per_1x16_f4_quant
    from tunedgemm.ops.formats.quant import dequant_blocks as dequant_blocks
    from tunedgemm.ops.formats.quant import dequant_rows as dequant_rows
    from tunedgemm.ops.formats.quant import per_1x128_quant as per_1x128_quant
    from tunedgemm.ops.formats.quant import per_block_quant as per_block_quant
    from tunedgemm.ops.formats.quant import per_tensor_quant as per_tensor_quant
    from tunedgemm.ops.formats.quant import pertoken_quant as pertoken_quant
    from tunedgemm.ops.formats.scales import ShuffledScale as ShuffledScale
    from tunedgemm.ops.formats.scales import as_shuffled_scale as as_shuffled_scale
    from tunedgemm.ops.formats.scales import shuffle_scale as shuffle_scale
    from tunedgemm.ops.formats.scales import swizzle_scale as swizzle_scale
    from tunedgemm.ops.formats.scales import transposed_scale as transposed_scale
    from tunedgemm.ops.formats.scales import unshuffle_scale as unshuffle_scale
    from tunedgemm.ops.formats.scales import unswizzle_scale as unswizzle_scale
    from tunedgemm.ops.formats.scales import untransposed_scale as untransposed_scale
    from tunedgemm.ops.formats.shuffle import ShuffledWeight as ShuffledWeight
    from tunedgemm.ops.formats.shuffle import as_shuffled as as_shuffled
    from tunedgemm.ops.formats.shuffle import shuffle_weight as shuffle_weight
    from tunedgemm.ops.formats.shuffle import unshuffle_weight as unshuffle_weight
    from tunedgemm.ops.microscaled import gemm_a4w4_nvfp4 as gemm_a4w4_nvfp4
    from tunedgemm.ops.microscaled import gemm_a8w8_mxfp8 as gemm_a8w8_mxfp8
    from tunedgemm.ops.moe_entry import fused_moe as fused_moe
    from tunedgemm.tuner import tune as tune

    gemm_a8w8_CK, gemm_a8w8_ASM = gemm_a8w8, gemm_a8w8_bpreshuffle
    batched_gemm_a8w8_CK, batched_gemm_bf16_CK = batched_gemm_a8w8, batched_gemm_bf16

_INSTANCE, _GRAPHS = "tunedgemm.dispatch.tuned_gemm", "tunedgemm.integrations.graph_ops"
_EXPOSITION = "tunedgemm.integrations.exposition"
_HOME = {
    **dict.fromkeys(("TunedGemm", "call", "dispatcher", "reload", "set_batch_invariant", "tgemm"), _INSTANCE),
    "metrics": "tunedgemm.dispatch.counters",
    **dict.fromkeys(("explain", "fingerprint", "is_tuned"), "tunedgemm.dispatch.explain"),
    **dict.fromkeys(("prewarm", "unbound"), "tunedgemm.dispatch.prewarm"),
    **dict.fromkeys(("convert", "refresh"), "tunedgemm.integrations.conversion"),
    **dict.fromkeys(("ShuffledWeight", "as_shuffled", "shuffle_weight", "unshuffle_weight"), "tunedgemm.ops.formats.shuffle"),
    **dict.fromkeys(("as_fp4", "dequant_fp4", "per_1x32_f4_quant"), "tunedgemm.ops.formats.mxfp4"),
    "per_1x32_f8_quant": "tunedgemm.ops.formats.mxfp8",
    "per_1x16_f4_quant": "tunedgemm.ops.formats.nvfp4",
    **dict.fromkeys(
        ("dequant_blocks", "dequant_rows", "per_1x128_quant", "per_block_quant", "per_tensor_quant", "pertoken_quant"),
        "tunedgemm.ops.formats.quant",
    ),
    **dict.fromkeys(
        (
            "ShuffledScale", "as_shuffled_scale", "shuffle_scale", "swizzle_scale",
            "transposed_scale", "unshuffle_scale", "unswizzle_scale", "untransposed_scale",
        ),
        "tunedgemm.ops.formats.scales",
    ),
    **dict.fromkeys(("ActivationType", "QuantType"), "tunedgemm.ops.fmoe"),
    "linear": "tunedgemm.integrations.linear",
    **dict.fromkeys(("patch", "patched", "unpatch"), "tunedgemm.integrations.patching"),
    "tune": "tunedgemm.tuner",
}  # fmt: skip


def _functions() -> Any:
    """Return the ops' public functions by name, without loading torch."""
    return importlib.import_module("tunedgemm.ops").functions()


def _instance() -> Any:
    """Return the default instance's module, after registering its custom ops for graphs, and counters."""
    importlib.import_module(_GRAPHS)
    importlib.import_module(_EXPOSITION).expose_counters()
    return importlib.import_module(_INSTANCE)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if _HOME.get(name) == _INSTANCE:
        value = getattr(_instance(), name)
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    # Python looks up a submodule as an attribute before it imports it; that needs no ops.
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is None and name in _functions():
        value = getattr(_instance().tgemm, name)
    else:
        raise AttributeError(f"module 'tunedgemm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_HOME, *_functions(), "__version__"})

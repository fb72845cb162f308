"""AITER's names about GEMM that are not served, and why: data for errors and for the migration page."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from tunedgemm_aiter_names.names import NAME

#: What AITER defines for itself: fakes for its tracing, implementations below its operators.
INTERNAL = ("gen_*", "*_fake", "*_fake_tensor", "*_fake_tensors", "*_", "*_custom_op", "*_custom_op_core", "aiter_lib", "this_dir")

_TABLE = "`tunedgemm explain` names the row of a shape"
_TUNER = "`tunedgemm tune`"
_GFX1250 = "formats of gfx1250 alone"
_MOE = "stages and sorting of one kernel: `fused_moe` has them inside"
_BUILD = "AITER's builds: a plugin compiles what a row needs"
_REFERENCE = "a reference of AITER's tests"
_QUANT = "writes the layouts of one kernel; `get_hip_quant` returns a function of tensors"
#: Served functions whose arguments are not AITER's -> how they differ.
DIFFERENT: Mapping[str, str] = {
    "fused_moe": "the arguments behind `splitk` by name",
}
#: ``module:name`` as a pattern -> the reason; the first that matches counts.
REASONS: Mapping[str, str] = {
    "aiter.ops.flydsl*:*": "FlyDSL's kernels: rows of tables run them by an installed AITER",
    "aiter.ops.opus*:*": "opus's kernels: rows of tables run them by an installed AITER",
    "aiter.ops.deepgemm:*": "grouped products: without an op",
    "aiter.aot*:*": _BUILD,
    "aiter.utility.pretune:*": _BUILD,
    "aiter.utility.base_tuner:*": _TUNER,
    "aiter.utility.mp_tuner:*": _TUNER,
    "aiter.jit*:*": _BUILD,
    "*:*_tune": _TUNER,
    "*:get_*GEMM*config*": _TABLE,
    "*:get_CKBatchedGEMM_config": _TABLE,
    "*:lookup_mxscale_bmm_config": _TABLE,
    "*:compute_*SplitK": _TABLE,
    "*:save_shapes": "`AITER_TUNE_GEMM=1` writes them",
    "aiter.tuned_gemm:*": "internal to the look-up",
    "*:get_zero_bias_buf*": "a workspace of one kernel",
    "*:get_semaphore_workspace": "a workspace of one kernel",
    "*:ASM_SPLITK_MAX_GRID": "a workspace of one kernel",
    "*:gemm_a8w8_mxfp8*": _GFX1250,
    "*:gemm_a8w4_mxfp8": _GFX1250,
    "*:gemm_mxfp4_asm": _GFX1250,
    "*:gemm_nvfp4_asm": _GFX1250,
    "*:gemm_a4w4o?": _GFX1250,
    "*:*mxfp8_out_scale*": _GFX1250,
    "*:MXFP8_OUT_SCALE_BLOCK": _GFX1250,
    "*:flatmm_a8w8_blockscale_*": "a kernel with a weight order of its kind alone",
    "*:gfx950_a8w8_blockscale_ASM": "calls a function that AITER lacks",
    "*:batched_gemm_a8w8_mxscale": "batched products with e8m0 scales: without an op",
    "aiter.ops.gradlib:rocb_*": "rocBLAS: a `rocblas` row runs torch's own product",
    "aiter.ops.gradlib:getHipblasltKernelName": "`tunedgemm explain` names the solution",
    "aiter.ops.triton.gemm*:set_use_gemm_splitk_bf16": "K is split by the row in use",
    "aiter.ops.triton.gemm*:get_splitk": "K is split by the row in use",
    "*:fused_gemm_a16w16_quant_x": "quantises to mxfp8, a format without an op",
    "aiter.fused_moe*:torch_moe*": _REFERENCE,
    "aiter.fused_moe:swiglu": _REFERENCE,
    "aiter.fused_moe:situv2": _REFERENCE,
    "aiter.ops.triton.moe*:*": _MOE,
    "aiter.ops.triton.quant*:*": _QUANT,
    "aiter.ops.triton.utils.gemm_config_utils:*": _TABLE,
    "aiter.ops.triton.utils.shuffle:*": "orders of one kernel; see `aiter.ops.shuffle`",
    "aiter*moe*:*": _MOE,
    "*:*moe*sort*": _MOE,
    "aiter.int4_utils:*": "int4: `aiter.ops.quant` has what `fused_moe` takes",
    "*:*int4*": "int4: `aiter.ops.quant` has what `fused_moe` takes",
    "*:*_scaled_quant*": _QUANT,
    "*:quant_mxfp4*": _QUANT,
    "aiter.ops.quant:rotate_*": "outside GEMM",
    "aiter.ops.quant:*rope*": "outside GEMM",
    "aiter.ops.quant:get_torch_act": "outside GEMM",
    "aiter.ops.quant:*": _QUANT,
    "aiter.ops.shuffle:*": "orders that no kernel here reads",
    "aiter.utility.dtypes:torch_to_aiter*": "AITER's own tensor type",
    "aiter.utility.aiter_types:*": "AITER's own tensor type",
    "aiter.utility.fp4_utils:*": "steps of `per_1x32_f4_quant` and `dequant_fp4`",
    "aiter.utility.mx_types:*": "AITER's enums of rounding; `per_1x32_f4_quant` takes their numbers",
    "aiter.utility.dtypes:*": "parses AITER's command lines",
    "aiter.ops.enum:*": "outside GEMM",
}


def is_internal(name: str) -> bool:
    """Tell whether AITER defines a name for itself."""
    return any(fnmatchcase(name, pattern) for pattern in INTERNAL)


def matching(module: str, name: str) -> str:
    """Return the pattern of `REASONS` that holds for a name of a module; "" where it is outside GEMM.

    AITER's top-level module repeats names of others, so that there the name alone decides.
    """
    for pattern in REASONS:
        home, _, names = pattern.partition(":")
        if fnmatchcase(name, names) and (fnmatchcase(module, home) if module != NAME else names != "*"):
            return pattern
    return ""


def reason(module: str, name: str) -> str:
    """Return why a name of a module is not served; "" where it is outside GEMM."""
    return REASONS.get(matching(module, name), "")

"""AITER's modules and names, and where each is found here: data that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping

NAME = "aiter"
_GEMM, _QUANTISE, _DTYPE, _DEVICE, _BASIC, _BATCH, _FUSE, _MOE, _EXPERTS = (
    f"tunedgemm_aiter_names.{module}"
    for module in (
        *("gemm", "quant", "dtypes", "device", "triton_basic", "triton_batched", "triton_fused"),
        *("moe", "moe_entries"),
    )
)
#: Stands for the installed plugins: a name is that of the first whose package has it.
PLUGINS = "plugins"


def _alias(home: str, *names: str, **others: str) -> Mapping[str, tuple[str, str]]:
    """Map a name here to (module, name there); *others* have another spelling there."""
    return {**{name: (home, name) for name in names}, **{name: (home, there) for name, there in others.items()}}


_BACKENDS_A8W8 = (
    *("gemm_a8w8_ck", "gemm_a8w8_asm", "gemm_a8w8_bpreshuffle_ck", "gemm_a8w8_bpreshuffle_cktile", "gemm_a8w8_bpreshuffle_flydsl"),
    *("gemm_a8w8_blockscale_ck", "gemm_a8w8_blockscale_cktile", "gemm_a8w8_blockscale_bpreshuffle_ck"),
    *("gemm_a8w8_blockscale_bpreshuffle_cktile", "gemm_a8w8_blockscale_bpreshuffle_asm"),
)
_A8W8 = {
    **_alias("tunedgemm", "gemm_a8w8", "gemm_a8w8_CK"),
    **_alias(_GEMM, "gemm_a8w8_bpreshuffle", "gemm_a8w8_blockscale", "gemm_a8w8_blockscale_bpreshuffle", *_BACKENDS_A8W8),
    **_alias(_GEMM, gemm_a8w8_ASM="gemm_a8w8_bpreshuffle"),
}
_BATCHED = {bits: {**_alias("tunedgemm", f"batched_gemm_{bits}_CK"), **_alias(_GEMM, f"batched_gemm_{bits}")} for bits in ("bf16", "a8w8")}
_TUNED = {**_alias("tunedgemm", "TunedGemm", "tgemm"), **_alias("tunedgemm", gemm_a16w16="tgemm.gemm_AB")}
_BY_BACKEND = dict.fromkeys(
    ("asm_gemm", "flydsl_gemm", "hipb_gemm", "opus_gemm", "skinny_gemm", "torch_gemm", "triton_gemm"), "gemm_by_table"
)
_A16W16 = _alias(_GEMM, "gemm_a16w16_asm")
_A4W4 = _alias(_GEMM, "gemm_a4w4", "gemm_a4w4_asm", "gemm_a4w4_blockscale")
_SKINNY = _alias(_GEMM, "LLMM1", "wvSpltK", "wvSplitKQ", wv_splitk_small_fp16_bf16="wvSpltK")
_ENUMS = _alias("tunedgemm", "ActivationType", "QuantType")
_INT4 = "tunedgemm.integrations"
_ORDER = "tunedgemm_aiter_names.shuffle"
_SHUFFLE = {
    **_alias("tunedgemm", "shuffle_weight"),
    **_alias(_ORDER, "moe_shuffle_scale", "moe_shuffle_weight", "shuffle_scale", "shuffle_scale_a16w4"),
    **_alias(_ORDER, "shuffle_weight_NK", "shuffle_weight_a16w4"),
    **_alias(_INT4, "pack_int8_to_packed_int4", "shuffle_scale_for_int4"),
}
_QUANT = {
    **_alias("tunedgemm", "per_tensor_quant", "pertoken_quant"),
    **_alias(_QUANTISE, "per_1x32_f4_quant", "quant_mxfp4_hip"),
    **_alias(_QUANTISE, "get_torch_quant", get_hip_quant="get_quant", get_triton_quant="get_quant"),
    **_alias(_QUANTISE, *(f"per_{kind}_quant_hip" for kind in ("token", "tensor", "group", "1x32_f4"))),
    **_alias(_QUANTISE, **{f"per_{kind}_quant_triton": f"per_{kind}_quant_hip" for kind in ("token", "tensor", "1x32_f4")}),
    **_alias(
        _QUANTISE,
        "static_per_tensor_quant",
        "dynamic_per_tensor_quant",
        "dynamic_per_token_scaled_quant",
        "smoothquant_fwd",
    ),
    **_alias(_QUANTISE, "per_1x32_f8_scale_f8_quant"),
    **_alias(_INT4, "per_1x32_i4_quant"),
}
_AROUND_MOE = _alias(_MOE, "BLOCK_SIZE_M", "get_block_size_M", "get_inter_dim", "nextPow2")
_DTYPES = {
    **_alias("torch", bf16="bfloat16", fp16="float16", fp32="float32", i4x2="int4", fp4x2="float4_e2m1fn_x2", fp8_e8m0="float8_e8m0fnu"),
    **_alias("torch", **{f"{sign}{bits}": f"{word}{bits}" for sign, word in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)}),
    **_alias(_DTYPE, "fp8"),
}
_TRITON_QUANT = _alias(
    *(
        _QUANTISE,
        "static_per_tensor_quant_fp8_i8",
        "dynamic_per_tensor_quant_fp8_i8",
        "dynamic_per_token_quant_fp8_i8",
        "dynamic_mxfp4_quant",
    )
)
_GRADLIB = _alias(PLUGINS, "hipb_create_extension", "hipb_destroy_extension", "hipb_findallsols", "hipb_mm")
_LOGGER = _alias(_DEVICE, "logger")
_CHIP = {**_LOGGER, **_alias(_DEVICE, "get_cu_num", "get_device_name", "get_gfx", "get_gfx_list", get_gfx_runtime="get_gfx")}


def _names(folder: str, home: str, modules: Mapping[str, tuple[str, ...]]) -> dict[str, Mapping[str, tuple[str, str]]]:
    """Map modules of a folder of Triton's products, and their older paths without it, to names of *home*."""
    paths = {f"aiter.ops.triton.{place}{module}": module for place in (f"gemm.{folder}.", "") for module in modules}
    return {path: _alias(home, *modules[module]) for path, module in paths.items()}


def _itself(*names: str) -> dict[str, tuple[str, ...]]:
    """Map modules to one function of the same name."""
    return {name: (name,) for name in names}


_A8W8_GROUPS = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
_FP4 = "gemm_afp4wfp4"
_TRITON = {
    **_names("basic", _BASIC, {
        **_itself("gemm_a16w16", "gemm_a16w16_atomic", "gemm_a16w16_gated", "gemm_a8w8", "gemm_a8w8_per_token_scale", "gemm_a8wfp4"),
        **{name: (name, f"{name}_preshuffle")
           for name in ("gemm_a8w8_blockscale", "gemm_a16w8_blockscale", "gemm_a16wfp4", "gemm_afp8wfp8")},
        _FP4: (_FP4, *(f"{_FP4}_{rest}" for rest in ("preshuffle", "preshuffled_scales", "preshuffled_weight_scales"))),
        f"{_FP4}_pre_quant_atomic": (f"{_FP4}_pre_quant",),
    }),
    **_names("batched", _BATCH, _itself(
        *("batched_gemm_bf16", "batched_gemm_a8w8", "batched_gemm_a16wfp4", "batched_gemm_afp4wfp4"),
        *("batched_gemm_afp4wfp4_pre_quant", _A8W8_GROUPS),
    )),
    **_names("fused", _FUSE, {
        **_itself("fused_gemm_a8w8_blockscale_a16w16", "fused_gemm_afp4wfp4_a16w16", "fused_gemm_a8w8_blockscale_mul_add"),
        **{name: (name, name.replace("_split", "_preshuffle_split"))
           for name in ("fused_gemm_a8w8_blockscale_split_cat", "fused_gemm_afp4wfp4_split_cat")},
        "fused_gemm_afp4wfp4_mul_add": ("fused_gemm_afp4wfp4_mul_add", "fused_gemm_afp4wfp4_preshuffle_add_mul"),
    }),
    **_names("feed_forward", _FUSE, {
        "ff_a16w16": ("ff_a16w16_nogate", "ff_a16w16_gated"),
        **_itself("ff_a16w16_fused_gated", "ff_a16w16_fused_ungated"),
    }),
}  # fmt: skip
#: The older form of some, below a compiler's name.
_GLUON = {
    f"aiter.ops.triton.gluon.{module}": _alias(_BASIC, *found)
    for module, found in {"gemm_a8w8": ("gemm_a8w8", "gemm_a8w8_preshuffle"), **_itself("gemm_a8w8_blockscale", _FP4)}.items()
}
#: Served names: module -> name -> (module, name there).
SERVED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "aiter": {
        **_TUNED, **_A16W16, **_A8W8, **_A4W4, **_BATCHED["bf16"], **_BATCHED["a8w8"], **_SKINNY, **_GRADLIB,
        **_ENUMS, **_SHUFFLE, **_QUANT, **_LOGGER, **_alias(_DEVICE, "get_gfx"),
    },
    "aiter.tuned_gemm": {**_TUNED, **_LOGGER, **_alias(_GEMM, **_BY_BACKEND)},
    "aiter.fused_moe": {
        **_alias(_EXPERTS, "fused_moe"), **_AROUND_MOE,
        **_alias(_MOE, "GateMode", "MOEMetadata", "fused_topk", "get_2stage_cfgs", "get_padded_M", "get_topk_valid_mask", "moe_sorting"),
    },
    "aiter.fused_moe_bf16_asm": {
        **_alias(_EXPERTS, "asm_moe", "asm_moe_tkw1", "ck_moe_2stages", "get_block_size"),
        **_alias(_MOE, "BLOCK_SIZE_M", "fused_topk", "moe_sorting_ck"),
    },
    "aiter.fused_moe_dp_shared_expert": {
        **_alias(_EXPERTS, "fused_moe_dp_share_expert", "get_dp_shared_expert_token_range"), **_AROUND_MOE,
    },
    "aiter.jit": {},
    "aiter.jit.core": {**_LOGGER, **_alias(_DEVICE, "AITER_CONFIGS", "AITER_LOG_TUNED_CONFIG")},
    "aiter.jit.utils": {},
    "aiter.jit.utils.chip_info": _CHIP,
    "aiter.ops": {},
    "aiter.ops.batched_gemm_op_a8w8": _BATCHED["a8w8"],
    "aiter.ops.batched_gemm_op_bf16": _BATCHED["bf16"],
    "aiter.ops.custom": _SKINNY,
    "aiter.ops.enum": _ENUMS,
    "aiter.ops.flydsl": {},
    "aiter.ops.flydsl.moe_common": _alias(_MOE, "GateMode"),
    "aiter.ops.flydsl.utils": _alias(_MOE, "is_flydsl_available"),
    "aiter.ops.gemm_op_a16w16": _A16W16,
    "aiter.ops.gemm_op_a4w4": _A4W4,
    "aiter.ops.gemm_op_a8w8": _A8W8,
    "aiter.ops.gemm_op_common": _alias(_DEVICE, "get_padded_m"),
    "aiter.ops.gradlib": _GRADLIB,
    "aiter.ops.quant": _QUANT,
    "aiter.ops.shuffle": _SHUFFLE,
    "aiter.ops.triton": {},
    "aiter.ops.triton.gemm": {},
    **{f"aiter.ops.triton.gemm.{folder}": {} for folder in ("basic", "batched", "feed_forward", "fused")},
    "aiter.ops.triton.gluon": {},
    "aiter.ops.triton.quant": _TRITON_QUANT,
    "aiter.ops.triton.quant.quant": _TRITON_QUANT,
    **_TRITON,
    **_GLUON,
    "aiter.utility": {},
    "aiter.utility.dtypes": _DTYPES,
    "aiter.utility.fp4_utils": {
        **_alias(_ORDER, "shuffle_scale", "e8m0_shuffle"), **_alias(_QUANTISE, dynamic_mxfp4_quant="mxfp4_by_even_scales"),
    },
}  # fmt: skip
#: Modules with another name in AITER's top-level namespace.
ALIASES = {"dtypes": "aiter.utility.dtypes"}

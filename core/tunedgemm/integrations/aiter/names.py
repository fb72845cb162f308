"""AITER's modules and names, and where each is found here: data that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping

NAME = "aiter"
_GEMM, _QUANTISE, _DTYPE = (f"tunedgemm.integrations.aiter.{module}" for module in ("gemm", "quant", "dtypes"))


def _alias(home: str, *names: str, **others: str) -> Mapping[str, tuple[str, str]]:
    """Map a name here to (module, name there); *others* have another spelling there."""
    return {**{name: (home, name) for name in names}, **{name: (home, there) for name, there in others.items()}}


_A8W8 = {
    **_alias("tunedgemm", "gemm_a8w8", "gemm_a8w8_CK", "gemm_a8w8_blockscale"),
    **_alias(_GEMM, "gemm_a8w8_bpreshuffle", "gemm_a8w8_blockscale_bpreshuffle", gemm_a8w8_ASM="gemm_a8w8_bpreshuffle"),
}
_BATCHED = {bits: _alias("tunedgemm", f"batched_gemm_{bits}_CK") for bits in ("bf16", "a8w8")}
_TUNED = _alias("tunedgemm", "TunedGemm", "gemm_a16w16", "tgemm")
_A4W4 = _alias("tunedgemm", "gemm_a4w4")
_ENUMS = _alias("tunedgemm", "ActivationType", "QuantType")
_SHUFFLE = _alias("tunedgemm", "shuffle_scale", "shuffle_weight")
_QUANT = {
    **_alias("tunedgemm", "per_1x32_f4_quant", "per_tensor_quant", "pertoken_quant"),
    **_alias(_QUANTISE, "get_torch_quant", get_hip_quant="get_quant", get_triton_quant="get_quant"),
}
_DTYPES = {
    **_alias("torch", bf16="bfloat16", fp16="float16", fp32="float32", fp4x2="float4_e2m1fn_x2", fp8_e8m0="float8_e8m0fnu"),
    **_alias("torch", **{f"{sign}{bits}": f"{word}{bits}" for sign, word in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)}),
}
#: Served names: module -> name -> (module, name there).
SERVED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "aiter": {**_TUNED, **_A8W8, **_A4W4, **_BATCHED["bf16"], **_BATCHED["a8w8"], **_ENUMS, **_SHUFFLE, **_QUANT},
    "aiter.tuned_gemm": _TUNED,
    "aiter.fused_moe": _alias("tunedgemm", "fused_moe"),
    "aiter.ops": {},
    "aiter.ops.batched_gemm_op_a8w8": _BATCHED["a8w8"],
    "aiter.ops.batched_gemm_op_bf16": _BATCHED["bf16"],
    "aiter.ops.enum": _ENUMS,
    "aiter.ops.gemm_op_a4w4": _A4W4,
    "aiter.ops.gemm_op_a8w8": _A8W8,
    "aiter.ops.quant": _QUANT,
    "aiter.ops.shuffle": _SHUFFLE,
    "aiter.ops.triton": {},
    "aiter.ops.triton.gemm_a16w16": _alias(_GEMM, gemm_a16w16="triton_gemm_a16w16"),
    "aiter.utility": {},
    "aiter.utility.dtypes": {**_DTYPES, **_alias(_DTYPE, "fp8")},
    "aiter.utility.fp4_utils": _alias("tunedgemm", "shuffle_scale", e8m0_shuffle="shuffle_scale"),
}
#: Modules with another name in AITER's top-level namespace.
ALIASES = {"dtypes": "aiter.utility.dtypes"}

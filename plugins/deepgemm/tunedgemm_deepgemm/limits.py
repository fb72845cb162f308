"""Check which shapes DeepGEMM's kernels support; absent devices included."""

from __future__ import annotations

from tunedgemm.plugin import Device, Platform, Shape
from tunedgemm.tools.launching import ARCHITECTURES, dtype_bits, unusual_experts

#: Op -> dtype of both operands, kind of scales, outputs.
OPS = {
    "a16w16": ("bf16", "none", ("bf16", "fp32")),
    "a8w8_blockscale": ("fp8_e4m3fn", "block", ("bf16",)),
    "fmoe": ("", "none", ("bf16", "fp16")),
}
#: Supported weight dtype, quantisation and activation of experts.
_EXPERT_WORDS = {"q_dtype_w": "fp8_e4m3fn", "q_type": "per_1x128", "act": "silu"}
#: Most experts and pairs of a token: one program counts all of them, or reads all of a token's.
_MOST_EXPERTS, _MOST_TOPK = 1024, 32
#: Architectures: those of wgmma. On sm_100 the library traps at scales other than powers of two.
GFX = ARCHITECTURES.having(matrix="wgmma")
_NEEDS = ("deep_gemm 2.4 or newer, or a vLLM with it", "nvcc of CUDA 12.3 or newer")
PLATFORMS = (
    Platform(GFX, needs=_NEEDS, ran=("H100",), ops=("a16w16", "a8w8_blockscale")),
    Platform(GFX, needs=(*_NEEDS, "Triton"), ran=("H100",), ops=("fmoe",)),
)
#: Rows of an operand in memory are multiples of these bytes, a limit of TMA.
ROW_BYTES = 16
#: Elements of K per scale.
BLOCK = 128


def unsupported(shape: Shape, device: Device) -> str:
    """Return why a shape exceeds the static limits of the library's kernels, or an empty text."""
    if device.gfx not in GFX:
        return f"architecture must be {', '.join(GFX)} (got {device.gfx})"
    dtype, scale, outputs = OPS[shape.op]
    if shape.op == "fmoe":
        return _experts_fault(shape)
    if shape.dtype != dtype:
        return f"{shape.op}: operands must be {dtype} (got {shape.dtype})"
    if shape.scale != scale:
        return f"{shape.op}: scales must be {scale} (got {shape.scale})"
    if shape.outdtype not in outputs:
        return f"{shape.op}: output must be {' or '.join(outputs)} (got {shape.outdtype})"
    if shape.bias:
        return f"{shape.op}: has no bias (got {shape.bias_dtype})"
    if shape.layout != "row":
        return f"weight layout must be row (got {shape.layout!r})"
    for size, name, bits in ((shape.k, "K", dtype_bits(dtype)), (shape.n, "N", dtype_bits(shape.outdtype))):
        step = 8 * ROW_BYTES // bits
        if size % step:
            return f"{shape.op}: {name} must be a multiple of {step} (got {size})"
    return ""


def _experts_fault(shape: Shape) -> str:
    if unusual := unusual_experts(shape):
        return f"fmoe has no {unusual}"
    words = tuple(str(shape[name]) for name in _EXPERT_WORDS)
    if words != tuple(_EXPERT_WORDS.values()) or not shape["g1u1"]:
        gate = "gated" if shape["g1u1"] else "not gated"
        return f"fmoe must have fp8_e4m3fn per_1x128 with a gate and silu (got {', '.join(words)}, {gate})"
    if shape.layout != "row":
        return f"weight layout must be row (got {shape.layout!r})"
    for name, most in (("expert", _MOST_EXPERTS), ("topk", _MOST_TOPK)):
        if not 1 <= int(shape[name]) <= most:
            return f"fmoe: {name} must be in 1..{most} (got {shape[name]})"
    if shape.n % ROW_BYTES or shape.k % ROW_BYTES:
        return f"fmoe: model_dim and inter_dim must be multiples of {ROW_BYTES} (got {shape.n} and {shape.k})"
    return ""

"""Static limits: what each library multiplies, answered without it and without a device."""

from __future__ import annotations

from tunedgemm.plugin import Device, Shape, Unsupported
from tunedgemm.tools import dtype_bits

from tunedgemm_hipblaslt.abi import Abi
from tunedgemm_hipblaslt.problem import quantised

_OPS = ("a16w16", "a8w8", "batched_bf16", "batched_a8w8")
#: Those of one library alone: it reads shuffled weights, or takes scales of blocks.
_OWN_OPS = {"hipblasLt": ("a8w8_bpreshuffle",), "cublasLt": ("a8w8_blockscale",)}

FLOATS = ("bf16", "fp16", "fp32")
#: Alignment of the rows of 8-bit operands in bytes, which is that of K.
_BYTES = 16

#: Compute capabilities whose tensor cores multiply fp8.
_FP8 = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
#: Scales by row and by block came to cuBLASLt for these (CUDA 12.9; the kernels of Blackwell want others than float32).
_SCALED = ("sm_90",)
#: AMD's fp8: the older kind on MI300, the standard one from MI350 and RDNA 4 on.
_AMD_FP8 = {"gfx942": "fp8_e4m3fnuz", "gfx950": "fp8_e4m3fn", "gfx1200": "fp8_e4m3fn", "gfx1201": "fp8_e4m3fn"}
#: Where hipBLASLt reads AITER's shuffled weights (ROCm 6.4 on).
_SHUFFLED = ("gfx942", "gfx950")
LAYOUT = "aiter16x16"


def ops_of(abi: Abi) -> tuple[str, ...]:
    """The ops that a library has something of."""
    return _OPS + _OWN_OPS[abi.prefix]


def supports(shape: Shape, device: Device, abi: Abi) -> bool | Unsupported:
    """True, or why the library has no product for the shape on the architecture."""
    amd = abi.kind == "amd"
    if device.kind != abi.kind:
        return Unsupported(f"{abi.libtype} is {'AMD' if amd else 'NVIDIA'}'s library; this device is {device.gfx}")
    if shape.m == 0:
        return Unsupported("an empty batch needs no kernel")
    reason = _layout(shape, device, amd) or _operands(shape, device, amd) or _scales(shape, device, amd) or _output(shape)
    return Unsupported(reason) if reason else True


def _layout(shape: Shape, device: Device, amd: bool) -> str:
    if shape.layout == "row":
        return ""
    if not amd:
        return f"cuBLASLt reads plain [N, K] weights, not layout {shape.layout!r}"
    if shape.layout != LAYOUT or device.gfx not in _SHUFFLED:
        return f"hipBLASLt reads shuffled weights of layout {LAYOUT} on {' and '.join(_SHUFFLED)}, not {shape.layout} on {device.gfx}"
    if dtype_bits(shape.dtype) not in (8, 16) or shape.dtype == "int8":
        return f"hipBLASLt reads shuffled weights of 16-bit floats and fp8, not {shape.dtype}"
    return ""


def _operands(shape: Shape, device: Device, amd: bool) -> str:
    if shape.dtype in FLOATS:
        return ""
    if not quantised(shape.dtype):
        return f"operands must be {', '.join(FLOATS)}, int8 or fp8 e4m3, not {shape.dtype}"
    if shape.k % _BYTES:
        return f"8-bit operands need K divisible by {_BYTES} (K={shape.k})"
    if shape.dtype == "int8":
        return "" if shape.n % 4 == 0 else f"int8 products need N divisible by 4 (N={shape.n})"
    wanted = _AMD_FP8.get(device.gfx, "") if amd else "fp8_e4m3fn" if device.gfx in _FP8 else ""
    if shape.dtype != wanted:
        return f"{device.gfx} multiplies {wanted}, not {shape.dtype}" if wanted else f"{device.gfx} multiplies no fp8"
    if not amd and shape.n % _BYTES:
        return f"fp8 products need N divisible by {_BYTES} (N={shape.n})"
    return ""


def _scales(shape: Shape, device: Device, amd: bool) -> str:
    if shape.scale == "none":
        return ""
    if not quantised(shape.dtype):
        return f"scaled operands must have 8 bits, not {shape.dtype}"
    whole = shape.scale == "tensor" or shape.dtype == "int8" or shape.op.startswith("batched_")
    if not whole and not amd and device.gfx not in _SCALED:
        return f"scales by {shape.scale} need {', '.join(_SCALED)}, not {device.gfx}"
    return ""


def _output(shape: Shape) -> str:
    if shape.outdtype not in FLOATS:
        return f"the output must be {', '.join(FLOATS)}, not {shape.outdtype}"
    if shape.dtype in FLOATS and shape.outdtype not in (shape.dtype, "fp32"):
        return f"the output of {shape.dtype} operands must be {shape.dtype} or fp32, not {shape.outdtype}"
    if shape.bias and shape.bias_dtype not in FLOATS:
        return f"the bias must be {', '.join(FLOATS)}, not {shape.bias_dtype}"
    return ""

"""Check which shapes vLLM's products serve on each architecture; needs neither vLLM nor a device.

The facts are those of its sources, 0.20 to 0.33 (``csrc``, ``quantization/w8a8/cutlass``).
"""

from __future__ import annotations

from tunedgemm.plugin import Device, Platform, Shape
from tunedgemm.tools.launching import ARCHITECTURES, unusual_experts

from tunedgemm_vllm.weights import MACHETE, PRODUCTS

#: Products by what their kernels need: int8 of mma and wgmma, fp8 by tensor or row, fp8 by block
#: fed by TMA, experts. `launch.refusal` asks the library what it was built with.
_NVIDIA = ("mma", "wgmma", "tcgen05")
_HOPPER = ARCHITECTURES.having(matrix="wgmma")
_INT8 = ARCHITECTURES.having(matrix=("mma", "wgmma"), fp4=False)
_FP8 = ARCHITECTURES.having(matrix=_NVIDIA, fp8="fp8_e4m3fn")
_BLOCK = ARCHITECTURES.having(matrix=_NVIDIA, tma=True)
_MARLIN = ARCHITECTURES.having(matrix=_NVIDIA)
_GROUPED = (*_HOPPER, *ARCHITECTURES.having(family="sm_10x"))
_NEEDS, _NEEDS_OF_EXPERTS = ("vLLM 0.20 to 0.33",), ("vLLM 0.22 to 0.33",)
PLATFORMS = (
    Platform(_HOPPER, needs=_NEEDS, ran=("H100",), ops=("a8w8", "a8w8_blockscale")),
    Platform(_HOPPER, needs=_NEEDS_OF_EXPERTS, ran=("H100",), ops=("fmoe",)),
    Platform(tuple(gfx for gfx in dict.fromkeys((*_INT8, *_FP8)) if gfx not in _HOPPER), needs=_NEEDS, ops=("a8w8",)),
    Platform(_BLOCK[1:], needs=_NEEDS, ops=("a8w8_blockscale",)),
    Platform(_GROUPED[1:], needs=_NEEDS_OF_EXPERTS, ops=("fmoe",)),
    Platform(_MARLIN, needs=_NEEDS, ops=("a16wn",)),
)
#: Op -> dtypes of x and weight, and kinds of scales.
OPS = {
    "a8w8": (("int8", "fp8_e4m3fn"), ("tensor", "row")),
    "a8w8_blockscale": (("fp8_e4m3fn",), ("block",)),
    "fmoe": (("bf16", "fp16"), ("none",)),
    "a16wn": (("bf16", "fp16"), ("block",)),
}
#: Orders of 1x128 scales; apart from M-major ones they are copied first.
SCALE_ORDERS = ("m_major", "m_major_padded")
_OUTPUTS = ("bf16", "fp16")
#: N and K are multiples of it: the operator checks both strides in elements. K is a multiple of a
#: block with block scales: CUTLASS wants full tiles.
_ALIGNED, _TILE = 16, 128
#: What experts multiply. They and a further group have a thread each of one block.
_FORMATS = {"q_dtype_w": "fp8_e4m3fn", "q_type": "per_Token", "act": "silu"}
_EXPERTS = 1024
#: Rows of x come in groups of four with block scales on Hopper, before the version given.
_ROWS, _ROWS_FREE = 4, (0, 24)


def unsupported(shape: Shape, device: Device, release: tuple[int, int] | None) -> str:
    """Return why no product serves the shape on the architecture, or "" where one does.

    *release* is the version of the installed vLLM; None stands for the newest.
    """
    dtypes, scales = OPS[shape.op]
    if shape.dtype not in dtypes:
        return f"{shape.op}: operands must be {' or '.join(dtypes)} (got {shape.dtype})"
    if shape.scale not in scales:
        return f"{shape.op}: scales must be by {' or '.join(scales)} (got {shape.scale})"
    if shape.op == "fmoe":
        return _experts_fault(shape, device) or _size_fault(shape, device, release) or _output_fault(shape)
    if shape.op == "a16wn":
        return _weights_fault(shape, device)
    served = _BLOCK if shape.scale == "block" else _INT8 if shape.dtype == "int8" else _FP8
    if device.gfx not in served:
        return f"{shape.dtype} with scales by {shape.scale} needs one of {', '.join(served)} (got {device.gfx})"
    return _size_fault(shape, device, release) or _output_fault(shape)


def _experts_fault(shape: Shape, device: Device) -> str:
    if device.gfx not in _GROUPED:
        return f"fmoe needs one of {', '.join(_GROUPED)} (got {device.gfx})"
    if unusual := unusual_experts(shape):
        return f"fmoe has no {unusual}"
    formats = tuple(str(shape[name]) for name in _FORMATS)
    if formats != tuple(_FORMATS.values()) or not shape["g1u1"] or shape["doweight_stage1"]:
        gate = "gated" if shape["g1u1"] else "not gated"
        weighted = ", weighted in stage 1" if shape["doweight_stage1"] else ""
        return f"fmoe must have fp8_e4m3fn per_Token with a gate and silu (got {', '.join(formats)}, {gate}{weighted})"
    if not 1 <= int(shape["expert"]) < _EXPERTS:
        return f"experts must be in 1..{_EXPERTS - 1} (got {shape['expert']})"
    return f"topk must be a number of experts (got {shape['topk']})" if int(shape["topk"]) < 1 else ""


def _weights_fault(shape: Shape, device: Device) -> str:
    if shape.layout not in PRODUCTS:
        return f"weight layout must be {' or '.join(PRODUCTS)} (got {shape.layout!r}), as vLLM repacks it"
    served = _HOPPER if shape.layout == MACHETE else _MARLIN
    if device.gfx not in served:
        return f"{PRODUCTS[shape.layout]} needs one of {', '.join(served)} (got {device.gfx})"
    if not shape.m:
        return "M must be at least 1 (got 0)"
    if shape.bias:
        return f"{PRODUCTS[shape.layout]} adds no bias in its order (got a bias in {shape.bias_dtype})"
    return "" if shape.outdtype == shape.dtype else f"output must be {shape.dtype}, as x (got {shape.outdtype})"


def _size_fault(shape: Shape, device: Device, release: tuple[int, int] | None) -> str:
    if shape.layout != "row":
        return f"weight layout must be row (got {shape.layout!r})"
    if shape.n % _ALIGNED or shape.k % _ALIGNED:
        return f"N and K must be multiples of {_ALIGNED} (got {shape.n} and {shape.k})"
    if not shape.m:
        return "M must be at least 1 (got 0)"
    if shape.scale == "block" and shape.k % _TILE:
        return f"K must be a multiple of {_TILE} with block scales (got {shape.k})"
    grouped = shape.scale == "block" and device.gfx == "sm_90" and release is not None and release < _ROWS_FREE
    if grouped and shape.m % _ROWS:
        return f"M must be a multiple of {_ROWS} with block scales before vLLM {'.'.join(map(str, _ROWS_FREE))} (got {shape.m})"
    return ""


def _output_fault(shape: Shape) -> str:
    if shape.outdtype not in _OUTPUTS:
        return f"output must be {' or '.join(_OUTPUTS)} (got {shape.outdtype})"
    if shape.bias and shape.bias_dtype != shape.outdtype:
        return f"bias must be {shape.outdtype}, as the output (got {shape.bias_dtype})"
    return ""

"""Check which shapes each library supports, and lay out their operands; needs no device.

Our row-major ``out[M, N] = x[M, K] @ weight[N, K].T`` is the column-major
``D[N, M] = weight.T[N, K] @ x.T[K, M]``. A is the weight, stored [K, N] and transposed. B is x,
stored [K, M]. fp8 products exist in this form alone.
"""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device, Platform, Shape
from tunedgemm.tools.launching import ARCHITECTURES, dtype_bits

from tunedgemm_hipblaslt.abi import Abi

_OPS = ("a16w16", "a8w8", "batched_bf16", "batched_a8w8")
#: Orders of 1x128 scales that the launchers take apart from row-major ones.
SCALE_ORDERS = ("m_major", "m_major_padded")
#: Ops of one library: hipBLASLt reads shuffled weights, cuBLASLt takes block scales.
_OWN_OPS = {"hipblasLt": ("a8w8_bpreshuffle",), "cublasLt": ("a8w8_blockscale",)}

FLOATS = ("bf16", "fp16", "fp32")
FP8 = ("fp8_e4m3fn", "fp8_e4m3fnuz")
#: AITER's layout of shuffled weights.
SHUFFLED_LAYOUT = "aiter16x16"
#: Side of a block with one scale.
BLOCK = 128
#: Multiple of x's rows for 1x128 scales (cuBLAS manual, 128-element scaling factors).
_ROWS = 4
#: Alignment in bytes of the rows of 8-bit operands, and so of K.
_BYTES = 16

#: Devices with row and block scales (CUDA 12.9; Blackwell's kernels take no float32 scales).
_SCALED = ARCHITECTURES.having(matrix="wgmma")
#: Devices on which hipBLASLt reads AITER's shuffled weights (ROCm 6.4 and later).
_SHUFFLED = ARCHITECTURES.having(matrix="mfma", fp8=FP8)

#: Work after the library's product: add the ``bias``, or apply the ``scales`` and add the bias.
REMAINDERS = ("", "bias", "scales")


@attrs.frozen
class Matrix:
    """Column-major matrix in memory.

    Attributes:
        dtype: short name of the elements' type.
        rows, columns: sizes as stored.
        ld: elements from one column to the next.
        stride: elements from one matrix of a batch to the next.
        order: ``col``, or ``shuffled8`` or ``shuffled16`` for AITER's shuffled weights.
    """

    dtype: str
    rows: int
    columns: int
    ld: int
    stride: int
    order: str = "col"


@attrs.frozen
class Problem:
    """Operands of one shape as the library sees them.

    Attributes:
        a, b, d: the weight, the activations and the output.
        batch: matrices in each operand.
        compute: ``32f`` or ``32i``.
        a_scale, b_scale: granularity of the scales: "" for none, ``tensor``, ``row``,
            ``block`` (1x128) or ``square`` (128x128).
        bias_dtype: dtype of the bias that the library adds; "" for none.
        fast_accum: whether fp8 products may be summed in a shorter accumulator.
        remainder: one of `REMAINDERS`.
    """

    a: Matrix
    b: Matrix
    d: Matrix
    batch: int = 1
    compute: str = "32f"
    a_scale: str = ""
    b_scale: str = ""
    bias_dtype: str = ""
    fast_accum: bool = False
    remainder: str = attrs.field(default="", validator=attrs.validators.in_(REMAINDERS))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows of D, columns of D, and K: our N, M and K."""
        return self.d.rows, self.d.columns, self.b.rows


def make_problem(shape: Shape, *, bias_after: bool = False, fast_accum: bool = False) -> Problem:
    """Return the library's problem for a supported shape.

    Args:
        shape: a shape that `unsupported` accepts.
        bias_after: whether the bias is added after the product instead of in its epilogue.
        fast_accum: whether fp8 products may be summed in a shorter accumulator.
    """
    batched = shape.op.startswith("batched_")
    batch = int(shape["B"]) if batched else 1
    a_scale, b_scale = _scale_kinds(shape, batch)
    unscaled = is_quantised(shape.dtype) and shape.scale != "none" and not a_scale
    order = "col" if shape.layout == "row" else f"shuffled{dtype_bits(shape.dtype)}"
    rows = -(-shape.m // _ROWS) * _ROWS if b_scale == "block" else shape.m
    in_epilogue = shape.bias and not (bias_after or unscaled or batched)
    return Problem(
        a=Matrix(shape.dtype, shape.k, shape.n, shape.k, shape.n * shape.k, order),
        b=Matrix(shape.dtype, shape.k, rows, shape.k, rows * shape.k),
        d=Matrix("int32" if shape.dtype == "int8" else "fp32" if unscaled else shape.outdtype, shape.n, rows, shape.n, rows * shape.n),
        batch=batch,
        compute="32i" if shape.dtype == "int8" else "32f",
        a_scale=a_scale,
        b_scale=b_scale,
        bias_dtype=shape.bias_dtype if in_epilogue else "",
        fast_accum=fast_accum,
        remainder="scales" if unscaled else "bias" if shape.bias and not in_epilogue else "",
    )


def is_quantised(dtype: str) -> bool:
    """Return whether the elements are fp8 or int8."""
    return dtype_bits(dtype) == 8


def supported_ops(abi: Abi) -> tuple[str, ...]:
    """Return the ops that a library covers, in part or whole."""
    return _OPS + _OWN_OPS[abi.prefix]


def platforms(abi: Abi) -> tuple[Platform, ...]:
    """Return the architectures that a library serves; each has its own kernels for `_OPS`."""
    if abi.kind == "amd":
        needs = ("hipBLASLt of ROCm, which torch has",)
        return Platform(_SHUFFLED, needs=needs), Platform(("amd",), needs=needs, ops=_OPS)
    needs = ("cuBLASLt, which torch has; CUDA 12.9 for row and block scales",)
    ranked = ("a16w16", "a8w8", "a8w8_blockscale")
    return Platform(_SCALED, needs=needs, ran=("H200",), ranked=ranked), Platform(("nvidia",), needs=needs, ops=_OPS)


def unsupported(shape: Shape, device: Device, abi: Abi) -> str | None:
    """Return why the library has no product for the shape on the device; None where it has."""
    amd = abi.kind == "amd"
    if device.kind != abi.kind:
        return f"{abi.libtype}: needs an {'AMD' if amd else 'NVIDIA'} device (got {device.gfx})"
    if shape.m == 0:
        return "M: an empty batch needs no kernel (got 0)"
    reason = _unsupported_layout(shape, device, amd) or _unsupported_operands(shape, device, amd)
    return reason or _unsupported_scales(shape, device, amd) or _unsupported_output(shape)


def _scale_kinds(shape: Shape, batch: int) -> tuple[str, str]:
    """Return the scales of A and B; "" where the library does not multiply by them.

    It does not for int8, nor for row scales of a batch.
    """
    if shape.dtype == "int8" or shape.scale == "none" or (batch > 1 and shape.scale == "row"):
        return "", ""
    return ("square", "block") if shape.scale == "block" else (shape.scale, shape.scale)


def _unsupported_layout(shape: Shape, device: Device, amd: bool) -> str | None:
    if shape.layout == "row":
        return None
    if not amd:
        return f"layout: cuBLASLt reads plain [N, K] weights (got {shape.layout!r})"
    if shape.layout != SHUFFLED_LAYOUT or device.gfx not in _SHUFFLED:
        return f"layout: hipBLASLt reads {SHUFFLED_LAYOUT} on {' and '.join(_SHUFFLED)} (got {shape.layout} on {device.gfx})"
    if dtype_bits(shape.dtype) not in (8, 16) or shape.dtype == "int8":
        return f"dtype: hipBLASLt reads shuffled weights of 16-bit floats and fp8 (got {shape.dtype})"
    return None


def _unsupported_operands(shape: Shape, device: Device, amd: bool) -> str | None:
    if shape.dtype in FLOATS:
        return None
    if not is_quantised(shape.dtype):
        return f"dtype: operands must be {', '.join(FLOATS)}, int8 or fp8 e4m3 (got {shape.dtype})"
    if shape.k % _BYTES:
        return f"K: 8-bit operands need a multiple of {_BYTES} (got {shape.k})"
    if shape.dtype == "int8":
        return None if shape.n % 4 == 0 else f"N: int8 products need a multiple of 4 (got {shape.n})"
    known = ARCHITECTURES.get(device.gfx)
    if shape.dtype != (wanted := known.fp8 if known else ""):
        return f"dtype: {device.gfx} multiplies {wanted or 'no fp8'} (got {shape.dtype})"
    if not amd and shape.n % _BYTES:
        return f"N: fp8 products need a multiple of {_BYTES} (got {shape.n})"
    return None


def _unsupported_scales(shape: Shape, device: Device, amd: bool) -> str | None:
    if shape.scale == "none":
        return None
    if not is_quantised(shape.dtype):
        return f"scale: scaled operands must have 8 bits (got {shape.dtype})"
    plain = shape.scale == "tensor" or shape.dtype == "int8" or shape.op.startswith("batched_")
    if not plain and not amd and device.gfx not in _SCALED:
        return f"scale: {shape.scale} scales need {', '.join(_SCALED)} (got {device.gfx})"
    return None


def _unsupported_output(shape: Shape) -> str | None:
    if shape.outdtype not in FLOATS:
        return f"outdtype: must be {', '.join(FLOATS)} (got {shape.outdtype})"
    if shape.dtype in FLOATS and shape.outdtype not in (shape.dtype, "fp32"):
        return f"outdtype: {shape.dtype} operands give {shape.dtype} or fp32 (got {shape.outdtype})"
    if shape.bias and shape.bias_dtype not in FLOATS:
        return f"bias: must be {', '.join(FLOATS)} (got {shape.bias_dtype})"
    return None

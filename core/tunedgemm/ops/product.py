"""Compute the exact product for references, bound the error of others, and make empty outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedgemm.ops.op import Tolerance
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: By the dtype of the output. Operands are used unchanged, so only the order of a float32 sum
#: and the rounding of the output remain. The isclose bounds are those of AITER's tuner. A row
#: may be off by the rounding of the output (2^-9, 2^-12) with head room. That of fp8 is 2^-4 or
#: 2^-3 of an element, half as much of a row.
TOLERANCES = {
    "bf16": Tolerance(5e-2, 5e-2, 2.0**-6),
    "fp16": Tolerance(1e-2, 1e-2, 2.0**-9),
    "fp32": Tolerance(1e-2, 1e-2, 2.0**-12),
    "fp64": Tolerance(1e-2, 1e-2, 2.0**-12),
    **dict.fromkeys(("fp8_e4m3fn", "fp8_e4m3fnuz"), Tolerance(2.0**-4, 2.0**-4, 2.0**-4)),
    **dict.fromkeys(("fp8_e5m2", "fp8_e5m2fnuz"), Tolerance(2.0**-3, 2.0**-3, 2.0**-3)),
}
#: Of fp8 in float32: Hopper's tensor cores accumulate fp8 products with less precision than
#: float32, however the kernel is written. Row errors on an H200: 3.5e-4 with one scale a tensor,
#: 1.5e-4 with one a row or block, 3e-7 of bf16 products.
_FP8_IN_FP32 = Tolerance(1e-2, 1e-2, 2.0**-11)

#: Multiplications up to which results of float64 are quick.
SMALL = 1 << 30
#: Elements of an operand that are converted at a time: 1 GiB in float64.
_CHUNK = 1 << 27


def tolerance(shape: Shape) -> Tolerance:
    """Return bounds by the dtypes of output and operands."""
    if shape.outdtype == "fp32" and shape.dtype.startswith("fp8"):
        return _FP8_IN_FP32
    return TOLERANCES[shape.outdtype]


def fake(x: torch.Tensor, weight: torch.Tensor, *_: Any, otype: torch.dtype | None = None) -> torch.Tensor:
    """Make an empty output [..., N], by default in the dtype of x."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=otype or x.dtype)


def exact_dtype(m: int, n: int, k: int) -> torch.dtype:
    """Return the dtype of a reference: float64 where its memory and conversions are cheap, else float32."""
    import torch

    return torch.float64 if m * n * k <= SMALL else torch.float32


def exact_product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute ``x[..., M, K] @ weight[..., N, K].T``, rounded once to *dtype* (float32 or float64).

    It runs on the operands' device. Both have the same number of dimensions, two or three. The
    product itself is in float64: no switch of torch changes its precision, while TF32 and oneDNN's
    bf16 change those of float32. Data-centre GPUs multiply both at one rate. On other
    processors it takes as long as 100 calls of a kernel, of the thousands that tune a shape.
    """
    import torch

    (m, k), n = x.shape[-2:], weight.shape[-2]
    out = torch.empty(*x.shape[:-1], n, dtype=dtype, device=x.device)
    rows = max(1, _CHUNK // max(1, k * (weight.shape[0] if weight.dim() == 3 else 1)))
    for first in range(0, m, rows):
        wide = x[..., first : first + rows, :].double()
        for start in range(0, n, rows):
            columns = weight[..., start : start + rows, :].double().transpose(-1, -2)
            out[..., first : first + rows, start : start + rows] = wide @ columns
    return out

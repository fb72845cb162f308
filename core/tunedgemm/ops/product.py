"""Reference GEMM, its tolerances, and empty outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedgemm.ops.op import Tolerance
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

#: Tolerances by output dtype. The reference uses the same operands, so only the summation order in
#: float32 and the rounding of the output differ. The element bounds are those of AITER's tuner. The
#: row bounds allow the rounding of the output (2^-9, 2^-12) with headroom; fp8 rounds an element by
#: 2^-4 or 2^-3, a row by half as much.
TOLERANCES = {
    "bf16": Tolerance(5e-2, 5e-2, 2.0**-6),
    "fp16": Tolerance(1e-2, 1e-2, 2.0**-9),
    "fp32": Tolerance(1e-2, 1e-2, 2.0**-12),
    "fp64": Tolerance(1e-2, 1e-2, 2.0**-12),
    **dict.fromkeys(("fp8_e4m3fn", "fp8_e4m3fnuz"), Tolerance(2.0**-4, 2.0**-4, 2.0**-4)),
    **dict.fromkeys(("fp8_e5m2", "fp8_e5m2fnuz"), Tolerance(2.0**-3, 2.0**-3, 2.0**-3)),
}
#: Tolerance of fp8 operands with float32 output: Hopper's tensor cores accumulate fp8 below float32
#: precision in any kernel. Row errors on an H200: 3.5e-4 with per-tensor scales, 1.5e-4 with
#: row-wise or block scales, 3e-7 for bf16.
_FP8_IN_FP32 = Tolerance(1e-2, 1e-2, 2.0**-11)

#: Largest M * N * K for which a float64 reference is fast.
SMALL = 1 << 30
#: Elements of an operand converted to float64 at a time: 1 GiB.
_CHUNK = 1 << 27


def tolerance(shape: Shape) -> Tolerance:
    """Return the tolerance of a shape by its output and operand dtypes."""
    if shape.outdtype == "fp32" and shape.dtype.startswith("fp8"):
        return _FP8_IN_FP32
    return TOLERANCES[shape.outdtype]


def fake(x: torch.Tensor, weight: torch.Tensor, *_: Any, otype: torch.dtype | None = None) -> torch.Tensor:
    """Make an empty output [..., N], by default in the dtype of x."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=otype or x.dtype)


def exact_dtype(m: int, n: int, k: int) -> torch.dtype:
    """Return the dtype of a reference: float64 for small shapes, else float32."""
    import torch

    return torch.float64 if m * n * k <= SMALL else torch.float32


def exact_product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute ``x[..., M, K] @ weight[..., N, K].T``, rounded once to *dtype* (float32 or float64).

    It runs on the operands' device; both have two or both three dimensions. It multiplies in
    float64, because TF32 and oneDNN's bf16 settings affect float32. Data-centre GPUs run both at
    one rate; elsewhere it takes as long as 100 kernel calls, of the thousands that tune a shape.
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

"""Compare an output with its reference: AITER's error ratio, worst row error, bitwise equality.

The ratio alone accepts a kernel that corrupts a few rows, so the tuner and the conformance suite
check both. With relaxed flags, only AITER's ratio is checked.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from tunedgemm.ops.op import Tolerance

if TYPE_CHECKING:
    import torch

#: Default of AITER's ``--errRatio``: largest fraction of elements outside the tolerance.
MAX_ERROR_RATIO = 0.05

#: Tolerance that accepts any finite output.
_ANY = Tolerance(math.inf, 0.0, math.inf)
#: Row bound that only requires finite values.
LIFTED = sys.float_info.max
#: Elements compared at a time: 128 MiB of float64.
_CHUNK = 1 << 24


def with_flags(own: Tolerance, atol: float | None, rtol: float | None, err_ratio: float) -> Tolerance:
    """Return the tolerance set by flags; a looser one than the op's disables the row bound.

    Args:
        own: the op's tolerance.
        atol, rtol: element bounds; None for the op's.
        err_ratio: largest fraction outside them; above `MAX_ERROR_RATIO` it counts as looser, too.
    """
    stated = own.atol if atol is None else atol, own.rtol if rtol is None else rtol
    relaxed = stated[0] > own.atol or stated[1] > own.rtol or err_ratio > MAX_ERROR_RATIO
    return attrs.evolve(own, atol=stated[0], rtol=stated[1], row_error=LIFTED if relaxed else own.row_error)


def errors(out: torch.Tensor, ref: torch.Tensor, tolerance: Tolerance) -> tuple[float, float]:
    """Return the error ratio and the worst row error in one pass.

    See `error_ratio` and `worst_row_error`.

    Args:
        out: [..., N], any dtype that converts to float64.
        ref: the reference, float32 or float64, with the same size, N and device.
        tolerance: gives the element bounds.
    """
    import torch

    chunks = _chunks(out, ref)
    if chunks is None:
        return 1.0, math.inf
    if ref.numel() == 0:
        return 0.0, 0.0
    parts = []
    for out_rows, ref_rows in chunks:
        difference = out_rows - ref_rows  # a non-finite element makes its row error non-finite
        error, norm = difference.norm(dim=-1), ref_rows.norm(dim=-1)
        ratio = (error / norm).masked_fill_(error == 0, 0.0)  # 0 / 0 is a correct row of zeros
        outside = (difference.abs_() > ref_rows.abs().mul_(tolerance.rtol).add_(tolerance.atol)).sum()
        worst = ratio.nan_to_num_(nan=math.inf, posinf=math.inf).max()
        parts.append(torch.stack([outside.double(), worst, error.isfinite().all().double()]))
    outsides, worsts, finite = zip(*torch.stack(parts).tolist(), strict=True)  # a single synchronisation
    return sum(outsides) / ref.numel() if all(finite) else 1.0, max(worsts) if all(finite) else math.inf


def error_ratio(out: torch.Tensor, ref: torch.Tensor, tolerance: Tolerance) -> float:
    """Return the fraction of elements with ``|out - ref| > atol + rtol * |ref|``.

    Arguments as in `errors`.

    Returns:
        0.0 for an empty output; 1.0 if a value is not finite or the sizes differ.
    """
    return errors(out, ref, tolerance)[0]


def worst_row_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Return the largest ``norm(out - ref) / norm(ref)`` over the rows (the last dimension).

    Arguments as in `errors`. A row whose reference is all zeros must be all zeros.

    Returns:
        0.0 for an empty output; infinity if a value is not finite, a row of zeros is not, or sizes
        differ.
    """
    return errors(out, ref, _ANY)[1]


def same_bits(tensor: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Check whether two tensors (or Nones) are bitwise equal.

    Shuffled weights and scales must have the same order.
    """
    import torch

    from tunedgemm.ops.formats.tensor_bytes import raw

    if tensor is None or other is None:
        return tensor is other
    orders = [(getattr(each, "layout_name", "row"), getattr(each, "scale_order", "row")) for each in (tensor, other)]
    if tensor.shape != other.shape or tensor.dtype != other.dtype or orders[0] != orders[1]:
        return False
    return torch.equal(raw(tensor), raw(other))


def _chunks(out: torch.Tensor, ref: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]] | None:
    """Yield chunks of both as float64 rows; return None if their numbers of rows differ."""
    import torch

    if out.dim() == 0 or ref.dim() == 0 or out.numel() != ref.numel() or out.shape[-1] != ref.shape[-1]:
        return None
    if ref.numel() == 0:
        return iter(())
    out_rows, ref_rows = out.detach().reshape(-1, out.shape[-1]), ref.detach().reshape(-1, ref.shape[-1])
    rows = max(1, _CHUNK // ref.shape[-1])
    return ((out_rows[i : i + rows].to(torch.float64), ref_rows[i : i + rows].to(torch.float64)) for i in range(0, len(ref_rows), rows))

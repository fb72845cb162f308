"""AITER's functions that pick a quantising function by its kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunedgemm.errors import UserError

if TYPE_CHECKING:
    import torch

    Quantised = tuple[torch.Tensor, torch.Tensor | None]


def get_torch_quant(qType: Any) -> Callable[..., Quantised]:
    """Return the torch function of a kind, with AITER's arguments; otherwise `get_quant`'s."""
    import tunedgemm

    functions: dict[str, Callable[..., Quantised]] = {"per_Tensor": tunedgemm.per_tensor_quant, "per_Token": tunedgemm.pertoken_quant}
    function: Callable[..., Quantised] = functions.get(_kind(qType)) or get_quant(qType)
    return function


def get_quant(qType: Any) -> Callable[..., Quantised]:
    """Return a kind's quantising function, with the arguments of AITER's ``get_hip_quant``.

    Args:
        qType: a member of `tunedgemm.QuantType`, or of an enum with the same names.

    Returns:
        ``f(x, scale=None, quant_dtype=int8, ...) -> (q, scale)``; for ``No`` x itself and None.

    Raises:
        UserError: the kind is unknown.
    """
    try:
        return _FUNCTIONS[_kind(qType)]
    except KeyError:
        raise UserError(f"QuantType: unknown kind (got {qType!r}); known: {', '.join(_FUNCTIONS)}") from None


def _kind(kind: Any) -> str:
    """Return the name of a member of QuantType, or of another library's enum of the same names."""
    return str(getattr(kind, "name", kind))


def _unchanged(x: torch.Tensor, *_rest: Any, **_named: Any) -> Quantised:
    return x, None


def _per_row(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    quant_dtype: torch.dtype | None = None,
    *,
    function: str,
    **_rows: Any,
) -> Quantised:
    """Quantise all rows, with one scale a row or one in all; AITER's numbers of valid rows are ignored."""
    import torch

    import tunedgemm

    quantised: Quantised = getattr(tunedgemm, function)(x, scale, quant_dtype=quant_dtype or torch.int8)
    return quantised


def _per_1x128(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    quant_dtype: torch.dtype | None = None,
    group_size: int = 128,
    transpose_scale: bool = False,
    **_rows: Any,
) -> Quantised:
    """Quantise with one scale for 128 elements of a row, which *transpose_scale* transposes."""
    import torch

    import tunedgemm
    from tunedgemm.errors import OperandError

    if scale is not None or group_size != 128:
        raise OperandError(f"per_1x128: computes one scale for 128 values (got group_size {group_size} and scale {scale}); omit both")
    q, scales = tunedgemm.per_1x128_quant(x, quant_dtype or torch.int8, "m_major" if transpose_scale else "row")
    return q, tunedgemm.transposed_scale(scales) if transpose_scale else scales


def _per_1x32(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    quant_dtype: torch.dtype | None = None,
    shuffle: bool = False,
    **_rows: Any,
) -> Quantised:
    """Quantise to mxfp4; raises OperandError for another dtype, as `tunedgemm.per_1x32_f4_quant` does."""
    import tunedgemm
    from tunedgemm.ops.formats.mxfp4 import FP4

    quantised: Quantised = tunedgemm.per_1x32_f4_quant(x, scale, FP4 if quant_dtype is None else quant_dtype, shuffle)
    return quantised


_FUNCTIONS: Mapping[str, Callable[..., Quantised]] = {
    "No": _unchanged,
    "per_Tensor": functools.partial(_per_row, function="per_tensor_quant"),
    "per_Token": functools.partial(_per_row, function="pertoken_quant"),
    "per_1x128": _per_1x128,
    "per_1x32": _per_1x32,
}

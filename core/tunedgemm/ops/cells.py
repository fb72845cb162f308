"""Read the texts of a CSV row as values, for the ops' parsers."""

from __future__ import annotations

from collections.abc import Mapping

from tunedgemm.dtype import parse_dtype
from tunedgemm.errors import ShapeError
from tunedgemm.shape import MAX_SIZE

_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False, "": False}


def flag(row: Mapping[str, str], column: str) -> bool:
    """Read True or False, as words or as 1 and 0; an absent column is False.

    Raises:
        ShapeError: another text.
    """
    text = row.get(column, "").strip().lower()
    value = _FLAGS.get(text)
    if value is None:
        raise ShapeError(f"column {column!r} must be True or False (got {text[:40]!r})")
    return value


def size(row: Mapping[str, str], column: str) -> int:
    """Read a whole number below `MAX_SIZE`; pandas writes 16.0 where a column has gaps.

    Raises:
        ShapeError: the column is absent, or no such number.
    """
    text = row.get(column, "").strip()
    try:
        number = float(text)
    except ValueError:
        number = 0.5
    if not number.is_integer():
        raise ShapeError(f"column {column!r} must be a whole number (got {text[:40]!r})")
    if not 0 <= number < MAX_SIZE:
        raise ShapeError(f"column {column!r} must be a whole number from 0 to {MAX_SIZE - 1} (got {text[:40]!r})")
    return int(number)


def text(row: Mapping[str, str], column: str, default: str) -> str:
    """Return the text of a column; *default* where it is absent or holds AITER's filler 0."""
    cell = row.get(column, "").strip()
    return default if cell in ("", "0") else cell


def dtype(row: Mapping[str, str], column: str, default: str, allowed: tuple[str, ...] = ()) -> str:
    """Read the short text of a dtype; *default* where the column is absent or holds AITER's filler 0.

    The word ``fp8``, in the cell or as *default*, is that of the row's gfx; see `fp8_of`.

    Args:
        allowed: the short texts that the op takes; empty for all.

    Raises:
        DtypeError, ShapeError: an unknown dtype, or one that the op does not take.
    """
    cell = text(row, column, default)
    short = parse_dtype(cell, row.get("gfx", "")) if cell else ""
    if allowed and short not in allowed:
        raise ShapeError(f"column {column!r} must be one of {', '.join(allowed)} (got {cell[:40]!r})")
    return short


def word(row: Mapping[str, str], column: str, default: str, allowed: tuple[str, ...]) -> str:
    """Read one of some words; *default* where the column is absent or holds AITER's filler 0.

    Raises:
        ShapeError: another word.
    """
    cell = text(row, column, default)
    if cell not in allowed:
        raise ShapeError(f"column {column!r} must be one of {', '.join(allowed)} (got {cell[:40]!r})")
    return cell

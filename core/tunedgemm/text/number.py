"""Whole numbers that people write; imports nothing from the package."""

from __future__ import annotations

#: Most digits: a longer number fits no 64-bit integer, and `int` refuses thousands of them.
_DIGITS = 18


def whole_number(text: str) -> int | None:
    """Return the whole number, of at least 0, that a text is; None for any other text.

    `str.isdigit` and `str.isdecimal` are true for texts that `int` refuses.
    """
    text = text.strip()
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else None

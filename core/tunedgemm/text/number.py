"""Parse whole numbers from user input; imports nothing from the package."""

from __future__ import annotations

#: Most digits; longer numbers exceed 64 bits.
_DIGITS = 18


def whole_number(text: str) -> int | None:
    """Parse a non-negative whole number; return None for other texts.

    `str.isdigit` and `str.isdecimal` also accept texts that `int` rejects.
    """
    text = text.strip()
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else None

"""Whole numbers that people write: a text is a number or None, never an exception."""

from __future__ import annotations

import sys

import pytest
from tunedgemm.text.number import whole_number


def test_every_character_is_a_digit_or_none() -> None:
    """Each character that Python calls numeric in some sense has its value, or none."""
    for character in filter(str.isnumeric, map(chr, range(sys.maxunicode + 1))):
        number = whole_number(character)
        assert number == (int(character) if character.isdecimal() else None)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 12 ", 12),
        ("007", 7),
        ("", None),
        ("-1", None),
        ("+1", None),
        ("1_0", None),
        ("1e3", None),
        ("9" * 18, 10**18 - 1),
        ("9" * 5000, None),
    ],
)
def test_only_plain_digits_count(text: str, number: int | None) -> None:
    """Signs, separators, exponents and numbers beyond 64 bits are none."""
    assert whole_number(text) == number

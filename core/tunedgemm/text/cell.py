"""Cell: which texts a table gives back as they were written; imports nothing from the package."""

from __future__ import annotations

import itertools

#: Words for a missing value, of pandas and others.
_WORDS = ("", "nan", "na", "n/a", "<na>", "none", "null")

#: The same in small letters, in capitals and in any mixture.
MISSING = frozenset("".join(letters) for word in _WORDS for letters in itertools.product(*zip(word, word.upper(), strict=True)))

#: Longest text of a cell: ten times the longest kernel name, and fewer digits than `int` refuses.
LONGEST_CELL = 4096

#: What a text must be, for messages.
RULE = f"one line of text of at most {LONGEST_CELL} letters, without zero bytes, half characters or blanks at its ends"


#: Beginnings of cells that a spreadsheet runs as a formula; of a number they are its sign.
FORMULA = ("=", "+", "-", "@")


def is_formula(text: str) -> bool:
    """Tell whether a spreadsheet that opens a table would run a cell."""
    if not text.lstrip(" \t").startswith(FORMULA):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def is_kept(value: object) -> bool:
    """Tell whether a table gives back a value as it was written; see `RULE`."""
    return isinstance(value, str) and len(value) <= LONGEST_CELL and value == value.strip() and (value.isprintable() or is_one_line(value))


def is_one_line(text: str) -> bool:
    """Tell whether a text is one line that UTF-8 can hold, without zero bytes."""
    return text.isprintable() or not any(character in "\0\r\n" or "\ud800" <= character <= "\udfff" for character in text)

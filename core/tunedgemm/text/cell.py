"""Cell: texts that a table preserves exactly; imports nothing from the package."""

from __future__ import annotations

import itertools

#: Spellings of a missing value, by pandas and others.
_WORDS = ("", "nan", "na", "n/a", "<na>", "none", "null")

#: The same in small letters, in capitals and in any mixture.
MISSING = frozenset("".join(letters) for word in _WORDS for letters in itertools.product(*zip(word, word.upper(), strict=True)))

#: Most characters of a cell: ten times the longest kernel name, and below the limit of `int`.
LONGEST_CELL = 4096

#: The rule for valid texts, for messages.
RULE = f"one line of text of at most {LONGEST_CELL} letters, without zero bytes, half characters or blanks at its ends"


#: First characters of cells that a spreadsheet evaluates as a formula, unless they sign a number.
FORMULA = ("=", "+", "-", "@")


def is_formula(text: str) -> bool:
    """Check whether a spreadsheet would evaluate a cell as a formula."""
    if not text.lstrip(" \t").startswith(FORMULA):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def is_kept(value: object) -> bool:
    """Check whether a table preserves a value exactly; see `RULE`."""
    return isinstance(value, str) and len(value) <= LONGEST_CELL and value == value.strip() and (value.isprintable() or is_one_line(value))


def is_one_line(text: str) -> bool:
    """Check that a text is one line, encodable as UTF-8, without zero bytes."""
    return text.isprintable() or not any(character in "\0\r\n" or "\ud800" <= character <= "\udfff" for character in text)

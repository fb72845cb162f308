"""KernelName: the form of a family's kernel names, which parses and writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs

_FIELD = re.compile(r"\{(?P<name>[\w.]+)(?:=(?P<default>\d+))?(?::(?P<form>x\d|word))?\}")
_PART = re.compile(r"\[(?P<text>[^][{}?]+)\?(?P<flag>[\w.]+)\]|\[(?P<optional>[^][]+)\]|(?P<always>[^][]+)")
#: A number without leading zeros, and a word.
_NUMBER, _WORD = r"(?:0|[1-9]\d{0,8})", r"[A-Za-z0-9]+"


@attrs.frozen
class _Field:
    """A number, or numbers joined by x, or a word."""

    name: str
    form: str
    default: int
    given: bool

    @property
    def source(self) -> str:
        """Return an expression of the value, of the object ``of`` or an argument."""
        return self.name if self.given else f"of.{self.name}"

    @property
    def regex(self) -> str:
        """Return what the field matches."""
        return f"(?P<{_group(self.name)}>{self.format.replace('%s', _WORD).replace('%d', _NUMBER)})"

    def parse(self, text: str) -> Any:
        """Return the value of a text."""
        return text if self.form == "word" else tuple(map(int, text.split("x"))) if self.form else int(text)

    @property
    def format(self) -> str:
        """Return the text of the field for ``%``."""
        return "%s" if self.form == "word" else "x".join(["%d"] * int(self.form[1:] or 1))

    @property
    def absent(self) -> tuple[int | str, ...]:
        """Return the values with which an optional part that begins with the field is left out."""
        return self.default, ""


@attrs.frozen
class _Part:
    """Text and fields: always present, or where a flag is set, or where the first field has a value."""

    pieces: tuple[str | _Field, ...]
    flag: str = ""
    optional: bool = False

    @property
    def fields(self) -> tuple[_Field, ...]:
        """Return the fields of the part."""
        return tuple(piece for piece in self.pieces if isinstance(piece, _Field))

    @property
    def source(self) -> str:
        """Return an expression of the part's text."""
        template = "".join(piece.replace("%", "%%") if isinstance(piece, str) else piece.format for piece in self.pieces)
        if self.flag:
            return f"({template!r} if of.{self.flag} else '')"
        values = "".join(f"*{field.source}, " if field.form.startswith("x") else f"{field.source}, " for field in self.fields)
        text = f"{template!r} % ({values})"
        if not self.optional:
            return f"({text})"
        first = self.fields[0]
        present = f"any({first.source})" if first.form.startswith("x") else f"{first.source} not in {first.absent}"
        return f"({text} if {present} else '')"

    @property
    def regex(self) -> str:
        """Return what the part matches."""
        inner = "".join(re.escape(piece) if isinstance(piece, str) else piece.regex for piece in self.pieces)
        return f"(?P<{_group(self.flag)}>{inner})?" if self.flag else f"(?:{inner})?" if self.optional else inner


class KernelName:
    """The form of names, by which one declaration reads and writes them.

    A form is text with fields. ``{field}`` is a number without leading zeros, ``{field:x3}`` three
    joined by x, ``{field:word}`` letters and digits. ``[_t?field]`` is a flag: text that is present
    where the field is true. Another part in brackets is left out where its first field is 0, empty
    or its default, as in ``[_p{field=1}]``. ``{first.warps}`` is an attribute of an attribute. The
    fields *given* are arguments of `write`, and no attributes of its object.
    """

    def __init__(self, form: str, *given: str) -> None:
        self._parts = tuple(_parts_of(form, given))
        self._regex = re.compile("".join(part.regex for part in self._parts), re.ASCII)
        # One expression, because listing the kernels of a shape writes thousands of names.
        source = f"lambda of, {', '.join(given)}: {' + '.join(part.source for part in self._parts)}"
        #: Returns the name of an object with these attributes, and of the *given* fields.
        self.write: Callable[..., str] = eval(source, {"any": any})

    def parse(self, name: str) -> dict[str, Any] | None:
        """Return the fields that a name has, and all flags; None for a text that `write` never returns."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        values: dict[str, Any] = {part.flag: found[_group(part.flag)] is not None for part in self._parts if part.flag}
        for part in self._parts:
            present = {field.name: field.parse(found[_group(field.name)]) for field in part.fields if found[_group(field.name)] is not None}
            values |= present
        return values if self._is_canonical(values) else None

    def _is_canonical(self, values: dict[str, Any]) -> bool:
        """Tell whether each optional part that is present says more than its absence."""
        firsts = (part.fields[0] for part in self._parts if part.optional)
        return not any(values[first.name] in (*first.absent, (0,) * 2) for first in firsts if first.name in values)


def _group(field: str) -> str:
    """Return the group of a field in the regex."""
    return field.replace(".", "__")


def _parts_of(form: str, given: tuple[str, ...]) -> Iterator[_Part]:
    for part in _PART.finditer(form):
        if part["flag"]:
            yield _Part((part["text"],), part["flag"])
        else:
            yield _Part(tuple(_pieces_of(part["optional"] or part["always"], given)), optional=part["optional"] is not None)


def _pieces_of(text: str, given: tuple[str, ...]) -> Iterator[str | _Field]:
    end = 0
    for field in _FIELD.finditer(text):
        yield text[end : field.start()]
        yield _Field(field["name"], field["form"] or "", int(field["default"] or 0), field["name"] in given)
        end = field.end()
    yield text[end:]

"""KernelName: the form of a family's kernel names, which parses and writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

#: A flag, another part that may be absent, and what is always present.
_PART = re.compile(r"\[(?P<text>[^][{}?]+)\?(?P<flag>[\w.]+)\]|\[(?P<optional>[^][]+)\]|(?P<always>[^][]+)")
_FIELD = re.compile(r"\{([\w.]+)(?:=(\d+))?(?::(x\d|word))?\}")
#: A number without leading zeros, and a word.
_NUMBER, _WORD = r"(?:0|[1-9]\d{0,17})", r"[A-Za-z0-9]+"


class KernelName:
    """The form of names, by which one declaration reads and writes them.

    A form is text with fields. ``{field}`` is a number without leading zeros, ``{field:x3}`` three
    joined by x, ``{field:word}`` letters and digits. ``[_t?field]`` is a flag: text that is present
    where the field is true. Another part in brackets is left out where its first field is 0, empty
    or its default, as in ``[_p{field=1}]``. ``{first.warps}`` is an attribute of an attribute. The
    fields *given* are arguments of `write`, and no attributes of its object.
    """

    def __init__(self, form: str, *given: str) -> None:
        self._given = given
        self._readers: dict[str, Callable[[str], Any]] = {}
        #: First field of an optional part -> its values with which the part is left out.
        self._absent: dict[str, tuple[Any, ...]] = {}
        parts = [self._flag(part["text"], part["flag"]) if part["flag"] else self._part(part) for part in _PART.finditer(form)]
        self._regex = re.compile("".join(regex for regex, _ in parts), re.ASCII)
        # One expression, because listing the kernels of a shape writes thousands of names.
        source = f"lambda of, {', '.join(given)}: {' + '.join(source for _, source in parts)}"
        #: Returns the name of an object with these attributes, and of the *given* fields.
        self.write: Callable[..., str] = eval(source, {"any": any})

    def parse(self, name: str) -> dict[str, Any] | None:
        """Return the fields that a name has, and all flags; None for a text that `write` never returns."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        texts = zip(self._readers.items(), found.groups(), strict=True)
        values = {field: reader(text) for (field, reader), text in texts if text is not None or reader is bool}
        return None if any(values.get(field) in absent for field, absent in self._absent.items()) else values

    def _flag(self, text: str, field: str) -> tuple[str, str]:
        """Return the regex of a flag, and the expression that writes it."""
        self._readers[field] = bool
        return f"({re.escape(text)})?", f"({text!r} if of.{field} else '')"

    def _part(self, part: re.Match[str]) -> tuple[str, str]:
        """Return the regex of text with fields, and the expression that writes it."""
        regex, template, values, end = "", "", "", 0
        form, optional = part["optional"] or part["always"], bool(part["optional"])
        fields = list(_FIELD.finditer(form))
        for field in fields:
            name, kind = field[1], field[3] or ""
            text, end = form[end : field.start()], field.end()
            shown = "%s" if kind == "word" else "x".join(["%d"] * int(kind[1:] or 1))
            regex += f"{re.escape(text)}({shown.replace('%s', _WORD).replace('%d', _NUMBER)})"
            template += text.replace("%", "%%") + shown
            values += f"{'*' * kind.startswith('x')}{self._source(name)}, "
            self._readers[name] = str if kind == "word" else _numbers if kind else int
        source = f"({template + form[end:].replace('%', '%%')!r} % ({values}))"
        regex += re.escape(form[end:])
        if not optional:
            return regex, source
        first, size = fields[0][1], int((fields[0][3] or "x1")[1:]) if fields[0][3] != "word" else 1
        self._absent[first] = (int(fields[0][2] or 0), "", (0,) * size)
        return f"(?:{regex})?", f"({source} if {self._source(first)} not in {self._absent[first]!r} else '')"

    def _source(self, field: str) -> str:
        """Return the expression of a field's value: an argument, or an attribute of the object."""
        return field if field in self._given else f"of.{field}"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))

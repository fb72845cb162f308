"""Schema: an op's table columns as data, with one parser and one formatter of shapes.

An op lists its columns as records of the classes below, so a new format needs no parser. Imports
no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from tunedgemm.dtype import FP8, parse_dtype, table_text
from tunedgemm.errors import ShapeError
from tunedgemm.shape import MAX_SIZE, Shape

_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False, "": False}
_FIELDS = frozenset(field.name for field in attrs.fields(Shape))
#: Shapes cached per schema, regardless of M: more than a model has layers.
_CACHED = 4096
#: Most digits of a size that is certainly below `MAX_SIZE`.
_SHORT = 9

#: Cells of a line by column, absent ones left out; ``gfx`` decides the meaning of ``fp8``.
Cells = Mapping[str, str]


@attrs.frozen
class Column:
    """A column of any text, and the shape field that it holds.

    Attributes:
        name: name of the column.
        field: field of `Shape` or of `Shape.extra`.
        default: value of an empty cell, or of AITER's filler 0; None if a cell is required. A
            function computes it from the shape of the other columns.
        spare: whether `Shape.extra` omits the field at its default.
    """

    name: str
    field: str
    default: Any = ""
    spare: bool = False

    def value(self, cells: Cells) -> Any:
        """Return the value of a cell; None for an empty one whose default is a function.

        Raises:
            UserError: an invalid text; the message names the column.
        """
        text = cells.get(self.name, "").strip()
        if self.default is None or text not in ("", "0"):
            return self.read(text, cells)
        return None if callable(self.default) else self.default

    def read(self, text: str, cells: Cells) -> Any:
        """Parse a text; raise UserError if it is invalid."""
        del cells
        return text

    def write(self, value: Any) -> str:
        """Format a value as text."""
        return str(value)

    def default_of(self, shape: Shape) -> Any:
        """Return the default value for a line of this shape."""
        return self.default(shape) if callable(self.default) else self.default

    def refuse(self, wanted: str, text: str) -> ShapeError:
        """Return the error for an invalid text."""
        return ShapeError(f"column {self.name!r} must {wanted} (got {text[:40]!r})")


@attrs.frozen
class Size(Column):
    """An integer below `MAX_SIZE`; also as 16.0, as pandas writes columns with gaps."""

    default: Any = None

    def read(self, text: str, cells: Cells) -> int:
        """Return the number."""
        del cells
        try:
            number = float(text)
        except ValueError:
            number = 0.5
        if not number.is_integer():
            raise self.refuse("be a whole number", text)
        if not 0 <= number < MAX_SIZE:
            raise self.refuse(f"be a whole number from 0 to {MAX_SIZE - 1}", text)
        return int(number)


@attrs.frozen
class Dtype(Column):
    """A dtype in any known spelling.

    Attributes:
        allowed: the valid short dtypes, or a function from the line's cells to them; () for all.
        default: as in `Column`, or ``fp8`` for the fp8 dtype of the line's architecture.
    """

    allowed: tuple[str, ...] | Callable[[Cells], tuple[str, ...]] = ()

    def value(self, cells: Cells) -> Any:
        """Return the short dtype of a cell; the default for an empty one."""
        value = super().value(cells)
        return self.read(FP8, cells) if value == FP8 else value

    def read(self, text: str, cells: Cells) -> str:
        """Return the short dtype of a spelling."""
        short = parse_dtype(text, cells.get("gfx", "")) if text not in ("", "0") else ""
        allowed = self.allowed(cells) if callable(self.allowed) else self.allowed
        if allowed and short not in allowed:
            raise self.refuse(f"be one of {', '.join(allowed)}", text)
        return short

    def write(self, value: Any) -> str:
        """Return AITER's spelling."""
        return table_text(str(value))


@attrs.frozen
class Flag(Column):
    """True or False, as words or as 1 and 0.

    Attributes:
        values: values of the field for False and True.
        texts: texts of the cell for False and True.
    """

    values: tuple[Any, Any] = (False, True)
    texts: tuple[str, str] = ("False", "True")
    default: Any = attrs.field(default=attrs.Factory(lambda self: self.values[0], takes_self=True))

    def read(self, text: str, cells: Cells) -> Any:
        """Return the field's value."""
        del cells
        value = _FLAGS.get(text.lower())
        if value is None:
            raise self.refuse("be True or False", text.lower())
        return self.values[value]

    def write(self, value: Any) -> str:
        """Return the text for a value of the field."""
        return self.texts[value != self.values[0]]


@attrs.frozen
class Word(Column):
    """One of several words; *allowed* as in `Dtype`."""

    allowed: tuple[str, ...] | Callable[[Cells], tuple[str, ...]] = ()

    def read(self, text: str, cells: Cells) -> str:
        """Return the word."""
        allowed = self.allowed(cells) if callable(self.allowed) else self.allowed
        if text not in allowed:
            raise self.refuse(f"be one of {', '.join(allowed)}", text)
        return text


@attrs.frozen
class ShuffledLayout(Column):
    """The layout of an op with shuffled weights, by default AITER's."""

    name: str = "layout"
    field: str = "layout"
    default: Any = "aiter16x16"

    def read(self, text: str, cells: Cells) -> str:
        """Return the layout; raise ShapeError for ``row``."""
        del cells
        if text == "row":
            raise self.refuse(f"name a shuffled layout such as {self.default}", text)
        return text


#: Columns of most ops: sizes, and whether a bias is added.
MNK = (Size("M", "m"), Size("N", "n"), Size("K", "k"))
BIAS = Flag("bias", "epilogue", values=("none", "bias"))


@attrs.frozen(eq=False)
class Schema:
    """The columns that hold the shapes of an op.

    Attributes:
        fixed: fields that every shape of the op has, ``op`` among them.
        key: AITER's columns, which are always written.
        own: our columns after AITER's, written as "" at their defaults.
    """

    fixed: Mapping[str, Any]
    key: tuple[Column, ...]
    own: tuple[Column, ...] = ()
    _m: Column = attrs.field(init=False)
    _others: tuple[Column, ...] = attrs.field(init=False)
    _names: tuple[str, ...] = attrs.field(init=False)
    _cached: Callable[[tuple[str | None, ...]], Shape] = attrs.field(init=False, repr=False)

    @_m.default
    def _of_m(self) -> Column:
        return next(column for column in self.key if column.field == "m")

    @_others.default
    def _but_m(self) -> tuple[Column, ...]:
        return tuple(column for column in (*self.key, *self.own) if column is not self._m)

    @_names.default
    def _of_cells(self) -> tuple[str, ...]:
        return (*(column.name for column in self._others), "gfx")

    @_cached.default
    def _cache(self) -> Callable[[tuple[str | None, ...]], Shape]:
        return functools.lru_cache(_CACHED)(self._read)

    def columns(self) -> dict[str, Any]:
        """Return the arguments of `tunedgemm.ops.op.Columns` that the schema defines."""
        key, own = (tuple(column.name for column in columns) for columns in (self.key, self.own))
        return {"key": key, "own": own, "parse": self.parse, "format": self.format}

    def parse(self, cells: Cells) -> Shape:
        """Parse the shape of a line.

        Raises:
            UserError: an invalid cell; the message names its column.
        """
        text = cells.get(self._m.name, "")
        m = int(text) if text.isdecimal() and len(text) <= _SHORT else self._m.value(cells)
        texts = tuple(map(cells.get, self._names))
        shape = self._cached(texts) if texts[-1] else self._read(texts)  # without gfx the current device decides, so no cache
        return shape.with_m(m)

    def _read(self, texts: tuple[str | None, ...]) -> Shape:
        """Parse the shape of a line with M = 1 from its other columns."""
        cells = {name: text for name, text in zip(self._names, texts, strict=True) if text is not None}
        given = [column for column in self._others if column.name in cells]  # report an invalid cell before an absent one
        absent = [column for column in self._others if column.name not in cells]
        values = {column.name: column.value(cells) for column in (*given, *absent)}
        fields, extra, later = dict(self.fixed), {}, []
        for column in self._others:
            value = values[column.name]
            if callable(column.default):
                later.append((column, value))
            elif column.field in _FIELDS:
                fields[column.field] = value
            elif not column.spare or value != column.default:
                extra[column.field] = value
        shape = Shape(m=1, extra=extra, **fields)  # type: ignore[arg-type]
        for column, value in later:
            shape = _put(shape, column, column.default_of(shape) if value is None else value)
        return shape

    def format(self, shape: Shape) -> dict[str, str]:
        """Format a shape as the cells of all columns."""
        extra, cells = dict(shape.extra), {}
        for column in self.key:
            cells[column.name] = column.write(getattr(shape, column.field) if column.field in _FIELDS else extra[column.field])
        for column in self.own:
            default = column.default_of(shape)
            value = getattr(shape, column.field) if column.field in _FIELDS else extra.get(column.field, default)
            cells[column.name] = "" if value == default else column.write(value)
        return cells

    def plain(self, shape: Shape) -> Shape:
        """Return a shape with our columns at their defaults, as in AITER's rows."""
        usual = {
            column.field: column.default
            for column in self.own
            if column.field in _FIELDS and not callable(column.default) and column.default not in (FP8, getattr(shape, column.field))
        }
        shape = attrs.evolve(shape, **usual) if usual else shape
        for column in self.own:
            if column.field not in _FIELDS or callable(column.default):
                shape = _put(shape, column, column.default_of(shape))
        return shape

    def equivalent_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Return the shape and its form in AITER's key, for `Op.equivalent_shapes`."""
        return (shape,) if (plain := self.plain(shape)) is shape else (shape, plain)


def _put(shape: Shape, column: Column, value: Any) -> Shape:
    """Return a shape with a column's field set to a value; the same shape if it is unchanged."""
    if column.field in _FIELDS:
        return shape if getattr(shape, column.field) == value else attrs.evolve(shape, **{column.field: value})
    kept = tuple(field for field in shape.extra if field[0] != column.field)
    extra = kept if column.spare and value == column.default_of(shape) else tuple(sorted((*kept, (column.field, value))))
    return shape if extra == shape.extra else shape.with_extra(extra)

"""Match: a row that may serve a shape, before and after it is parsed. Torch-free."""

from __future__ import annotations

import functools
from typing import Any

import attrs

from tunedgemm.products import with_memory
from tunedgemm.table.index import Kind
from tunedgemm.table.row import Row

#: N, K and kind of an equivalent shape.
Product = tuple[int, int, Kind]

#: Row numbers of a key, and the key: M, granularity, product and cu_num.
Bucket = tuple[int | list[int], int, str, Product, int]


@attrs.frozen
class Match:
    """A row that may serve a shape.

    Attributes:
        row: the row, with the tuned shape.
        granularity: relation of its M to the requested one, such as ``exact``.
        same_device: whether it was tuned on a device of this name, or names none.
        layer: name of its table's layer; "" for rows without a file.
    """

    row: Row
    granularity: str
    same_device: bool
    layer: str = ""

    @functools.cached_property
    def why(self) -> str:
        """Describe the row: file, line, layer, time, and relation to the requested M and device."""
        row = self.row
        other = "" if self.same_device else f", measured on {with_memory(row.device)}"
        layer = f" ({self.layer})" if self.layer else ""
        return f"{row.source}:{row.line}{layer}, {row.us:.2f} us, {self.granularity} M={row.shape.m}{other}"


@attrs.frozen(eq=False)
class UnparsedRow:
    """A matching row before parsing.

    Attributes:
        number: its number in the index.
        m, product, units: the key of its bucket.
        word: its granularity.
        same_device: see `Match`.
        offered: the first row per solution and device of this key, shared by its rows.
    """

    number: int
    m: int
    word: str
    same_device: bool
    product: Product
    units: int
    offered: dict[Any, int]

"""Order the tiles in groups along a, so that concurrent CTAs share loads in L2.

Items are numbered split by split, and within a split tile by tile; clusters take them round-robin.
The tiles of a cluster, adjacent along a, count as one. The last tile along an operand ends with it:
see `last_rows`.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.frame import Frame


@attrs.frozen
class Place:
    """Place of an item's tile, as registers.

    Attributes:
        row_a, row_b: first rows of the operands.
        first: first step along K.
        steps: number of steps, at least one.
        tile: index of the tile, counted in CTAs.
        part: index of the split; empty with stream-K.
    """

    row_a: str
    row_b: str
    first: str
    steps: str
    tile: str
    part: str


@attrs.frozen
class Items:
    """Position of a CTA among its items, as registers.

    Attributes:
        item: index of the item.
        step: distance to the next item.
    """

    item: str
    step: str

    def ended(self, f: Frame) -> str:
        """Return a predicate: whether all items are done."""
        return f.text.to("pred", "setp.ge.u32", self.item, f.arguments["items"])

    def place(self, f: Frame) -> Place:
        """Return the place of the item's tile."""
        t, numbers = f.text, f.arguments
        if not f.variant.split:
            return place_tile(f, self.item, ("0", numbers["steps"]), "0")
        part = t.to("b32", "div.u32", self.item, numbers["tiles"])
        before = t.to("b32", "mul.lo.u32", part, numbers["tiles"])
        tile = t.to("b32", "sub.u32", self.item, before)
        return place_tile(f, tile, _steps_of_part(f, part), part)

    def steps(self, f: Frame) -> str:
        """Return the steps along K of the item; arbitrary after the last, whose stages are never
        awaited.
        """
        if not f.variant.split:
            return f.arguments["steps"]
        return _steps_of_part(f, f.text.to("b32", "div.u32", self.item, f.arguments["tiles"]))[1]

    def advance(self, f: Frame, steps: str, times: str = "") -> None:
        """Advance to the next item; *times* is 1, or 0 to stay."""
        del steps
        if times:
            f.text.op("mad.lo.u32", self.item, self.step, times, self.item)
        else:
            f.text.op("add.u32", self.item, self.item, self.step)


def place_of(tile: int, units_a: int, tiles_b: int, group: int) -> tuple[int, int]:
    """Return a tile's position along a, counted in clusters, and along b, as `place_tile` computes
    it.
    """
    number, inside = divmod(tile, group * tiles_b)
    size = min(units_a - number * group, group)
    return number * group + inside % size, inside // size


def place_tile(f: Frame, tile: str, along: tuple[str, str], part: str = "") -> Place:
    """Return the place of a tile; *along* has its first step along K and the number of steps."""
    t, numbers, config, (first, steps) = f.text, f.arguments, f.config, along
    tiles = t.to("b32", "mul.lo.u32", numbers["tiles_b"], config.group)
    number = t.to("b32", "div.u32", tile, tiles)
    inside = t.to("b32", "rem.u32", tile, tiles)
    begin = t.to("b32", "mul.lo.u32", number, config.group)
    left_a = t.to("b32", "sub.u32", numbers["units_a"], begin)
    size = t.to("b32", "min.u32", left_a, config.group)
    at_b = t.to("b32", "div.u32", inside, size)
    over = t.to("b32", "rem.u32", inside, size)
    at_a = t.to("b32", "add.u32", begin, over)
    if config.cluster > 1:
        at_a = t.to("b32", "mad.lo.u32", at_a, config.cluster, f.rank)
        tile = t.to("b32", "mad.lo.u32", tile, config.cluster, f.rank)
    row_a = t.to("b32", "min.u32", t.to("b32", "mul.lo.u32", at_a, config.tile_a), numbers["last_a"])
    row_b = t.to("b32", "min.u32", t.to("b32", "mul.lo.u32", at_b, config.tile_b), numbers["last_b"])
    return Place(row_a, row_b, first, steps, tile, part)


def _steps_of_part(f: Frame, part: str) -> tuple[str, str]:
    """Return the first step of a split and its number of steps; the last split may have fewer."""
    t, numbers = f.text, f.arguments
    first = t.to("b32", "mul.lo.u32", part, numbers["part"])
    left = t.to("b32", "sub.u32", numbers["steps"], first)
    return first, t.to("b32", "min.u32", left, numbers["part"])


def cluster_of(f: Frame) -> tuple[str, str]:
    """Return the index of the CTA's cluster and the number of clusters."""
    t, cluster = f.text, f.config.cluster
    number, count = t.to("b32", "mov.u32", "%ctaid.x"), t.to("b32", "mov.u32", "%nctaid.x")
    if cluster > 1:
        number, count = (t.to("b32", "shr.u32", ctas, cluster.bit_length() - 1) for ctas in (number, count))
    return number, count


def first_element(f: Frame, place: Place) -> str:
    """Return a new register with the first element along K of an item."""
    return f.text.to("b32", "mul.lo.u32", place.first, f.variant.step) if place.first != "0" else f.text.to("b32", "mov.u32", 0)

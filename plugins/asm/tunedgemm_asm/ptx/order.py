"""The order in which tiles are computed: in groups along a, so that blocks at work at the same time share what L2 holds.

Items are numbered part by part of K, within a part tile by tile; clusters take turns. The tiles of a cluster count as one: its blocks have
tiles side by side along a.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.frame import Frame


@attrs.frozen
class Place:
    """Where the tile of an item lies, as registers.

    Attributes:
        row_a, row_b: first rows of the operands.
        first: first step along K.
        steps: steps, one at least.
        tile: number of the tile among all, also those of a cluster.
        part: number of the part of K; empty where steps are shared.
    """

    row_a: str
    row_b: str
    first: str
    steps: str
    tile: str
    part: str


@attrs.frozen
class Items:
    """Where a block stands among its items, as registers.

    Attributes:
        item: number of the item.
        step: how far the next one is.
    """

    item: str
    step: str

    def ended(self, f: Frame) -> str:
        """A predicate: whether there is no item any more."""
        return f.text.to("pred", "setp.ge.u32", self.item, f.arguments["items"])

    def place(self, f: Frame) -> Place:
        """Where the tile of the item lies."""
        t, told = f.text, f.arguments
        if not f.variant.split:
            return place_tile(f, self.item, ("0", told["steps"]), "0")
        part = t.to("b32", "div.u32", self.item, told["tiles"])
        before = t.to("b32", "mul.lo.u32", part, told["tiles"])
        tile = t.to("b32", "sub.u32", self.item, before)
        return place_tile(f, tile, _steps_of_part(f, part), part)

    def steps(self, f: Frame) -> str:
        """Steps along K of the item; of one behind the last any number, whose stages nobody waits for."""
        if not f.variant.split:
            return f.arguments["steps"]
        return _steps_of_part(f, f.text.to("b32", "div.u32", self.item, f.arguments["tiles"]))[1]

    def advance(self, f: Frame, steps: str, times: str = "") -> None:
        """To the next item, of whatever steps this one has; *times* is 0 where it stays there, or 1."""
        del steps
        if times:
            f.text.op("mad.lo.u32", self.item, self.step, times, self.item)
        else:
            f.text.op("add.u32", self.item, self.item, self.step)


def place_of(tile: int, units_a: int, tiles_b: int, group: int) -> tuple[int, int]:
    """The place along a, counted in clusters, and along b, of a tile; what `find_place` writes."""
    number, inside = divmod(tile, group * tiles_b)
    size = min(units_a - number * group, group)
    return number * group + inside % size, inside // size


def place_tile(f: Frame, tile: str, along: tuple[str, str], part: str = "") -> Place:
    """Where a tile lies, of which the steps *along* K are given by the first and their number."""
    t, told, config, (first, steps) = f.text, f.arguments, f.config, along
    tiles = t.to("b32", "mul.lo.u32", told["tiles_b"], config.group)
    number = t.to("b32", "div.u32", tile, tiles)
    inside = t.to("b32", "rem.u32", tile, tiles)
    begin = t.to("b32", "mul.lo.u32", number, config.group)
    left_a = t.to("b32", "sub.u32", told["units_a"], begin)
    size = t.to("b32", "min.u32", left_a, config.group)
    at_b = t.to("b32", "div.u32", inside, size)
    over = t.to("b32", "rem.u32", inside, size)
    at_a = t.to("b32", "add.u32", begin, over)
    if config.cluster > 1:
        at_a = t.to("b32", "mad.lo.u32", at_a, config.cluster, f.rank)
        tile = t.to("b32", "mad.lo.u32", tile, config.cluster, f.rank)
    row_a = t.to("b32", "mul.lo.u32", at_a, config.tile_a)
    row_b = t.to("b32", "mul.lo.u32", at_b, config.tile_b)
    return Place(row_a, row_b, first, steps, tile, part)


def _steps_of_part(f: Frame, part: str) -> tuple[str, str]:
    """First step along K of a part, and how many it has: the last may have fewer."""
    t, told = f.text, f.arguments
    first = t.to("b32", "mul.lo.u32", part, told["part"])
    left = t.to("b32", "sub.u32", told["steps"], first)
    return first, t.to("b32", "min.u32", left, told["part"])


def cluster_of(f: Frame) -> tuple[str, str]:
    """The number of the block's cluster, and how many there are."""
    t, cluster = f.text, f.config.cluster
    number, count = t.to("b32", "mov.u32", "%ctaid.x"), t.to("b32", "mov.u32", "%nctaid.x")
    if cluster > 1:
        number, count = (t.to("b32", "shr.u32", each, cluster.bit_length() - 1) for each in (number, count))
    return number, count


def first_element(f: Frame, place: Place) -> str:
    """The first element along K of an item, in a register of its own."""
    return f.text.to("b32", "mul.lo.u32", place.first, f.variant.step) if place.first != "0" else f.text.to("b32", "mov.u32", 0)

"""Ranges: a cluster's range of steps of the tiles that are shared, then its whole tiles.

Steps are numbered tile by tile, those of the tiles that are shared first. A piece is what lies in one tile. Ranges come before whole tiles,
so that parts meet while there is work left: a consumer that adds up has the next stages loaded meanwhile, and where consumers take turns
the other multiplies. Nobody waits for another cluster.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.order import Items, Place, cluster_of, place_tile


@attrs.frozen
class Ranges:
    """Where a cluster stands among its pieces, as registers.

    Attributes:
        at: the first step of the piece, among those of all tiles.
        limit: the first behind the range, or behind all tiles.
        shared: the first behind the tiles that are shared.
    """

    at: str
    limit: str
    shared: str

    @classmethod
    def of(cls, f: Frame) -> Ranges:
        """At the cluster's first piece: of its range, or of a tile where it has none."""
        t, told = f.text, f.arguments
        cluster, _ = cluster_of(f)
        shared = t.to("b32", "mul.lo.u32", told["items"], told["steps"])
        at = t.to("b32", "mul.lo.u32", cluster, told["part"])
        end = t.to("b32", "add.u32", at, told["part"])
        ranges = cls(at, t.to("b32", "min.u32", end, shared), shared)
        ranges._go_on(f, cluster, t.to("pred", "setp.ge.u32", at, shared))
        return ranges

    def ended(self, f: Frame) -> str:
        """A predicate: whether there is no piece any more."""
        return f.text.to("pred", "setp.ge.u32", self.at, self.limit)

    def place(self, f: Frame) -> Place:
        """Where the piece lies."""
        tile, first, steps = self._piece(f)
        return place_tile(f, tile, (first, steps))

    def steps(self, f: Frame) -> str:
        """Steps of the piece; behind the last any number, whose stages nobody waits for."""
        return self._piece(f)[2]

    def parts(self, f: Frame, place: Place) -> tuple[str, str]:
        """Of a piece that is no whole tile: its number among the parts of the tile, and their number."""
        t, told = f.text, f.arguments
        begin = t.to("b32", "sub.u32", self.at, place.first)
        last = t.to("b32", "sub.u32", t.to("b32", "add.u32", begin, told["steps"]), 1)
        of_first, of_own, of_last = (t.to("b32", "div.u32", each, told["part"]) for each in (begin, self.at, last))
        behind = t.to("b32", "sub.u32", of_last, of_first)
        return t.to("b32", "sub.u32", of_own, of_first), t.to("b32", "add.u32", behind, 1)

    def advance(self, f: Frame, steps: str, times: str = "") -> None:
        """To the next piece, behind one of so many steps; *times* is 0 where there it stays, or 1."""
        t = f.text
        cluster, clusters = cluster_of(f)
        within = t.to("pred", "setp.lt.u32", self.at, self.shared)
        round_steps = t.to("b32", "mul.lo.u32", clusters, f.arguments["steps"])
        far = t.to("b32", "selp.b32", steps, round_steps, within)
        if times:
            t.op("mad.lo.u32", self.at, far, times, self.at)
        else:
            t.op("add.u32", self.at, self.at, far)
        ended = t.to("pred", "setp.ge.u32", self.at, self.limit)
        self._go_on(f, cluster, t.to("pred", "and.pred", ended, within))

    def _go_on(self, f: Frame, cluster: str, behind: str) -> None:
        """To the cluster's first whole tile where its range is *behind*."""
        t, told = f.text, f.arguments
        t.op("mad.lo.u32", self.at, cluster, told["steps"], self.shared, when=behind)
        t.op("mul.lo.u32", self.limit, told["tiles"], told["steps"], when=behind)

    def _piece(self, f: Frame) -> tuple[str, str, str]:
        """Tile, first step in it and steps."""
        t, steps = f.text, f.arguments["steps"]
        tile = t.to("b32", "div.u32", self.at, steps)
        first = t.to("b32", "sub.u32", self.at, t.to("b32", "mul.lo.u32", tile, steps))
        left, within = t.to("b32", "sub.u32", steps, first), t.to("b32", "sub.u32", self.limit, self.at)
        return tile, first, t.to("b32", "min.u32", left, within)


def start_items(f: Frame) -> Items | Ranges:
    """What a block computes one after the other, at the first."""
    return Ranges.of(f) if f.config.stream else Items(*cluster_of(f))

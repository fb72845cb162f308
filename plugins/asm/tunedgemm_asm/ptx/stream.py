"""Iterate over stream-K work: a cluster's range of steps of the shared tiles, then its whole tiles.

Steps are numbered tile by tile, shared tiles first. A piece is the part of a range in one tile.
Ranges come before whole tiles, so that fixups overlap with remaining work: the next stages load
meanwhile, and a ping-pong consumer multiplies. No cluster waits for another.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.order import Items, Place, cluster_of, place_tile


@attrs.frozen
class Ranges:
    """Position of a cluster among its pieces, as registers.

    Attributes:
        at: first step of the piece, counted over all tiles.
        limit: end of the range, or of all tiles.
        shared: end of the shared tiles.
    """

    at: str
    limit: str
    shared: str

    @classmethod
    def of(cls, f: Frame) -> Ranges:
        """Start at the cluster's first piece: of its range, or a whole tile where it has none."""
        t, numbers = f.text, f.arguments
        cluster, _ = cluster_of(f)
        shared = t.to("b32", "mul.lo.u32", numbers["items"], numbers["steps"])
        at = t.to("b32", "mul.lo.u32", cluster, numbers["part"])
        end = t.to("b32", "add.u32", at, numbers["part"])
        ranges = cls(at, t.to("b32", "min.u32", end, shared), shared)
        ranges._go_on(f, cluster, t.to("pred", "setp.ge.u32", at, shared))
        return ranges

    def ended(self, f: Frame) -> str:
        """Return a predicate: whether all pieces are done."""
        return f.text.to("pred", "setp.ge.u32", self.at, self.limit)

    def place(self, f: Frame) -> Place:
        """Return the place of the piece."""
        tile, first, steps = self._piece(f)
        return place_tile(f, tile, (first, steps))

    def steps(self, f: Frame) -> str:
        """Return the steps of the piece; arbitrary after the last, whose stages are never awaited."""
        return self._piece(f)[2]

    def parts(self, f: Frame, place: Place) -> tuple[str, str]:
        """Return the index of a piece among the partials of its tile, and their number."""
        t, numbers = f.text, f.arguments
        begin = t.to("b32", "sub.u32", self.at, place.first)
        last = t.to("b32", "sub.u32", t.to("b32", "add.u32", begin, numbers["steps"]), 1)
        of_first, of_own, of_last = (t.to("b32", "div.u32", step, numbers["part"]) for step in (begin, self.at, last))
        behind = t.to("b32", "sub.u32", of_last, of_first)
        return t.to("b32", "sub.u32", of_own, of_first), t.to("b32", "add.u32", behind, 1)

    def advance(self, f: Frame, steps: str, times: str = "") -> None:
        """Advance to the piece after one of this many steps; *times* is 1, or 0 to stay."""
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
        """Move to the cluster's first whole tile where its range is *behind*."""
        t, numbers = f.text, f.arguments
        t.op("mad.lo.u32", self.at, cluster, numbers["steps"], self.shared, when=behind)
        t.op("mul.lo.u32", self.limit, numbers["tiles"], numbers["steps"], when=behind)

    def _piece(self, f: Frame) -> tuple[str, str, str]:
        """Return the tile, the first step in it and the number of steps."""
        t, steps = f.text, f.arguments["steps"]
        tile = t.to("b32", "div.u32", self.at, steps)
        first = t.to("b32", "sub.u32", self.at, t.to("b32", "mul.lo.u32", tile, steps))
        left, within = t.to("b32", "sub.u32", steps, first), t.to("b32", "sub.u32", self.limit, self.at)
        return tile, first, t.to("b32", "min.u32", left, within)


def start_items(f: Frame) -> Items | Ranges:
    """Return the iteration of a CTA over its work, at its start."""
    return Ranges.of(f) if f.config.stream else Items(*cluster_of(f))

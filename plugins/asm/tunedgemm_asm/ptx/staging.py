"""Copy the block scales of each stage to shared memory, and read a thread's from there.

A warp of the producer's warpgroup copies: 4 bytes for each row of x, and one scale for each block
of the weight that the tile touches. The copies are asynchronous and complete the full barrier of
the stage, so latency is hidden by as many stages as the ring has. Any order of the scales of x
serves. Rows outside x have zeros.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.barriers import Ring, arrive_after_copies, barrier_of, next_stage, start_ring, wait
from tunedgemm_asm.ptx.fragment import columns_of_thread, first_accumulator, rows_of_thread
from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.names import SCALE_BYTES, WARP_THREADS, KernelConfig
from tunedgemm_asm.ptx.order import Place
from tunedgemm_asm.ptx.promotion import BLOCK_BITS, LoadedScales, blocks_of, next_blocks, step_of_scales
from tunedgemm_asm.ptx.scales import scale_bases
from tunedgemm_asm.ptx.stream import start_items

_COPY = "cp.async.ca.shared.global"


def stage_scales(f: Frame) -> None:
    """Generate the warp that copies the scales of all stages of all items of its CTA."""
    t, config = f.text, f.config
    items, ring = start_items(f), start_ring(f, 1)
    own = t.to("b32", "mad.lo.u32", f.lane, SCALE_BYTES, t.to("b32", "add.u32", f.shared, f.scales))
    tile, inner = t.label("SCALE_TILE"), t.label("SCALE")
    t.place(tile)
    t.op("bra", f.end, when=items.ended(f))
    place = items.place(f)
    of_x, of_weight = _Source.of_x(f, place), _Source.of_weight(f, place)
    left = t.to("b32", "mov.u32", place.steps)
    t.place(inner)
    barrier = barrier_of(f, ring.stage)
    wait(f, barrier, f.empty, ring.parity)
    to = t.to("b32", "mad.lo.u32", ring.stage, config.scale_bytes, own)
    of_x.copy(f, to, config.tile_m)
    of_weight.copy(f, t.to("b32", "add.u32", to, config.tile_m * SCALE_BYTES), weight_blocks(config))
    arrive_after_copies(f, barrier)
    next_stage(f, ring)
    t.op("sub.u32", left, left, 1)
    t.op("bra", inner, when=t.to("pred", "setp.ne.u32", left, 0))
    items.advance(f, place.steps)
    t.op("bra", tile)


def weight_blocks(config: KernelConfig) -> int:
    """Return the scale blocks of the weight that a tile can touch."""
    return max(1, config.tile_n >> BLOCK_BITS) if config.swapped else blocks_of(config)


@attrs.frozen
class _Source:
    """Scales of one operand in global memory, as registers.

    Attributes:
        address: address of the lane's first scale of the next stage.
        left: scales of the operand from the lane's first on; at most 0 past its end.
        far: bytes to the scale of the lane's next row, `WARP_THREADS` further.
        step: bytes to the scale of the next stage.
    """

    address: str
    left: str
    far: object
    step: object

    @classmethod
    def of_x(cls, f: Frame, place: Place) -> _Source:
        """Return the scales of x: one for each row."""
        t, swapped = f.text, f.config.swapped
        rows = f.arguments["rows_b" if swapped else "rows_a"]
        row = t.to("b32", "add.u32", place.row_b if swapped else place.row_a, f.lane)
        stride = step_of_scales(f, rows)
        return cls._of(f, (scale_bases(f)[swapped], rows), row, place.first, stride)

    @classmethod
    def of_weight(cls, f: Frame, place: Place) -> _Source:
        """Return the scales of the weight: one for each `SCALE_BLOCK` rows."""
        t, swapped = f.text, f.config.swapped
        rows = f.arguments["rows_a" if swapped else "rows_b"]
        blocks = t.to("b32", "shr.u32", t.to("b32", "add.u32", rows, (1 << BLOCK_BITS) - 1), BLOCK_BITS)
        begin = t.to("b32", "shr.u32", place.row_a if swapped else place.row_b, BLOCK_BITS)
        return cls._of(f, (scale_bases(f)[not swapped], blocks), t.to("b32", "add.u32", begin, f.lane), place.first, "")

    @classmethod
    def _of(cls, f: Frame, operand: tuple[str, str], row: str, first: str, stride: str) -> _Source:
        """Return the scales of an operand, which are ordered by stage where *stride* is given."""
        t, (base, rows) = f.text, operand
        pitch = 1 if stride else f.arguments["steps"]
        index = t.to("b32", "mad.lo.u32", first, stride or 1, t.to("b32", "mul.lo.u32", row, pitch))
        far = WARP_THREADS * SCALE_BYTES
        return cls(
            address=t.to("b64", "mad.wide.u32", index, SCALE_BYTES, base),
            left=t.to("b32", "sub.s32", rows, row),
            far=far if stride else t.to("b64", "mul.wide.u32", pitch, far),
            step=t.to("b64", "mul.wide.u32", stride, SCALE_BYTES) if stride else SCALE_BYTES,
        )

    def copy(self, f: Frame, to: str, count: int) -> None:
        """Copy *count* scales of the next stage, zeros outside the operand, and advance."""
        t, at = f.text, self.address
        for first in range(0, count, WARP_THREADS):
            size = t.to("b32", "selp.b32", SCALE_BYTES, 0, t.to("pred", "setp.gt.s32", self.left, first))
            when = t.to("pred", "setp.lt.u32", f.lane, count - first) if count - first < WARP_THREADS else ""
            t.op(_COPY, f"[{to}+{first * SCALE_BYTES}]", f"[{at}]", SCALE_BYTES, size, when=when)
            at = t.to("b64", "add.s64", at, self.far)
        t.op("add.s64", self.address, self.address, self.step)


@attrs.frozen
class StageScales:
    """Addresses of a thread's scales in the first stage, as registers.

    Attributes:
        x, weight: addresses of the first scale of x and of the weight.
        next: offset of a span -> predicate: whether the span is in the next block.
    """

    x: str
    weight: str
    next: dict[int, str]

    @classmethod
    def of(cls, f: Frame, place: Place, number: str) -> StageScales:
        """Return the addresses of the consumer *number* for an item."""
        t, config = f.text, f.config
        first = t.to("b32", "mul.lo.u32", number, config.rows)
        row, column = first_accumulator(f, first, "0")
        block = t.to("b32", "shr.u32", first, BLOCK_BITS) if config.swapped else "0"
        base = t.to("b32", "add.u32", f.shared, f.scales)
        behind = t.to("b32", "add.u32", base, config.tile_m * SCALE_BYTES)
        return cls(
            x=t.to("b32", "mad.lo.u32", column if config.swapped else row, SCALE_BYTES, base),
            weight=t.to("b32", "mad.lo.u32", block, SCALE_BYTES, behind),
            next=next_blocks(f, place),
        )

    def registers(self, f: Frame) -> LoadedScales:
        """Return new registers for the scales of one stage."""
        of_x = columns_of_thread(f.config) if f.config.swapped else rows_of_thread(f.config)
        return f.text.many("f32", len(of_x)), f.text.many("f32", blocks_of(f.config))

    def read(self, f: Frame, ring: Ring, to: LoadedScales) -> None:
        """Read the scales of a stage that has arrived."""
        t, config, (of_x, of_weight) = f.text, f.config, to
        x, weight = (t.to("b32", "mad.lo.u32", ring.stage, config.scale_bytes, base) for base in (self.x, self.weight))
        if config.swapped:
            for column, pair in zip(columns_of_thread(config)[::2], zip(of_x[::2], of_x[1::2], strict=True), strict=True):
                t.op("ld.shared.v2.f32", f"{{{', '.join(pair)}}}", f"[{x}+{column * SCALE_BYTES}]")
        else:
            for row, register in zip(rows_of_thread(config), of_x, strict=True):
                t.op("ld.shared.f32", register, f"[{x}+{row * SCALE_BYTES}]")
        for block, register in enumerate(of_weight):
            t.op("ld.shared.f32", register, f"[{weight}+{block * SCALE_BYTES}]")

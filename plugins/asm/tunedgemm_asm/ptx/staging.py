"""Copy the block scales of each stage to shared memory, and load a thread's from there.

A warp of the producer's warpgroup copies a scale for each row of x and for each span of the
weight's rows. A span is within one scale block, wherever the tile begins. The copies are
asynchronous and complete the full barrier of the stage, so the stages of the ring hide their
latency. Any order of the scales of x serves. Rows outside an operand have zeros.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.ptx.barriers import arrive_after_copies, barrier_of, next_stage, start_ring, wait
from tunedgemm_asm.ptx.fragment import BELOW, columns_of_thread, first_accumulator
from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.names import SCALE_BLOCK, SCALE_BYTES, SIDE, WARP_THREADS
from tunedgemm_asm.ptx.order import Place
from tunedgemm_asm.ptx.promotion import LoadedScales
from tunedgemm_asm.ptx.scales import scale_bases
from tunedgemm_asm.ptx.stream import start_items

#: Scales to whose multiple a padded step is rounded up, and the mask of such a multiple.
PADDED = 4
_WHOLE = (1 << 32) - PADDED
_BLOCK_BITS = SCALE_BLOCK.bit_length() - 1
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
    of_weight.copy(f, t.to("b32", "add.u32", to, config.tile_m * SCALE_BYTES), config.spans)
    arrive_after_copies(f, barrier)
    next_stage(f, ring)
    t.op("sub.u32", left, left, 1)
    t.op("bra", inner, when=t.to("pred", "setp.ne.u32", left, 0))
    items.advance(f, place.steps)
    t.op("bra", tile)


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
        rows = stride = f.arguments["rows_b" if swapped else "rows_a"]
        if f.variant.padded:
            stride = t.to("b32", "and.b32", t.to("b32", "add.u32", rows, PADDED - 1), _WHOLE)
        row = t.to("b32", "add.u32", place.row_b if swapped else place.row_a, f.lane)
        return cls._of(f, (scale_bases(f)[swapped], rows), row, place.first, stride if f.variant.transposed else "")

    @classmethod
    def of_weight(cls, f: Frame, place: Place) -> _Source:
        """Return the scales of the weight: one for each span of its rows."""
        t, swapped = f.text, f.config.swapped
        rows = f.arguments["rows_a" if swapped else "rows_b"]
        blocks = t.to("b32", "shr.u32", t.to("b32", "add.u32", rows, SCALE_BLOCK - 1), _BLOCK_BITS)
        row = t.to("b32", "mad.lo.u32", f.lane, f.config.span, place.row_a if swapped else place.row_b)
        return cls._of(f, (scale_bases(f)[not swapped], blocks), t.to("b32", "shr.u32", row, _BLOCK_BITS), place.first, "")

    @classmethod
    def _of(cls, f: Frame, operand: tuple[str, str], row: str, first: str, stride: str) -> _Source:
        """Return the scales of an operand, which are ordered by stage where *stride* is given."""
        t, (base, rows) = f.text, operand
        pitch, far = 1 if stride else f.arguments["steps"], WARP_THREADS * SCALE_BYTES
        index = t.to("b32", "mad.lo.u32", first, stride or 1, t.to("b32", "mul.lo.u32", row, pitch))
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
            if first:
                at = t.to("b64", "add.s64", at, self.far)
            size = t.to("b32", "selp.b32", SCALE_BYTES, 0, t.to("pred", "setp.gt.s32", self.left, first))
            when = t.to("pred", "setp.lt.u32", f.lane, count - first) if count - first < WARP_THREADS else ""
            t.op(_COPY, f"[{to}+{first * SCALE_BYTES}]", f"[{at}]", SCALE_BYTES, size, when=when)
        t.op("add.s64", self.address, self.address, self.step)


@attrs.frozen
class StageScales:
    """Addresses in shared memory of a thread's scales of a stage, as registers.

    Attributes:
        x, weight: addresses of the first scale of x and of the weight.
        loaded: address and index of a scale -> register that holds it.
    """

    x: str
    weight: str
    loaded: dict[tuple[str, int], str] = attrs.field(factory=dict)

    @classmethod
    def of(cls, f: Frame, number: str) -> StageScales:
        """Return the addresses of the consumer *number* in the first stage."""
        t, config = f.text, f.config
        first = t.to("b32", "mul.lo.u32", number, config.rows)
        row, column = first_accumulator(f, first, "0")
        span = t.to("b32", "shr.u32", first, _BLOCK_BITS) if config.swapped else "0"
        base = t.to("b32", "add.u32", f.shared, f.scales)
        behind = t.to("b32", "add.u32", base, config.tile_m * SCALE_BYTES)
        own = t.to("b32", "mad.lo.u32", column if config.swapped else row, SCALE_BYTES, base)
        return cls(own, t.to("b32", "mad.lo.u32", span, SCALE_BYTES, behind))

    def at(self, f: Frame, stage: str) -> StageScales:
        """Return the addresses in another stage."""
        x, weight = (f.text.to("b32", "mad.lo.u32", stage, f.config.scale_bytes, base) for base in (self.x, self.weight))
        return StageScales(x, weight)

    def load(self, f: Frame, portion: tuple[int, int]) -> LoadedScales:
        """Load the scales of a portion, an element of `KernelConfig.portions`."""
        config, (block, first) = f.config, portion
        if config.swapped:
            columns = [first + column for column in columns_of_thread(config) if column < config.portion]
            return self._registers(f, self.x, columns), self._registers(f, self.weight, [0])
        spans = range(first // config.span, (first + config.portion - 1) // config.span + 1)
        return self._registers(f, self.x, [SIDE * block, SIDE * block + BELOW]), self._registers(f, self.weight, list(spans))

    def _registers(self, f: Frame, base: str, indices: list[int]) -> list[str]:
        """Load the scales of these indices unless another portion did, and return their registers."""
        for index in indices:
            if (base, index) not in self.loaded:
                self.loaded[base, index] = f.text.to("f32", "ld.shared.f32", f"[{base}+{index * SCALE_BYTES}]")
        return [self.loaded[base, index] for index in indices]

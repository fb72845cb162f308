"""Generate a consumer: a warpgroup that multiplies its rows of every stage and stores its part of
the tile.

Ping-pong consumers take all rows of every second item and skip the stages of the other. Only an
arrival at a barrier separates the last wgmma of one from the first of the other. So the tensor
cores have work while one consumer stores. Both may have wgmma instructions in flight: each has its
own accumulators and stages.
"""

from __future__ import annotations

from tunedgemm_asm.ptx import matrix
from tunedgemm_asm.ptx.barriers import (
    Ring,
    Turn,
    barrier_of,
    end_turn,
    next_stage,
    release,
    skip_stages,
    start_ring,
    start_turns,
    wait,
    wait_for_turn,
)
from tunedgemm_asm.ptx.epilogue import store_tile
from tunedgemm_asm.ptx.frame import Frame
from tunedgemm_asm.ptx.names import DEEP, STEP_BYTES
from tunedgemm_asm.ptx.order import Items
from tunedgemm_asm.ptx.panels import await_reads
from tunedgemm_asm.ptx.promotion import LoadedScales, promote, promote_scaled
from tunedgemm_asm.ptx.splitk import fixup_splits, fixup_stream
from tunedgemm_asm.ptx.staging import StageScales
from tunedgemm_asm.ptx.stream import Ranges, start_items


def consume(f: Frame) -> None:
    """Generate the whole consumer."""
    t, config = f.text, f.config
    t.op("setmaxnreg.inc.sync.aligned.u32", config.consumer_registers)
    number = t.to("b32", "sub.u32", f.group, 1)
    arriving = t.to("pred", "setp.lt.u32", f.lane, config.cluster)
    base_a = _descriptor(f, f.shared if config.turns else t.to("b32", "mad.lo.u32", number, config.rows * STEP_BYTES, f.shared))
    base_b = _descriptor(f, t.to("b32", "add.u32", f.shared, config.tile_a * STEP_BYTES))
    scales = StageScales.of(f, number) if config.staged else None
    accumulators = t.many(f.variant.accumulator_kind, config.accumulators)
    parts = t.many("f32", config.accumulators) if config.folded else []
    items = start_items(f)
    ring = start_ring(f, 0)
    turn = _start_turns(f, number, ring, items) if config.turns else None
    tile, next_tile, end = t.label("TILE"), t.label("NEXT_TILE"), t.label("STORED") if config.panels else f.end
    t.place(tile)
    t.op("bra", end, when=items.ended(f))
    place = items.place(f)
    if config.promoted:
        multiply = _multiply_overlapped if config.overlapped else _multiply_promoted
        multiply(f, (base_a, base_b), accumulators, ring, (place.steps, arriving, scales))
    elif config.folded:
        _multiply_folded(f, (base_a, base_b), (accumulators, parts), ring, (place.steps, arriving))
    else:
        _multiply(f, (base_a, base_b), accumulators, ring, (place.steps, arriving, turn))
    if isinstance(items, Ranges):
        whole = t.label("WHOLE")
        t.op("bra", whole, when=t.to("pred", "setp.eq.u32", place.steps, f.arguments["steps"]))
        fixup_stream(f, place.tile, items.parts(f, place), (number, accumulators), next_tile)
        t.place(whole)
    elif f.variant.split:
        fixup_splits(f, place, number, accumulators, next_tile)
    row_a = place.row_a if config.turns else t.to("b32", "mad.lo.u32", number, config.rows, place.row_a)
    store_tile(f, row_a, place.row_b, accumulators)
    t.place(next_tile)
    items.advance(f, place.steps)
    if config.turns:
        theirs = items.steps(f)
        skip_stages(f, ring, theirs)
        items.advance(f, theirs)
    t.op("bra", tile)
    if config.panels:
        t.place(end)
        await_reads(f)


def _start_turns(f: Frame, number: str, ring: Ring, items: Items | Ranges) -> Turn:
    """Start the second consumer at the second item of the CTA."""
    steps = items.steps(f)
    skip_stages(f, ring, f.text.to("b32", "mul.lo.u32", steps, number))
    items.advance(f, steps, number)
    return start_turns(f, number)


def _descriptor(f: Frame, address: str) -> str:
    """Return the matrix descriptor of an address in the first stage."""
    t = f.text
    units = t.to("b32", "bfe.u32", address, 4, matrix.ADDRESS_BITS)
    wide = t.to("b64", "cvt.u64.u32", units)
    return t.to("b64", "or.b64", wide, f"0x{matrix.CONSTANT:016x}")


def _multiply(f: Frame, bases: tuple[str, str], accumulators: list[str], ring: Ring, state: tuple[str, str, Turn | None]) -> None:
    """Accumulate over the steps of an item.

    *state* has the number of steps, the lanes that release a stage, and the ping-pong state. The
    previous stage is released while a stage is multiplied. Accumulators start as zeros and not by a
    flag of the first wgmma, which keeps ptxas from waiting after each instruction (warning C7515).
    """
    t, (steps, arriving, turn) = f.text, state
    left, before = t.to("b32", "mov.u32", steps), t.to("b32", "mov.u32", ring.stage)
    releasing = t.to("pred", "setp.ne.u32", 0, 0)
    _clear(f, accumulators)
    if turn:
        wait_for_turn(f, turn)
    _multiply_steps(f, bases, accumulators, ring, (left, before, releasing, arriving, turn))
    release(f, before, arriving)


def _multiply_folded(f: Frame, bases: tuple[str, str], registers: tuple[list[str], list[str]], ring: Ring, state: tuple[str, str]) -> None:
    """Accumulate each part of K in other registers, *registers[1]*, and add the parts in the order of K.

    The last stage of a part is released while the next part's first one is multiplied.
    """
    t, (accumulators, parts), (steps, arriving) = f.text, registers, state
    left, before = t.to("b32", "mov.u32", steps), t.to("b32", "mov.u32", ring.stage)
    releasing = t.to("pred", "setp.ne.u32", 0, 0)
    _clear(f, accumulators)
    outer = t.label("PART")
    t.place(outer)
    here = t.to("b32", "min.u32", left, f.arguments["part"])
    t.op("sub.u32", left, left, here)
    _clear(f, parts)
    _multiply_steps(f, bases, parts, ring, (here, before, releasing, arriving, None))
    promote(f, accumulators, parts)
    t.op("bra", outer, when=t.to("pred", "setp.ne.u32", left, 0))
    release(f, before, arriving)


def _multiply_steps(
    f: Frame, bases: tuple[str, str], accumulators: list[str], ring: Ring, state: tuple[str, str, str, str, Turn | None]
) -> None:
    """Accumulate some steps and wait for the last; *state* has registers that count and release."""
    t, (left, before, releasing, arriving, turn) = f.text, state
    inner = t.label("MULTIPLY")
    t.place(inner)
    wait(f, barrier_of(f, ring.stage), f.full, ring.parity)
    size = f.config.accumulators_per_block
    _products(f, _stage(f, bases, ring), {(block, 0): accumulators[block * size : (block + 1) * size] for block in range(f.config.blocks)})
    t.op("wgmma.wait_group.sync.aligned", 1)
    release(f, before, releasing)
    t.op("mov.pred", releasing, arriving)
    t.op("mov.u32", before, ring.stage)
    next_stage(f, ring)
    t.op("sub.u32", left, left, 1)
    if turn:
        end_turn(f, turn, left)
    t.op("bra", inner, when=t.to("pred", "setp.ne.u32", left, 0))
    t.op("wgmma.wait_group.sync.aligned", 0)


def _multiply_promoted(
    f: Frame, bases: tuple[str, str], accumulators: list[str], ring: Ring, state: tuple[str, str, StageScales | None]
) -> None:
    """Accumulate each stage in other registers, and promote them to fp32 accumulators, scaled by
    block.

    A portion is multiplied at a time, so that a thread needs few such registers. Each portion
    restarts by a flag that is never true: ptxas serializes wgmma instructions where that flag
    varies. While one consumer promotes, another multiplies.
    """
    t = f.text
    steps, arriving, scales = state
    left, parts = t.to("b32", "mov.u32", steps), t.many("f32", f.config.portion // 2)
    never = t.to("pred", "setp.ne.u32", 0, 0)
    _clear(f, accumulators)
    inner = t.label("MULTIPLY")
    t.place(inner)
    wait(f, barrier_of(f, ring.stage), f.full, ring.parity)
    stage, held = _stage(f, bases, ring), scales.at(f, ring.stage) if scales else None
    for portion in f.config.portions:
        loaded = held.load(f, portion) if held else None
        _products(f, stage, {portion: parts}, never)
        t.op("wgmma.wait_group.sync.aligned", 0)
        if portion == f.config.portions[-1]:
            release(f, ring.stage, arriving)
        _promote(f, (accumulators, parts), portion, loaded)
    next_stage(f, ring)
    t.op("sub.u32", left, left, 1)
    t.op("bra", inner, when=t.to("pred", "setp.ne.u32", left, 0))


def _multiply_overlapped(
    f: Frame, bases: tuple[str, str], accumulators: list[str], ring: Ring, state: tuple[str, str, StageScales | None]
) -> None:
    """Promote one portion while the next is multiplied into other registers.

    The tensor cores thus never wait for the promotion or for the latency of an instruction. Two
    stages are unrolled, because registers have fixed names.
    """
    t, portions, (steps, arriving, scales) = f.text, f.config.portions, state
    left, before = t.to("b32", "mov.u32", steps), t.new("b32")
    parts = [t.many("f32", f.config.portion // 2) for _ in range(2)]
    never = t.to("pred", "setp.ne.u32", 0, 0)
    _clear(f, accumulators)
    stages = [(t.new("b64"), t.new("b64")) for _ in range(2)]
    held, last_loaded = scales, []

    def enter(parity: int, to: list[str]) -> None:
        """Wait for the stage and multiply its first portion."""
        wait(f, barrier_of(f, ring.stage), f.full, ring.parity)
        for register, at in zip(stages[parity], _stage(f, bases, ring), strict=True):
            t.op("mov.b64", register, at)
        _products(f, stages[parity], {portions[0]: to}, never)

    enter(0, parts[0])
    inner, ends, done = t.label("MULTIPLY"), [t.label("LAST"), t.label("LAST")], t.label("MULTIPLIED")
    t.place(inner)
    for parity in range(2):
        for index, portion in enumerate(portions):
            number = parity * len(portions) + index
            mine, following = parts[number % 2], parts[(number + 1) % 2]
            last = portion == portions[-1]
            held = scales.at(f, ring.stage) if scales and not index else held
            loaded = held.load(f, portion) if held else None
            if last:
                last_loaded.append(loaded)
                t.op("sub.u32", left, left, 1)
                t.op("bra", ends[parity], when=t.to("pred", "setp.eq.u32", left, 0))
                t.op("mov.u32", before, ring.stage)
                next_stage(f, ring)
                enter(1 - parity, following)
            else:
                _products(f, stages[parity], {portions[index + 1]: following}, never)
            t.op("wgmma.wait_group.sync.aligned", 1)
            if last:
                release(f, before, arriving)
            _promote(f, (accumulators, mine), portion, loaded)
    t.op("bra", inner)
    for parity, end in enumerate(ends):
        t.place(end)
        t.op("wgmma.wait_group.sync.aligned", 0)
        release(f, ring.stage, arriving)
        _promote(f, (accumulators, parts[((parity + 1) * len(portions) - 1) % 2]), portions[-1], last_loaded[parity])
        if not parity:
            t.op("bra", done)
    t.place(done)
    next_stage(f, ring)


def _promote(f: Frame, registers: tuple[list[str], list[str]], portion: tuple[int, int], loaded: LoadedScales | None) -> None:
    """Add a portion's accumulators of the stage, *registers[1]*, to those of the tile, *registers[0]*."""
    accumulators, parts = registers
    block, first = portion
    begin = block * f.config.accumulators_per_block + first // 2
    own = accumulators[begin : begin + len(parts)]
    if loaded:
        promote_scaled(f, own, parts, first, loaded)
    else:
        promote(f, own, parts)


def _clear(f: Frame, accumulators: list[str]) -> None:
    """Set the accumulators to zero."""
    name, zero = ("mov.f32", "0f00000000") if f.variant.accumulator_kind == "f32" else ("mov.u32", 0)
    for accumulator in accumulators:
        f.text.op(name, accumulator, zero)


def _stage(f: Frame, bases: tuple[str, str], ring: Ring) -> tuple[str, str]:
    """Return the matrix descriptors of both operands in the stage."""
    t = f.text
    offset = t.to("b32", "mul.lo.u32", ring.stage, f.config.stage_bytes // matrix.UNIT)
    wide = t.to("b64", "cvt.u64.u32", offset)
    stage_a, stage_b = (t.to("b64", "add.s64", base, wide) for base in bases)
    return stage_a, stage_b


def _products(f: Frame, stage: tuple[str, str], accumulators: dict[tuple[int, int], list[str]], adding: object = 1) -> None:
    """Issue the wgmma instructions of some portions of a stage as one group.

    *adding* tells whether the first wgmma of each portion adds to its accumulators.
    """
    t, (stage_a, stage_b) = f.text, stage
    t.op("wgmma.fence.sync.aligned")
    for deep in range(DEEP):
        for (block, first), own in accumulators.items():
            a = t.to("b64", "add.s64", stage_a, deep * matrix.ALONG_K + block * matrix.ALONG_ROWS)
            b = t.to("b64", "add.s64", stage_b, deep * matrix.ALONG_K + first * matrix.ROW)
            flags = matrix.flags(f.variant, 1 if deep else adding)
            t.op(matrix.instruction(f.variant), f"{{{', '.join(own)}}}", a, b, *flags)
    t.op("wgmma.commit_group.sync.aligned")

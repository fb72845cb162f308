"""Generate the loop over K: loads, LDS traffic and MFMA, interleaved.

A step is 64 elements along K, in two halves of 32. During the MFMAs of the first half, a wave reads
the operands of the second half from LDS. Then all waves synchronize: the step's part of LDS is
free. During the MFMAs of the second half, the wave writes the next step to LDS, issues later loads
and reads the next step's first operands. So no MFMA waits for a load issued just before it.

With a second LDS buffer the next step is written there, and the waves synchronize once a step. They
also do so where loads write LDS directly, into the buffer that was read last.
"""

from __future__ import annotations

from tunedgemm_asm_gcn.frame import Frame
from tunedgemm_asm_gcn.names import HALVES, ROWS, SIDE, STEP_BYTES
from tunedgemm_asm_gcn.prologue import step_bytes
from tunedgemm_asm_gcn.registers import M0, Reg
from tunedgemm_asm_gcn.stream import Item, Label, Op, branch, op, weave

#: Bytes between a lane's loads of a shuffled weight for the two halves of a step.
_HALF_SHUFFLED = 1024
#: Fractions of a step's MFMAs at which: the second half's operands are read; all waves have them
#: and LDS may be written; it is written; all waves see it; the next step's first operands are read.
#: The gaps before the barriers hide the latency of LDS.
_READ, _LEFT, _WRITTEN, _SEEN, _FOLLOW, _HALF = 0.25, 0.36, 0.62, 0.7, 0.95, 0.5
#: Fraction at which the next step is written where it has another buffer.
_BESIDE = 0.35
LOOP, DONE = Label("loop"), Label("done")


def load(f: Frame, step: int) -> list[Op]:
    """Issue the loads of a step of x and of a plain weight, to registers or directly to LDS."""
    config = f.config
    sources = [(f.from_a, f.offset_a, 0)] + ([] if config.shuffled else [(f.from_b, f.offset_b, config.tile_m)])
    ops: list[Op] = []
    for source, offsets, first in sources:
        for load, offset in enumerate(offsets[index] for index in range(offsets.count)):
            if config.target.direct:
                at = (step % config.buffers) * config.buffer_bytes + (first + load * ROWS) * STEP_BYTES
                ops.append(op("s_add_u32", M0, f.write, at))
                ops.append(Op("buffer_load_dwordx4", (), (offset, source, 0), "offen lds", reads=(M0,), writes=(f.lds(step),)))
            else:
                to = f.staged[step % config.prefetch].fours()[first // ROWS + load]
                ops.append(op("buffer_load_dwordx4", to, offset, source, 0, mods="offen"))
    return ops + advance(
        f.left_a, *((f.from_a, step_bytes(config, "a")), *([] if config.shuffled else [(f.from_b, step_bytes(config, "b"))]))
    )


def load_shuffled(f: Frame, step: int, half: int) -> list[Op]:
    """Issue the loads of half a step of a shuffled weight to the registers that MFMA reads."""
    config = f.config
    to = f.blocks_b[step % config.sets * HALVES + half].fours()
    mods = "offen" + (f" offset:{half * _HALF_SHUFFLED}" if half else "")
    ops = [op("buffer_load_dwordx4", to[block], f.offset_b[block], f.from_b, 0, mods=mods) for block in range(config.blocks_n)]
    return ops + (advance(f.left_b, (f.from_b, step_bytes(config, "b"))) if half == HALVES - 1 else [])


def advance(left: Reg, *buffers: tuple[Reg, int]) -> list[Op]:
    """Advance the buffer descriptors by a step; after the last one they are empty, without memory
    traffic.
    """
    ops: list[Op] = []
    for buffer, count in buffers:
        ops += [op("s_add_u32", buffer[0], buffer[0], count), op("s_addc_u32", buffer[1], buffer[1], 0)]
    ops += [op("s_sub_u32", left, left, 1), op("s_cmp_eq_u32", (), left, 0)]
    return ops + [op("s_cselect_b32", buffer[2], 0, buffer[2]) for buffer, _ in buffers]


def write_lds(f: Frame, step: int) -> list[Op]:
    """Write the loaded step to LDS."""
    staged = f.staged[step % f.config.prefetch].fours()
    first = step % f.config.buffers * f.config.buffer_bytes
    return [
        Op("ds_write_b128", (), (f.write, four), _offset(first + load * ROWS * STEP_BYTES), writes=(f.lds(step),))
        for load, four in enumerate(staged)
    ]


def read_lds(f: Frame, step: int, half: int) -> list[Op]:
    """Read the operands of half a step, 16 bytes per lane for each 16 rows, in the order of the
    MFMAs.
    """
    reads_a = _reads(f, f.read_a, f.blocks_a[half], step, half)
    if f.config.shuffled:
        return reads_a
    reads_b = _reads(f, f.read_b, f.blocks_b[half], step, half)
    return [reads_a[0], *reads_b, *reads_a[1:]]


def _reads(f: Frame, addresses: tuple[Reg, ...], blocks: Reg, step: int, half: int) -> list[Op]:
    address = addresses[step % f.config.buffers][half]
    return [
        Op("ds_read_b128", (four,), (address,), _offset(block * SIDE * STEP_BYTES), reads=(f.lds(step),))
        for block, four in enumerate(blocks.fours())
    ]


def _offset(count: int) -> str:
    return f"offset:{count}" if count else ""


def products(f: Frame, step: int, half: int) -> list[Op]:
    """Return the MFMAs of half a step: weight by x, so that a lane's four results are neighbours
    along N.

    gfx942 needs two MFMAs of 16 elements for 32 and takes a lane's 16 bytes in halves. Both
    operands have the same order along K, so the sum is the same. The two do not follow each other,
    so that no MFMA waits for an accumulator.
    """
    config, name, depth = f.config, f.config.target.product, f.config.target.depth
    blocks_a = f.blocks_a[half].fours()
    blocks_b = f.blocks_b[step % config.sets * HALVES + half if config.shuffled else half].fours()
    parts, together = 32 // depth, 2 if config.blocks_n == 1 else 1
    ops = []
    for first in range(0, config.blocks_m, together):
        for part in range(parts):
            words = slice(part * 4 // parts, (part + 1) * 4 // parts)
            for m in range(first, min(first + together, config.blocks_m)):
                ops += [
                    op(name, f.accumulators_of(m, n), four_b[words], blocks_a[m][words], f.accumulators_of(m, n))
                    for n, four_b in enumerate(blocks_b)
                ]
    return ops


def meet(f: Frame, step: int | None = None) -> list[Op]:
    """Synchronize all waves; with a step, its part of LDS is complete afterwards."""
    return [Op("s_barrier", reads=() if step is None else (f.lds(step),))]


def start(f: Frame) -> list[Op]:
    """Issue the first loads and write the first step to LDS."""
    config = f.config
    ops: list[Op] = []
    for step in range(config.sets):
        ops += load(f, step)
        if config.shuffled:
            ops += load_shuffled(f, step, 0)
            ops += load_shuffled(f, step, 1) if step < config.sets - 1 else []
    if not config.target.direct:
        ops += [*write_lds(f, 0), *load(f, config.prefetch)]
    return [*ops, *meet(f, 0), *read_lds(f, 0, 0)]


def step(f: Frame, number: int) -> list[Op]:
    """Return the instructions of one step; its number selects registers and buffers."""
    config = f.config
    ahead = number + config.sets
    own = [*read_lds(f, number, 1), *(load_shuffled(f, ahead - 1, 1) if config.shuffled else [])]
    following = read_lds(f, number + 1, 0)
    shuffled = load_shuffled(f, ahead, 0) if config.shuffled else []
    run = [*products(f, number, 0), *products(f, number, 1)]
    if config.target.direct:
        return weave(
            run,
            (0, _READ, own),
            (_HALF, _HALF, meet(f, number + 1)),
            (_HALF, _FOLLOW, following),
            (_HALF, 1, [*load(f, ahead), *shuffled]),
        )
    written, later = write_lds(f, number + 1), load(f, number + 1 + config.prefetch)
    if config.buffers > 1:
        return weave(
            run,
            (0, _READ, own),
            (0, _BESIDE, written),
            (_HALF, _HALF, meet(f, number + 1)),
            (_HALF, _FOLLOW, following),
            (_HALF, 1, [*shuffled, *later]),
        )
    return weave(
        run,
        (0, _READ, own),
        (_LEFT, _LEFT, meet(f)),
        (_LEFT, _WRITTEN, written),
        (_SEEN, _SEEN, meet(f, number + 1)),
        (_SEEN, _FOLLOW, following),
        (_WRITTEN, 1, [*shuffled, *later]),
    )


def loop(f: Frame) -> list[Item]:
    """Return the unrolled loop, one step for each set of registers; the last step exits in place."""
    items: list[Item] = [LOOP]
    for number in range(f.config.unrolled):
        items += step(f, number)
        items += [op("s_sub_u32", f.steps, f.steps, 1), op("s_cmp_eq_u32", (), f.steps, 0), branch("s_cbranch_scc1", DONE)]
    return [*items, branch("s_branch", LOOP), DONE]

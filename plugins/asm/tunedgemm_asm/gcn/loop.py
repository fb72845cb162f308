"""The loop over K: what is loaded, what goes through LDS, what is multiplied, and how these are woven.

A step is 64 elements along K, in two halves of 32. While the products of the first half run, a wave reads the second half's operands from
LDS; then all waves meet, since nobody needs the step's part of LDS any more. While the products of the second half run, what comes next
goes into LDS, later loads set out, and the next step's first operands are read. So no product waits for what was asked for just before.

Where LDS has a second buffer, the next step goes there while this one is read, and the waves meet once a step; so they do where loads end
in LDS, which fill the buffer that was read last.
"""

from __future__ import annotations

from tunedgemm_asm.gcn.frame import Frame
from tunedgemm_asm.gcn.names import HALVES, ROWS, SIDE, STEP_BYTES
from tunedgemm_asm.gcn.prologue import step_bytes
from tunedgemm_asm.gcn.registers import M0, Reg
from tunedgemm_asm.gcn.stream import Item, Label, Op, branch, op, weave

#: Bytes between a lane's loads of a shuffled weight for the two halves of a step.
_HALF_SHUFFLED = 1024
#: Shares of a step's products by which: the second half's operands are read; all waves have them, and LDS may be written; it is written;
#: all waves see it; the next step's first operands are read. Between asking LDS and meeting the others there is time for the answer.
_READ, _LEFT, _WRITTEN, _SEEN, _FOLLOW, _HALF = 0.25, 0.36, 0.62, 0.7, 0.95, 0.5
#: The same where the next step has a buffer of its own: it is written.
_BESIDE = 0.35
LOOP, DONE = Label("loop"), Label("done")


def load(f: Frame, step: int) -> list[Op]:
    """Loads of a step of x, and of a plain weight, on their way: to registers, or where the hardware can to LDS."""
    config = f.config
    sources = [(f.from_a, f.offset_a, 0)] + ([] if config.shuffled else [(f.from_b, f.offset_b, config.tile_m)])
    ops: list[Op] = []
    for source, offsets, first in sources:
        for one, offset in enumerate(offsets[index] for index in range(offsets.count)):
            if config.target.direct:
                at = (step % config.buffers) * config.buffer_bytes + (first + one * ROWS) * STEP_BYTES
                ops.append(op("s_add_u32", M0, f.write, at))
                ops.append(Op("buffer_load_dwordx4", (), (offset, source, 0), "offen lds", reads=(M0,), writes=(f.lds(step),)))
            else:
                to = f.staged[step % config.prefetch].fours()[first // ROWS + one]
                ops.append(op("buffer_load_dwordx4", to, offset, source, 0, mods="offen"))
    return ops + advance(
        f.left_a, *((f.from_a, step_bytes(config, "a")), *([] if config.shuffled else [(f.from_b, step_bytes(config, "b"))]))
    )


def load_shuffled(f: Frame, step: int, half: int) -> list[Op]:
    """Loads of half a step of a shuffled weight on their way to the registers that the products read."""
    config = f.config
    to = f.blocks_b[step % config.sets * HALVES + half].fours()
    mods = "offen" + (f" offset:{half * _HALF_SHUFFLED}" if half else "")
    ops = [op("buffer_load_dwordx4", to[one], f.offset_b[one], f.from_b, 0, mods=mods) for one in range(config.blocks_n)]
    return ops + (advance(f.left_b, (f.from_b, step_bytes(config, "b"))) if half == HALVES - 1 else [])


def advance(left: Reg, *buffers: tuple[Reg, int]) -> list[Op]:
    """Buffer descriptors move on by a step; once all steps have set out they are empty, and loads cost no memory traffic."""
    ops: list[Op] = []
    for buffer, count in buffers:
        ops += [op("s_add_u32", buffer[0], buffer[0], count), op("s_addc_u32", buffer[1], buffer[1], 0)]
    ops += [op("s_sub_u32", left, left, 1), op("s_cmp_eq_u32", (), left, 0)]
    return ops + [op("s_cselect_b32", buffer[2], 0, buffer[2]) for buffer, _ in buffers]


def write_lds(f: Frame, step: int) -> list[Op]:
    """What was loaded of a step into LDS."""
    staged = f.staged[step % f.config.prefetch].fours()
    first = step % f.config.buffers * f.config.buffer_bytes
    return [
        Op("ds_write_b128", (), (f.write, four), _offset(first + one * ROWS * STEP_BYTES), writes=(f.lds(step),))
        for one, four in enumerate(staged)
    ]


def read_lds(f: Frame, step: int, half: int) -> list[Op]:
    """The operands of the products of half a step: for each 16 rows, 16 bytes a lane. In the order in which the products want them."""
    reads_a = _reads(f, f.read_a, f.blocks_a[half], step, half)
    if f.config.shuffled:
        return reads_a
    reads_b = _reads(f, f.read_b, f.blocks_b[half], step, half)
    return [reads_a[0], *reads_b, *reads_a[1:]]


def _reads(f: Frame, addresses: tuple[Reg, ...], blocks: Reg, step: int, half: int) -> list[Op]:
    address = addresses[step % f.config.buffers][half]
    return [
        Op("ds_read_b128", (four,), (address,), _offset(one * SIDE * STEP_BYTES), reads=(f.lds(step),))
        for one, four in enumerate(blocks.fours())
    ]


def _offset(count: int) -> str:
    return f"offset:{count}" if count else ""


def products(f: Frame, step: int, half: int) -> list[Op]:
    """The products of half a step: weight by x, so that a lane's four results are neighbours along N.

    The two instructions of 16 elements each that gfx942 needs for 32 take a lane's 16 bytes in halves: the order of elements along K is
    the same in both operands, so the sum is the same. They do not follow each other, so that no product waits for a sum.
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
    """All waves meet; with a step: its part of LDS is complete afterwards."""
    return [Op("s_barrier", reads=() if step is None else (f.lds(step),))]


def start(f: Frame) -> list[Op]:
    """The first loads, and the first step into LDS."""
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
    """One step; its number says which registers and buffers are its own."""
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
    """All steps: as many of them in the text as there are sets of registers; the last of all leaves from where it is."""
    items: list[Item] = [LOOP]
    for number in range(f.config.unrolled):
        items += step(f, number)
        items += [op("s_sub_u32", f.steps, f.steps, 1), op("s_cmp_eq_u32", (), f.steps, 0), branch("s_cbranch_scc1", DONE)]
    return [*items, branch("s_branch", LOOP), DONE]

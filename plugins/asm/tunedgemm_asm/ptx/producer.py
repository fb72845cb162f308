"""Generate the producer: one thread that fills stage after stage with TMA for all items of its CTA.

Another warp copies the block scales of each stage, where stages hold them.
"""

from __future__ import annotations

from tunedgemm_asm.ptx.abi import MAP_OUT, MAPS
from tunedgemm_asm.ptx.barriers import announce, barrier_of, next_stage, start_ring, wait
from tunedgemm_asm.ptx.frame import Frame, map_of
from tunedgemm_asm.ptx.names import STEP_BYTES
from tunedgemm_asm.ptx.order import first_element
from tunedgemm_asm.ptx.staging import stage_scales
from tunedgemm_asm.ptx.stream import start_items

#: Warp that copies scales; the first has the thread that loads operands.
_SCALE_WARP = 1
_LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


def produce(f: Frame) -> None:
    """Generate the producer's warpgroup; the threads without work exit at once."""
    t, config = f.text, f.config
    t.op("setmaxnreg.dec.sync.aligned.u32", config.producer_registers)
    scales = t.label("SCALES")
    if config.staged:
        t.op("bra", scales, when=t.to("pred", "setp.eq.u32", t.to("b32", "shr.u32", f.thread, 5), _SCALE_WARP))
    t.op("bra", f.end, when=t.to("pred", "setp.ne.u32", f.thread, 0))
    maps = [_fetched(f, offset) for offset in MAPS.values()]
    if config.panels:
        _fetched(f, MAP_OUT)  # for the consumers
    items = start_items(f)
    ring = start_ring(f, 1)
    tile, inner, done = t.label("LOAD_TILE"), t.label("LOAD"), f.end
    t.place(tile)
    t.op("bra", done, when=items.ended(f))
    place = items.place(f)
    k, left = first_element(f, place), t.to("b32", "mov.u32", place.steps)
    column = t.to("b32", "mov.u32", place.first) if f.variant.columns else ""
    row_b = t.to("b32", "mad.lo.u32", f.rank, config.box_b, place.row_b) if config.cluster > 1 else place.row_b
    t.place(inner)
    barrier = barrier_of(f, ring.stage)
    wait(f, barrier, f.empty, ring.parity)
    announce(f, barrier)
    to_a = t.to("b32", "mad.lo.u32", ring.stage, config.stage_bytes, f.shared)
    to_b = t.to("b32", "add.u32", to_a, config.tile_a * STEP_BYTES)
    full = t.to("b32", "add.u32", barrier, f.full)
    load_a, from_a = _box(f, maps[0], k, place.row_a, column * config.swapped)
    load_b, from_b = _box(f, maps[1], k, row_b, column * (not config.swapped))
    t.op(load_a, f"[{to_a}]", from_a, f"[{full}]")
    if config.cluster == 1:
        t.op(load_b, f"[{to_b}]", from_b, f"[{full}]")
    else:
        # Multicast its part of b to all CTAs of the cluster, whose own barriers count the bytes.
        part = t.to("b32", "mad.lo.u32", f.rank, config.box_b * STEP_BYTES, to_b)
        mask = t.to("b16", "mov.u16", (1 << config.cluster) - 1)
        t.op(f"{load_b}.multicast::cluster", f"[{part}]", from_b, f"[{full}]", mask)
    t.op("add.u32", k, k, f.variant.step)
    if column:
        t.op("add.u32", column, column, 1)
    next_stage(f, ring)
    t.op("sub.u32", left, left, 1)
    t.op("bra", inner, when=t.to("pred", "setp.ne.u32", left, 0))
    items.advance(f, place.steps)
    t.op("bra", tile)
    if config.staged:
        t.place(scales)
        stage_scales(f)


def _box(f: Frame, described: str, k: str, row: str, column: str) -> tuple[str, str]:
    """Return the load instruction and its box: rows from an element along K on, or a whole column."""
    if not column:
        return _LOAD.format(2), f"[{described}, {{{k}, {row}}}]"
    return _LOAD.format(3), f"[{described}, {{{f.text.to('b32', 'mov.u32', 0)}, {row}, {column}}}]"


def _fetched(f: Frame, offset: int) -> str:
    """Prefetch a tensor map among the arguments and return its generic address."""
    generic = map_of(f, offset)
    f.text.op("prefetch.tensormap", f"[{generic}]")
    return generic

"""Combine the partials of several workgroups that share the K of a tile.

Each workgroup stores its accumulators in the workspace and counts itself at the tile's semaphore.
The last one adds all partials in order, so the result does not depend on which workgroup is last.
The increment wraps at the number of splits, which leaves the semaphore at zero.

Workgroups of a tile may run on different chiplets, whose L2 caches are not coherent. So stores and
loads of partials have device scope (``sc1``), which bypasses L2: LLVM's "Memory Model GFX942" has
them for atomic stores and loads of scope agent. The increment has that scope without a bit (``sc0``
returns the old value; ``sc1`` would mean system scope). A wave waits for its stores, and the
workgroup for its waves, before one wave counts. The last workgroup loads after it has read the
count. No other store must become visible, so L2 needs neither a write-back (``buffer_wbl2``) nor an
invalidation (``buffer_inv``).
"""

from __future__ import annotations

from tunedgemm_asm_gcn.frame import Frame
from tunedgemm_asm_gcn.prologue import RAW
from tunedgemm_asm_gcn.registers import EXEC, Reg
from tunedgemm_asm_gcn.stream import Item, Label, Op, branch, op

#: Bytes that a wave stores of one block: 16 for each lane.
_BLOCK = 1024
#: Blocks that are loaded at once while partials are added.
_AT_ONCE = 8
_COUNTED, _LAST, _ADD = Label("counted"), Label("last"), Label("add")


def share_tile(f: Frame) -> list[Item]:
    """Combine the partials in the last workgroup's accumulators; all other workgroups exit."""
    return [*store_part(f), *count(f), *add_parts(f)]


def describe_part(f: Frame, to: Reg, part: Reg | int) -> list[Op]:
    """Describe the buffer of the tile's partial; the workspace holds all tiles of a split side by
    side.
    """
    config, s = f.config, f.spare
    workspace = f.argument("workspace")
    return [
        op("s_mul_i32", s[0], f.argument("tiles_m"), f.argument("tiles_n")),
        op("s_mul_i32", s[0], s[0], part),
        op("s_add_u32", s[0], s[0], f.tile),
        op("s_mul_hi_u32", s[1], s[0], config.tile_m * config.tile_n * 4),
        op("s_mul_i32", s[0], s[0], config.tile_m * config.tile_n * 4),
        op("s_add_u32", to[0], workspace[0], s[0]),
        op("s_addc_u32", to[1], workspace[1], s[1]),
        op("s_and_b32", to[1], to[1], 0xFFFF),
        op("s_mov_b32", to[2], config.tile_m * config.tile_n * 4),
        op("s_mov_b32", to[3], RAW),
    ]


def place_lane(f: Frame, offset: Reg) -> list[Op]:
    """Compute the offset of a lane in a partial; each wave's accumulators are contiguous, block by
    block.
    """
    config, s = f.config, f.spare
    return [
        op("s_mul_i32", s[0], f.wave_n, config.waves_m),
        op("s_add_u32", s[0], s[0], f.wave_m),
        op("s_mul_i32", s[0], s[0], config.blocks * _BLOCK),
        op("v_lshlrev_b32_e32", offset, 4, f.lane),
        op("v_add_u32_e32", offset, s[0], offset),
    ]


def _each_block(offset: Reg, first: int, count: int) -> list[tuple[int, str, list[Op]]]:
    """Yield blocks: index, modifiers of the memory instruction, and code that advances the offset
    before it.
    """
    blocks = []
    for block in range(first, first + count):
        moved = [op("v_add_u32_e32", offset, 4 * _BLOCK, offset)] if block % 4 == 0 and block else []
        within = block % 4 * _BLOCK
        blocks.append((block, "offen" + (f" offset:{within}" if within else "") + " sc1", moved))
    return blocks


def store_part(f: Frame) -> list[Op]:
    """Store this workgroup's accumulators in the workspace, without a copy to vector registers."""
    offset, ops = f.loose[0], []
    ops += [*describe_part(f, f.from_a, f.part), *place_lane(f, offset)]
    for block, mods, moved in _each_block(offset, 0, f.config.blocks):
        ops += [*moved, op("buffer_store_dwordx4", (), f.accumulators.fours()[block], offset, f.from_a, 0, mods=mods)]
    return ops


def count(f: Frame) -> list[Item]:
    """Count the workgroup after all stores; tell all waves whether it is the last."""
    s, v = f.spare, f.loose
    semaphore = f.argument("semaphore")
    return [
        op("s_waitcnt", (), mods="vmcnt(0)"),
        op("s_barrier"),
        op("s_lshl_b32", s[2], f.tile, 2),
        op("s_add_u32", s[4], semaphore[0], s[2]),
        op("s_addc_u32", s[5], semaphore[1], 0),
        op("s_sub_u32", s[3], f.argument("splits"), 1),
        op("v_mov_b32_e32", v[0], 0),
        op("s_add_u32", s[2], f.wave_m, f.wave_n),
        op("s_cmp_lg_u32", (), s[2], 0),
        branch("s_cbranch_scc1", _COUNTED),
        op("s_mov_b64", EXEC, 1, note="one lane"),
        op("v_mov_b32_e32", v[1], s[3]),
        op("global_atomic_inc", v[2], v[0], v[1], s[4:6], mods="sc0"),
        Op("ds_write_b32", (), (v[0], v[2]), writes=(f.lds(0),)),
        op("s_mov_b64", EXEC, -1),
        _COUNTED,
        Op("s_barrier", reads=(f.lds(0),)),
        Op("ds_read_b32", (v[3],), (v[0],), reads=(f.lds(0),)),
        op("v_readfirstlane_b32", s[2], v[3]),
        op("s_cmp_eq_u32", (), s[2], s[3]),
        branch("s_cbranch_scc1", _LAST),
        op("s_endpgm"),
        _LAST,
    ]


def add_parts(f: Frame) -> list[Item]:
    """Load the first partial into the accumulators and add the others in order."""
    config, part, left = f.config, f.part, f.steps
    free = f.given.taken["v"] // 4 - 1
    at_once = max(1, min(_AT_ONCE, config.blocks, free - 1))
    offset, room = Reg("v", 1), [Reg("v", 4 + 4 * block, 4) for block in range(at_once)]
    spare = Reg("v", 2)
    f.given.taken["v"] = max(f.given.taken["v"], 4 + 4 * at_once)
    accumulators = f.accumulators.fours()
    ops: list[Item] = [op("s_mov_b32", part, 0), *describe_part(f, f.from_a, part), *place_lane(f, offset)]
    for block, mods, moved in _each_block(offset, 0, config.blocks):
        ops += [*moved, op("buffer_load_dwordx4", accumulators[block], offset, f.from_a, 0, mods=mods)]
    ops += [op("s_sub_u32", left, f.argument("splits"), 1), _ADD, op("s_add_u32", part, part, 1)]
    ops += [*describe_part(f, f.from_a, part), *place_lane(f, offset)]
    for first in range(0, config.blocks, at_once):
        group = range(first, min(first + at_once, config.blocks))
        for block, mods, moved in _each_block(offset, first, len(group)):
            ops += [*moved, op("buffer_load_dwordx4", room[block - first], offset, f.from_a, 0, mods=mods)]
        for block in group:
            for index in range(4):
                ops += [
                    op("v_accvgpr_read_b32", spare, accumulators[block][index]),
                    op("v_add_f32_e32", spare, spare, room[block - first][index]),
                    op("v_accvgpr_write_b32", accumulators[block][index], spare),
                ]
    return [*ops, op("s_sub_u32", left, left, 1), op("s_cmp_lg_u32", (), left, 0), branch("s_cbranch_scc1", _ADD)]

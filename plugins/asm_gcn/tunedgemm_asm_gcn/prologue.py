"""Generate the code before the loop: the tile, its operands, and each lane's part of them."""

from __future__ import annotations

from tunedgemm_asm_gcn.frame import ABI, Frame
from tunedgemm_asm_gcn.names import HALVES, PACK, ROWS, SIDE, STEP, STEP_BYTES, KernelConfig
from tunedgemm_asm_gcn.registers import Reg
from tunedgemm_asm_gcn.stream import Op, op

#: Word 3 of a buffer descriptor: 32-bit format, no stride, no swizzle; the range is checked in
#: bytes.
RAW = 0x20000
#: Chiplets (XCDs), over which the hardware distributes workgroups. Tiles along M of a panel.
CHIPLETS, PANEL = 8, 8
#: Bytes of a lane's load.
WIDE = 2 * PACK


def load_arguments(f: Frame) -> list[Op]:
    """Load the 96 bytes of arguments into scalars."""
    first, second = f.arguments[:16], f.arguments[16:24]
    return [
        op("s_load_dwordx16", first, f.kernarg, hex(0), note=f"arguments of {ABI.name}"),
        op("s_load_dwordx8", second, f.kernarg, hex(64)),
    ]


def divide(f: Frame, quotient: Reg, rest: Reg, dividend: Reg, divisor: Reg) -> list[Op]:
    """Divide a number below 2**22 by one below 2**25; return quotient and remainder.

    The fp32 reciprocal has an error of 2**-22 of the quotient, so its integer part is off by at
    most one and is corrected.
    """
    v, s = f.loose, f.spare[6]
    return [
        op("v_cvt_f32_u32_e32", v[0], divisor),
        op("v_rcp_iflag_f32_e32", v[0], v[0]),
        op("v_cvt_f32_u32_e32", v[1], dividend),
        op("v_mul_f32_e32", v[0], v[1], v[0]),
        op("v_cvt_u32_f32_e32", v[0], v[0]),
        op("v_readfirstlane_b32", quotient, v[0]),
        op("s_mul_i32", s, quotient, divisor),
        op("s_sub_i32", rest, dividend, s),
        op("s_cmp_lt_i32", (), rest, 0),
        op("s_cselect_b32", s, divisor, 0),
        op("s_cselect_b32", f.spare[7], 1, 0),
        op("s_add_i32", rest, rest, s),
        op("s_sub_i32", quotient, quotient, f.spare[7]),
        op("s_cmp_ge_i32", (), rest, divisor),
        op("s_cselect_b32", s, divisor, 0),
        op("s_cselect_b32", f.spare[7], 1, 0),
        op("s_sub_i32", rest, rest, s),
        op("s_add_i32", quotient, quotient, f.spare[7]),
    ]


def choose_tile(f: Frame) -> list[Op]:
    """Choose the tile of this workgroup.

    Workgroups are distributed over the chiplets, each with its own L2, so neighbouring tiles go to
    the workgroups of one chiplet. The tiles of a panel are neighbours: up to 8 along M that share
    rows of the weight, then the next along N.
    """
    tiles_m, tiles_n = f.argument("tiles_m"), f.argument("tiles_n")
    s = f.spare
    return [
        op("s_mul_i32", s[0], tiles_m, tiles_n, note="tiles"),
        op("s_and_b32", s[1], f.tile, CHIPLETS - 1, note="chiplet"),
        op("s_lshr_b32", s[2], f.tile, 3, note="which of its workgroups"),
        op("s_and_b32", s[3], s[0], CHIPLETS - 1),
        op("s_lshr_b32", s[0], s[0], 3),
        op("s_mul_i32", s[0], s[0], s[1]),
        op("s_min_u32", s[3], s[3], s[1]),
        op("s_add_u32", f.tile, s[0], s[3]),
        op("s_add_u32", f.tile, f.tile, s[2], note="tile"),
        op("s_lshl_b32", s[0], tiles_n, 3, note="tiles of a whole panel"),
        *divide(f, s[1], s[2], f.tile, s[0]),
        op("s_lshl_b32", s[1], s[1], 3, note="first tile of M in the panel"),
        op("s_sub_u32", s[3], tiles_m, s[1]),
        op("s_min_u32", s[3], s[3], PANEL, note="tiles of M in it"),
        *divide(f, f.at_n, f.at_m, s[2], s[3]),
        op("s_add_u32", f.at_m, f.at_m, s[1]),
    ]


def share_of_k(f: Frame) -> list[Op]:
    """Compute the steps of this workgroup and its first element along K."""
    return [
        op("s_mul_i32", f.begin, f.part, f.argument("k_part"), note="first element along K"),
        op("s_sub_u32", f.steps, f.argument("k"), f.begin),
        op("s_min_u32", f.steps, f.steps, f.argument("k_part")),
        op("s_lshr_b32", f.steps, f.steps, STEP.bit_length() - 1, note="steps"),
        op("s_mov_b32", f.left_a, f.steps),
        *([op("s_mov_b32", f.left_b, f.steps)] if f.config.shuffled else []),
    ]


def describe(f: Frame, to: Reg, pointer: Reg, index: Reg, tile: int, stride: Reg) -> list[Op]:
    """Set the 64-bit base of a buffer descriptor to the first row of a tile; a matrix may exceed 4
    GiB.
    """
    s = f.spare
    return [
        op("s_mul_i32", s[0], index, tile),
        op("s_mul_hi_u32", s[1], s[0], stride),
        op("s_mul_i32", s[2], s[0], stride),
        op("s_add_u32", to[0], pointer[0], s[2]),
        op("s_addc_u32", to[1], pointer[1], s[1]),
        op("s_mov_b32", to[3], RAW),
    ]


def rows_left(f: Frame, to: Reg, index: Reg, tile: int, size: str) -> list[Op]:
    """Compute the rows of a tile inside the matrix."""
    return [
        op("s_mul_i32", to, index, tile),
        op("s_sub_u32", to, f.argument(size), to),
        op("s_min_u32", to, to, tile),
    ]


def describe_operand(f: Frame, name: str) -> list[Op]:
    """Describe the buffer of ``a`` or ``b``, which starts at this workgroup's first step of its
    tile.

    It ends with the step's bytes of the last row: loads from later rows return zeros.
    """
    config, s = f.config, f.spare
    shuffled = name == "b" and config.shuffled
    to, index, tile, size = (f.from_a, f.at_m, config.tile_m, "m") if name == "a" else (f.from_b, f.at_n, config.tile_n, "n")
    stride = f.argument(f"stride_{name}")
    return [
        *describe(f, to, f.argument(name), index, tile, stride),
        op("s_lshl_b32", s[0], f.begin, 5 if shuffled else 1, note="bytes before the first element along K"),
        op("s_add_u32", to[0], to[0], s[0]),
        op("s_addc_u32", to[1], to[1], 0),
        op("s_and_b32", to[1], to[1], 0xFFFF),
        *rows_left(f, s[0], index, tile, size),
        *([op("s_lshr_b32", s[0], s[0], 4, note="blocks of 16 rows")] if shuffled else []),
        op("s_sub_u32", s[0], s[0], 1),
        op("s_mul_i32", s[0], s[0], stride),
        *([op("s_lshl_b32", s[0], s[0], 4)] if shuffled else []),
        op("s_add_u32", to[2], s[0], step_bytes(config, name)),
    ]


def step_bytes(config: KernelConfig, name: str) -> int:
    """Return the bytes from a step to the next: in a row, or in 16 rows of a shuffled weight."""
    return STEP_BYTES * (SIDE if name == "b" and config.shuffled else 1)


def place_waves(f: Frame) -> list[Op]:
    """Compute the wave's position along M and N; ``lane`` remains the lane of the workgroup."""
    v = f.loose[0]
    return [
        op("v_lshrrev_b32_e32", v, 6, f.lane),
        op("v_readfirstlane_b32", f.wave, v),
        op("s_and_b32", f.wave_m, f.wave, f.config.waves_m - 1),
        op("s_lshr_b32", f.wave_n, f.wave, f.config.waves_m.bit_length() - 1),
    ]


def place_loads(f: Frame) -> list[Op]:
    """Compute where each lane loads from, and where in LDS that goes.

    Eight lanes load the 128 bytes of a row. A row's 8 packs of 16 bytes are stored in LDS at their
    index XOR the row modulo 8. The lanes that LDS serves at once, which read 8 different rows or
    write one, then access 32 different banks.
    """
    config = f.config
    row, pack, mixed = f.loose[0], f.loose[1], f.loose[2]
    ops = [
        op("v_lshrrev_b32_e32", row, 3, f.lane, note="row"),
        op("v_and_b32_e32", pack, PACK - 1, f.lane, note="pack"),
        op("v_and_b32_e32", mixed, PACK - 1, row),
        op("v_xor_b32_e32", mixed, mixed, pack),
    ]
    if config.target.direct:
        ops += [
            op("v_mov_b32_e32", pack, mixed),
            op("s_lshl_b32", f.write, f.wave, 10, note="a wave's 8 rows in LDS"),
        ]
    else:
        ops += [
            op("v_lshlrev_b32_e32", f.write, 7, row),
            op("v_lshl_add_u32", f.write, mixed, 4, f.write),
        ]
    for name, offsets, loads in (("a", f.offset_a, config.loads_a), ("b", f.offset_b, config.loads_b)):
        if not loads:
            continue
        stride = f.argument(f"stride_{name}")
        ops += [
            op("v_mul_lo_u32", offsets[0], row, stride),
            op("v_lshl_add_u32", offsets[0], pack, 4, offsets[0]),
            op("s_lshl_b32", f.spare[0], stride, ROWS.bit_length() - 1),
        ]
        ops += [op("v_add_u32_e32", offsets[load], f.spare[0], offsets[load - 1]) for load in range(1, loads)]
    return ops


def place_shuffled(f: Frame) -> list[Op]:
    """Compute where each lane loads a shuffled weight: 1 KiB of a wave is the operand of 16 rows by
    32 elements.
    """
    config, s = f.config, f.spare
    ops = [
        op("s_mul_i32", s[0], f.wave_n, config.blocks_n),
        op("s_lshl_b32", s[1], f.argument("stride_b"), 4, note="bytes of a block of 16 rows"),
        op("s_mul_i32", s[0], s[0], s[1]),
        op("v_lshlrev_b32_e32", f.offset_b[0], 4, f.lane),
        op("v_add_u32_e32", f.offset_b[0], s[0], f.offset_b[0]),
    ]
    return ops + [op("v_add_u32_e32", f.offset_b[block], s[1], f.offset_b[block - 1]) for block in range(1, config.blocks_n)]


def narrow_lane(f: Frame) -> list[Op]:
    """Reduce ``lane`` to the index in the wave."""
    return [op("v_and_b32_e32", f.lane, 63, f.lane)]


def place_reads(f: Frame) -> list[Op]:
    """Compute where each lane reads LDS: row lane % 16, pack lane / 16 of the half."""
    config = f.config
    row, pack = f.loose[0], f.loose[1]
    ops = [
        op("v_and_b32_e32", row, SIDE - 1, f.lane),
        op("v_lshrrev_b32_e32", pack, 4, f.lane),
        op("v_lshlrev_b32_e32", row, 7, row),
        op("v_lshl_add_u32", row, pack, 4, row),
        op("v_and_b32_e32", pack, PACK - 1, f.lane),
        op("v_lshlrev_b32_e32", pack, 4, pack),
        op("v_xor_b32_e32", row, row, pack, note="pack XOR row % 8"),
    ]
    for reads, wave, blocks, first in ((f.read_a, f.wave_m, config.blocks_m, 0), (f.read_b, f.wave_n, config.blocks_n, config.tile_m)):
        for buffer, addresses in enumerate(reads):
            ops += [
                op("s_mul_i32", f.spare[0], wave, blocks * SIDE * STEP_BYTES),
                op("s_add_u32", f.spare[0], f.spare[0], buffer * config.buffer_bytes + first * STEP_BYTES),
                op("v_add_u32_e32", addresses[0], f.spare[0], row),
                op("v_xor_b32_e32", addresses[1], WIDE * (PACK // HALVES), addresses[0], note="the other half"),
            ]
    return ops


def clear_accumulators(f: Frame) -> list[Op]:
    """Set the accumulators to zero."""
    return [op("v_accvgpr_write_b32", f.accumulators[register], 0) for register in range(f.accumulators.count)]

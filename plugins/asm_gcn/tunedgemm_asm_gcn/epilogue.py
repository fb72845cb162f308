"""Add the bias, round and store the tile after the loop.

The weight is the first operand of MFMA, so a lane's four results are neighbours along N: row lane %
16 of x, rows 4 * (lane / 16) to + 3 of the weight. A lane stores 8 bytes of bf16 or 16 of fp32 at
once, and four lanes store 32 or 64 bytes of a line.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm_gcn.frame import Frame
from tunedgemm_asm_gcn.names import SIDE
from tunedgemm_asm_gcn.prologue import RAW, describe, rows_left
from tunedgemm_asm_gcn.registers import VCC, Reg
from tunedgemm_asm_gcn.stream import Item, Label, Op, branch, op

#: Offset outside every buffer; stores there are dropped.
NOWHERE = 0x80000000
_ROUND, _NAN, _UPPER = 0x7FFF, 0x7FFF0000, 0x07060302


@attrs.frozen
class Output:
    """Registers of storing one of the two output dtypes.

    Attributes:
        f: registers of the kernel.
        bits: bits of a value, 16 (bf16) or 32 (fp32).
        to, bias: buffer descriptors.
        rows: offset of a lane's row in each block along M.
        column: a lane's first column in the tile.
        columns_left: columns of the tile inside the output.
        added: bias of the four results of each block along N.
        nowhere: offset of values that must not be stored.
        values, spare: four results to store, and scratch registers for rounding.
        scalars: constants of rounding.
    """

    f: Frame
    bits: int
    to: Reg
    bias: Reg
    rows: Reg
    column: Reg
    columns_left: Reg
    added: Reg
    nowhere: Reg
    values: tuple[Reg, ...]
    spare: Reg
    scalars: Reg

    @property
    def bytes(self) -> int:
        """Return the bytes of a value."""
        return self.bits // 8

    @property
    def width(self) -> str:
        """Return the width suffix of a memory instruction for four values."""
        return "x2" if self.bits == 16 else "x4"


def output(f: Frame, bits: int) -> Output:
    """Allocate registers for storing, reusing those of the loop except lane and accumulators."""
    given = attrs.evolve(f.given, taken={**f.given.taken, "v": 1})
    registers = Output(
        f=f, bits=bits, to=f.from_a, bias=f.from_b,
        rows=given("v", f.config.blocks_m, align=1), column=given("v"), columns_left=f.steps,
        added=given("v", 4 * f.config.blocks_n), nowhere=given("v"),
        values=tuple(given("v", 4) for _ in range(4)), spare=given("v", 4), scalars=f.spare[4:8],
    )  # fmt: skip
    f.given.taken["v"] = max(f.given.taken["v"], given.taken["v"])
    return registers


def store_tile(f: Frame) -> list[Item]:
    """Store the tile as bf16 or fp32."""
    fp32, end = Label("store_fp32"), Label("end")
    return [
        op("s_cmp_eq_u32", (), f.argument("out_is_bf16"), 0),
        branch("s_cbranch_scc1", fp32),
        *store_as(output(f, 16)),
        branch("s_branch", end),
        fp32,
        *store_as(output(f, 32)),
        end,
        op("s_endpgm"),
    ]


def store_as(o: Output) -> list[Op]:
    """Store the tile into an output of this many bits."""
    return [*place_rows(o), *describe_output(o), *load_bias(o), *store_products(o)]


def place_rows(o: Output) -> list[Op]:
    """Compute the offsets of a lane's rows in the tile, and its first column."""
    f, config, v, s = o.f, o.f.config, o.spare, o.f.spare
    stride = f.argument("stride_out")
    shift = o.bytes.bit_length() - 1
    ops = [
        op("v_and_b32_e32", v[0], SIDE - 1, f.lane),
        op("s_mul_i32", s[0], f.wave_m, config.blocks_m * SIDE),
        op("v_add_u32_e32", v[0], s[0], v[0], note="row"),
        op("v_lshrrev_b32_e32", v[1], 4, f.lane),
        op("v_lshlrev_b32_e32", v[1], 2, v[1]),
        op("s_mul_i32", s[1], f.wave_n, config.blocks_n * SIDE),
        op("v_add_u32_e32", o.column, s[1], v[1], note="first column"),
        op("v_mul_lo_u32", o.rows[0], v[0], stride),
        op("v_lshl_add_u32", o.rows[0], o.column, shift, o.rows[0]),
        op("s_lshl_b32", s[0], stride, SIDE.bit_length() - 1),
    ]
    ops += [op("v_add_u32_e32", o.rows[block], s[0], o.rows[block - 1]) for block in range(1, config.blocks_m)]
    return [*ops, op("v_mov_b32_e32", o.nowhere, NOWHERE)]


def describe_output(o: Output) -> list[Op]:
    """Describe the buffers of the tile in the output and in the bias; without a bias its buffer is
    empty.

    Loads from an empty buffer return zeros. The output's buffer ends after its last row; columns
    outside the output are handled in `store_products`.
    """
    f, config, s = o.f, o.f.config, o.f.spare
    shift = o.bytes.bit_length() - 1
    return [
        *describe(f, o.to, f.argument("out"), f.at_m, config.tile_m, f.argument("stride_out")),
        op("s_mul_i32", s[0], f.at_n, config.tile_n),
        op("s_lshl_b32", s[0], s[0], shift, note="bytes before the first column"),
        op("s_add_u32", o.to[0], o.to[0], s[0]),
        op("s_addc_u32", o.to[1], o.to[1], 0),
        op("s_and_b32", o.to[1], o.to[1], 0xFFFF),
        op("s_add_u32", o.bias[0], f.argument("bias")[0], s[0]),
        op("s_addc_u32", o.bias[1], f.argument("bias")[1], 0),
        op("s_and_b32", o.bias[1], o.bias[1], 0xFFFF),
        *rows_left(f, o.columns_left, f.at_n, config.tile_n, "n"),
        op("s_lshl_b32", s[1], o.columns_left, shift),
        op("s_mul_i32", o.bias[2], s[1], f.argument("add_bias")),
        op("s_mov_b32", o.bias[3], RAW),
        *rows_left(f, s[0], f.at_m, config.tile_m, "m"),
        op("s_sub_u32", s[0], s[0], 1),
        op("s_mul_i32", s[0], s[0], f.argument("stride_out")),
        op("s_add_u32", o.to[2], s[0], s[1]),
    ]


def load_bias(o: Output) -> list[Op]:
    """Load four bias values for each block along N, as fp32."""
    v, ops = o.spare, []
    ops.append(op("v_lshlrev_b32_e32", v[0], o.bytes.bit_length() - 1, o.column))
    fours = o.added.fours()
    for n, four in enumerate(fours):
        to = four[2:4] if o.bits == 16 else four
        offset = n * SIDE * o.bytes
        ops.append(op(f"buffer_load_dword{o.width}", to, v[0], o.bias, 0, mods="offen" + (f" offset:{offset}" if offset else "")))
    if o.bits == 32:
        return ops
    ops.append(op("s_mov_b32", o.scalars[0], 0xFFFF0000))
    for four in fours:
        ops += [
            op("v_lshlrev_b32_e32", four[0], 16, four[2]),
            op("v_and_b32_e32", four[1], o.scalars[0], four[2]),
            op("v_lshlrev_b32_e32", four[2], 16, four[3]),
            op("v_and_b32_e32", four[3], o.scalars[0], four[3]),
        ]
    return ops


def store_products(o: Output) -> list[Op]:
    """Store results with the bias; columns outside the output go to `NOWHERE`."""
    f, config = o.f, o.f.config
    ops = round_constants(o)
    for n, added in enumerate(o.added.fours()):
        ops.append(op("v_sub_u32_e32", o.spare[0], o.columns_left, o.column))
        ops.append(op("v_cmp_lt_i32_e32", VCC, n * SIDE, o.spare[0], note="columns of the products that exist"))
        for m in range(config.blocks_m):
            values = o.values[m % len(o.values)]
            total = f.accumulators_of(m, n)
            ops += [op("v_accvgpr_read_b32", values[index], total[index]) for index in range(4)]
            ops += [op("v_add_f32_e32", values[index], values[index], added[index]) for index in range(4)]
            stored = values if o.bits == 32 else values[0:2]
            if o.bits == 16:
                ops += rounded(o, values)
            ops.append(op("v_cndmask_b32_e32", o.spare[1], o.nowhere, o.rows[m], VCC))
            offset = n * SIDE * o.bytes
            mods = "offen" + (f" offset:{offset}" if offset else "")
            ops.append(op(f"buffer_store_dword{o.width}", (), stored, o.spare[1], o.to, 0, mods=mods))
    return ops


def round_constants(o: Output) -> list[Op]:
    """Load the scalar constants of `rounded`."""
    if o.bits == 32 or o.f.config.target.packs:
        return []
    constants = (_ROUND, _UPPER)
    return [op("s_mov_b32", o.scalars[index], constant) for index, constant in enumerate(constants)] + [
        op("v_mov_b32_e32", o.spare[3], _NAN, note="NaN")
    ]


def rounded(o: Output, values: Reg) -> list[Op]:
    """Round four fp32 values to bf16, to nearest, ties to even, in the first two registers."""
    pairs = ((0, 1), (2, 3))
    if o.f.config.target.packs:
        return [op("v_cvt_pk_bf16_f32", values[first // 2], values[first], values[second]) for first, second in pairs]
    ops = []
    mask, odd = o.scalars[2:4], o.spare[2]
    for value in (values[index] for index in range(4)):
        ops += [
            op("v_cmp_u_f32_e64", mask, value, value, note="NaN"),
            op("v_bfe_u32", odd, value, 16, 1),
            op("v_add3_u32", value, value, odd, o.scalars[0]),
            op("v_cndmask_b32_e64", value, value, o.spare[3], mask),
        ]
    ops += [op("v_perm_b32", values[first // 2], values[second], values[first], o.scalars[1]) for first, second in pairs]
    return ops

"""Compare the emulator's instructions with values computed by hand from the ISA guides."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.nightly

LANE = np.arange(64, dtype=np.uint32)


def floats(*values):
    """Return the bits of floats."""
    return np.asarray(values, np.float32).view(np.uint32)


F = {each: int(floats(each)[0]) for each in (0.5, 1.0, 1.5, 2.0, 3.0, -2.0, 7.0, -3.5, 0.25)}
# Instruction that writes v9, the registers it reads, what every lane of v9 holds.
VECTOR = [
    ("v_mov_b32_e32 v9, v1", {"v1": 7}, 7),
    ("v_mov_b32_e32 v9, -1", {}, 0xFFFFFFFF),
    ("v_mov_b32_e32 v9, 0x12345678", {}, 0x12345678),
    ("v_mov_b32_e32 v9, 1.0", {}, F[1.0]),
    ("v_not_b32_e32 v9, v1", {"v1": 0xFF}, 0xFFFFFF00),
    ("v_and_b32_e32 v9, 12, v1", {"v1": 10}, 8),
    ("v_or_b32_e32 v9, v1, v2", {"v1": 12, "v2": 3}, 15),
    ("v_xor_b32_e32 v9, v1, v2", {"v1": 12, "v2": 10}, 6),
    ("v_add_u32_e32 v9, v1, v2", {"v1": 0xFFFFFFFF, "v2": 3}, 2),
    ("v_sub_u32_e32 v9, v1, v2", {"v1": 3, "v2": 5}, 0xFFFFFFFE),
    ("v_subrev_u32_e32 v9, v1, v2", {"v1": 3, "v2": 5}, 2),
    ("v_mul_lo_u32 v9, v1, s4", {"v1": 0x10001, "s4": 0x10001}, 0x20001),
    ("v_mul_hi_u32 v9, v1, v2", {"v1": 0x80000000, "v2": 6}, 3),
    ("v_mul_hi_i32 v9, v1, v2", {"v1": 0x80000000, "v2": 2}, 0xFFFFFFFF),
    ("v_mul_u32_u24_e32 v9, v1, v2", {"v1": 0xFF000003, "v2": 5}, 15),
    ("v_mul_i32_i24_e32 v9, v1, v2", {"v1": 0x00FFFFFF, "v2": 5}, 0xFFFFFFFB),
    ("v_mad_u32_u24 v9, v1, v2, v3", {"v1": 3, "v2": 5, "v3": 7}, 22),
    ("v_lshlrev_b32_e32 v9, 4, v1", {"v1": 0xF0000001}, 0x10),
    ("v_lshlrev_b32_e32 v9, 33, v1", {"v1": 1}, 2),
    ("v_lshrrev_b32_e32 v9, 4, v1", {"v1": 0xF0000010}, 0x0F000001),
    ("v_ashrrev_i32_e32 v9, 4, v1", {"v1": 0xF0000010}, 0xFF000001),
    ("v_lshl_add_u32 v9, v1, 3, v2", {"v1": 2, "v2": 5}, 21),
    ("v_add_lshl_u32 v9, v1, v2, 3", {"v1": 2, "v2": 5}, 56),
    ("v_lshl_or_b32 v9, v1, 3, v2", {"v1": 2, "v2": 1}, 17),
    ("v_and_or_b32 v9, v1, v2, v3", {"v1": 12, "v2": 10, "v3": 1}, 9),
    ("v_or3_b32 v9, v1, v2, v3", {"v1": 1, "v2": 2, "v3": 8}, 11),
    ("v_add3_u32 v9, v1, v2, v3", {"v1": 1, "v2": 2, "v3": 8}, 11),
    ("v_xad_u32 v9, v1, v2, v3", {"v1": 12, "v2": 10, "v3": 1}, 7),
    ("v_bfe_u32 v9, v1, 16, 1", {"v1": 0x00030000}, 1),
    ("v_bfe_i32 v9, v1, 4, 4", {"v1": 0x90}, 0xFFFFFFF9),
    ("v_bfi_b32 v9, v1, v2, v3", {"v1": 0xFF, "v2": 0x1234, "v3": 0x5678}, 0x5634),
    ("v_alignbit_b32 v9, v1, v2, 8", {"v1": 0x11223344, "v2": 0x55667788}, 0x44556677),
    ("v_alignbyte_b32 v9, v1, v2, 2", {"v1": 0x11223344, "v2": 0x55667788}, 0x33445566),
    ("v_perm_b32 v9, v1, v2, s4", {"v1": 0x44556677, "v2": 0x00112233, "s4": 0x07060302}, 0x44550011),
    ("v_perm_b32 v9, v1, v2, s4", {"v1": 0x44556677, "v2": 0x00112233, "s4": 0x0C0D0004}, 0x00FF3377),
    ("v_min_u32_e32 v9, v1, v2", {"v1": 0xFFFFFFFF, "v2": 3}, 3),
    ("v_max_i32_e32 v9, v1, v2", {"v1": 0xFFFFFFFF, "v2": 3}, 3),
    ("v_bfrev_b32_e32 v9, v1", {"v1": 1}, 0x80000000),
    ("v_bcnt_u32_b32 v9, v1, v2", {"v1": 0xF00F, "v2": 2}, 10),
    ("v_add_f32_e32 v9, v1, v2", {"v1": F[1.5], "v2": F[0.5]}, F[2.0]),
    ("v_add_f32_e64 v9, -v1, |v2|", {"v1": F[1.0], "v2": F[-2.0]}, F[1.0]),
    ("v_sub_f32_e32 v9, v1, v2", {"v1": F[1.5], "v2": F[0.5]}, F[1.0]),
    ("v_mul_f32_e32 v9, 2.0, v2", {"v2": F[1.5]}, F[3.0]),
    ("v_mul_f32_e64 v9, v1, v2 clamp", {"v1": F[3.0], "v2": F[1.5]}, F[1.0]),
    ("v_mul_f32_e64 v9, v1, v2 mul:2", {"v1": F[1.0], "v2": F[1.5]}, F[3.0]),
    ("v_fma_f32 v9, v1, v2, v3", {"v1": F[2.0], "v2": F[3.0], "v3": F[1.0]}, F[7.0]),
    ("v_max_f32_e32 v9, v1, v2", {"v1": 0x7FC00000, "v2": F[1.0]}, F[1.0]),
    ("v_rcp_f32_e32 v9, v1", {"v1": F[2.0]}, F[0.5]),
    ("v_exp_f32_e32 v9, v1", {"v1": F[-2.0]}, F[0.25]),
    ("v_cvt_f32_u32_e32 v9, v1", {"v1": 3}, F[3.0]),
    ("v_cvt_f32_i32_e32 v9, v1", {"v1": 0xFFFFFFFE}, F[-2.0]),
    ("v_cvt_u32_f32_e32 v9, v1", {"v1": F[-3.5]}, 0),
    ("v_cvt_i32_f32_e32 v9, v1", {"v1": F[-3.5]}, 0xFFFFFFFD),
    ("v_cvt_f32_f16_e32 v9, v1", {"v1": 0xABCD3C00}, F[1.0]),
    ("v_cvt_f16_f32_e32 v9, v1", {"v1": F[1.0]}, 0x3C00),
    ("v_pack_b32_f16 v9, v1, v2 op_sel:[1,0,0]", {"v1": 0x12345678, "v2": 0x9ABCDEF0}, 0xDEF01234),
    ("v_cndmask_b32_e32 v9, v1, v2, vcc", {"v1": 1, "v2": 2, "vcc": (1 << 64) - 1}, 2),
    ("v_accvgpr_read_b32 v9, a3", {"a3": 5}, 5),
]


def test_a_vector_instruction_computes_what_the_guide_says(gcn, failing):
    """Each lane of a vector instruction has the value computed by hand."""

    def check(text, registers, expected):
        assert set(gcn.Bench(text).give(registers).run().vector("v9")) == {expected}

    assert not failing(check, VECTOR)


# Instruction that writes s9 (and SCC), the registers it reads, what they hold then.
SCALAR = [
    ("s_add_u32 s9, s1, s2", {"s1": 0xFFFFFFFF, "s2": 2}, 1, 1),
    ("s_add_i32 s9, s1, s2", {"s1": 0x7FFFFFFF, "s2": 1}, 0x80000000, 1),
    ("s_add_i32 s9, s1, s2", {"s1": 0xFFFFFFFF, "s2": 2}, 1, 0),
    ("s_sub_u32 s9, s1, s2", {"s1": 1, "s2": 2}, 0xFFFFFFFF, 1),
    ("s_sub_i32 s9, s1, s2", {"s1": 1, "s2": 2}, 0xFFFFFFFF, 0),
    ("s_add_u32 s8, s1, -1\n s_addc_u32 s9, s2, 0", {"s1": 1, "s2": 4}, 5, 0),
    ("s_sub_u32 s8, s1, 2\n s_subb_u32 s9, s2, 0", {"s1": 1, "s2": 4}, 3, 0),
    ("s_mul_i32 s9, s1, -3", {"s1": 5}, 0xFFFFFFF1, None),
    ("s_mul_hi_u32 s9, s1, s2", {"s1": 0x80000000, "s2": 6}, 3, None),
    ("s_lshl_b32 s9, s1, 4", {"s1": 0xF0000000}, 0, 0),
    ("s_lshr_b32 s9, s1, 4", {"s1": 0xF0}, 15, 1),
    ("s_ashr_i32 s9, s1, 4", {"s1": 0x80000000}, 0xF8000000, 1),
    ("s_and_b32 s9, s1, 0xffff", {"s1": 0x12345678}, 0x5678, 1),
    ("s_andn2_b32 s9, s1, s2", {"s1": 15, "s2": 3}, 12, 1),
    ("s_xor_b32 s9, s1, s1", {"s1": 15}, 0, 0),
    ("s_min_u32 s9, s1, s2", {"s1": 0xFFFFFFFF, "s2": 2}, 2, 0),
    ("s_max_i32 s9, s1, s2", {"s1": 0xFFFFFFFF, "s2": 2}, 2, 0),
    ("s_bfe_u32 s9, s1, 0x80008", {"s1": 0x12345678}, 0x56, 1),
    ("s_movk_i32 s9, 0x8000", {}, 0xFFFF8000, None),
    ("s_mov_b32 s9, s1\n s_addk_i32 s9, -1", {"s1": 3}, 2, 0),
    ("s_cmp_lt_i32 s1, s2\n s_cselect_b32 s9, 7, 8", {"s1": 0xFFFFFFFF, "s2": 0}, 7, 1),
    ("s_cmp_lt_u32 s1, s2\n s_cselect_b32 s9, 7, 8", {"s1": 0xFFFFFFFF, "s2": 0}, 8, 0),
    ("s_cmpk_eq_i32 s1, -1\n s_cselect_b32 s9, 7, 8", {"s1": 0xFFFFFFFF}, 7, 1),
    ("s_bitcmp1_b32 s1, 3\n s_cselect_b32 s9, 7, 8", {"s1": 8}, 7, 1),
    ("s_bcnt1_i32_b32 s9, s1", {"s1": 0xF0}, 4, 1),
    ("s_ff1_i32_b32 s9, s1", {"s1": 0xF0}, 4, None),
    ("s_mov_b64 s[2:3], 5\n s_lshl_b64 s[8:9], s[2:3], 33", {}, 10, 1),
    ("s_mov_b64 s[8:9], -1", {}, 0xFFFFFFFF, None),
    ("s_lshl2_add_u32 s9, s1, s2", {"s1": 3, "s2": 1}, 13, 0),
    ("s_pack_ll_b32_b16 s9, s1, s2", {"s1": 0x10001, "s2": 0x20002}, 0x20001, None),
]


def test_a_scalar_instruction_computes_what_the_guide_says(gcn, failing):
    """Result and SCC of a scalar instruction are the values computed by hand."""

    def check(text, registers, expected, condition):
        bench = gcn.Bench(text).give(registers).run()
        assert bench.scalar(9) == expected
        assert bench.group.waves[0].scc == condition

    assert not failing(check, SCALAR)


def test_sums_of_64_bits_carry(gcn):
    """A 64-bit addition passes its carry through a mask."""
    text = "v_add_co_u32_e32 v9, vcc, v1, v2\n s_nop 1\n v_addc_co_u32_e32 v8, vcc, v3, v4, vcc\n v_lshl_add_u64 v[6:7], v[2:3], 1, v[4:5]"
    bench = gcn.Bench(text).give({"v1": 0xFFFFFFFF, "v2": LANE, "v3": 1, "v4": 2, "v5": 0}).run()
    assert bench.vector("v9").tolist() == [(0xFFFFFFFF + lane) & 0xFFFFFFFF for lane in range(64)]
    assert bench.vector("v8").tolist() == [3, *[4] * 63]
    assert bench.vector("v6").tolist() == [2 * lane + 2 for lane in range(64)]
    assert bench.vector("v7").tolist() == [2] * 64


def test_a_comparison_gives_a_bit_for_each_active_lane(gcn):
    """A comparison gives 0 for inactive lanes."""
    bench = gcn.Bench("v_cmp_gt_u32_e64 s[8:9], 8, v1").give({"v1": LANE, "exec": 0xFFFFFFFFFFFFFFF0}).run()
    assert (bench.scalar(8), bench.scalar(9)) == (0xF0, 0)


def test_inactive_lanes_keep_their_value(gcn):
    """EXEC masks vector writes; saveexec narrows it and returns the old mask."""
    text = "s_and_saveexec_b64 s[8:9], s[2:3]\n v_mov_b32_e32 v1, 5"
    bench = gcn.Bench(text).give({"v1": LANE, "s2": 3, "s3": 0}).run()
    assert bench.vector("v1").tolist() == [5, 5, *range(2, 64)]
    assert (bench.scalar(8), bench.scalar(9)) == (0xFFFFFFFF, 0xFFFFFFFF)


def test_a_scalar_is_read_from_the_first_active_lane(gcn):
    """v_readfirstlane, v_readlane and v_writelane access one lane."""
    text = "v_readfirstlane_b32 s4, v1\n v_readlane_b32 s5, v1, 9\n v_writelane_b32 v1, s6, 3"
    bench = gcn.Bench(text).give({"v1": LANE, "exec": 0xFFFFFFFFFFFFFF00, "s6": 77}).run()
    assert (bench.scalar(4), bench.scalar(5), bench.vector("v1")[3]) == (8, 9, 77)


def test_dpp_moves_lanes(gcn, failing):
    """DPP reads the first source from another lane of the row."""

    def check(how, expected):
        bench = gcn.Bench(f"v_mov_b32_dpp v9, v1 {how} row_mask:0xf bank_mask:0xf").give({"v1": LANE}).run()
        assert bench.vector("v9").tolist() == expected

    assert not failing(
        check,
        [
            ("quad_perm:[1,0,3,2]", [lane ^ 1 for lane in range(64)]),
            ("row_shr:1 bound_ctrl:0", [lane - 1 if lane % 16 else 0 for lane in range(64)]),
            ("row_newbcast:3", [lane // 16 * 16 + 3 for lane in range(64)]),
            ("row_ror:4", [lane // 16 * 16 + (lane - 4) % 16 for lane in range(64)]),
        ],
    )


def test_sdwa_picks_parts_of_sources_and_writes_a_part(gcn):
    """SDWA reads parts of its sources and writes a part of its result."""
    text = "v_add_u32_sdwa v9, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2 src1_sel:WORD_1"
    bench = gcn.Bench(text).give({"v1": 0x00AB0000, "v2": 0x00050000, "v9": 0x11112222}).run()
    assert set(bench.vector("v9")) == {0x00B02222}


def test_gfx950_swaps_rows_rounds_to_bf16_and_has_any_function_of_three_bits(gcn):
    """gfx950 executes v_permlane*_swap, v_cvt_pk_bf16_f32 and v_bitop3_b32; gfx942 rejects them."""
    text = "v_permlane32_swap_b32_e32 v1, v2\n v_permlane16_swap_b32_e32 v3, v4\n v_cvt_pk_bf16_f32 v9, v5, v6\n"
    text += " v_bitop3_b32 v8, v5, v6, v7 bitop3:0x96"
    given = {"v1": LANE, "v2": LANE + 100, "v3": LANE, "v4": LANE + 100, "v5": 0x3F808000, "v6": 0x3F818000, "v7": 0xF}
    bench = gcn.Bench(text, gfx="gfx950").give(given).run()
    assert bench.vector("v1").tolist() == [*range(32), *range(100, 132)]
    assert bench.vector("v2").tolist() == [*range(32, 64), *range(132, 164)]
    assert bench.vector("v3").tolist() == [*range(16), *range(100, 116), *range(32, 48), *range(132, 148)]
    assert bench.vector("v4").tolist() == [*range(16, 32), *range(116, 132), *range(48, 64), *range(148, 164)]
    assert set(bench.vector("v9")) == {0x3F823F80}, "ties go to even"
    assert set(bench.vector("v8")) == {0x3F808000 ^ 0x3F818000 ^ 0xF}
    for line in text.splitlines():
        with pytest.raises(gcn.Fault, match="not on gfx942"):
            gcn.Bench(line)


def test_lds_exchanges_lanes_and_holds_pairs(gcn):
    """ds_bpermute reads another lane, and pairs of LDS use their own offset units."""
    text = """
 v_lshlrev_b32_e32 v2, 2, v1
 v_sub_u32_e32 v3, 0xfc, v2
 ds_bpermute_b32 v4, v3, v1
 ds_write2st64_b32 v2, v1, v3 offset1:1
 s_waitcnt lgkmcnt(0)
 ds_read2_b32 v[6:7], v2 offset0:0 offset1:64
 ds_read_u16 v8, v2 offset:256
 s_waitcnt lgkmcnt(0)"""
    bench = gcn.Bench(text, lds=512).give({"v1": LANE}).run()
    assert bench.vector("v4").tolist() == list(range(63, -1, -1))
    assert bench.vector("v6").tolist() == list(range(64))
    assert bench.vector("v7").tolist() == bench.vector("v8").tolist() == [252 - 4 * lane for lane in range(64)]


LAYOUTS = [
    ("gfx942", "v_mfma_f32_16x16x16_bf16", 16, 16), ("gfx942", "v_mfma_f32_32x32x8_bf16", 32, 8),
    ("gfx942", "v_mfma_f32_32x32x8bf16_1k", 32, 8), ("gfx950", "v_mfma_f32_16x16x32_bf16", 16, 32),
    ("gfx950", "v_mfma_f32_32x32x16_bf16", 32, 16),
]  # fmt: skip


def test_a_matrix_instruction_places_rows_columns_and_depth_as_the_guide_says(gcn, failing):
    """One nonzero element of A and of B give one of D at the guide's lane and register."""

    def check(gfx, name, side, depth):
        each, count = depth * side // 64, side * side // 64
        words = each // 2
        a, b = f"v[10:{9 + words}]", f"v[20:{19 + words}]"
        for row, column, k in ((0, 0, 0), (5, 9, depth - 1), (side - 1, 3, depth // 2), (6, side - 1, 3)):
            given = {f"v{at}": 0 for at in (*range(10, 10 + words), *range(20, 20 + words))} | {f"a{at}": F[1.0] for at in range(count)}
            for base, line, value in ((10, row, 0x4000), (20, column, 0x4040)):  # 2.0 and 3.0 in bf16
                lane, place = line + side * (k // each), k % each
                content = np.zeros(64, np.uint32)
                content[lane] = value << (16 * (place % 2))
                given[f"v{base + place // 2}"] = content
            bench = gcn.Bench(f"{name} a[0:{count - 1}], {a}, {b}, a[0:{count - 1}]", gfx=gfx).give(given).run()
            found = np.stack([bench.vector(f"a{at}", np.float32) for at in range(count)])
            if side == 16:
                register, lane = row % 4, 16 * (row // 4) + column
            else:
                register, lane = 4 * (row // 8) + row % 4, 32 * (row // 4 % 2) + column
            expected = np.ones((count, 64), np.float32)
            expected[register, lane] = 7
            assert (found == expected).all()

    assert not failing(check, LAYOUTS)


def test_buffers_give_zero_out_of_range_and_drop_stores(gcn):
    """Buffer accesses are checked in units of 4 bytes against num_records."""
    memory = gcn.Memory()
    base = memory.place("x", np.arange(64, dtype=np.uint32))
    text = """
 buffer_load_dwordx2 v[2:3], v1, s[4:7], s8 offen offset:4
 buffer_store_dword v4, v1, s[4:7], 0 offen
 s_waitcnt vmcnt(0)"""
    given = {"v1": 8 * LANE, "v4": 9, "s4": base & 0xFFFFFFFF, "s5": base >> 32, "s6": 60, "s7": 0x20000, "s8": 8}
    bench = gcn.Bench(text, memory=memory).give(given).run()
    assert bench.vector("v2").tolist() == [*(2 * lane + 3 for lane in range(6)), *[0] * 58]
    assert bench.vector("v3").tolist() == [*(2 * lane + 4 for lane in range(6)), *[0] * 58][:64]
    stored = memory.read("x", np.uint32)
    assert stored[:16].tolist() == [9, 1, 9, 3, 9, 5, 9, 7, 9, 9, 9, 11, 9, 13, 9, 15]
    assert stored[16:].tolist() == list(range(16, 64))


def test_atomics_return_what_was_there(gcn):
    """Atomics apply lane by lane and return the old value."""
    memory = gcn.Memory()
    at = memory.place("x", np.asarray([5, 3, 0x3F803F80], np.uint32))
    text = """
 global_atomic_add v2, v1, v3, s[4:5] sc0
 global_atomic_inc v6, v1, v7, s[4:5] offset:4 sc0
 global_atomic_pk_add_bf16 v1, v8, s[4:5] offset:8
 s_waitcnt vmcnt(0)"""
    given = {"v1": 0, "v3": 1, "v7": 3, "v8": 0x3F804000, "s4": at & 0xFFFFFFFF, "s5": at >> 32, "exec": 7}
    bench = gcn.Bench(text, memory=memory).give(given).run()
    wave = bench.group.waves[0]
    assert wave.v[2, :3].tolist() == [5, 6, 7]
    assert wave.v[6, :3].tolist() == [3, 0, 1]
    assert memory.read("x", np.uint32).tolist() == [8, 2, 0x408040E0]

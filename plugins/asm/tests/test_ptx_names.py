"""Test names, arguments, descriptors and tile order of the PTX generator against hand-computed
values.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import PluginError, Shape
from tunedgemm_asm.ptx import matrix
from tunedgemm_asm.ptx.abi import ABI, SCALED, argument, declaration
from tunedgemm_asm.ptx.kernel import text_of
from tunedgemm_asm.ptx.launch import arguments_of
from tunedgemm_asm.ptx.limits import boxes_of, last_rows, unfit
from tunedgemm_asm.ptx.names import KernelConfig, Variant, parse_name
from tunedgemm_asm.ptx.order import place_of

CONFIG = KernelConfig(128, 160, 5)
SHAPE = Shape("a16w16", 4096, 7168, 8192)


def test_names_round_trip() -> None:
    """A name has every field of its configuration."""
    configs = [
        CONFIG,
        KernelConfig(64, 256, 4, 1, 2, 3),
        KernelConfig(16, 128, 8, 2, 1, 4, swapped=True),
        KernelConfig(16, 128, 8, swapped=True, promoted=True),
    ]
    configs += [KernelConfig(128, 192, 5, turns=True), KernelConfig(16, 64, 8, swapped=True, turns=True)]
    assert CONFIG.name == "ptx_128x160_s5_c2_x1_g8_r1"
    assert configs[2].name == "ptx_16x128_s8_c2_x1_g4_swap_r1"
    assert configs[3].name == "ptx_16x128_s8_c2_x1_g8_swap_p_r1"
    assert [config.name for config in configs[4:6]] == ["ptx_128x192_s5_c2_x1_g8_t_r1", "ptx_16x64_s8_c2_x1_g8_swap_t_r1"]
    configs += [KernelConfig(128, 192, 5, turns=True, stream=True), KernelConfig(128, 256, 4, promoted=True, panels=2, stream=True)]
    configs += [KernelConfig(128, 96, 7, promoted=True, overlapped=True, staged=True)]
    assert [config.name for config in configs[6:]] == [
        "ptx_128x192_s5_c2_x1_g8_t_k_r1",
        "ptx_128x256_s4_c2_x1_g8_p_k_b2_r1",
        "ptx_128x96_s7_c2_x1_g8_p_o_s_r1",
    ]
    assert [parse_name(config.name) for config in configs] == configs


def test_impossible_configurations_are_refused(failing: Any) -> None:
    """Impossible names raise with the reason."""

    def check(name: str, reason: str) -> None:
        with pytest.raises(PluginError, match=re.escape(reason)):
            parse_name(name)

    assert not failing(
        check,
        [
            ("tunedgemm_bf16_128x128_pf2", "is not a kernel"),
            ("ptx_128x160_s5_c2_x1_g8_r99", "revision 99 is not 1; tune again"),
            ("ptx_128x0160_s5_c2_x1_g8_r1", "is not a kernel"),
            ("ptx_128x256_s5_c2_x1_g8_r1", "245848 bytes of shared memory exceed the 232448 of a block"),
            ("ptx_256x256_s2_c2_x1_g8_r1", "256 accumulators and 40 other registers exceed the 240 of a thread"),
            ("ptx_256x136_s4_c2_x1_g8_p_r1", "204 accumulators and 40 other registers exceed the 240 of a thread"),
            ("ptx_128x200_s4_c2_x1_g8_p_r1", "half of 200 rows is not a multiple of 8"),
            ("ptx_96x128_s4_c2_x1_g8_r1", "2 consumers cannot share 96 rows in steps of 64"),
            ("ptx_128x100_s4_c2_x1_g8_r1", "100 rows; needs a multiple of 8"),
            ("ptx_128x264_s2_c2_x1_g8_r1", "264 rows; needs a multiple of 8, up to 256"),
            ("ptx_128x136_s4_c2_x2_g8_r1", "136 rows; needs a multiple of 16"),
            ("ptx_128x128_s1_c2_x1_g8_r1", "2 stages or more"),
            ("ptx_192x128_s3_c3_x1_g8_r1", "needs 1 or 2 consumers"),
            ("ptx_64x128_s4_c1_x1_g8_t_r1", "ping-pong (_t) needs 2 consumers"),
            ("ptx_128x128_s4_c2_x1_g8_p_t_r1", "ping-pong (_t) needs 2 consumers and no promotion (_p)"),
            ("ptx_128x128_s4_c2_x1_g8_t_p_r1", "is not a kernel"),
            ("ptx_96x128_s4_c2_x1_g8_t_r1", "a consumer cannot take 96 rows in steps of 64"),
            ("ptx_128x256_s4_c2_x1_g8_t_r1", "256 accumulators and 40 other registers exceed the 240 of a thread"),
            ("ptx_64x256_s12_c2_x1_g8_t_r1", "491736 bytes of shared memory"),
        ],
    )


def test_plans_match_values_computed_by_hand() -> None:
    """Shared memory, registers and occupancy are those computed by hand."""
    assert CONFIG.stage_bytes == (128 + 160) * 128 == 36864
    assert CONFIG.shared_bytes == 5 * (36864 + 16) + 8 == 184408
    assert (CONFIG.threads, CONFIG.accumulators, CONFIG.blocks, CONFIG.resident) == (384, 80, 1, 1)
    wide = KernelConfig(256, 128, 4)
    assert (wide.rows, wide.blocks, wide.accumulators, wide.entry_registers) == (128, 2, 128, 168)
    promoted = KernelConfig(128, 256, 4, promoted=True)
    assert (promoted.accumulators, promoted.portion, promoted.portions) == (128, 128, [(0, 0), (0, 128)])
    assert KernelConfig(256, 128, 4, promoted=True).portions == [(0, 0), (1, 0)]
    turns = KernelConfig(128, 192, 5, turns=True)
    assert (turns.sharing, turns.rows, turns.blocks, turns.accumulators, turns.threads, turns.resident) == (1, 128, 2, 192, 384, 1)
    assert turns.shared_bytes == 5 * (320 * 128 + 16) + 8 + 16
    few = KernelConfig(64, 128, 4, 1)
    assert (few.threads, few.accumulators, few.entry_registers, few.resident) == (256, 64, 128, 2)


def test_consumers_take_only_released_registers(failing: Any) -> None:
    """Consumers take no more registers than the producer gives back."""

    def check(config: KernelConfig) -> None:
        assert config.producer_registers + config.consumers * config.consumer_registers <= (1 + config.consumers) * config.entry_registers
        assert config.entry_registers * config.threads <= 65536
        for count in (config.producer_registers, config.consumer_registers):
            assert count % 8 == 0 and 24 <= count <= 256
        assert config.producer_registers <= config.entry_registers <= config.consumer_registers

    assert not failing(
        check,
        itertools.product(
            [
                CONFIG,
                KernelConfig(64, 128, 4, 1),
                KernelConfig(64, 256, 4, 1),
                KernelConfig(256, 192, 3),
                KernelConfig(128, 192, 5, turns=True),
            ]
        ),
    )


def test_matrix_descriptors() -> None:
    """Matrix descriptors have the fields of the PTX ISA."""
    assert matrix.descriptor(0x400) == 0x4000_0040_0001_0040
    assert matrix.descriptor(0x400 + 36864) == 0x4000_0040_0001_0940
    assert matrix.descriptor((1 << 18) + 0x400) == matrix.descriptor(0x400)
    assert matrix.ALONG_K == 2  # 16 elements of 2 bytes
    assert matrix.ALONG_ROWS == 512  # 64 rows of 128 bytes
    assert matrix.instruction(Variant(CONFIG, "fp16", "fp32")) == "wgmma.mma_async.sync.aligned.m64n160k16.f32.f16.f16"


def test_matrix_instructions_of_eight_bits() -> None:
    """8-bit wgmma instructions have the shapes and flags of the PTX ISA."""
    fp8, int8 = (Variant(CONFIG, dtype, "bf16", scale="row") for dtype in ("fp8_e4m3fn", "int8"))
    assert matrix.instruction(fp8) == "wgmma.mma_async.sync.aligned.m64n160k32.f32.e4m3.e4m3"
    assert matrix.instruction(int8) == "wgmma.mma_async.sync.aligned.m64n160k32.s32.s8.s8"
    assert (matrix.flags(fp8), matrix.flags(int8, "%p1")) == ((1, 1, 1), ("%p1",))
    assert [rows for rows in range(8, 80, 8) if matrix.multiplies(rows, "int8")] == [8, 16, 24, 32, 48, 64]
    assert all(matrix.multiplies(rows, "fp8_e4m3fn") for rows in range(8, 264, 8))
    assert (fp8.step, Variant(CONFIG, "bf16", "bf16").step) == (128, 64)


def test_arguments_are_placed_as_in_ptx() -> None:
    """Arguments have the documented offsets."""
    assert declaration("none") == ".param .align 64 .b8 arguments[340]"
    assert declaration("row") == declaration("block") == ".param .align 64 .b8 arguments[360]"
    assert (argument("x_scale"), argument("w_scale"), SCALED.size) == ("[arguments+344]", "[arguments+352]", 360)
    assert argument("counters") == "[arguments+280]"
    assert (ABI.field("out").offset, ABI.field("counters").offset, ABI.field("rows_a").offset, ABI.size) == (256, 280, 288, 340)


def test_every_tile_is_computed_once(failing: Any) -> None:
    """The order covers every tile once, group by group."""

    def check(units_a: int, tiles_b: int, group: int) -> None:
        places = [place_of(tile, units_a, tiles_b, group) for tile in range(units_a * tiles_b)]
        assert sorted(places) == [(a, b) for a in range(units_a) for b in range(tiles_b)]
        assert places[: min(group, units_a)] == [(a, 0) for a in range(min(group, units_a))]

    assert not failing(check, [(1, 1, 8), (7, 5, 1), (7, 5, 3), (8, 3, 8), (17, 9, 8), (3, 40, 16)])


def test_a_problem_in_numbers() -> None:
    """Arguments, grid and workspace are those computed by hand."""
    arguments = arguments_of(CONFIG, 3, attrs.evolve(SHAPE, m=300, n=1000, k=1000), 132)
    assert dict(arguments.values) == {
        "rows_a": 300, "rows_b": 1000, "stride": 1000, "units_a": 3, "tiles_b": 7, "tiles": 21, "items": 63,
        "steps": 16, "part": 6, "splits": 3, "last_a": 172, "last_b": 840, "loaded": 36864,
    }  # fmt: skip
    assert arguments.grid == 63
    assert (arguments.counters, arguments.workspace) == (42, 42 * 3 * 80 * 128 * 4)
    assert arguments_of(KernelConfig(128, 128, 4, cluster=2), 1, SHAPE, 131).grid == 130
    turns = arguments_of(attrs.evolve(CONFIG, turns=True), 3, attrs.evolve(SHAPE, m=300, n=1000, k=1000), 132)
    assert dict(turns.values) == dict(arguments.values)
    assert (turns.grid, turns.counters, turns.workspace) == (63, 21, arguments.workspace)
    eight = Shape("a8w8_blockscale", 300, 1000, 1040, "fp8_e4m3fn", "bf16", scale="block")
    scaled = arguments_of(KernelConfig(128, 160, 5, promoted=True, staged=True), 3, eight, 132)
    assert (scaled.values["steps"], scaled.values["part"], scaled.variant.scale, scaled.workspace) == (9, 3, "block", arguments.workspace)
    swapped = arguments_of(KernelConfig(16, 128, 8, swapped=True), 1, attrs.evolve(SHAPE, m=9), 132)
    assert (swapped.values["rows_a"], swapped.values["rows_b"], swapped.values["stride"], swapped.grid) == (7168, 9, 7168, 56)


def test_no_load_takes_rows_outside_an_operand(failing: Any) -> None:
    """Boxes have no more rows than an operand, and the last tiles end with it, where both may be so."""
    plain, stream, staged = (attrs.evolve(CONFIG, **more) for more in ({}, {"stream": True}, {"promoted": True, "staged": True}))
    pair, swapped = attrs.evolve(CONFIG, cluster=2), KernelConfig(40, 128, 4, swapped=True)
    never = (1 << 32) - 1

    def check(config: KernelConfig, sizes: tuple[int, int], boxes: tuple[int, int], last: tuple[int, int]) -> None:
        shape = attrs.evolve(SHAPE, m=sizes[0], n=sizes[1])
        assert (boxes_of(config, shape), last_rows(config, shape)) == (boxes, last)

    assert not failing(
        check,
        [
            (plain, (300, 1000), (128, 160), (172, 840)),
            (plain, (100, 70), (100, 70), (0, 0)),
            (pair, (100, 70), (100, 80), (0, 0)),
            (swapped, (37, 1000), (128, 37), (872, 0)),
            (stream, (100, 1000), (100, 160), (never, never)),
            (staged, (300, 960), (128, 160), (172, 800)),
            (staged, (300, 1000), (128, 160), (172, never)),
        ],
    )


def test_empty_parts_of_k_are_refused(failing: Any) -> None:
    """Splits without a step are refused."""

    def check(splits: int, k: int, reason: str) -> None:
        assert reason in unfit(CONFIG, splits, attrs.evolve(SHAPE, k=k))

    assert not failing(
        check,
        [(0, 8192, "1 to 16 splits (got 0)"), (17, 8192, "(got 17)"), (5, 256, "K=256 into 5 splits"), (7, 1024, "K=1024 into 7 splits")],
    )


def test_a_text_names_its_kernel() -> None:
    """The text has its version, architecture, threads, registers and cluster."""
    text = text_of(Variant(KernelConfig(128, 128, 4, cluster=2), "bf16", "bf16"))
    for part in (
        ".version 8.0",
        ".target sm_90a",
        ".reqntid 384, 1, 1",
        ".reqnctapercluster 2, 1, 1",
        ".maxnreg 168",
        "multicast::cluster",
    ):
        assert part in text
    plain = text_of(Variant(CONFIG, "bf16", "bf16"))
    assert "cluster, 1, 1" not in plain and "multicast" not in plain and "barrier.cluster" not in plain
    assert plain == text_of(Variant(CONFIG, "bf16", "bf16"))

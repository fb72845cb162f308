"""Run 8-bit kernels on the emulator: scales of every kind, promotion, planted mistakes."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tunedgemm.plugin import Shape
from tunedgemm_asm.ptx.limits import unfit
from tunedgemm_asm.ptx.names import KernelConfig

pytestmark = pytest.mark.nightly


def of(
    scale: str, sizes: tuple[int, int, int], dtype: str = "fp8_e4m3fn", outdtype: str = "bf16", bias: str = "", order: str = "row"
) -> Shape:
    """Return a shape of the op with such scales."""
    op, extra = "a8w8_blockscale" if scale == "block" else "a8w8", {} if order == "row" else {"scale_order": order}
    return Shape(op, *sizes, dtype, outdtype, "bias" if bias else "none", bias, scale=scale, extra=extra)


#: Configuration, shape, splits, multiprocessors: each has tails in M, N and K, and blocks with
#: several tiles.
CASES = [
    (KernelConfig(128, 128, 3, promoted=True), of("row", (150, 200, 272)), 1, 2),
    (KernelConfig(128, 160, 3), of("row", (150, 200, 272), bias="bf16"), 1, 2),
    (KernelConfig(64, 72, 3, 1, promoted=True), of("row", (150, 74, 272), outdtype="fp16", bias="fp32"), 1, 2),
    (KernelConfig(64, 40, 3, 1), of("row", (70, 73, 272), outdtype="fp32", bias="fp16"), 2, 2),
    (KernelConfig(256, 32, 2, promoted=True), of("tensor", (300, 73, 400), outdtype="fp16", bias="fp16"), 1, 2),
    (KernelConfig(64, 40, 3, 1), of("tensor", (70, 104, 272), bias="fp32"), 2, 2),
    (KernelConfig(16, 128, 4, swapped=True, promoted=True), of("row", (13, 300, 400), bias="bf16"), 1, 2),
    (KernelConfig(24, 64, 4, 1, swapped=True), of("row", (47, 101, 272), outdtype="fp32"), 1, 2),
    (KernelConfig(8, 256, 3, swapped=True, promoted=True), of("tensor", (5, 300, 528), bias="fp16", outdtype="fp16"), 3, 2),
    (KernelConfig(128, 48, 3, 2, 2, 2, promoted=True), of("row", (300, 73, 400), bias="bf16"), 2, 5),
    (KernelConfig(128, 96, 3), of("row", (150, 200, 272), "int8", bias="bf16"), 1, 2),
    (KernelConfig(64, 48, 3, 1, 2), of("row", (150, 73, 528), "int8", "fp32", "fp32"), 3, 4),
    (KernelConfig(256, 16, 2), of("tensor", (300, 37, 400), "int8", "fp16"), 2, 2),
    (KernelConfig(24, 128, 3, swapped=True), of("row", (20, 201, 528), "int8", bias="bf16"), 3, 2),
    (KernelConfig(16, 64, 3, 1, 2, 2, swapped=True), of("tensor", (20, 300, 272), "int8", "fp32"), 1, 4),
    (KernelConfig(128, 128, 3, promoted=True), of("block", (150, 200, 272)), 1, 2),
    (KernelConfig(64, 32, 3, 1, promoted=True), of("block", (70, 264, 400), outdtype="fp16"), 1, 2),
    (KernelConfig(128, 96, 3, promoted=True), of("block", (150, 300, 272), outdtype="fp32"), 1, 2),
    (KernelConfig(64, 192, 3, 1, promoted=True), of("block", (70, 400, 272)), 2, 3),
    (KernelConfig(64, 224, 3, 1, promoted=True), of("block", (70, 1000, 272)), 1, 2),
    (KernelConfig(64, 176, 3, 1, promoted=True), of("block", (70, 1300, 144)), 1, 2),
    (KernelConfig(64, 24, 3, 1, promoted=True), of("block", (70, 400, 144)), 1, 4),
    (KernelConfig(64, 184, 3, 1, promoted=True), of("block", (70, 1200, 144)), 1, 2),
    (KernelConfig(128, 256, 3, promoted=True), of("block", (150, 300, 272)), 1, 2),
    (KernelConfig(256, 128, 2, promoted=True), of("block", (300, 264, 272), outdtype="fp16"), 2, 2),
    (KernelConfig(64, 224, 3, 1, promoted=True), of("row", (70, 300, 272), bias="bf16"), 1, 2),
    (KernelConfig(208, 64, 3, 1, swapped=True, promoted=True), of("row", (215, 72, 272)), 1, 2),
    (KernelConfig(96, 64, 3, 1, swapped=True, promoted=True), of("block", (101, 72, 272)), 1, 2),
    (KernelConfig(128, 160, 3, promoted=True), of("block", (150, 500, 144)), 1, 2),
    (KernelConfig(256, 64, 2, promoted=True), of("block", (300, 137, 272)), 1, 2),
    (KernelConfig(128, 1 << 5, 3, 2, 2, 2, promoted=True), of("block", (300, 165, 528)), 3, 5),
    (KernelConfig(8, 64, 4, 1, swapped=True, promoted=True), of("block", (1, 201, 528)), 3, 2),
    (KernelConfig(24, 128, 4, swapped=True, promoted=True), of("block", (47, 333, 272), outdtype="fp32"), 1, 2),
    (KernelConfig(32, 256, 3, swapped=True, promoted=True), of("block", (41, 400, 272)), 1, 2),
    (KernelConfig(16, 128, 3, 2, 2, 2, swapped=True, promoted=True), of("block", (20, 600, 400), outdtype="fp16"), 2, 5),
    (KernelConfig(128, 128, 3, promoted=True), of("block", (150, 200, 272), order="m_major"), 1, 2),
    (KernelConfig(128, 96, 3, promoted=True), of("block", (150, 300, 272), outdtype="fp32", order="m_major_padded"), 2, 2),
    (KernelConfig(64, 192, 3, 1, promoted=True), of("block", (71, 400, 272), order="m_major_padded"), 2, 3),
    (KernelConfig(24, 128, 4, swapped=True, promoted=True), of("block", (47, 333, 272), order="m_major"), 1, 2),
    (KernelConfig(32, 256, 3, swapped=True, promoted=True), of("block", (41, 400, 272), order="m_major_padded"), 1, 2),
    (KernelConfig(8, 64, 4, 1, swapped=True, promoted=True), of("block", (1, 201, 528), order="m_major_padded"), 3, 2),
]
CASES = [(attrs.evolve(config, staged=shape.scale == "block"), shape, *rest) for config, shape, *rest in CASES]
#: One, two, three and more steps, one to four portions, and everything around them.
CASES += [
    (attrs.evolve(config, overlapped=True), shape, splits, multiprocessors)
    for config, shape, splits, multiprocessors in [
        *(case for case in CASES if case[0].promoted and case[0].tile_b % 32 == 0 and case[0].tile_b <= 192),
        *((KernelConfig(64, 64, 2, 1, promoted=True, staged=True), of("block", (70, 72, k)), 1, 2) for k in (16, 144, 272, 400, 528)),
        (KernelConfig(256, 128, 2, promoted=True, staged=True), of("block", (300, 264, 400), order="m_major"), 1, 2),
        (KernelConfig(256, 96, 2, 2, 2, 2, promoted=True, staged=True), of("block", (600, 264, 528)), 1, 5),
        (KernelConfig(128, 192, 3, promoted=True, staged=True), of("block", (150, 400, 528)), 2, 3),
        (KernelConfig(64, 96, 3, 1, promoted=True, staged=True, stream=True), of("block", (150, 300, 400)), 1, 3),
    ]
]
BLOCKS = (KernelConfig(64, 96, 2, 1, promoted=True, staged=True), of("block", (100, 200, 400)), 1)
PADDED = (BLOCKS[0], of("block", (71, 200, 400), order="m_major_padded"), 1)
OVERLAPPED = (attrs.evolve(BLOCKS[0], overlapped=True), of("block", (100, 200, 528)), 1)
ROWS = (KernelConfig(64, 32, 2, 1), of("row", (100, 40, 400)), 1)


def test_sums_of_integers_are_whole(ptx: ModuleType) -> None:
    """int8 partials are added as integers, beyond the precision of fp32."""
    config, shape = KernelConfig(8, 64, 3, 1, swapped=True), of("tensor", (3, 8, 2176), "int8", "fp32")
    x, weight = np.full((3, 2176), -128), np.full((8, 2176), -128)
    x[1, 0], x[2, :1088] = -127, 127
    out, wanted = ptx.Bench(shape, config, 2, 2, given=(x, weight)).output()
    np.testing.assert_array_equal(out, wanted)
    assert len(np.unique(out)) == 3


def test_numbers_of_eight_bits(ptx: ModuleType) -> None:
    """The emulator's e4m3 values are torch's."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(ptx.E4M3, codes)
    config, shape = KernelConfig(64, 8, 2, 1, promoted=True), of("tensor", (4, 8, 128), outdtype="fp32")
    x, weight = np.zeros((4, 128)), np.zeros((8, 128))
    x[:, 0], weight[:, 0] = (448.0, -448.0, 2.0**-9, 2.0**-6), 448.0
    out, wanted = ptx.Bench(shape, config, given=(x, weight)).output()
    np.testing.assert_array_equal(out, wanted)


#: Config, shape, splits, multiprocessors, seeds: `test_ptx_run` runs these orders of events.
ORDERS = [
    (*case, 2, range(1, 6))
    for case in (BLOCKS, (*BLOCKS[:2], 2), (attrs.evolve(BLOCKS[0], cluster=2), BLOCKS[1], 2), OVERLAPPED, ROWS, (*ROWS[:2], 2))
]
#: Name -> case, pattern in its text, replacement: a plausible mistake that a kernel could
#: have.
MISTAKES = {
    "every block has the scale of the first": (BLOCKS, r"add\.s64 (%d\d+), \1, 4;", r"add.s64 \1, \1, 0;"),
    "stages have the scales of another": (BLOCKS, r"mad\.lo\.u32 (%r\d+), %r\d+, 272, (%r\d+);\n", r"mov.u32 \1, \2;\n"),
    "the rows 32 further have the first row's scale": (BLOCKS, r"(add\.s64 %d\d+, %d\d+), %d\d+;\n    setp\.gt", r"\1, 0;\n    setp.gt"),
    "the row 8 below has the first row's scale": (BLOCKS, r"(ld\.shared\.f32 %f\d+, \[%r\d+)\+32\]", r"\1+0]"),
    "every span of a tile has the scale of the first": (BLOCKS, r"mad\.lo\.u32 (%r\d+), %r\d+, 32, (%r\d+);", r"mov.u32 \1, \2;"),
    "columns have the scales of the span before": (BLOCKS, r"(ld\.shared\.f32 %f\d+, \[%r\d+)\+4\]", r"\1+0]"),
    "scales of x and of the weight are exchanged": (BLOCKS, r"344\];\n(.*)352\];", r"352];\n\g<1>344];"),
    "no row is the last that has scales": (BLOCKS, r"selp\.b32 (%r\d+), 4, 0, %p\d+;", r"mov.u32 \1, 4;"),
    "padded steps have the rows of x alone": (PADDED, r"and\.b32 (%r\d+), (%r\d+), 4294967292;", r"mov.u32 \1, \2;"),
    "a stage is full before its scales": (BLOCKS, r"(mbarrier\.init\S+ \[%r\d+\+\d+\]), 33;", r"\1, 1;"),
    "a warp arrives before its copies": (
        BLOCKS,
        r"cp\.async\.mbarrier\.arrive\.noinc\S+( .*);",
        r"mbarrier.arrive.release.cta.shared::cta.b64 _,\1;",
    ),
    "scales are copied to a stage in use": (BLOCKS, r"(SCALE_1:(?:.*\n)+?)    mbarrier\.try_wait.*\n.* bra WAIT_2;", r"\1"),
    "scales are read before they arrive": (
        BLOCKS,
        r"(WAIT_3:\n(?:.*\n)+?    @!%p\d+ bra WAIT_3;\n)((?:.*\n)*?(?:    ld\.shared.*\n)+)",
        r"\2\1",
    ),
    "sums of stages go on": (BLOCKS, r"setp\.ne\.u32 (%p\d+), 0, 0;", r"setp.eq.u32 \1, 0, 0;"),
    "sums of a stage are not added": (BLOCKS, r"fma\.rn\.f32 (%f\d+), (%f\d+), (%f\d+), \1;", r"mul.rn.f32 \1, \2, \3;"),
    "sums are added before they are done": (BLOCKS, r"wait_group\.sync\.aligned 0;", "wait_group.sync.aligned 1;"),
    "a stage is released before its products are done": (
        BLOCKS,
        r"(    wgmma\.wait_group\.sync\.aligned 0;\n)((?:.*\n)*?    @%p\d+ mbarrier\.arrive.*\n)",
        r"\2\1",
    ),
    "overlapped sums are added before they are done": (OVERLAPPED, r"wait_group\.sync\.aligned 1;", "wait_group.sync.aligned 2;"),
    "the last sums are added before they are done": (OVERLAPPED, r"wait_group\.sync\.aligned 0;", "wait_group.sync.aligned 1;"),
    "a stage is released while another portion is multiplied": (
        OVERLAPPED,
        r"(    wgmma\.wait_group\.sync\.aligned 1;\n)((?:.*\n)*?    @%p\d+ mbarrier\.arrive.*\n)",
        r"\2\1",
    ),
    "rows have the scale of the first": (ROWS, r"(ld\.global\.nc\.f32 %f\d+, \[%d\d+)\+32\]", r"\1+0]"),
    "columns have the scales of others": (ROWS, r"(ld\.global\.nc\.v2\.f32 .*\[%d\d+)\+32\]", r"\1+0]"),
    "scales of columns are left out": (ROWS, r"(mul\.rn\.f32 .*\n)    mul\.rn\.f32 (%f\d+), (%f\d+), .*;", r"\1    mov.f32 \2, \3;"),
    "a step along K is 64 elements": (ROWS, r"(LOAD_1(?:.*\n)*?    add\.u32 (%r\d+), \2), 128;", r"\1, 64;"),
}


def test_plans_refuse_unsupported_dtypes_and_scales(failing: Any) -> None:
    """Configurations refuse dtypes and scales that they do not support."""

    def check(config: KernelConfig, shape: Shape, reason: str) -> None:
        assert reason in unfit(config, 1, shape)

    assert not failing(
        check,
        [
            (
                KernelConfig(64, 96, 4, 1, promoted=True),
                of("row", (100, 200, 400), "int8"),
                "promotes fp8 products only, not int8",
            ),
            (KernelConfig(64, 40, 4, 1), of("row", (100, 200, 400), "int8"), "tiles of 40 rows, which wgmma lacks for int8"),
            (KernelConfig(64, 96, 4, 1), BLOCKS[1], "has no scales in its stages, as block scales require; use a kernel with _p and _s"),
            (KernelConfig(64, 96, 4, 1, promoted=True), BLOCKS[1], "use a kernel with _p and _s, or tune again"),
            (
                KernelConfig(8, 192, 4, 1, swapped=True, promoted=True, staged=True),
                BLOCKS[1],
                "has consumers whose 192 rows of the weight are not in one scale block of 128 rows",
            ),
            (
                KernelConfig(64, 96, 4, 1, promoted=True, staged=True),
                of("row", (100, 200, 400)),
                "has scales in its stages (_s), for block scales only",
            ),
            (KernelConfig(64, 96, 4, 1, promoted=True), Shape("a16w16", 100, 200, 400), "promotes fp8 products only, not bf16"),
        ],
    )


def test_spans_of_a_tile_have_one_scale_each(failing: Any) -> None:
    """No span of a tile crosses a scale block."""

    def check(rows: int) -> None:
        config = KernelConfig(64, rows, 2, 1, promoted=True, staged=True)
        assert config.spans * config.span == rows
        for start in range(0, 300 * rows, config.span):
            assert start // 128 == (start + config.span - 1) // 128

    assert not failing(check, itertools.product([rows for rows in range(8, 257, 8) if rows <= 192 or rows % 16 == 0]))

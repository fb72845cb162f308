"""Run kernels with TMA stores on the emulator, and test where they are listed."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, PluginError, Shape, Solution
from tunedgemm_asm.ptx.abi import MAP_OUT
from tunedgemm_asm.ptx.kernel import text_of
from tunedgemm_asm.ptx.limits import unfit
from tunedgemm_asm.ptx.names import KernelConfig, Variant, parse_name
from tunedgemm_asm.ptx.space import enumerate_candidates, refine, with_panels

pytestmark = pytest.mark.nightly

H200 = Device("sm_90", 132, "nvidia-h200")


def of(scale: str, sizes: tuple[int, int, int], dtype: str = "fp8_e4m3fn", outdtype: str = "bf16", bias: str = "") -> Shape:
    """Return a shape of the op with such scales."""
    op = {"none": "a16w16", "block": "a8w8_blockscale"}.get(scale, "a8w8")
    return Shape(op, *sizes, dtype, outdtype, "bias" if bias else "none", bias, scale=scale)


#: Configuration, shape, splits, multiprocessors: each has tails in M, N and K, most blocks
#: several tiles.
CASES = [
    (KernelConfig(128, 256, 3, panels=2), of("none", (300, 520, 136), "bf16"), 1, 2),
    (KernelConfig(128, 64, 3, panels=1), of("none", (300, 200, 136), "bf16", bias="bf16"), 1, 2),
    (KernelConfig(128, 192, 3, panels=3), of("none", (150, 200, 136), "fp16", "fp16", "fp32"), 1, 2),
    (KernelConfig(128, 160, 3, panels=5), of("none", (150, 328, 136), "fp16", "bf16", "fp16"), 1, 2),
    (KernelConfig(128, 224, 3, panels=3), of("none", (150, 456, 136), "bf16", "fp16", "bf16"), 1, 2),
    (KernelConfig(128, 112, 3, panels=6), of("none", (150, 240, 136), "bf16"), 1, 2),
    (KernelConfig(128, 16, 3, panels=1), of("none", (150, 40, 136), "bf16", bias="bf16"), 1, 2),
    (KernelConfig(256, 128, 3, panels=3), of("none", (300, 136, 200), "bf16", bias="fp32"), 1, 1),
    (KernelConfig(256, 96, 3, panels=5), of("none", (600, 104, 136), "fp16", "fp16"), 1, 1),
    (KernelConfig(64, 80, 3, 1, panels=4), of("none", (200, 168, 136), "bf16"), 1, 2),
    (KernelConfig(128, 64, 3, 1, panels=2), of("none", (5, 8, 136), "bf16"), 1, 2),
    (KernelConfig(64, 64, 3, 1, panels=1), of("none", (70, 104, 456), "bf16", bias="bf16"), 3, 2),
    (KernelConfig(128, 96, 3, 2, 2, 2, panels=2), of("none", (300, 200, 136), "bf16"), 1, 4),
    (KernelConfig(64, 64, 3, 1, 2, 2, panels=1), of("none", (150, 200, 328), "fp16", "fp16", "bf16"), 3, 5),
    (KernelConfig(128, 128, 3, panels=2, promoted=True), of("row", (150, 200, 272), bias="bf16"), 1, 2),
    (KernelConfig(128, 224, 3, panels=6, promoted=True), of("row", (150, 456, 272), outdtype="fp16"), 1, 2),
    (KernelConfig(128, 160, 3, panels=4), of("row", (150, 328, 272), bias="fp32"), 1, 2),
    (KernelConfig(256, 64, 2, panels=2, promoted=True), of("tensor", (300, 136, 272), outdtype="fp16", bias="fp16"), 2, 2),
    (KernelConfig(128, 96, 3, panels=3), of("row", (150, 200, 272), "int8", bias="bf16"), 1, 2),
    (KernelConfig(128, 256, 3, panels=2, promoted=True, staged=True), of("block", (150, 520, 272)), 1, 2),
    (KernelConfig(128, 160, 3, panels=3, promoted=True, staged=True), of("block", (150, 504, 144)), 1, 2),
    (KernelConfig(256, 128, 2, panels=4, promoted=True, staged=True), of("block", (300, 264, 272), outdtype="fp16"), 2, 2),
    (KernelConfig(128, 48, 3, 2, 2, 2, panels=3, promoted=True, staged=True), of("block", (300, 168, 528)), 3, 5),
]
#: One buffer for two panels, three for three of 32 and of 16 columns; several tiles for each CTA.
TURNS = (KernelConfig(64, 128, 2, 1, panels=1), of("none", (130, 136, 136), "bf16"), 1)
NARROW = (KernelConfig(64, 96, 2, 1, panels=3), of("none", (130, 200, 136), "bf16"), 1)
FINEST = (KernelConfig(64, 48, 2, 1, panels=3), of("none", (130, 104, 136), "bf16"), 1)


#: Config, shape, splits, multiprocessors, seeds: `test_ptx_run` runs these orders of events.
ORDERS = [(*case, 2, range(1, 8)) for case in (TURNS, NARROW, (KernelConfig(128, 128, 2, 2, 2, panels=1), *TURNS[1:]))]
_WAIT, _MEET = r"    @%p\d+ cp\.async\.bulk\.wait_group\.read \d;\n", r"    bar\.sync %r\d+, 128;\n"
_FENCE, _STORE = r"    fence\.proxy\.async\.shared::cta;\n", r"    @%p\d+ cp\.async\.bulk\.tensor\.2d\.global.*\n"
_COMMIT = r"    @%p\d+ cp\.async\.bulk\.commit_group;\n"
#: Name -> case, pattern in its text, replacement: a plausible mistake of a kernel.
MISTAKES = {
    "a place is written while it is read": (TURNS, f"{_WAIT}({_MEET})", r"\1"),
    "a place is written again in a tile while it is read": (TURNS, f"({_COMMIT}(?:.*\n)*?){_WAIT}({_MEET})", r"\1\2"),
    "all but one group are waited for where none may be left": (TURNS, r"wait_group\.read 0;", "wait_group.read 1;"),
    "others do not hear that a place was read": (TURNS, f"({_WAIT}){_MEET}", r"\1"),
    "nobody fences": (TURNS, f"{_FENCE}({_MEET})", r"\1"),
    "only the thread that stores fences": (TURNS, rf"    (fence.*\n{_MEET}(?:.*\n)*?    (@%p\d+) cp)", r"    \2 \1"),
    "fenced after they met": (TURNS, f"({_FENCE})({_MEET})", r"\2\1"),
    "nobody meets before the store": (TURNS, f"({_FENCE}){_MEET}", r"\1"),
    "stored before all is written": (TURNS, f"(    stmatrix.*\n)({_FENCE}{_MEET}(?:.*\n)*?{_STORE})", r"\2\1"),
    "a group is never committed": (TURNS, _COMMIT, ""),
    "the block ends while the engine reads": (TURNS, f"(STORED_1:\n(?:.*\n)*?){_WAIT}", r"\1"),
    "no swizzle": (TURNS, r"bfe\.u32 (%r\d+), (%r\d+), 0, 3;", r"mov.u32 \1, 0;"),
    "rows are swizzled as others": (TURNS, r"(    bfe\.u32 (%r\d+), %r\d+, 0, 3;\n)", r"\1    xor.b32 \2, \2, 1;\n"),
    "32 columns are swizzled as others": (NARROW, r"(    bfe\.u32 (%r\d+), %r\d+, 1, 2;\n)", r"\1    xor.b32 \2, \2, 1;\n"),
    "16 columns are not swizzled": (FINEST, r"bfe\.u32 (%r\d+), (%r\d+), 2, 1;", r"mov.u32 \1, 0;"),
    "the row 8 below comes first": (TURNS, r"(stmatrix.*\{)(%r\d+), (%r\d+)", r"\1\3, \2"),
    "panels begin at no multiple of 1024": (TURNS, r"(cp\.async\.bulk\.tensor\.2d\.global.*\[%r\d+\+)(\d+)\]", r"\g<1>16]"),
    "every panel goes to the first columns": (TURNS, r"add\.u32 (%r\d+), (%r\d+), 64;(\n    @%p\d+ cp)", r"add.u32 \1, \2, 0;\3"),
    "rows and columns are exchanged": (TURNS, r"(2d\.global.*)\{(%r\d+), (%r\d+)\}", r"\1{\3, \2}"),
    "the descriptor of the weight": (TURNS, rf"add\.s64 (%d\d+), (%d\d+), {MAP_OUT};", r"add.s64 \1, \2, 128;"),
}


def test_names_and_memory() -> None:
    """`_b` in the name counts panel buffers, with shared memory computed by hand."""
    wide, odd = KernelConfig(128, 256, 4, panels=2), KernelConfig(128, 224, 4, promoted=True, panels=6)
    assert (wide.name, odd.name) == ("ptx_128x256_s4_c2_x1_g8_b2_r1", "ptx_128x224_s4_c2_x1_g8_p_b6_r1")
    assert [parse_name(config.name) for config in (wide, odd)] == [wide, odd]
    assert (wide.panel_columns, wide.panel_bytes, wide.all_panels, wide.shared_bytes) == (64, 8192, 4, 4 * (49152 + 16) + 4 * 8192 + 8)
    assert (odd.panel_columns, odd.panel_bytes, odd.all_panels, odd.shared_bytes) == (32, 4096, 7, 4 * (45056 + 16) + 12 * 4096 + 8)
    assert (KernelConfig(256, 112, 3, panels=1).panel_bytes, KernelConfig(256, 112, 3, panels=1).all_panels) == (2048, 14)


def test_impossible_configurations_are_refused(failing: Any) -> None:
    """Names of impossible panels raise with the reason."""

    def check(name: str, reason: str) -> None:
        with pytest.raises(PluginError, match=re.escape(reason)):
            parse_name(name)

    assert not failing(
        check,
        [
            ("ptx_128x256_s4_c2_x1_g8_b5_r1", "5 panels exceed the 4 of a consumer"),
            ("ptx_128x256_s4_c2_x1_g8_b3_r1", "245832 bytes of shared memory exceed the 232448 of a block"),
            ("ptx_128x160_s4_c2_x1_g8_b0_r1", "is not a kernel of this plugin for sm_90"),
            ("ptx_128x72_s4_c2_x1_g8_b1_r1", "a multiple of 16 rows of the weight"),
            ("ptx_64x128_s4_c2_x1_g8_swap_b1_r1", "panels need rows of x"),
            ("ptx_128x160_s4_c2_x1_g8_b5_p_r1", "is not a kernel"),
        ],
    )


def test_outputs_that_threads_have_to_store() -> None:
    """Panels are refused for fp32 outputs and unaligned rows."""
    config, shape = KernelConfig(128, 160, 4, panels=5), Shape("a16w16", 4096, 7168, 8192)
    assert unfit(config, 1, shape) is None
    for other in (attrs.evolve(shape, outdtype="fp32"), attrs.evolve(shape, n=7172)):
        assert "stores 16-bit outputs with TMA: needs N %" in unfit(config, 1, other)
        assert not any(each.panels for each, _ in enumerate_candidates(other, H200))


@pytest.mark.parametrize("scale", ["none", "row", "block"])
def test_plans_with_panels_are_listed_beside_others(scale: str) -> None:
    """At most eight solutions with panels are listed, none for few rows."""
    like = of(scale, (4096, 7168, 8192), "bf16" if scale == "none" else "fp8_e4m3fn")
    listed = enumerate_candidates(like, H200)
    assert 0 < sum(config.panels > 0 for config, _ in listed) <= 8 and len(listed) <= 64
    assert not any(config.panels for config, _ in enumerate_candidates(attrs.evolve(like, m=64), H200))
    for config, splits in listed[:12]:
        near = [parse_name(each.kernel_name) for each in refine("asm", Solution("asm", config.name, splits), like, H200)]
        assert sum((each.panels > 0) != (config.panels > 0) for each in near) <= 1
        assert config.consumers == 1 or config.turns or any((each.panels > 0) != (config.panels > 0) for each in near)


def test_column_loads_are_not_read_only_if_registers_are_few() -> None:
    """Column loads are not read-only where registers are few."""
    crowded = Variant(KernelConfig(128, 256, 4, panels=2), "fp8_e4m3fn", "bf16", "bf16", scale="row")
    texts = [text_of(attrs.evolve(crowded, **changes)) for changes in ({}, {"bias": ""}, {"config": KernelConfig(128, 256, 4)})]
    assert ["ld.global.v2.f32" in text for text in texts] == [True, False, False]
    body = texts[0][texts[0].index("wait_group.read") :]
    counts = [part.count("ld.global.v2.f32") for part in body.split("fence.proxy.async")]
    assert counts == [8, 8, 8, 0, 0]  # those of the first panel went before


def test_panels_take_free_shared_memory() -> None:
    """Panels take free shared memory, or that of one stage."""
    assert with_panels(KernelConfig(128, 256, 4)) == [KernelConfig(128, 256, 4, panels=2)]
    assert with_panels(KernelConfig(128, 224, 5)) == [KernelConfig(128, 224, 4, panels=6)]
    assert with_panels(KernelConfig(256, 192, 3)) == [KernelConfig(256, 192, 3, panels=3)]
    assert with_panels(KernelConfig(128, 256, 3)) == [KernelConfig(128, 256, 3, panels=4)]
    assert with_panels(KernelConfig(128, 72, 4)) == with_panels(KernelConfig(16, 128, 4, swapped=True)) == []

"""Run ping-pong kernels on the emulator, and test where they are listed."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm_asm.ptx.cost import cost_of
from tunedgemm_asm.ptx.names import KernelConfig, parse_name
from tunedgemm_asm.ptx.space import MOST, TURNS, enumerate_candidates, refine

pytestmark = pytest.mark.nightly

H200 = Device("sm_90", 132, "nvidia-h200")

#: Configuration, shape, splits, multiprocessors: each has tails in M, N and K; items of a block
#: are one to six, steps fewer or more than stages.
CASES = [
    (KernelConfig(64, 40, 3, turns=True), Shape("a16w16", 150, 101, 200, epilogue="bias"), 1, 2),
    (KernelConfig(128, 72, 3, turns=True), Shape("a16w16", 300, 200, 136, "fp16", "fp16", epilogue="bias", bias_dtype="bf16"), 1, 2),
    (KernelConfig(128, 160, 4, turns=True), Shape("a16w16", 150, 328, 136, outdtype="fp32", epilogue="bias", bias_dtype="fp16"), 1, 2),
    (KernelConfig(64, 32, 4, group=2, turns=True), Shape("a16w16", 150, 70, 264, outdtype="fp32"), 1, 1),
    (KernelConfig(64, 16, 5, turns=True), Shape("a16w16", 100, 74, 72, "fp16", epilogue="bias", bias_dtype="fp32"), 1, 3),
    (KernelConfig(192, 24, 2, turns=True), Shape("a16w16", 300, 40, 328), 1, 1),
    (KernelConfig(64, 24, 3, turns=True), Shape("a16w16", 70, 101, 296, epilogue="bias"), 2, 2),
    (KernelConfig(64, 32, 3, turns=True), Shape("a16w16", 150, 73, 456, "fp16", "fp16"), 4, 2),
    (KernelConfig(64, 16, 3, cluster=2, group=2, turns=True), Shape("a16w16", 300, 41, 328, outdtype="fp32"), 1, 4),
    (KernelConfig(128, 16, 2, cluster=2, turns=True), Shape("a16w16", 300, 41, 296, epilogue="bias"), 3, 2),
    (KernelConfig(16, 128, 4, swapped=True, turns=True), Shape("a16w16", 13, 700, 200, epilogue="bias"), 1, 2),
    (KernelConfig(24, 64, 3, swapped=True, turns=True), Shape("a16w16", 47, 101, 136, outdtype="fp32", epilogue="bias"), 2, 1),
    (KernelConfig(16, 64, 3, cluster=2, swapped=True, turns=True), Shape("a16w16", 20, 400, 328), 3, 5),
    (KernelConfig(128, 32, 3, turns=True), Shape("a8w8", 150, 101, 400, "int8", "bf16", "bias", "fp32", scale="row"), 2, 2),
    (KernelConfig(64, 40, 3, turns=True), Shape("a8w8", 150, 104, 272, "fp8_e4m3fn", "bf16", "bias", "bf16", scale="row"), 1, 2),
    (KernelConfig(8, 128, 3, swapped=True, turns=True), Shape("a8w8", 5, 600, 528, "fp8_e4m3fn", "fp32", scale="tensor"), 3, 2),
]
#: Eight items of five steps in two stages, and the same with splits of three and two steps.
SMALL = (KernelConfig(64, 16, 2, turns=True), Shape("a16w16", 100, 56, 296))
PLAIN, SPLIT = (*SMALL, 1), (*SMALL, 2)


#: Config, shape, splits, multiprocessors, seeds: `test_ptx_run` runs these orders of events.
ORDERS = [
    (config, shape, splits, multiprocessors, range(12))
    for config, shape, splits in (
        PLAIN,
        SPLIT,
        (attrs.evolve(SMALL[0], cluster=2), SMALL[1], 2),
        (attrs.evolve(SMALL[0], stages=5), attrs.evolve(SMALL[1], k=72), 1),
        (attrs.evolve(SMALL[0], stages=4), attrs.evolve(SMALL[1], k=40), 1),
        (attrs.evolve(SMALL[0], stages=3), attrs.evolve(SMALL[1], k=360), 1),
    )
    for multiprocessors in (config.cluster, 2)
] + [(*case, (1,)) for case in CASES]
#: Name -> case, pattern in its text, replacement: a plausible mistake of a kernel.
MISTAKES = {
    "one stage too many is passed over": (
        PLAIN,
        r"(add\.u32 (%r\d+), %r\d+, %r\d+;\n)(    div\.u32 %r\d+, \2, 2;)",
        r"\1    add.u32 \2, \2, 1;\n\3",
    ),
    "the phase stays where stages are passed over": (PLAIN, r"and\.b32 (%r\d+), (%r\d+), 1;\n    xor", r"and.b32 \1, \2, 0;\n    xor"),
    "both consumers are to release a stage": (PLAIN, r"(init.*\+(?:20496|20504)\]), 4;", r"\1, 8;"),
    "nobody waits for a turn": (PLAIN, r"WAIT_2:\n(?:.*\n){2}", ""),
    "a turn ends at its first stage": (PLAIN, r"(setp\.eq\.u32 %p\d+, %r\d+), 0;\n(    and\.pred)", r"\1, 4;\n\2"),
    "the phase of a turn stays": (PLAIN, r"(xor\.b32 (%r\d+), \2), 1;\nMULTIPLY", r"\1, 0;\nMULTIPLY"),
    "the first consumer waits for its first turn": (
        PLAIN,
        r"mov\.u32 (%r\d+), %r\d+;\n(    setp\.eq\.u32 .*\nTILE)",
        r"mov.u32 \1, 0;\n\2",
    ),
    "a turn is one's own again": (PLAIN, r"xor\.b32 (%r\d+), (%r\d+), 1;\n(    mad\.lo.*\n    mad)", r"mov.u32 \1, \2;\n\3"),
    "both begin with the first item": (PLAIN, r"    mad\.lo\.u32 (%r\d+), (%r\d+), (%r\d+), \1;\n", ""),
    "a consumer has every item": (PLAIN, r"(add\.u32 (%r\d+), \2, %r\d+;\n)    bra TILE_1;", r"    bra TILE_1;"),
    "every part has as many steps": (SPLIT, r"(NEXT_TILE(?:.*\n)*?    )min\.u32 (%r\d+), %r\d+, (%r\d+);", r"\1mov.u32 \2, \3;"),
    "tiles count by consumers": (SPLIT, r"(bar\.sync %r\d+, 128;\n(?:.*\n){2}    mul\.wide\.u32 %d\d+), %r\d+, 4;", r"\1, %r42, 4;"),
}


SIXTEEN, EIGHT = Shape("a16w16", 4096, 7168, 8192), Shape("a8w8", 4096, 7168, 8192, "fp8_e4m3fn", "bf16", scale="row")


def test_turns_are_listed_where_an_sm_has_several_tiles(failing: Any) -> None:
    """Ping-pong is listed where an SM has several tiles, and not with promotion."""

    def check(shape: Shape, listed: int) -> None:
        found = enumerate_candidates(shape, H200)
        turns = [(config, splits) for config, splits in found if config.turns and not config.stream]
        assert len(turns) == listed <= sum(map(len, TURNS.values())) == 8
        assert len(found) <= MOST and {splits for _, splits in turns} <= {1}
        assert listed == len({(config.tile_m, config.tile_n) for config, _ in turns})

    assert not failing(
        check,
        [
            (SIXTEEN, 8),
            (attrs.evolve(SIXTEEN, dtype="fp16", outdtype="fp32"), 8),
            (attrs.evolve(SIXTEEN, m=1024, n=3000), 4),
            (attrs.evolve(SIXTEEN, m=256), 0),
            (attrs.evolve(SIXTEEN, m=1), 0),
            (EIGHT, 8),
            (attrs.evolve(EIGHT, dtype="int8", scale="tensor"), 8),
            (attrs.evolve(EIGHT, outdtype="fp32"), 0),
            (Shape("a8w8_blockscale", 4096, 7168, 8192, "fp8_e4m3fn", "bf16", scale="block"), 0),
        ],
    )


def test_neighbours_take_turns_or_not() -> None:
    """`refine` switches ping-pong on where an SM has several tiles and enough registers."""

    def near(config: KernelConfig, shape: Shape) -> list[KernelConfig]:
        return [parse_name(each.kernel_name) for each in refine("asm", Solution("asm", config.name, 1), shape, H200)]

    shared, turns = KernelConfig(128, 160, 5), KernelConfig(128, 160, 5, turns=True)
    assert turns in near(shared, SIXTEEN) and shared in near(turns, SIXTEEN)
    assert attrs.evolve(turns, cluster=2) in near(turns, SIXTEEN)
    assert turns not in near(shared, attrs.evolve(SIXTEEN, m=256))
    assert not any(config.turns for config in near(KernelConfig(128, 256, 4), SIXTEEN))
    assert not any(
        config.turns for config in near(KernelConfig(128, 128, 4, 1), SIXTEEN) + near(KernelConfig(128, 128, 4, promoted=True), EIGHT)
    )


def test_stores_overlapped_with_products_cost_no_time() -> None:
    """The model hides the store of all tiles but the last behind products, within 1 %."""
    turns, shared = KernelConfig(128, 128, 7, turns=True), KernelConfig(128, 128, 7)
    long, short = attrs.evolve(SIXTEEN, m=128 * 12, n=128 * 11), attrs.evolve(SIXTEEN, m=128 * 12, n=128 * 11, k=256)
    # One consumer stores a whole tile, which two shared before.
    stored = cost_of(turns, 1, long, 132) - cost_of(shared, 1, long, 132)
    assert stored > 0

    def more(config: KernelConfig, shape: Shape) -> float:
        """Microseconds of nine more tiles on each SM."""
        return cost_of(config, 1, attrs.evolve(shape, n=10 * shape.n), 132) - cost_of(config, 1, shape, 132)

    assert more(shared, long) - more(turns, long) == pytest.approx(9 * stored, rel=0.01)
    # With four steps both consumers multiply for less time than they store.
    whole = more(shared, short) / 9 - stored
    assert whole < 2 * stored and more(turns, short) == pytest.approx(9 * (whole + 2 * stored) / 2, rel=0.01)

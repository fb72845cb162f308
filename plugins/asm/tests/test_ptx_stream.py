"""Run stream-K kernels on the emulator, and test how steps are shared."""

from __future__ import annotations

import itertools
import re
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import pytest
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm_asm.ptx.cost import cost_of
from tunedgemm_asm.ptx.launch import arguments_of
from tunedgemm_asm.ptx.limits import shared_evenly, unfit
from tunedgemm_asm.ptx.names import KernelConfig, parse_name
from tunedgemm_asm.ptx.shares import MOST_RANGES, shares_of
from tunedgemm_asm.ptx.space import MOST, enumerate_candidates, refine

pytestmark = pytest.mark.nightly

H200 = Device("sm_90", 132, "nvidia-h200")

#: Rows of the weight and multiprocessors: by how many rounds of whole tiles of 128 by 16 there
#: would be of 300 rows of x.
GRIDS = {
    "two tiles, eleven blocks": (130, 8, 11),
    "0.8 rounds": (300, 41, 11),
    "one round": (300, 41, 9),
    "1.1 rounds": (300, 41, 8),
    "1.9 rounds": (300, 73, 8),
    "2.5 rounds": (300, 73, 6),
    "15 rounds": (300, 73, 1),
}
#: Configuration, shape, multiprocessors: each has tails in M, N and K.
KINDS = [
    (KernelConfig(64, 40, 3, 1, stream=True), Shape("a16w16", 150, 101, 200, outdtype="fp32", epilogue="bias", bias_dtype="fp16"), 2),
    (KernelConfig(256, 16, 2, stream=True), Shape("a16w16", 300, 73, 264, "fp16", "fp16", epilogue="bias", bias_dtype="fp32"), 3),
    (KernelConfig(16, 128, 4, swapped=True, stream=True), Shape("a16w16", 13, 700, 200, epilogue="bias"), 5),
    (KernelConfig(24, 64, 3, 1, swapped=True, stream=True), Shape("a16w16", 20, 201, 264, outdtype="fp32"), 4),
    (KernelConfig(64, 16, 3, 1, 2, 2, stream=True), Shape("a16w16", 300, 73, 200, outdtype="fp32"), 6),
    (KernelConfig(128, 16, 3, cluster=2, stream=True), Shape("a16w16", 300, 73, 200, epilogue="bias"), 9),
    (KernelConfig(64, 16, 3, turns=True, stream=True), Shape("a16w16", 300, 73, 200, epilogue="bias"), 7),
    (KernelConfig(64, 32, 2, cluster=2, turns=True, stream=True), Shape("a16w16", 300, 73, 200, "fp16", "fp16"), 6),
    (KernelConfig(16, 64, 3, swapped=True, turns=True, stream=True), Shape("a16w16", 20, 400, 264), 4),
    (KernelConfig(128, 32, 3, panels=1, stream=True), Shape("a16w16", 300, 72, 200, epilogue="bias"), 5),
    (KernelConfig(64, 48, 3, 1, stream=True), Shape("a8w8", 150, 101, 400, "int8", "fp32", "bias", "fp32", scale="row"), 2),
    (KernelConfig(64, 16, 3, turns=True, stream=True), Shape("a8w8", 150, 73, 400, "int8", "bf16", scale="tensor"), 4),
    (KernelConfig(128, 40, 3, stream=True), Shape("a8w8", 300, 101, 400, "fp8_e4m3fn", "bf16", "bias", "bf16", scale="tensor"), 7),
    (KernelConfig(128, 32, 3, promoted=True, stream=True), Shape("a8w8", 300, 73, 400, "fp8_e4m3fn", "fp32", scale="row"), 5),
    (
        KernelConfig(64, 96, 3, 1, promoted=True, staged=True, stream=True),
        Shape("a8w8_blockscale", 150, 300, 400, "fp8_e4m3fn", "bf16", scale="block"),
        3,
    ),
    (
        KernelConfig(16, 128, 3, 2, 2, 2, swapped=True, promoted=True, staged=True, stream=True),
        Shape("a8w8_blockscale", 20, 600, 400, "fp8_e4m3fn", "fp16", scale="block"),
        4,
    ),
    (
        KernelConfig(64, 96, 3, 1, promoted=True, staged=True, stream=True),
        Shape("a8w8_blockscale", 150, 300, 400, "fp8_e4m3fn", "bf16", scale="block", extra={"scale_order": "m_major_padded"}),
        3,
    ),
    (
        KernelConfig(64, 32, 3, 1, promoted=True, staged=True, stream=True),
        Shape("a8w8_blockscale_bpreshuffle", 150, 73, 384, "fp8_e4m3fn", "bf16", scale="block", layout="columns128"),
        3,
    ),
]
SMALL = KernelConfig(64, 16, 2, 1, stream=True)


def of(n: int, k: int = 392, config: KernelConfig = SMALL) -> tuple[KernelConfig, Shape, int, int]:
    """Return a case with two rows of tiles on three multiprocessors, which hold six CTAs."""
    return config, Shape("a16w16", 100, n, k), 1, 3


#: Four tiles of seven steps in ranges of five, which make three parts of one; four of six in ranges
#: of four, of which every third ends with a tile; eight in ranges of ten; and fourteen of three, of
#: which each block has a whole one.
FEW, EVEN, MORE, MANY = of(24), of(24, 328), of(56), of(104, 136)
TURNS = (KernelConfig(64, 16, 3, turns=True, stream=True), Shape("a16w16", 100, 104, 200), 1, 6)


def test_products_are_exact_whatever_the_grid(ptx: ModuleType, failing: Any) -> None:
    """Products are exact for any ratio of tiles to CTAs, and counters end at zero."""

    def check(outdtype: str, grid: str) -> None:
        m, n, multiprocessors = GRIDS[grid]
        shape = Shape("a16w16", m, n, 264, outdtype=outdtype, epilogue="bias")
        out, wanted = ptx.Bench(shape, KernelConfig(128, 16, 3, stream=True), 1, multiprocessors, launches=2).output()
        np.testing.assert_array_equal(out, wanted)

    assert not failing(check, itertools.product(["bf16", "fp32"], GRIDS))


def test_products_are_exact(ptx: ModuleType, failing: Any) -> None:
    """Products are exact for every dtype, kind of scales and feature of a configuration."""

    def check(config: KernelConfig, shape: Shape, multiprocessors: int) -> None:
        for resident in (0, 1):
            out, wanted = ptx.Bench(shape, config, 1, multiprocessors, resident, resident=resident).output()
            np.testing.assert_array_equal(out, wanted)

    assert not failing(check, KINDS)


def test_no_order_of_events_matters(ptx: ModuleType, failing: Any) -> None:
    """Four orders with any number of resident CTAs give the same bits without a deadlock."""

    def check(case: tuple[KernelConfig, Shape, int, int], resident: int) -> None:
        config, shape, splits, multiprocessors = case
        for seed in range(4):
            out, wanted = ptx.Bench(shape, config, splits, multiprocessors, seed, resident=resident, launches=2).output()
            np.testing.assert_array_equal(out, wanted)

    assert not failing(check, itertools.product([FEW, EVEN, MORE, MANY, TURNS, of(56, config=attrs.evolve(SMALL, cluster=2))], [0, 1, 3]))


def test_the_bits_do_not_depend_on_the_last_cta(ptx: ModuleType, failing: Any) -> None:
    """Rounded sums have the same bits in six orders and are close to fp64."""

    def check(case: tuple[KernelConfig, Shape, int, int]) -> None:
        config, shape = case[0], attrs.evolve(case[1], dtype="fp16", outdtype="fp32")
        chance = np.random.default_rng(0)
        x, weight = (chance.standard_normal((rows, shape.k)).astype(np.float16).astype(np.float64) for rows in (shape.m, shape.n))
        outs = [ptx.Bench(shape, config, *case[2:], seed, (x, weight), seed % 3).output()[0] for seed in range(6)]
        assert len({out.tobytes() for out in outs}) == 1
        assert np.abs(outs[0] - x @ weight.T).max() < 1e-4 < np.abs(outs[0]).max()

    assert not failing(check, itertools.product([FEW, MORE, MANY, TURNS]))


def orders(ptx: ModuleType, pattern: str = "", by: str = "") -> set[float]:
    """Return the values of a tile with partials 2**25, 1 and -2**25 in 24 orders of three CTAs;
    *pattern* of the text is replaced by *by*.
    """
    x, weight = np.zeros((4, 192)), np.zeros((8, 192))
    x[:, [0, 64, 128]], weight[:, [0, 64, 128]] = (1 << 12, 1, -(1 << 12)), (1 << 13, 1, 1 << 13)
    found: set[float] = set()
    for seed in range(24):
        bench = ptx.Bench(
            Shape("a16w16", 4, 8, 192, "fp16", "fp32"), KernelConfig(64, 8, 2, 1, stream=True), 1, 2, seed, (x, weight), seed % 2
        )
        text, changes = re.subn(pattern, by, bench.text) if pattern else (bench.text, 1)
        assert changes == 1
        found |= set(bench.output(text)[0].reshape(-1).tolist())
    return found


def test_parts_are_added_in_the_order_of_k(ptx: ModuleType) -> None:
    """Partials are added in the order of K, whichever CTA is last."""
    assert orders(ptx) == {0.0}
    assert orders(ptx, r"setp\.lt\.u32 (%p\d+), (%r\d+), 2;", r"setp.ge.u32 \1, \2, 0;") == {0.0, 1.0}


#: Name -> case, pattern in its text, replacement: a plausible mistake of a kernel.
MISTAKES = {
    "who looks leaves the counter": (MORE, r"    @%p\d+ st\.relaxed\.gpu\.global\.u32 .*\n", ""),
    "the own part is added twice": (MORE, r"    @%p\d+ bra PASSED_1;\n", ""),
    "the own part is added twice where it was loaded": (FEW, r"selp\.b32 (%r\d+), (%r\d+), 0, (%p\d+);\n", r"selp.b32 \1, \2, 9, \3;\n"),
    "who looks waits for nobody": (MORE, r"    @%p\d+ bra LEAVE_1;\n(    mov\.u32 %r\d+, 0;\n)", r"\1"),
    "the first that counts adds": (MORE, r"setp\.ne(\.u32 (%p\d+), .*\n    @\2 bra NEXT_TILE_1;)", r"setp.eq\1"),
    "a counter wraps a part too late": (MORE, r"(inc\.u32 %r\d+, \[%d\d+\]), %r\d+;", r"\1, 2;"),
    "a tile has the part behind it, too": (EVEN, r"sub\.u32 (%r\d+), (%r\d+), 1;\n(    div)", r"mov.u32 \1, \2;\n\3"),
    "who looks does not acquire": (MORE, r"ld\.acquire\.gpu", "ld.relaxed.gpu"),
    "who counts neither releases nor acquires": (MORE, r"atom\.acq_rel", "atom.relaxed"),
    "who counts does not release": (MORE, r"atom\.acq_rel", "atom.acquire"),
    "who counts does not acquire": (MORE, r"atom\.acq_rel", "atom.release"),
    "threads do not meet before one counts": (MORE, r"(LEAVE_1:\n(?:.*\n)*?)    bar\.sync .*\n(    setp)", r"\1\2"),
    "parts lie in one place": (
        FEW,
        r"mul\.wide\.u32 (%d\d+), %r\d+, 4096;(\n    add\.s64 %d\d+, %d\d+, \1;\n    setp)",
        r"mul.wide.u32 \1, 0, 4096;\2",
    ),
    "tiles meet in one place": (MORE, r"mul\.wide\.u32 (%d\d+), %r\d+, 4;", r"mul.wide.u32 \1, 0, 4;"),
    "a range goes to the end": (MORE, r"(add\.u32 %r\d+, %r\d+), %r8;", r"\1, 99;"),
    "a piece goes to the end of its tile": (
        MORE,
        r"min\.u32 (%r\d+), (%r\d+), %r\d+;\n(    mul\.lo\.u32 %r\d+, %r4, 8;)",
        r"mov.u32 \1, \2;\n\3",
    ),
    "whole tiles begin with the first": (MANY, r"(@%p\d+ mad\.lo\.u32 %r\d+, %r\d+, %r7), %r\d+;", r"\1, 0;"),
    "whole tiles are left out": (MANY, r"(@%p\d+ mul\.lo\.u32 %r\d+), %r5, %r7;", r"\1, %r6, %r7;"),
    "all of a tile is passed over where the other has a piece": (
        TURNS,
        r"(NEXT_TILE(?:.*\n)*?    )min\.u32 (%r\d+), (%r\d+), %r\d+;",
        r"\1mov.u32 \2, \3;",
    ),
}


def test_shares_are_even(failing: Any) -> None:
    """Ranges cover the shared tiles evenly, and the other tiles fill whole rounds."""

    def check(steps: int, clusters: int) -> None:
        for tiles in range(1, 3 * clusters + 3):
            shares = shares_of(tiles, steps, clusters)
            ranges = -(-shares.tiles * steps // shares.length)
            assert ranges <= shares.clusters <= clusters and shares.tiles + shares.rounds * clusters == tiles
            assert shares.clusters == (clusters if shares.rounds else ranges)
            even = -(-shares.tiles * steps // clusters)
            assert shares.length == max(even, -(-steps // MOST_RANGES))
            assert shares.saved == -(-tiles // clusters) * steps - shares.rounds * steps - shares.length >= 0
            bounds = [(at // shares.length, (at + steps - 1) // shares.length) for at in range(0, shares.tiles * steps, steps)]
            most = max(last - first + 1 for first, last in bounds)
            assert most <= shares.parts <= MOST_RANGES + 1
            if tiles >= clusters:
                assert 2 * shares.length >= steps and most <= 3
                assert tiles % clusters == 0 or shares.tiles < 2 * clusters

    assert not failing(check, itertools.product([1, 2, 5, 7, 64, 129], [1, 2, 7, 66, 132]))


def test_shares_of_some_grids() -> None:
    """Shares of four grids are those computed by hand."""
    shares = shares_of(145, 128, 132)
    assert (shares.tiles, shares.length, shares.rounds, shares.parts, shares.saved) == (145, 141, 0, 2, 115)
    shares = shares_of(330, 128, 132)
    assert (shares.tiles, shares.length, shares.rounds, shares.parts, shares.saved) == (66, 64, 2, 3, 64)
    shares = shares_of(512, 128, 132)
    assert (shares.tiles, shares.length, shares.rounds, shares.parts, shares.saved) == (116, 113, 3, 3, 15)
    shares = shares_of(264, 128, 132)
    assert (shares.tiles, shares.length, shares.rounds, shares.saved) == (132, 128, 1, 0)


def test_a_problem_in_numbers() -> None:
    """Arguments of stream-K launches are those computed by hand."""
    shape = Shape("a16w16", 300, 1000, 1000)
    arguments = arguments_of(KernelConfig(128, 160, 5, stream=True), 1, shape, 16)
    # 21 tiles of 16 steps on 16 blocks: all are shared.
    told = {name: arguments.values[name] for name in ("tiles", "items", "steps", "part", "splits")}
    assert told == {"tiles": 21, "items": 21, "steps": 16, "part": 21, "splits": 2}
    assert (arguments.grid, arguments.counters, arguments.workspace) == (16, 42, 42 * 2 * 80 * 128 * 4)
    arguments = arguments_of(KernelConfig(128, 160, 5, cluster=2, turns=True, stream=True), 1, shape, 10)
    # 14 clusters of tiles on 5: 4 are left.
    told = {name: arguments.values[name] for name in ("tiles", "items", "steps", "part", "splits")}
    assert told == {"tiles": 14, "items": 4, "steps": 16, "part": 13, "splits": 3}
    assert (arguments.grid, arguments.counters, arguments.workspace) == (10, 8, 8 * 3 * 160 * 128 * 4)


def test_impossible_configurations_are_refused() -> None:
    """Stream-K rejects other splits and too many steps."""
    config, shape = KernelConfig(128, 160, 5, stream=True), Shape("a16w16", 4096, 7168, 8192)
    assert unfit(config, 1, shape) is None
    assert "shares 1440 times 128 steps along K" in unfit(config, 2, shape) and "with splitK 1 (got 2)" in unfit(config, 2, shape)
    assert "at most, of 65536 at most for a tile" in unfit(config, 1, attrs.evolve(shape, m=1, n=8, k=(1 << 22) + 64))
    assert "1073741824 at most" in unfit(config, 1, attrs.evolve(shape, m=1 << 20, n=1 << 20, k=1 << 20))


WIDE, EIGHT = Shape("a16w16", 1024, 6400, 5120), Shape("a8w8", 1024, 6400, 5120, "fp8_e4m3fn", "bf16", scale="row")


@pytest.mark.parametrize(
    ("shape", "listed"),
    [
        (WIDE, True),
        (attrs.evolve(WIDE, k=512), False),
        (attrs.evolve(WIDE, m=1024, n=132 * 128 // 8), False),
        (attrs.evolve(EIGHT, m=256, n=128256), True),
    ],
    ids=str,
)
def test_stream_k_is_listed_only_for_a_gain(shape: Shape, listed: bool) -> None:
    """Stream-K is listed only where the model predicts a gain."""
    found = enumerate_candidates(shape, H200)
    stream = [config for config, splits in found if config.stream and splits == 1]
    assert bool(stream) == listed and len(stream) <= 8 and len(found) <= MOST
    assert all(config.stream is False or splits == 1 for config, splits in found)
    best = min(cost_of(config, splits, shape, 132) for config, splits in found if not config.stream)
    for config in stream:
        assert cost_of(config, 1, shape, 132) < cost_of(attrs.evolve(config, stream=False), 1, shape, 132)
        assert cost_of(config, 1, shape, 132) <= 1.05 * best


def test_neighbours_share_steps_or_not() -> None:
    """`refine` switches stream-K on where a round is not full."""

    def near(config: KernelConfig, shape: Shape) -> list[Solution]:
        return list(refine("asm", Solution("asm", config.name, 1), shape, H200))

    config = KernelConfig(128, 128, 7)
    stream = attrs.evolve(config, stream=True)
    assert Solution("asm", stream.name, 1) in near(config, WIDE) and Solution("asm", config.name, 1) in near(stream, WIDE)
    others = [each for each in near(stream, WIDE) if parse_name(each.kernel_name).stream]
    assert len(others) > 5 and {each.split_k for each in others} == {1}
    whole = attrs.evolve(WIDE, m=12 * 128, n=11 * 128)
    assert Solution("asm", stream.name, 1) not in near(config, whole)
    assert Solution("asm", stream.name, 1) in refine("asm", Solution("asm", config.name, 2), WIDE, H200)


def test_the_model_shares_work_evenly() -> None:
    """The model gives 1.5 rounds 1.5 times the time of one, plus fixup and L2 misses."""
    config, stream = KernelConfig(128, 128, 7), KernelConfig(128, 128, 7, stream=True)
    shape = Shape("a16w16", 128 * 11, 128 * 18, 16384)
    assert shared_evenly(stream, shape, 132).length == 128
    one, two, shared = (
        cost_of(config, 1, attrs.evolve(shape, n=128 * 12), 132),
        cost_of(config, 1, shape, 132),
        cost_of(stream, 1, shape, 132),
    )
    assert (one + two) / 2 < shared < (one + two) / 2 + 0.44 * one / 2 + 8 < two

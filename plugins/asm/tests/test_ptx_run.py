"""Run generated PTX of every family on the emulator, and check that it finds planted mistakes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tunedgemm.plugin import Shape
from tunedgemm_asm.ptx.names import KernelConfig

pytestmark = pytest.mark.nightly

#: Configuration, shape, splits, multiprocessors: each has tails in M, N and K, and blocks with
#: several tiles.
CASES = [
    (KernelConfig(128, 160, 3), Shape("a16w16", 150, 200, 136), 1, 2),
    (KernelConfig(128, 72, 3), Shape("a16w16", 150, 200, 136, "fp16", "fp16", epilogue="bias", bias_dtype="bf16"), 1, 2),
    (KernelConfig(64, 40, 3, 1), Shape("a16w16", 70, 104, 136, outdtype="bf16", epilogue="bias", bias_dtype="fp32"), 2, 2),
    (KernelConfig(64, 40, 3, 1), Shape("a16w16", 70, 74, 136, epilogue="bias"), 1, 2),
    (KernelConfig(128, 32, 3, group=2), Shape("a16w16", 300, 72, 200, outdtype="fp32", epilogue="bias", bias_dtype="bf16"), 1, 4),
    (KernelConfig(64, 32, 3, 1, group=2), Shape("a16w16", 300, 73, 328, "fp16", "fp16", epilogue="bias", bias_dtype="fp32"), 1, 3),
    (KernelConfig(256, 16, 2), Shape("a16w16", 300, 37, 328, "fp16", "fp32", epilogue="bias", bias_dtype="fp16"), 1, 2),
    (KernelConfig(16, 128, 4, swapped=True), Shape("a16w16", 13, 300, 328, epilogue="bias"), 1, 2),
    (KernelConfig(24, 64, 4, 1, swapped=True), Shape("a16w16", 47, 101, 136, outdtype="fp32", epilogue="bias"), 1, 2),
    (KernelConfig(8, 128, 4, swapped=True), Shape("a16w16", 5, 300, 520, epilogue="bias"), 3, 2),
    (KernelConfig(64, 32, 3, 1, group=2), Shape("a16w16", 150, 73, 456, outdtype="fp32"), 4, 2),
    (KernelConfig(64, 32, 3, 1, 2, 2), Shape("a16w16", 150, 73, 328, outdtype="fp32"), 1, 4),
    (KernelConfig(128, 48, 3, 2, 2, 2), Shape("a16w16", 300, 73, 328, epilogue="bias"), 3, 5),
    (KernelConfig(16, 128, 3, 2, 2, 2, swapped=True), Shape("a16w16", 20, 400, 328), 3, 5),
]
SMALL = (KernelConfig(64, 16, 2, 1), Shape("a16w16", 100, 10, 392))
SPLIT = (KernelConfig(64, 16, 2, 1), Shape("a16w16", 100, 24, 392), 2)
#: The same in other orders of events, with their seeds.
ORDERS = [(*case, 2, range(1, 8)) for case in ((*SMALL, 1), SPLIT, (KernelConfig(64, 16, 2, 1, 2), *SPLIT[1:]))]
#: Name -> pattern in a text, replacement: a plausible mistake of a kernel.
_MISTAKES = {
    "the producer waits for the wrong phase": (r"mov\.u32 (%r\d+), 1;\nLOAD_TILE", r"mov.u32 \1, 0;\nLOAD_TILE"),
    "a stage is released before its products are done": (r"wait_group\.sync\.aligned 1;", "wait_group.sync.aligned 2;"),
    "sums are stored before they are done": (r"wait_group\.sync\.aligned 0;", "wait_group.sync.aligned 1;"),
    "the phase is never turned": (r"@(%p\d+) xor\.b32 (%r\d+), \2, 1;", r"@\1 xor.b32 \2, \2, 0;"),
    "too few bytes are announced": (r"(expect_tx.*), %r\d+;", r"\1, 9344;"),
    "too many bytes are announced": (r"(expect_tx.*), %r\d+;", r"\1, 9600;"),
    "no fence before the products": (r"wgmma\.fence\.sync\.aligned;", "fence.proxy.async.shared::cta;"),
    "rows of a are swizzled elsewhere": (r"mad\.lo\.u32 (%r\d+), (%r\d+), 10240, ", r"mad.lo.u32 \1, \2, 10368, "),
    "the last column is stored, too": (r"setp\.lt\.u32 (%p\d+), (%r\d+), %r1;", r"setp.ge.u32 \1, \2, 0;"),
    "a step along K is twice 16 elements": (r"(add\.s64 %d\d+, %d\d+), 2;", r"\1, 4;"),
}
MISTAKES = {name: ((*SMALL, 1), *change) for name, change in _MISTAKES.items()}


@pytest.mark.parametrize("family", ["plain", "eight bits", "columns", "panels", "turns"])
def test_products_are_exact(ptx: ModuleType, ptx_families: dict[str, Any], family: str, failing: Any) -> None:
    """Products with tails, splits and clusters are exact in any order of events, without a deadlock.

    No rule is broken.
    """

    def check(config: KernelConfig, shape: Shape, splits: int, multiprocessors: int, seeds: Sequence[int] = (0,)) -> None:
        for seed in seeds:
            out, wanted = ptx.Bench(shape, config, splits, multiprocessors, seed).output()
            np.testing.assert_array_equal(out, wanted)

    assert not failing(check, [*ptx_families[family].CASES, *ptx_families[family].ORDERS])


@pytest.mark.parametrize("family", ["plain", "eight bits", "columns", "panels", "turns", "stream-K"])
def test_the_emulator_finds_mistakes(ptx: ModuleType, ptx_families: dict[str, Any], family: str, failing: Any) -> None:
    """The emulator finds each planted mistake in one of five orders of events."""

    def check(mistake: str) -> None:
        assert ptx.mistake_shows(*ptx_families[family].MISTAKES[mistake])

    assert not failing(check, itertools.product(ptx_families[family].MISTAKES))


def test_no_block_of_a_cluster_ends_before_the_others_arrive(ptx: ModuleType) -> None:
    """A cluster needs release at its last synchronization."""
    case = KernelConfig(64, 16, 3, 1, 2), Shape("a16w16", 130, 24, 392), 1
    assert ptx.mistake_shows(case, r"cluster\.arrive\.release", "cluster.arrive.relaxed")


def test_parts_are_added_in_the_order_of_k(ptx: ModuleType) -> None:
    """Partials are added in the order of K, whichever CTA is last."""
    config, shape = KernelConfig(64, 8, 2, 1), Shape("a16w16", 4, 8, 192, "fp16", "fp32")
    x, weight = np.zeros((4, 192)), np.zeros((8, 192))
    x[:, [0, 64, 128]], weight[:, [0, 64, 128]] = (1 << 12, 1, -(1 << 12)), (1 << 13, 1, 1 << 13)
    for seed in range(6):
        out, _ = ptx.Bench(shape, config, 3, 3, seed, (x, weight)).output()
        assert not out.any()

"""Run stream-K kernels on a Hopper GPU: products, repeated bits, oversubscribed grids."""

from __future__ import annotations

import itertools
import random
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution
from tunedgemm.testing.launching import bind_launcher, draw_operands, fault_of, poisoned_output
from tunedgemm.testing.sharing import differing_calls
from tunedgemm_asm import asm
from tunedgemm_asm.ptx.limits import unfit
from tunedgemm_asm.ptx.names import KernelConfig
from tunedgemm_asm.ptx.space import enumerate_candidates, refine

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]

SHAPE = Shape("a16w16", 1371, 2900, 2056, epilogue="bias")
FLOATS = attrs.evolve(SHAPE, dtype="fp16", outdtype="fp32", bias_dtype="fp32")
ROWS = Shape("a8w8", 1371, 2900, 4112, "fp8_e4m3fn", "bf16", "bias", scale="row")
INT8 = attrs.evolve(ROWS, dtype="int8", outdtype="fp32")
BLOCKS = Shape("a8w8_blockscale", 1371, 2900, 4112, "fp8_e4m3fn", "bf16", scale="block")
FEW_ROWS = {"m": 13, "n": 7100}
#: A shape and a config of each kind.
KINDS = {
    "plain": (SHAPE, KernelConfig(128, 128, 6, stream=True)),
    "floats": (FLOATS, KernelConfig(128, 160, 5, stream=True)),
    "wide tile": (SHAPE, KernelConfig(128, 256, 4, stream=True)),
    "high tile": (SHAPE, KernelConfig(256, 192, 3, stream=True)),
    "two blocks an SM": (SHAPE, KernelConfig(64, 96, 4, 1, stream=True)),
    "cluster": (SHAPE, KernelConfig(128, 128, 4, cluster=2, stream=True)),
    "swapped": (attrs.evolve(SHAPE, **FEW_ROWS), KernelConfig(16, 64, 8, 1, swapped=True, stream=True)),
    "turns": (SHAPE, KernelConfig(128, 128, 6, turns=True, stream=True)),
    "turns, wide tile": (FLOATS, KernelConfig(128, 192, 5, turns=True, stream=True)),
    "turns cluster": (SHAPE, KernelConfig(128, 176, 5, cluster=2, turns=True, stream=True)),
    "panels": (attrs.evolve(SHAPE, n=2904), KernelConfig(128, 256, 4, panels=2, stream=True)),
    "rows": (ROWS, KernelConfig(128, 192, 5, promoted=True, stream=True)),
    "rows, fast": (ROWS, KernelConfig(128, 256, 4, stream=True)),
    "int8": (INT8, KernelConfig(128, 192, 5, turns=True, stream=True)),
    "blocks": (BLOCKS, KernelConfig(128, 192, 5, promoted=True, staged=True, stream=True)),
    "blocks cluster": (
        attrs.evolve(BLOCKS, n=2904),
        KernelConfig(128, 224, 4, cluster=2, promoted=True, staged=True, panels=6, stream=True),
    ),
    "blocks swapped": (attrs.evolve(BLOCKS, **FEW_ROWS), KernelConfig(16, 128, 8, swapped=True, promoted=True, staged=True, stream=True)),
}
#: Rows of x and of the weight in tiles of 128 by 128, by the rounds of them on 132 SMs.
GRIDS = {"0.1": (3, 5), "0.8": (11, 10), "1": (11, 12), "1.1": (11, 13), "1.9": (11, 23), "2.5": (11, 30), "5.1": (22, 31)}


def bound(config: KernelConfig, shape: Shape, device: Device) -> Launcher:
    """Bind a configuration."""
    return bind_launcher(asm, Solution("asm", config.name, 1), shape, device)


def test_each_kind_computes_its_product(device: Device, failing: Any) -> None:
    """Every kind computes its product for any number of tiles, with all tails."""

    def check(kind: str, grid: str) -> None:
        (like, config), (high, wide) = KINDS[kind], GRIDS[grid]
        shape = attrs.evolve(like, n=128 * wide - 20) if config.swapped else attrs.evolve(like, m=128 * high - 37, n=128 * wide - 20)
        shape = attrs.evolve(shape, n=shape.n // 8 * 8) if config.panels else shape
        if reason := unfit(config, 1, shape):
            pytest.skip(reason)
        given = draw_operands(shape, device)
        assert not fault_of(shape, poisoned_output(bound(config, shape, device), given), given)

    assert not failing(check, itertools.product(KINDS, GRIDS))


def test_random_products(device: Device, failing: Any) -> None:
    """Listed stream-K solutions and their neighbours compute random products."""

    def check(seed: int) -> None:
        chance = random.Random(seed)
        m, n = (chance.choice((chance.randint(1, 300), chance.randint(1, 4000))) for _ in range(2))
        like = (SHAPE, FLOATS, ROWS, INT8, BLOCKS)[seed % 5]
        shape = attrs.evolve(like, m=m, n=n, k=16 * chance.choice((chance.randint(1, 60), chance.randint(60, 600))))
        listed = [Solution("asm", config.name, splits) for config, splits in enumerate_candidates(shape, device)]
        near = [each for solution in listed[:16] for each in refine("asm", solution, shape, device)]
        found = [each for each in listed + near if "_k_" in each.kernel_name]
        if not found:
            pytest.skip("all rounds are full")
        given = draw_operands(shape, device, seed)
        for solution in chance.sample(found, min(4, len(found))):
            launcher = bind_launcher(asm, solution, shape, device)
            assert not fault_of(shape, poisoned_output(launcher, given), given), (shape, solution)
            assert not differing_calls(launcher, given, 20), (shape, solution)

    assert not failing(check, itertools.product(range(40)))


def test_blocks_that_fit_and_more(device: Device, failing: Any) -> None:
    """Grids for fewer or many more multiprocessors compute the product."""

    def check(kind: str, multiprocessors: int) -> None:
        shape, config = KINDS[kind]
        given = draw_operands(shape, device)
        launcher = bound(config, shape, attrs.evolve(device, cu_num=multiprocessors))
        assert not fault_of(shape, poisoned_output(launcher, given), given)
        assert not differing_calls(launcher, given, 50)

    assert not failing(check, itertools.product(KINDS, [1, 7, 100, 264, 1000]))

"""Run generated PTX on a Hopper GPU: random products, sums of fp8, large operands, times."""

from __future__ import annotations

import itertools
import random
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution
from tunedgemm.testing.launching import bind_launcher, draw_operands, poisoned_output
from tunedgemm.testing.sharing import differing_calls
from tunedgemm_asm import asm
from tunedgemm_asm.ptx.limits import unfit
from tunedgemm_asm.ptx.names import KernelConfig
from tunedgemm_asm.ptx.resources import BLOCK_SHARED
from tunedgemm_asm.ptx.space import enumerate_candidates, refine

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]

SHAPE = Shape("a16w16", 300, 456, 1000, epilogue="bias")
ROWS = Shape("a8w8", 300, 456, 1008, "fp8_e4m3fn", "bf16", "bias", scale="row")
TENSOR = attrs.evolve(ROWS, scale="tensor", outdtype="fp16", bias_dtype="fp16")
INT8 = attrs.evolve(ROWS, dtype="int8")
BLOCKS = Shape("a8w8_blockscale", 300, 456, 1008, "fp8_e4m3fn", "bf16", scale="block")
#: A configuration of each kind and its splits, the plainest first.
CONFIGS = {
    "plain": (KernelConfig(128, 128, 4), 1),
    "odd tile": (KernelConfig(128, 160, 5), 1),
    "one consumer": (KernelConfig(64, 96, 4, 1), 1),
    "high tile": (KernelConfig(256, 128, 4), 1),
    "split": (KernelConfig(128, 96, 4), 3),
    "swapped": (KernelConfig(24, 128, 8, swapped=True), 1),
    "swapped split": (KernelConfig(8, 128, 12, swapped=True), 4),
    "cluster": (KernelConfig(128, 128, 4, cluster=2), 1),
    "cluster split": (KernelConfig(64, 64, 4, 1, 2), 2),
    "panels": (KernelConfig(128, 256, 4, panels=2), 1),
    "panels, all at once": (KernelConfig(128, 128, 6, panels=2), 1),
    "panels of 32": (KernelConfig(128, 224, 4, panels=6), 1),
    "panels of 16": (KernelConfig(128, 112, 5, panels=3), 1),
    "panels, high tile": (KernelConfig(256, 192, 3, panels=3), 1),
    "panels, one consumer": (KernelConfig(64, 96, 4, 1, panels=1), 1),
    "panels split": (KernelConfig(128, 160, 5, panels=5), 3),
    "panels cluster": (KernelConfig(128, 192, 4, cluster=2, panels=3), 1),
}
#: Ping-pong kernels, for larger shapes, so that an SM has several tiles.
TURNS = {
    "turns": (KernelConfig(128, 128, 4, turns=True), 1),
    "turns, many stages": (KernelConfig(128, 96, 8, turns=True), 1),
    "turns, wide tile": (KernelConfig(128, 192, 5, turns=True), 1),
    "turns, flat tile": (KernelConfig(64, 256, 5, turns=True), 1),
    "turns, high tile": (KernelConfig(256, 72, 4, turns=True), 1),
    "turns split": (KernelConfig(128, 160, 4, turns=True), 3),
    "turns swapped": (KernelConfig(104, 128, 5, swapped=True, turns=True), 1),
    "turns swapped split": (KernelConfig(40, 64, 12, swapped=True, turns=True), 4),
    "turns cluster": (KernelConfig(128, 176, 5, cluster=2, turns=True), 1),
    "turns cluster split": (KernelConfig(64, 64, 4, cluster=2, turns=True), 2),
}
SEVERAL = {"m": 1500, "n": 3400}
KINDS = {name: (SHAPE, *chosen) for name, chosen in CONFIGS.items()} | {
    "rows": (ROWS, KernelConfig(128, 128, 5, promoted=True), 1),
    "rows, wide tile": (ROWS, KernelConfig(128, 224, 4, promoted=True), 1),
    "rows, fast": (ROWS, KernelConfig(128, 256, 4), 1),
    "rows split": (ROWS, KernelConfig(64, 96, 4, 1, promoted=True), 3),
    "rows swapped": (ROWS, KernelConfig(24, 128, 8, swapped=True, promoted=True), 1),
    "rows cluster": (ROWS, KernelConfig(128, 160, 5, cluster=2, promoted=True), 1),
    "tensors": (TENSOR, KernelConfig(128, 128, 5, promoted=True), 1),
    "tensors swapped split": (TENSOR, KernelConfig(8, 64, 12, 1, swapped=True), 2),
    "int8": (INT8, KernelConfig(128, 256, 4), 1),
    "int8 split": (INT8, KernelConfig(256, 96, 4), 3),
    "int8 swapped": (INT8, KernelConfig(24, 128, 8, swapped=True), 1),
    "int8 cluster": (attrs.evolve(INT8, scale="tensor", outdtype="fp32"), KernelConfig(64, 64, 4, 1, 2), 2),
    "blocks": (BLOCKS, KernelConfig(128, 128, 5, promoted=True, staged=True), 1),
    "blocks, odd tile": (BLOCKS, KernelConfig(128, 192, 5, promoted=True, staged=True), 1),
    "blocks, high tile": (BLOCKS, KernelConfig(256, 128, 4, promoted=True, staged=True), 2),
    "blocks, wide tile": (BLOCKS, KernelConfig(128, 256, 4, promoted=True, staged=True), 1),
    "blocks, one consumer": (BLOCKS, KernelConfig(64, 128, 4, 1, promoted=True, staged=True), 1),
    "blocks swapped": (BLOCKS, KernelConfig(24, 256, 5, swapped=True, promoted=True, staged=True), 1),
    "blocks swapped split": (BLOCKS, KernelConfig(8, 64, 12, 1, swapped=True, promoted=True, staged=True), 3),
    "blocks cluster": (BLOCKS, KernelConfig(128, 160, 5, cluster=2, promoted=True, staged=True), 1),
    **{name: (attrs.evolve(SHAPE, **SEVERAL), *chosen) for name, chosen in TURNS.items()},
    "turns rows": (attrs.evolve(ROWS, **SEVERAL), KernelConfig(128, 192, 5, turns=True), 1),
    "turns int8 split": (attrs.evolve(INT8, **SEVERAL), KernelConfig(128, 160, 4, turns=True), 2),
    "panels of fp16": (attrs.evolve(SHAPE, dtype="fp16", outdtype="fp16", bias_dtype="fp32"), KernelConfig(256, 128, 4, panels=2), 1),
    "panels of rows": (ROWS, KernelConfig(128, 224, 4, promoted=True, panels=6), 1),
    "panels of rows, fast": (ROWS, KernelConfig(128, 256, 4, panels=2), 1),
    "panels of rows split": (ROWS, KernelConfig(128, 128, 6, promoted=True, panels=2), 2),
    "panels of tensors": (TENSOR, KernelConfig(256, 96, 4, promoted=True, panels=6), 1),
    "panels of int8": (INT8, KernelConfig(128, 192, 4, panels=3), 1),
    "panels of blocks": (BLOCKS, KernelConfig(128, 256, 4, promoted=True, staged=True, panels=2), 1),
    "panels of blocks, odd tile": (BLOCKS, KernelConfig(128, 160, 5, promoted=True, staged=True, panels=5), 1),
    "panels of blocks cluster": (BLOCKS, KernelConfig(128, 224, 4, cluster=2, promoted=True, staged=True, panels=6), 1),
    "panels of blocks, high tile": (BLOCKS, KernelConfig(256, 128, 3, promoted=True, staged=True, panels=4), 2),
}
LARGE = Shape("a16w16", 1, 1, 64)
#: Shapes with an operand or output of more than 2^31 elements, and a configuration.
SIZES = {
    "output": (attrs.evolve(LARGE, m=65_600, n=32_784), KernelConfig(128, 256, 4)),
    "x": (attrs.evolve(LARGE, m=1_044_600, n=72, k=2056), KernelConfig(128, 96, 4)),
    "output of turns": (attrs.evolve(LARGE, m=65_600, n=32_784), KernelConfig(128, 160, 6, turns=True)),
    "output of panels": (attrs.evolve(LARGE, m=65_600, n=32_784), KernelConfig(128, 256, 4, panels=2)),
    "weight": (attrs.evolve(LARGE, m=13, n=1_044_600, k=2056), KernelConfig(16, 128, 8, swapped=True)),
}


def bound(config: KernelConfig, splits: int, shape: Shape, device: Device) -> Launcher:
    """Bind a configuration."""
    return bind_launcher(asm, Solution("asm", config.name, splits), shape, device)


def values(given: tuple[Any, ...], shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and the weight in fp64, scaled."""
    x, weight = (each.double() for each in given[:2])
    if shape.scale == "none":
        return x, weight
    x_scale, w_scale = (each.double() for each in given[2:4])
    if shape.scale != "block":
        return x * x_scale.reshape(-1, 1), weight * w_scale.reshape(-1, 1)
    w_scale = w_scale.repeat_interleave(128, 0)[: shape.n].repeat_interleave(128, 1)[:, : shape.k]
    return x * x_scale.repeat_interleave(128, 1)[:, : shape.k], weight * w_scale


def fault(out: torch.Tensor, given: tuple[Any, ...], shape: Shape, promoted: bool = True) -> str:
    """Return how far an output is from fp64, if it is too far. Tensor cores keep about 14 bits of
    fp8 sums, so sums of 128 lose less than 2^-11 of their terms, others more.
    """
    x, weight = values(given, shape)
    wanted, terms = x @ weight.T, x.abs() @ weight.abs().T
    if shape.bias:
        wanted, terms = wanted + given[-1].double(), terms + given[-1].double().abs()
    rounding = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-22}[shape.outdtype]
    lost = (2.0**-11 if promoted else 2.0**-10) if shape.dtype.startswith("fp8") else shape.k**0.5 * 2.0**-22
    error = (out.double() - wanted).abs() - rounding * wanted.abs() - lost * terms
    worst = error.max().item()
    return "" if worst <= 2.0**-24 else f"off by {worst} beyond rounding, {torch.isnan(out).sum().item()} NaN"


def test_each_kind_computes_its_product(device: Device, failing: Any) -> None:
    """Every kind computes its product, from one tile to many with tails."""

    def check(kind: str, sizes: tuple[int, int, int]) -> None:
        like, config, splits = KINDS[kind]
        shape = attrs.evolve(like, m=sizes[0], n=sizes[1], k=sizes[2])
        if reason := unfit(config, splits, shape):
            pytest.skip(reason)
        given = draw_operands(shape, device)
        assert fault(poisoned_output(bound(config, splits, shape, device), given), given, shape, config.promoted) == ""

    assert not failing(check, itertools.product(KINDS, [(128, 128, 64), (300, 456, 1008), (37, 105, 336), (1, 8, 528), (4096, 1536, 2048)]))


def test_random_products(device: Device, failing: Any) -> None:
    """Listed 16-bit solutions and their neighbours compute random products."""

    def check(seed: int) -> None:
        chance = random.Random(seed)
        m, n = (chance.choice((chance.randint(1, 40), chance.randint(1, 300), chance.randint(1, 3000))) for _ in range(2))
        k, dtype = 8 * chance.choice((chance.randint(1, 20), chance.randint(1, 600))), chance.choice(("bf16", "fp16"))
        outdtype = chance.choice((dtype, "fp32", "bf16", "fp16"))
        bias = chance.choice(("", outdtype, "fp32"))
        check_listed(Shape("a16w16", m, n, k, dtype, outdtype, "bias" if bias else "none", bias), device, chance)

    assert not failing(check, itertools.product(range(60)))


def test_random_products_of_eight_bits(device: Device, failing: Any) -> None:
    """Listed 8-bit solutions and their neighbours compute random products."""

    def check(seed: int) -> None:
        chance = random.Random(seed)
        m, n = (chance.choice((chance.randint(1, 40), chance.randint(1, 300), chance.randint(1, 3000))) for _ in range(2))
        k, outdtype = 16 * chance.choice((chance.randint(1, 10), chance.randint(1, 300))), chance.choice(("bf16", "fp16", "fp32"))
        scale = ("row", "tensor", "block")[seed % 3]
        if scale == "block":
            check_listed(Shape("a8w8_blockscale", m, n, k, "fp8_e4m3fn", outdtype, scale=scale), device, chance)
            return
        bias = chance.choice(("", "bf16", "fp16", "fp32"))
        dtype = chance.choice(("fp8_e4m3fn", "int8"))
        check_listed(Shape("a8w8", m, n, k, dtype, outdtype, "bias" if bias else "none", bias, scale=scale), device, chance)

    assert not failing(check, itertools.product(range(90)))


def test_random_turns(device: Device, failing: Any) -> None:
    """Random ping-pong configurations compute random products with the same bits."""

    def check(seed: int) -> None:
        chance = random.Random(seed)
        cluster, (tile_a, most) = chance.choice((1, 1, 2)), chance.choice(((64, 256), (128, 200), (128, 200), (192, 128), (256, 96)))
        tile_b, swapped = 8 * cluster * chance.randint(1, most // cluster // 8), chance.random() < 0.25
        stages = chance.randint(2, min(12, (BLOCK_SHARED - 64) // ((tile_a + tile_b) * 128 + 16)))
        tile = (tile_b, tile_a) if swapped else (tile_a, tile_b)
        config = KernelConfig(*tile, stages, 2, cluster, chance.choice((1, 4, 8)), swapped, turns=True)
        m, n = (rows * chance.randint(1, 36) - chance.randrange(rows) for rows in tile)
        outdtype, k = chance.choice(("bf16", "fp16", "fp32")), 8 * chance.choice((chance.randint(1, 60), chance.randint(1, 400)))
        shape = Shape("a16w16", m, n, k, chance.choice(("bf16", "fp16")), outdtype, *chance.choice((("none", ""), ("bias", "fp32"))))
        splits = chance.choice([1, *(parts for parts in range(1, 7) if not unfit(config, parts, shape))])
        given = draw_operands(shape, device, seed)
        launcher = bound(config, splits, shape, device)
        first = poisoned_output(launcher, given)
        assert fault(first, given, shape) == "", (shape, config.name, splits)
        assert not differing_calls(launcher, given, 20), (shape, config.name, splits)

    assert not failing(check, itertools.product(range(60)))


#: A kernel, an M of full tiles, and a smaller one with as many tiles.
FULL = [(KernelConfig(128, 112, 7, cluster=2, turns=True), 256, 130), (KernelConfig(64, 32, 10, 1), 64, 33)]


@pytest.mark.parametrize(("config", "full", "fewer"), FULL, ids=["tiles", "one tile"])
def test_rows_outside_take_no_time(device: Device, config: KernelConfig, full: int, fewer: int) -> None:
    """Fewer rows of x in as many tiles take at most 1.3 times as long.

    Loads of rows outside took 1.3 to 1.9 times.
    """
    shapes = {rows: Shape("a16w16", rows, 14336, 4096) for rows in (full, fewer)}
    calls = {rows: (bound(config, 1, shape, device).call, draw_operands(shape, device, 0)) for rows, shape in shapes.items()}
    least = dict.fromkeys(calls, float("inf"))
    for _, (rows, (call, given)) in itertools.product(range(30), calls.items()):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            call(*given)
        end.record()
        torch.cuda.synchronize()
        least[rows] = min(least[rows], begin.elapsed_time(end))
    assert least[fewer] < 1.3 * least[full]


def check_listed(shape: Shape, device: Device, chance: random.Random) -> None:
    """Check the first listed solution and three of all and their neighbours."""
    listed = [Solution("asm", config.name, splits) for config, splits in enumerate_candidates(shape, device)]
    near = [each for solution in chance.sample(listed, min(3, len(listed))) for each in refine("asm", solution, shape, device)]
    given = draw_operands(shape, device, chance.randrange(1 << 20))
    for solution in [listed[0], *chance.sample(listed + near, 3)]:
        launcher = bind_launcher(asm, solution, shape, device)
        assert fault(poisoned_output(launcher, given), given, shape, "_p_" in solution.kernel_name) == "", (shape, solution)


def scaled_mm(given: tuple[Any, ...], shape: Shape) -> torch.Tensor:
    """Return torch's product with fp32 sums."""
    x, weight, x_scale, w_scale = given[:4]
    if shape.scale == "block":
        x_scale, w_scale = x_scale.t().contiguous().t(), w_scale.t()  # cuBLAS takes the scales of x by columns
    elif shape.scale == "row":
        w_scale = w_scale.reshape(1, -1)
    else:
        x_scale, w_scale = x_scale.reshape(()), w_scale.reshape(())
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[shape.outdtype]
    return torch._scaled_mm(x, weight.t(), x_scale, w_scale, out_dtype=dtype, use_fast_accum=False)


@pytest.mark.parametrize(("like", "outdtype"), [(TENSOR, "fp32"), (ROWS, "bf16"), (BLOCKS, "bf16")], ids=["tensors", "rows", "blocks"])
def test_sums_of_fp8_are_as_exact_as_those_of_torch(like: Shape, outdtype: str, device: Device) -> None:
    """Errors over a long K are at most 1.5 times those of `torch._scaled_mm`."""
    shape = attrs.evolve(like, m=256, n=512, k=16384, outdtype=outdtype, epilogue="none", bias_dtype="")
    given = draw_operands(shape, device)
    try:
        theirs = scaled_mm(given, shape)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"torch does not take it: {error}")
    x, weight = values(given, shape)
    wanted = x @ weight.T
    own = bound(KernelConfig(128, 128, 5, promoted=True, staged=shape.scale == "block"), 1, shape, device).call(*given)
    ours, torchs = ((out.double() - wanted).norm() / wanted.norm() for out in (own, theirs))
    assert ours <= 1.5 * torchs + 1e-6, (ours.item(), torchs.item())


@pytest.mark.parametrize("what", SIZES)
def test_more_elements_than_32_bits_address(what: str, device: Device) -> None:
    """Operands and outputs of more than 2**31 elements are right."""
    shape, config = SIZES[what]
    if torch.cuda.mem_get_info(device.torch_device)[0] < 16 << 30:
        pytest.skip("needs 16 GiB of the GPU's memory")
    x, weight = draw_operands(shape, device)[:2]
    out = bound(config, 1, shape, device).call(x, weight)
    assert max(x.numel(), weight.numel(), out.numel()) > 1 << 31
    draw = torch.Generator().manual_seed(0)
    rows, columns = (
        torch.cat([torch.arange(min(40, size)), torch.arange(max(0, size - 40), size), torch.randint(0, size, (80,), generator=draw)])
        for size in (shape.m, shape.n)
    )
    rows, columns = rows.to(out.device), columns.to(out.device)
    # Some whole rows and some whole columns.
    for found, one, other in ((out[rows], x[rows], weight), (out[:, columns], x, weight[columns])):
        torch.testing.assert_close(found, one @ other.T, atol=2e-2 * shape.k**0.5, rtol=2e-2)

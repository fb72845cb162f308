"""Run weights in columns on a Hopper GPU: bits of plain weights, large weights, dispatch."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
import torch
import tunedgemm
from tunedgemm.plugin import Device, Launcher, Shape, Solution
from tunedgemm.testing.launching import bind_launcher, draw_operands
from tunedgemm.tools.tables import shuffle_weight
from tunedgemm_asm import asm
from tunedgemm_asm.ptx.names import COLUMNS, KernelConfig

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]

SHAPE = Shape("a16w16", 300, 456, 1024, epilogue="bias", layout=COLUMNS)
ROWS = Shape("a8w8_bpreshuffle", 300, 456, 1024, "fp8_e4m3fn", "bf16", "bias", scale="row", layout=COLUMNS)
BLOCKS = Shape("a8w8_blockscale_bpreshuffle", 300, 456, 1024, "fp8_e4m3fn", "bf16", scale="block", layout=COLUMNS)
KINDS = {
    "plain": (SHAPE, KernelConfig(128, 128, 4), 1),
    "odd tile": (attrs.evolve(SHAPE, dtype="fp16", outdtype="fp16"), KernelConfig(128, 160, 5), 1),
    "one consumer": (SHAPE, KernelConfig(64, 96, 4, 1), 1),
    "split": (SHAPE, KernelConfig(128, 96, 4), 3),
    "swapped": (SHAPE, KernelConfig(24, 128, 8, swapped=True), 1),
    "swapped split": (SHAPE, KernelConfig(8, 128, 12, swapped=True), 4),
    "cluster": (SHAPE, KernelConfig(128, 128, 4, cluster=2), 1),
    "swapped cluster split": (SHAPE, KernelConfig(16, 128, 6, cluster=2, swapped=True), 2),
    "panels": (SHAPE, KernelConfig(128, 256, 4, panels=2), 1),
    "turns": (attrs.evolve(SHAPE, m=1500, n=3400), KernelConfig(128, 160, 6, turns=True), 1),
    "rows": (ROWS, KernelConfig(128, 128, 5, promoted=True), 1),
    "rows, fast": (ROWS, KernelConfig(128, 256, 4), 1),
    "int8 split": (attrs.evolve(ROWS, dtype="int8", scale="tensor"), KernelConfig(256, 96, 4), 3),
    "blocks": (BLOCKS, KernelConfig(128, 128, 5, promoted=True, staged=True), 1),
    "blocks, wide tile": (BLOCKS, KernelConfig(128, 256, 4, promoted=True, staged=True), 2),
    "blocks swapped split": (BLOCKS, KernelConfig(8, 64, 12, 1, swapped=True, promoted=True, staged=True), 3),
    "blocks cluster": (BLOCKS, KernelConfig(128, 160, 5, cluster=2, promoted=True, staged=True), 1),
}


def plain_of(shape: Shape) -> Shape:
    """Return the product with a plain weight."""
    return attrs.evolve(shape, op=shape.op.removesuffix("_bpreshuffle"), layout="row")


def bound(config: KernelConfig, splits: int, shape: Shape, device: Device) -> Launcher:
    """Bind a configuration."""
    return bind_launcher(asm, Solution("asm", config.name, splits), shape, device)


def test_the_bits_are_those_of_a_plain_weight(device: Device, failing: Any) -> None:
    """The bits are those of a plain weight."""

    def check(kind: str, sizes: tuple[int, int, int]) -> None:
        like, config, splits = KINDS[kind]
        shape = attrs.evolve(like, m=sizes[0], n=sizes[1], k=sizes[2])
        out = bound(config, splits, shape, device).call(*draw_operands(shape, device))
        wanted = bound(config, splits, plain_of(shape), device).call(*draw_operands(plain_of(shape), device))
        assert wanted.float().abs().max() > 0
        assert torch.equal(out, wanted)

    assert not failing(check, itertools.product(KINDS, [(128, 128, 1024), (300, 456, 1024), (37, 104, 640), (2048, 1544, 2048)]))


def test_a_weight_of_more_elements_than_32_bits_count(device: Device) -> None:
    """A weight of more than 2**31 elements has the bits of a plain one."""
    if torch.cuda.mem_get_info(device.torch_device)[0] < 20 << 30:
        pytest.skip("needs 20 GiB of the GPU's memory")
    shape, config = Shape("a16w16", 13, 1_050_000, 2048 + 64, layout=COLUMNS), KernelConfig(16, 128, 8, swapped=True)
    x, weight = draw_operands(plain_of(shape), device)[:2]
    out = bound(config, 1, shape, device).call(x, shuffle_weight(weight, COLUMNS).plain)
    assert weight.numel() > 1 << 31
    assert torch.equal(out, bound(config, 1, plain_of(shape), device).call(x, weight))


@pytest.mark.parametrize("m", [1, 64, 300])
def test_an_untuned_call_is_served(m: int, device: Device) -> None:
    """An untuned call is served as exactly as by torch."""
    draw = torch.Generator(device.torch_device).manual_seed(m)
    x, weight = (torch.randn(rows, 1024, generator=draw, device=device.torch_device, dtype=torch.bfloat16) for rows in (m, 456))
    out = tunedgemm.gemm_a16w16(x, shuffle_weight(weight, COLUMNS))
    wanted = x.double() @ weight.double().T
    theirs = torch.nn.functional.linear(x, weight)
    ours, torchs = ((each.double() - wanted).norm() / wanted.norm() for each in (out, theirs))
    assert ours <= 1.1 * torchs
    assert asm.heuristic_fallback(attrs.evolve(SHAPE, m=m, epilogue="none", bias_dtype=""), device) is not None

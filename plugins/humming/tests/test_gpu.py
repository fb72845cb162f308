"""Humming's kernels on a GPU: every format, its own repacking, graphs and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tunedgemm.plugin import Launcher, Shape, Solution, device_of
from tunedgemm.tools.launching import FORMATS
from tunedgemm.tools.tables import op_named
from tunedgemm_humming import humming

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
OP = op_named("a16wn")
#: Formats and groups, each with the layout in which Humming reads it.
SERVED = [
    *(("gptq_int4", group, "marlin") for group in (128, 64, 32, 0)),
    *(("gptq_int4_order", 128, "marlin"), ("int8_channel", 0, "marlin"), ("awq_int4", 128, "humming"), ("ct_int4_zp", 0, "humming")),
    *(
        ("fp8_channel", 0, "humming"),
        ("fp8_block", 128, "humming"),
        ("mxfp8", 32, "humming"),
        ("mxfp4", 32, "humming"),
        ("nvfp4", 16, "humming"),
    ),
]


def weights(name: str, group: int, layout: str, m: int, dtype: str = "bf16", n: int = 1024, k: int = 2048) -> Shape:
    """Return a shape of a weight."""
    extra: Any = {"w_format": name, "w_group": group}
    return Shape("a16wn", m, n, k, dtype, dtype, scale="block", layout=layout, extra=extra)


def operands_of(shape: Shape, seed: int = 0) -> tuple[Any, ...]:
    """Return random operands as launchers get them."""
    made = OP.make_inputs(shape, torch.device("cuda"), seed)
    return tuple(getattr(operand, "plain", operand) for operand in made)


def error(shape: Shape, out: torch.Tensor, operands: tuple[Any, ...]) -> float:
    """Return the relative error by norm."""
    exact = OP.reference(shape, operands).double()
    return float((out.double().view(exact.shape) - exact).norm() / exact.norm())


def bound(shape: Shape, most: int) -> Iterator[tuple[Solution, Launcher]]:
    """Compile solutions, spread over the list, and bind them; skip where Humming serves none."""
    device = device_of(torch.cuda.current_device())
    if answer := humming.refusal(shape, device):
        pytest.skip(str(answer))
    listed = humming.solutions(shape, device)
    chosen = listed[:: max(1, len(listed) // most)][:most]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda solution: humming.hooks.prepare(solution, shape), chosen))
    for solution in chosen:
        launcher = humming.bind(solution, shape, device)
        assert isinstance(launcher, Launcher), launcher
        yield solution, launcher


@pytest.mark.parametrize("m", [1, 17, 64, 300])
@pytest.mark.parametrize(("name", "group", "layout"), SERVED)
def test_every_format(name: str, group: int, layout: str, m: int) -> None:
    """Humming's configurations agree with the op's reference, in both dtypes of x."""
    for dtype in ("bf16", "fp16"):
        shape = weights(name, group, layout, m, dtype)
        if OP.problem(shape) or (name, dtype) == ("int8_channel", "bf16"):
            continue
        operands = operands_of(shape)
        for solution, launcher in bound(shape, 6):
            out = launcher.call(*operands)
            assert error(shape, out, operands) < (2**-7 if dtype == "bf16" else 2**-9), (shape, solution)
            if solution.deterministic:
                assert torch.equal(out, launcher.call(*operands)), solution


def test_every_solution_of_a_shape() -> None:
    """All 32 run, for few rows and for many, and leave their locks at zero for the next one."""
    for m in (8, 512):
        shape = weights("gptq_int4", 128, "marlin", m, n=4096, k=4096)
        operands = operands_of(shape)
        for solution, launcher in bound(shape, 99):
            for _ in range(3):
                assert error(shape, launcher.call(*operands), operands) < 2**-7, solution


@pytest.mark.parametrize(("name", "bits"), [("ct_int4", 4), ("fp8_channel", 8), ("mxfp4", 4)])
def test_the_bytes_are_those_of_hummings_repacking(name: str, bits: int) -> None:
    """The core packs codes as Humming's own kernel does for activations of 16 bits."""
    layout, group = ("marlin" if name == "ct_int4" else "humming"), FORMATS[name].groups[0]
    list(bound(weights(name, group, layout, 1), 1))  # skips
    from humming.ops import repack_weight

    rows = operands_of(weights(name, group, "row", 1))[1].view(torch.uint8)
    words = rows.view(torch.int32).view(1024, 2048 * bits // 32)
    theirs = repack_weight(inputs=words, zero_point=None, weight_bits=bits, activation_bits=16, is_weight_packed=True)
    ours = operands_of(weights(name, group, layout, 1))[1]
    assert torch.equal(ours.view(-1).view(torch.int32), theirs.view(-1))


@pytest.mark.parametrize(("name", "group", "layout"), [("gptq_int4_order", 128, "marlin"), ("nvfp4", 16, "humming")])
def test_the_first_call_may_be_captured(name: str, group: int, layout: str) -> None:
    """A graph replays with other activations, and its locks begin at zero each time."""
    shape = weights(name, group, layout, 16, n=2048, k=4096)
    for _, launcher in bound(shape, 6):
        x, *rest = operands_of(shape)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = launcher.call(x, *rest)
        for seed in (1, 2):
            x.copy_(operands_of(shape, seed)[0])
            out.fill_(torch.nan)
            graph.replay()
            assert error(shape, out, (x, *rest)) < 2**-7


def test_a_call_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once bound, calls of any values start no compiler, and `bind` in this process needs none either."""
    shape = weights("gptq_int4", 128, "marlin", 4)
    solution, _ = next(iter(bound(shape, 1)))
    monkeypatch.delenv("TUNEDGEMM_HUMMING_COMPILE")
    monkeypatch.setattr("subprocess.Popen", None)
    launcher = humming.bind(solution, shape, device_of(torch.cuda.current_device()))
    assert isinstance(launcher, Launcher), launcher
    operands = operands_of(shape)
    assert error(shape, launcher.call(*operands), operands) < 2**-7


def test_the_first_is_hummings_own_choice() -> None:
    """Its output is that of Humming's function without a tuning, but for the order of shared sums."""
    shape = weights("gptq_int4", 128, "marlin", 64, n=4096, k=4096)
    ((solution, launcher),) = bound(shape, 1)
    from humming.config import LayerConfig
    from humming.ops import humming_gemm
    from tunedgemm_humming.space import layer_of

    x, weight, scale = operands_of(shape)
    words = weight.view(-1).view(torch.int32).view(4096 // 16, -1)
    layer = LayerConfig(**layer_of(shape)).to_str()
    locks = torch.zeros(2048, dtype=torch.int32, device="cuda")
    theirs = humming_gemm(
        layer_config=layer, compute_config=json.dumps({"gemm_type": "dense"}), inputs=x, weight=words, weight_scale=scale, locks=locks
    )
    ours = launcher.call(x, weight, scale)
    assert solution.kernel_name.startswith("default_") and float((ours - theirs).float().norm() / theirs.float().norm()) < 2**-7

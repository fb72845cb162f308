"""Generated PTX on a Hopper GPU: random products, repeated bits, graphs, threads, memory; skipped elsewhere."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution, device_of, ops
from tunedgemm_asm import asm
from tunedgemm_asm.ptx.plan import Plan
from tunedgemm_asm.ptx.problem import refusal
from tunedgemm_asm.ptx.solutions import choices, refine

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="there is no Hopper GPU")]

#: A plan of each kind with parts of K: the first that is tried is the plainest.
KINDS = {
    "plain": (Plan(128, 128, 4), 1),
    "odd tile": (Plan(128, 160, 5), 1),
    "one consumer": (Plan(64, 96, 4, 1), 1),
    "high tile": (Plan(256, 128, 4), 1),
    "split": (Plan(128, 96, 4), 3),
    "swapped": (Plan(24, 128, 8, swapped=True), 1),
    "swapped split": (Plan(8, 128, 12, swapped=True), 4),
    "cluster": (Plan(128, 128, 4, cluster=2), 1),
    "cluster split": (Plan(64, 64, 4, 1, 2), 2),
}
kinds = pytest.mark.parametrize("kind", KINDS)
SHAPE = Shape("a16w16", 300, 456, 1000, epilogue="bias")
#: What runs under memcheck: each kind with tails; with one more argument a kernel that stores beyond the output's last row.
PROGRAM = """
import ast, re, sys, torch
from tunedgemm.plugin import Shape, Solution, device_of, ops
from tunedgemm_asm import asm
from tunedgemm_asm.ptx import assembler
names, wrong = ast.literal_eval(sys.argv[1]), len(sys.argv) > 2
if wrong:
    plain = assembler.text_of
    assembler.text_of = lambda variant: re.sub(r"setp\\.lt\\.u32 (%p\\d+), (%r\\d+), %r0;", r"setp.ge.u32 \\1, \\2, 0;", plain(variant))
shape = Shape("a16w16", 37, 105, 328, epilogue="bias")
given = ops()["a16w16"].make_inputs(shape, torch.device("cuda", 0), 0)
for name, splits in names:
    asm.bind(Solution("asm", name, splits), shape, device_of(0)).call(*given)
    torch.cuda.synchronize()
"""


@pytest.fixture
def device() -> Device:
    """The first GPU."""
    return device_of(0)


@pytest.fixture
def nan_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All memory that a launcher takes starts as NaN."""
    plain = torch.empty

    def filled(*sizes: Any, **options: Any) -> torch.Tensor:
        made = plain(*sizes, **options)
        return made.fill_(0xFF if made.dtype == torch.uint8 else float("nan")) if made.is_cuda and made.numel() else made

    monkeypatch.setattr(torch, "empty", filled)
    yield


def operands(shape: Shape, device: Device, seed: int = 0) -> tuple[Any, ...]:
    """Random operands, without a bias that the shape does not have."""
    return tuple(each for each in ops()["a16w16"].make_inputs(shape, device.torch_device, seed) if each is not None)


def fault(out: torch.Tensor, given: tuple[Any, ...], shape: Shape) -> str:
    """How far an output is from the product in float64, where it is too far: each element against the sum of its terms' sizes."""
    x, weight = (each.double() for each in given[:2])
    wanted, terms = x @ weight.T, x.abs() @ weight.abs().T
    if shape.bias:
        wanted, terms = wanted + given[2].double(), terms + given[2].double().abs()
    rounding = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-22}[shape.outdtype]
    error = (out.double() - wanted).abs() - rounding * wanted.abs() - shape.k**0.5 * 2.0**-22 * terms
    worst = error.max().item()
    return "" if worst <= 2.0**-24 else f"off by {worst} beyond rounding, {torch.isnan(out).sum().item()} NaN"


def bound(plan: Plan, splits: int, shape: Shape, device: Device) -> Launcher:
    """A plan, bound."""
    answer = asm.bind(Solution("asm", plan.name, splits), shape, device)
    assert isinstance(answer, Launcher), answer
    return answer


@kinds
@pytest.mark.parametrize("sizes", [(128, 128, 64), (300, 456, 1000), (37, 105, 328), (1, 8, 520), (4096, 1536, 2048)], ids=str)
def test_each_kind_computes_its_product(kind: str, sizes: tuple[int, int, int], device: Device, nan_first: None) -> None:
    """From a single tile without tails to all tails and many tiles a block."""
    (plan, splits), shape = KINDS[kind], attrs.evolve(SHAPE, m=sizes[0], n=sizes[1], k=sizes[2])
    if reason := refusal(plan, splits, shape):
        pytest.skip(reason)
    given = operands(shape, device)
    assert fault(bound(plan, splits, shape, device).call(*given), given, shape) == ""


@pytest.mark.parametrize("seed", range(60))
def test_random_products(seed: int, device: Device, nan_first: None) -> None:
    """Random sizes, dtypes and bias; of what is listed and its neighbours four."""
    chance = random.Random(seed)
    m, n = (chance.choice((chance.randint(1, 40), chance.randint(1, 300), chance.randint(1, 3000))) for _ in range(2))
    k, dtype = 8 * chance.choice((chance.randint(1, 20), chance.randint(1, 600))), chance.choice(("bf16", "fp16"))
    outdtype = chance.choice((dtype, "fp32", "bf16", "fp16"))
    bias = chance.choice(("", outdtype, "fp32"))
    shape = Shape("a16w16", m, n, k, dtype, outdtype, "bias" if bias else "none", bias)
    listed = [Solution("asm", plan.name, splits) for plan, splits in choices(shape, device)]
    near = [each for solution in chance.sample(listed, min(3, len(listed))) for each in refine("asm", solution, shape, device)]
    given = operands(shape, device, seed)
    for solution in [listed[0], *chance.sample(listed + near, 3)]:
        launcher = asm.bind(solution, shape, device)
        assert isinstance(launcher, Launcher), launcher
        assert fault(launcher.call(*given), given, shape) == "", (shape, solution)


@kinds
def test_a_thousand_calls_have_the_same_bits(kind: str, device: Device) -> None:
    """Whatever the order in which blocks come."""
    plan, splits = KINDS[kind]
    launcher, given = bound(plan, splits, SHAPE, device), operands(SHAPE, device)
    first = launcher.call(*given)
    assert fault(first, given, SHAPE) == ""
    different = torch.zeros((), dtype=torch.int64, device=device.torch_device)
    for _ in range(1000):
        different += (launcher.call(*given).view(torch.int16) != first.view(torch.int16)).sum()
    assert different.item() == 0


@kinds
def test_a_graph_reads_new_inputs(kind: str, device: Device) -> None:
    """Two launches in a graph, replayed with new inputs; a split leaves its counters zero."""
    (plan, splits), graph = KINDS[kind], torch.cuda.CUDAGraph()
    launcher, given = bound(plan, splits, SHAPE, device), operands(SHAPE, device)
    launcher.call(*given)
    with torch.cuda.graph(graph):
        first, second = launcher.call(*given), launcher.call(*given)
    for seed in range(1, 5):
        given[0].copy_(operands(SHAPE, device, seed)[0])
        graph.replay()
        torch.cuda.synchronize()
        assert fault(first, given, SHAPE) == ""
        assert torch.equal(first, second)


def test_threads_without_a_context(device: Device) -> None:
    """A thread that has called nothing of CUDA's runtime binds and launches; others launch beside it on their own streams."""
    plan, splits = KINDS["split"]
    given, outs, failures = operands(SHAPE, device), [], []

    def work() -> None:
        try:
            launcher = bound(plan, splits, SHAPE, device)
            with torch.cuda.stream(torch.cuda.Stream()):
                outs.append(launcher.call(*given))
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(fault(out, given, SHAPE) == "" for out in outs) and len(outs) == 4


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [True, False], ids=["a wrong kernel", "all kinds"])
def test_memory_is_not_left(wrong: bool, tmp_path: Path) -> None:
    """compute-sanitizer's memcheck finds what a kernel stores beyond its output, and nothing in ours."""
    usual = "/usr/local/cuda/bin/compute-sanitizer"
    tool = shutil.which("compute-sanitizer") or (usual if os.access(usual, os.X_OK) else None)
    if tool is None:
        pytest.skip("there is no compute-sanitizer")
    fitting = [(plan.name, splits) for plan, splits in KINDS.values() if not refusal(plan, splits, Shape("a16w16", 37, 105, 328))]
    # Each tensor in an allocation of its own, so that memcheck knows its end.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TUNEDGEMM_CACHE": str(tmp_path)}
    program = [sys.executable, "-c", PROGRAM, repr(fitting[:1] if wrong else fitting), *["wrong"] * wrong]
    command = [tool, "--tool", "memcheck", "--error-exitcode", "99", "--report-api-errors", "no", *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == (99 if wrong else 0), done.stdout[-3000:] + done.stderr[-2000:]

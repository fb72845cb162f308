"""QuACK's kernels on a GPU: every listed solution, streams, graphs and the host's time of a call."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import pytest
import torch
from torch.nn.functional import linear
from tunedgemm.plugin import Launcher, Shape, device_of
from tunedgemm_quack import quack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(autouse=True)
def usable() -> None:
    """Skip where QuACK cannot serve the GPU."""
    if answer := quack.refusal(Shape("a16w16", 16, 256, 512), device_of(0)):
        pytest.skip(str(answer))


def draw(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Draw normal numbers."""
    return torch.randn(*sizes, device="cuda:0", dtype=dtype)


def launchers(shape: Shape, most: int) -> dict[str, Launcher]:
    """Bind solutions, spread over the list."""
    listed = list(quack.solutions(shape, device_of(0)))
    step = max(1, len(listed) // most)
    answers = {str(solution): quack.bind(solution, shape, device_of(0)) for solution in listed[::step][:most]}
    assert all(isinstance(answer, Launcher) for answer in answers.values()), answers
    return answers  # type: ignore[return-value]


def error(out: torch.Tensor, *operands: torch.Tensor) -> float:
    """Return the relative error of an output."""
    exact = linear(*(operand.double() for operand in operands))
    return float((out.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", [(1, 1280, 8192), (16, 2112, 7168), (77, 1032, 520), (1024, 4096, 4096)])
def test_listed_solutions(shape: tuple[int, int, int]) -> None:
    """Solutions from all of the list, with and without splits, are right and give the same bits twice."""
    m, n, k = shape
    x, weight = draw(m, k), draw(n, k)
    for name, launcher in launchers(Shape("a16w16", m, n, k), 12).items():
        out = launcher.call(x, weight)
        assert error(out, x, weight) < 2**-8, name
        assert torch.equal(out, launcher.call(x, weight)), name


def test_bind_compiles_nothing_after_prepare(compile_on_all_cores: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compiled in processes without a device are those that `bind` loads here."""
    monkeypatch.setenv("TUNEDGEMM_QUACK_COMPILE", "0")
    jobs = []
    for fields in ({}, {"epilogue": "bias", "bias_dtype": "fp32"}):
        shape = Shape("a16w16", 40, 1288, 2048, **fields)
        jobs += [(solution, shape, device_of(0)) for solution in list(quack.solutions(shape, device_of(0)))[::4]]
    assert {solution.split_k > 0 for solution, _, _ in jobs} == {False, True}
    compile_on_all_cores(jobs)
    before = quack.hooks.load().compiled()
    for solution, shape, device in jobs:
        assert isinstance(quack.bind(solution, shape, device), Launcher), solution
    assert quack.hooks.load().compiled()[1] == before[1]


def test_kinds_of_operands() -> None:
    """The kernel takes both dtypes, every output and bias, three dimensions, and one odd row."""
    for dtype, outdtype, bias_dtype in (("bf16", "fp32", "bf16"), ("fp16", "fp16", "fp32"), ("fp16", "bf16", "fp16")):
        shape = Shape("a16w16", 24, 320, 640, dtype=dtype, outdtype=outdtype, epilogue="bias", bias_dtype=bias_dtype)
        types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        x, weight, bias = draw(2, 12, 640, dtype=types[dtype]), draw(320, 640, dtype=types[dtype]), draw(320, dtype=types[bias_dtype])
        for name, launcher in launchers(shape, 3).items():
            out = launcher.call(x, weight, bias)
            assert out.shape == (2, 12, 320), name
            assert out.dtype == types[outdtype], name
            assert error(out, x, weight, bias) < 2**-8, name
    row, weight = draw(512).as_strided((1, 512), (3, 1)), draw(256, 512)
    for name, launcher in launchers(Shape("a16w16", 1, 256, 512), 3).items():
        assert error(launcher.call(row, weight), row, weight) < 2**-8, name


def test_host_time_of_a_call() -> None:
    """A call returns within 60 us of the host's time; `pytest -s` prints the figures."""
    x, weight, bias = draw(16, 512), draw(256, 512), draw(256)
    for epilogue in ("none", "bias"):
        operands = (x, weight, *((bias,) if epilogue == "bias" else ()))
        for name, launcher in launchers(attrs.evolve(Shape("a16w16", 16, 256, 512), epilogue=epilogue), 6).items():
            for _ in range(50):
                launcher.call(*operands)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                launcher.call(*operands)
            microseconds = (time.perf_counter() - start) / 200 * 1e6
            torch.cuda.synchronize()
            print(f"{name} {epilogue}: {microseconds:.1f} us of the host")
            assert microseconds < 60, name

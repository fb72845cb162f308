"""Dispatch: every call ends in a kernel that works, with the numbers of torch."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tunedgemm
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, device_of
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import OperandError, TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, read_rows, write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.testing.fakes import fake_backend, fake_registry

OP = op_named("a16w16")
F32 = {"dtype": "fp32"}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands of these tests are on the CPU, so that is the default device of questions, too."""
    monkeypatch.setattr("tunedgemm.dispatch.dispatcher.current_device", lambda: device_of(-1))


def table_of(path: Path, *solutions: tuple[Shape, Solution, float], device: Device | None = None) -> Path:
    """A tuned file with one row for each (shape, solution, us)."""
    here = device or device_of(-1)
    rows = [Row(shape=s, gfx=here.gfx, cu_num=here.cu_num, device=here.name, solution=sol, us=us) for s, sol, us in solutions]
    write_rows(path, OP, rows)
    return path


def linear(solution, shape, x, weight, bias=None):
    return torch.nn.functional.linear(x, weight, bias)


def recording(calls: list[str]):
    """A call that notes the kernel's name and computes with torch."""

    def call(solution, shape, *operands):
        calls.append(solution.kernel_name)
        return linear(solution, shape, *operands)

    return call


def loaded(path: Path, registry: Registry, **settings) -> TunedGemm:
    gemm = TunedGemm(registry, settings=Settings(**settings))
    gemm.load_config(path)
    return gemm


def test_a_row_names_the_solution_that_runs_with_and_without_bias(tmp_path: Path) -> None:
    """Bias is part of the key: each call runs its own row's kernel."""
    calls: list[str] = []
    registry = fake_registry(fake_backend("turbo", solutions=("a", "b"), call=recording(calls)))
    path = table_of(
        tmp_path / "t.csv",
        (Shape("a16w16", 4, 16, 32, **F32), Solution("turbo", "a"), 1.0),
        (Shape("a16w16", 4, 16, 32, **F32, epilogue="bias"), Solution("turbo", "b"), 1.0),
    )
    gemm, x, weight = loaded(path, registry), torch.randn(4, 32), torch.randn(16, 32)

    for _ in range(2):
        gemm.mm(x, weight)
        gemm.mm(x.view(2, 2, 32), weight, torch.randn(16))

    assert calls == ["a", "b", "a", "b"]


def test_a_bias_of_another_rank_is_an_error() -> None:
    """[1, N] adds like [N]; [N, 1] is refused, also after a [N] of the same length has been served."""
    gemm, x, weight, bias = TunedGemm(fake_registry()).gemm_a16w16, torch.randn(4, 32), torch.randn(16, 32), torch.randn(16)
    expected = torch.nn.functional.linear(x, weight, bias)

    for vector in (bias, bias.view(1, 16), bias):
        torch.testing.assert_close(gemm(x, weight, vector), expected)
    for _ in range(2):
        with pytest.raises(OperandError, match=r"bias must be \[16\]"):
            gemm(x, weight, bias.view(16, 1))


def test_views_and_misaligned_operands_reach_the_kernel_dense(tmp_path: Path) -> None:
    """A launcher sees contiguous, 16-byte aligned activations; a strided weight goes to torch."""
    seen: list[bool] = []

    def call(solution, shape, x, weight):
        seen.append(x.is_contiguous() and x.data_ptr() % 16 == 0)
        return linear(solution, shape, x, weight)

    registry = fake_registry(fake_backend("turbo", call=call))
    gemm = loaded(table_of(tmp_path / "t.csv", (Shape("a16w16", 4, 16, 32, **F32), Solution("turbo", "fake"), 1.0)), registry).mm
    weight = torch.randn(16, 32)
    misaligned = torch.randn(4 * 32 + 1)[1:].view(4, 32)
    inputs = [torch.randn(4, 64)[:, ::2], torch.randn(32, 4).t(), misaligned]

    for x in inputs:
        torch.testing.assert_close(gemm(x, weight), torch.nn.functional.linear(x, weight))
    strided = torch.randn(32, 16).t()
    torch.testing.assert_close(gemm(inputs[0], strided), torch.nn.functional.linear(inputs[0], strided))

    assert seen == [True] * 3


def test_a_call_that_needs_a_gradient_goes_to_torch(tmp_path: Path) -> None:
    """With grad mode on a Parameter's gradient arrives; with it off the tuned kernel runs."""
    calls: list[str] = []
    registry = fake_registry(fake_backend("turbo", call=recording(calls)))
    gemm = loaded(table_of(tmp_path / "t.csv", (Shape("a16w16", 4, 16, 32, **F32), Solution("turbo", "fake"), 1.0)), registry).mm
    x, weight = torch.randn(4, 32), torch.nn.Parameter(torch.randn(16, 32))

    gemm(x, weight).sum().backward()
    with torch.no_grad():
        gemm(x, weight)

    torch.testing.assert_close(weight.grad, x.sum(0).expand(16, 32))
    assert calls == ["fake"]


def test_an_error_on_torchs_own_path_blames_no_tuned_kernel(tmp_path: Path) -> None:
    """A refusal of autograd is the caller's error, and the shape keeps its kernel."""
    calls: list[str] = []
    registry = fake_registry(fake_backend("turbo", call=recording(calls)))
    shape = Shape("a16w16", 4, 16, 32, **F32)
    gemm = loaded(table_of(tmp_path / "t.csv", (shape, Solution("turbo", "fake"), 1.0)), registry)
    weight = torch.nn.Parameter(torch.randn(16, 32))
    with torch.inference_mode():
        x = torch.randn(4, 32)
        gemm.mm(x, weight)

    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
        gemm.mm(x, weight)

    assert calls == ["fake"]
    assert gemm.dispatcher.explain(shape).libtype == "turbo"


def test_a_vetoed_row_continues_the_ladder(tmp_path: Path) -> None:
    """A row whose backend or kernel is absent is skipped
    with its reason for the next usable one."""
    shape = Shape("a16w16", 5, 16, 32, **F32)
    padded = Shape("a16w16", 16, 16, 32, **F32)
    path = table_of(
        tmp_path / "t.csv",
        (shape, Solution("ck", "_ZN5aiter"), 1.0),
        (padded, Solution("turbo", "gone"), 2.0),
        (Shape("a16w16", 8, 16, 32, **F32), Solution("turbo", "fake"), 3.0),
    )
    calls: list[str] = []
    registry = fake_registry(fake_backend("turbo", call=recording(calls)))
    gemm = loaded(path, registry)

    gemm.mm(torch.randn(5, 32), torch.randn(16, 32))
    explanation = gemm.dispatcher.explain(shape)

    assert calls == ["fake"]
    assert explanation.tuned and "coarse" in explanation.offer.why
    assert [str(offer.solution) for offer, _ in explanation.passed_over] == ["ck:_ZN5aiter", "turbo:gone"]
    reasons = " ".join(reason for _, reason in explanation.passed_over)
    assert "not installed; pip install tunedgemm[ck]" in reasons
    assert "no kernel 'gone'" in reasons


def test_bind_sees_the_callers_shape_and_not_the_padded_rows(tmp_path: Path) -> None:
    """A row for M = 16 that serves M = 5 is bound for 5."""
    seen: list[int] = []

    def call(solution, shape, x, weight):
        seen.append(shape.m)
        return linear(solution, shape, x, weight)

    registry = fake_registry(fake_backend("turbo", call=call))
    gemm = loaded(table_of(tmp_path / "t.csv", (Shape("a16w16", 16, 16, 32, **F32), Solution("turbo", "fake"), 1.0)), registry)

    gemm.mm(torch.randn(5, 32), torch.randn(16, 32))

    assert seen == [5]


def test_heuristics_answer_untuned_calls_only_in_the_listed_order() -> None:
    """pip install alone changes nothing: a third party's heuristic joins by TUNEDGEMM_FALLBACK only."""
    calls: list[str] = []
    registry = fake_registry(fake_backend("turbo", heuristic="fake", call=recording(calls)))
    x, weight = torch.randn(4, 32), torch.randn(16, 32)

    TunedGemm(registry).mm(x, weight)
    assert calls == []
    TunedGemm(registry, settings=Settings.from_environment({"TUNEDGEMM_FALLBACK": "turbo,torch"})).mm(x, weight)
    assert calls == ["fake"]


def test_explain_answers_for_a_device_that_is_not_present(tmp_path: Path) -> None:
    """The row of an injected device is named, and nothing is bound."""
    far, shape = Device("gfx942", 304), Shape("a16w16", 64, 256, 512)
    path = table_of(tmp_path / "t.csv", (shape, Solution("turbo", "fake"), 4.0), device=far)
    gemm = loaded(path, fake_registry(fake_backend("turbo", call=None)))

    assert gemm.dispatcher.explain(shape, far).libtype == "turbo"
    assert gemm.dispatcher.explain(shape).libtype == "torch"


def test_is_tuned_and_explain_take_operands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public questions take a call's operands; explain says where torch serves for a gradient."""
    path = table_of(tmp_path / "t.csv", (Shape("a16w16", 4, 16, 32, **F32), Solution("torch", "mm"), 1.0))
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(path))
    tunedgemm.reload()
    try:
        assert tunedgemm.is_tuned(torch.randn(4, 32), torch.randn(16, 32))
        assert not tunedgemm.is_tuned(Shape("a16w16", 4, 17, 32, **F32))
        assert "t.csv:2" in str(tunedgemm.explain(torch.randn(2, 2, 32), torch.randn(16, 32)))
        parameter = torch.nn.Parameter(torch.randn(16, 32))
        said = tunedgemm.explain(torch.randn(4, 32), parameter)
        assert str(said.offer.solution) == "torch:native" and "the call needs a gradient" in str(said)
        assert [reason for _, reason in said.passed_over] == ["the call needs a gradient"]
        assert tunedgemm.is_tuned(torch.randn(4, 32), parameter)
        with torch.no_grad():
            assert tunedgemm.explain(torch.randn(4, 32), parameter).tuned
        assert tunedgemm.prewarm() == 1
    finally:
        monkeypatch.undo()
        tunedgemm.reload()


def test_an_instances_table_ranks_first_and_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """load_config wins over the variable for that instance only; a broken file is an error at once."""
    calls: list[str] = []
    registry = fake_registry(fake_backend("turbo", solutions=("mine", "theirs"), call=recording(calls)))
    shape = Shape("a16w16", 4, 16, 32, **F32)
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(table_of(tmp_path / "env.csv", (shape, Solution("turbo", "theirs"), 0.1))))
    mine, other = loaded(table_of(tmp_path / "mine.csv", (shape, Solution("turbo", "mine"), 9.0)), registry), TunedGemm(registry)
    x, weight = torch.randn(4, 32), torch.randn(16, 32)

    mine.gemm_a16w16(x, weight)
    other.gemm_a16w16(x, weight)

    assert calls == ["mine", "theirs"]
    with pytest.raises(TableError, match="absent"):
        other.load_config(tmp_path / "absent.csv")


def test_the_fingerprint_changes_with_the_table_and_not_with_its_path(tmp_path: Path) -> None:
    """Two ranks with equal tables agree, whatever the files are called."""
    shape, registry = Shape("a16w16", 4, 16, 32, **F32), fake_registry()
    one = loaded(table_of(tmp_path / "a.csv", (shape, Solution("torch", "mm"), 1.0)), registry)
    same = loaded(table_of(tmp_path / "b.csv", (shape, Solution("torch", "mm"), 1.0)), registry)
    other = loaded(table_of(tmp_path / "c.csv", (shape, Solution("torch", "bmm"), 1.0)), registry)

    prints = [gemm.dispatcher.fingerprint() for gemm in (one, same, other)]

    assert prints[0] == prints[1] != prints[2]


def test_the_log_names_each_shapes_choice_once(caplog: pytest.LogCaptureFixture) -> None:
    """AITER_LOG_TUNED_CONFIG prints one explanation a shape, not one a call."""
    gemm = TunedGemm(fake_registry(), settings=Settings.from_environment({"AITER_LOG_TUNED_CONFIG": "1"}))
    with caplog.at_level(logging.WARNING, "tunedgemm"):
        for _ in range(3):
            gemm.mm(torch.randn(4, 32), torch.randn(16, 32))
            gemm.mm(torch.randn(2, 2, 32), torch.randn(16, 32))

    assert caplog.text.count("runs torch:native") == 1


def test_launchers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that meets ever new shapes keeps no more launchers than the limit."""
    monkeypatch.setattr("tunedgemm.dispatch.dispatcher.MAX_LAUNCHERS", 8)
    gemm, weight = TunedGemm(fake_registry()), torch.randn(16, 32)

    for rows in range(1, 30):
        gemm.mm(torch.randn(rows, 32), weight)

    assert len(gemm.dispatcher.launchers) <= 8


def test_capture_counts_calls_that_need_no_resolving(tmp_path: Path) -> None:
    """With AITER_TUNE_GEMM every call is counted, and the file is whole when the process ends."""
    code = (
        "import torch, tunedgemm\n"
        "x, w = torch.randn(4, 32), torch.randn(16, 32)\n"
        "for _ in range(5): tunedgemm.gemm_a16w16(x, w)\n"
        "tunedgemm.gemm_a16w16(x.view(2, 2, 32), w)\n"
    )
    environment = {**os.environ, "AITER_TUNE_GEMM": "1", "TUNEDGEMM_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)

    lines = (tmp_path / "bf16_untuned_gemm.csv").read_text().splitlines()

    assert len(lines) == 2
    assert lines[1].split(",")[:3] == ["4", "16", "32"]
    assert lines[1].split(",")[lines[0].split(",").index("count")] == "6"


def test_a_given_table_replaces_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the environment's table nor, after a reload, any other is read."""
    shape, registry = Shape("a16w16", 4, 16, 32, **F32), fake_registry(fake_backend("turbo", solutions=("a", "b"), call=linear))
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(table_of(tmp_path / "env.csv", (shape, Solution("turbo", "a"), 1.0))))
    given = Table(OP, [read_rows(table_of(tmp_path / "own.csv", (shape, Solution("turbo", "b"), 9.0)), OP)[0]])
    dispatcher = Dispatcher(OP, registry, table=given)

    assert dispatcher.explain(shape).offer.solution.kernel_name == "b"
    dispatcher.reload()
    assert dispatcher.explain(shape).offer.solution.kernel_name == "b"
    assert Dispatcher(OP, registry).explain(shape).offer.solution.kernel_name == "a"

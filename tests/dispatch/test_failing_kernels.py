"""A kernel that fails: its solution alone is vetoed, and the call is served, whatever it raises."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tunedgemm.device import device_of
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.integrations import products
from tunedgemm.integrations.linear import routed_linear
from tunedgemm.integrations.products import routed_product
from tunedgemm.ops import op_named
from tunedgemm.plugin import Launcher, hookimpl
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.testing.fakes import FakeHooks, fake_backend, fake_registry
from tunedgemm.testing.listed import listed

OP = op_named("a16w16")
SHAPE = Shape("a16w16", 4, 16, 32, dtype="fp32")
X, WEIGHT = torch.randn(4, 32), torch.randn(16, 32)
EXPECTED = torch.nn.functional.linear(X, WEIGHT)
FIRST, SECOND = Solution("alpha", "first"), Solution("beta", "second")


class Abort(BaseException):
    """A BaseException, as test runners and event loops have."""


RAISED = {
    "RuntimeError": lambda: RuntimeError("lost"),
    "sys.exit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "another BaseException": Abort,
}


class Kernels:
    """Two backends with a row each; their kernels note their calls, and raise once they are to fail."""

    def __init__(self, folder: Path, raised: Callable[[], BaseException] = RAISED["RuntimeError"]) -> None:
        self.calls: list[str] = []
        self.failing: set[str] = set()
        self.raised = raised
        self.meeting: threading.Barrier | None = None
        self.answer: Callable[[torch.Tensor], Any] = lambda out: out
        here = device_of(-1)
        rows = [
            Row(shape=SHAPE, gfx=here.gfx, cu_num=here.cu_num, device=here.name, solution=solution, us=us)
            for solution, us in ((FIRST, 1.0), (SECOND, 2.0))
        ]
        write_rows(folder / "tuned.csv", OP, rows)
        backends = (fake_backend(each.libtype, solutions=(each.kernel_name,), call=self.run) for each in (FIRST, SECOND))
        self.gemm = TunedGemm(fake_registry(*backends), settings=Settings())
        self.gemm.load_config(folder / "tuned.csv")

    def run(self, solution: Solution, shape: Shape, *operands: torch.Tensor) -> torch.Tensor:
        """Compute with torch, or raise."""
        self.calls.append(solution.kernel_name)
        if solution.kernel_name in self.failing:
            if self.meeting is not None:
                self.meeting.wait()
            raise self.raised()
        out = torch.nn.functional.linear(*operands)
        return self.answer(out) if solution == FIRST else out

    @property
    def chosen(self) -> Solution:
        """Return the solution that the next call of the shape gets."""
        return self.gemm.dispatcher.explain(SHAPE, device_of(-1)).offer.solution


@pytest.fixture
def kernels(tmp_path: Path) -> Kernels:
    """Return two kernels that work so far."""
    return Kernels(tmp_path)


def test_a_failure_met_by_two_keys_vetoes_one_solution(kernels: Kernels) -> None:
    """A shape bound through two keys loses the solution that raised, and not its successor."""
    for x in (X, X.view(2, 2, 32)):
        kernels.gemm.mm(x, WEIGHT)
    kernels.failing = {"first"}
    kernels.calls.clear()

    for x in (X, X.view(2, 2, 32), X):
        torch.testing.assert_close(kernels.gemm.mm(x, WEIGHT).view(4, 16), EXPECTED)

    assert kernels.chosen == SECOND
    assert kernels.calls == ["first", "second", "second", "second"]  # the other key does not meet it again


@pytest.mark.parametrize(
    "answer",
    [
        lambda out: None, torch.Tensor.double, torch.Tensor.t, lambda out: out[:2], lambda out: out.to("meta"), lambda out: out.numpy()
    ],
    ids=["none", "dtype", "transposed", "rows", "device", "array"],
)  # fmt: skip
def test_an_output_that_is_not_the_ops_vetoes(
    answer: Callable[[torch.Tensor], Any], kernels: Kernels, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets the next solution's output, and the log names what was wrong."""
    kernels.answer = answer
    for _ in range(2):
        torch.testing.assert_close(kernels.gemm.mm(X, WEIGHT), EXPECTED)
    assert kernels.chosen == SECOND
    assert "its output must be (4, 16) torch.float32 on cpu (got " in caplog.text


def test_a_failure_during_a_reload_blames_no_successor(kernels: Kernels) -> None:
    """A launcher of before a reload that raises after it blames nothing that was bound since."""
    run, reloaded = kernels.run, []

    def run_and_reload(solution: Solution, shape: Shape, *operands: torch.Tensor) -> torch.Tensor:
        if not reloaded:
            reloaded.append(True)
            kernels.gemm.dispatcher.reload()
            kernels.gemm.load_config(kernels.gemm.dispatcher.above[0])
            kernels.gemm.mm(X, WEIGHT)
            raise RuntimeError("lost")
        return run(solution, shape, *operands)

    kernels.gemm.mm(X, WEIGHT)
    kernels.run = run_and_reload  # type: ignore[method-assign]
    torch.testing.assert_close(kernels.gemm.mm(X, WEIGHT), EXPECTED)
    assert kernels.chosen in (FIRST, SECOND)


@listed("warm", [True, False], ids=["bound", "new"])
@listed("what", RAISED)
def test_sixteen_threads_meet_a_failing_kernel(
    what: str, warm: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, hasty_switches: None
) -> None:
    """None of sixteen threads in a failing kernel raises: another plugin serves, and one warning says why."""
    caplog.clear()
    kernels = Kernels(tmp_path, RAISED[what])
    if warm:
        kernels.gemm.mm(X, WEIGHT)
        kernels.gemm.mm(X.view(2, 2, 32), WEIGHT)
    kernels.failing, kernels.meeting = {"first"}, threading.Barrier(16, timeout=20)
    outputs: list[torch.Tensor] = []
    raised: list[BaseException] = []

    def serve(index: int) -> None:
        try:
            outputs.append(kernels.gemm.mm(X if index % 2 else X.view(2, 2, 32), WEIGHT).view(4, 16))
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert raised == []
    assert len(outputs) == 16 and all(torch.equal(out, outputs[0]) for out in outputs)
    assert kernels.chosen == SECOND
    assert [record.levelno for record in caplog.records if "will not be used" in record.message] == [logging.WARNING]


@listed("function", ["linear", "mm"])
def test_a_failing_kernel_behind_routed_functions(function: str, tmp_path: Path) -> None:
    """F.linear and torch.mm, once routed, lose the solution that raised, and not its successor."""
    kernels = Kernels(tmp_path)
    if function == "linear":
        routed, weight = routed_linear(kernels.gemm.dispatcher), WEIGHT
    else:
        operands = functools.partial(products._of_product, products._OF_MM)
        routed, weight = routed_product(kernels.gemm.dispatcher, products._mm, operands), WEIGHT.t()
    for x in (X, X.view(2, 2, 32)):
        kernels.gemm.mm(x, WEIGHT)
    routed(X, weight)
    for failing in ({"first"}, {"first", "second"}):
        kernels.failing = failing
        for _ in range(2):
            torch.testing.assert_close(routed(X, weight), EXPECTED)
            torch.testing.assert_close(kernels.gemm.mm(X.view(2, 2, 32), WEIGHT).view(4, 16), EXPECTED)
        assert kernels.chosen == (SECOND if len(failing) == 1 else Solution("torch", "native"))


def test_an_error_of_torch_within_a_launcher_blames_no_kernel(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch serves a misaligned weight, its error reaches the caller, and the kernel stays."""
    weight = torch.empty(16 * 32 + 1)[1:].view(16, 32).copy_(WEIGHT)
    dispatcher = kernels.gemm.dispatcher

    def torch_fallback(shape: Shape, device: object) -> Callable[..., torch.Tensor]:
        def broken(*operands: torch.Tensor) -> torch.Tensor:
            raise ValueError("torch's own")

        return broken

    monkeypatch.setattr(dispatcher, "torch_fallback", torch_fallback)
    for _ in range(2):
        with pytest.raises(ValueError, match="torch's own"):
            kernels.gemm.mm(X, weight)
    assert kernels.calls == [] and kernels.chosen == FIRST


class Exiting(FakeHooks):
    """A plugin that raises in one of its hooks."""

    def __init__(self, hook: str, raised: Callable[[], BaseException]) -> None:
        super().__init__("alpha", solutions=("first",), heuristic="first")
        self._hook, self._raised = hook, raised

    def _meet(self, hook: str) -> None:
        if hook == self._hook:
            raise self._raised()

    @hookimpl
    def supports(self, shape: Shape, device: Any) -> None:
        """Support every shape."""
        self._meet("supports")

    @hookimpl
    def enumerate_solutions(self, shape: Shape, device: Any) -> Any:
        """List one solution."""
        self._meet("enumerate_solutions")
        yield FIRST

    @hookimpl
    def heuristic_fallback(self) -> Solution:
        """Choose it."""
        self._meet("heuristic_fallback")
        return FIRST

    @hookimpl
    def bind(self, solution: Solution, shape: Shape, device: Any) -> Launcher:
        """Bind torch's product."""
        self._meet("bind")

        def call(*operands: torch.Tensor) -> torch.Tensor:
            self._meet("call")
            return torch.nn.functional.linear(*operands)

        return Launcher(call)

    @hookimpl
    def lacks(self, solution: Solution, shape: Shape, device: Any) -> str:
        """Lack nothing."""
        self._meet("lacks")
        return ""

    @hookimpl
    def library_version(self, device: Any) -> str:
        """Return a version."""
        self._meet("library_version")
        return "1"


@listed("hook", ["supports", "heuristic_fallback", "enumerate_solutions", "bind", "call", "lacks", "library_version"])
@listed("what", RAISED)
def test_a_plugin_that_exits_costs_itself_only(what: str, hook: str, tmp_path: Path) -> None:
    """Whatever a plugin raises in a hook or a call, torch serves, with a row and without."""
    here = device_of(-1)
    row = Row(shape=SHAPE, gfx=here.gfx, cu_num=here.cu_num, device=here.name, solution=Solution("alpha", ""), us=1.0, libver="0")
    write_rows(tmp_path / "tuned.csv", OP, [row])
    plugin = Exiting(hook, RAISED[what])
    registry = fake_registry(fake_backend("alpha", hooks=plugin))
    for table in (True, False):
        gemm = TunedGemm(registry, settings=Settings(untuned=("alpha",)))
        if table:
            gemm.load_config(tmp_path / "tuned.csv")
        for _ in range(2):
            torch.testing.assert_close(gemm.mm(X, WEIGHT), EXPECTED)


class TestSignals:
    """A signal's exception reaches the caller, and vetoes nothing."""

    @pytest.fixture(autouse=True)
    def handlers(self) -> Iterator[None]:
        """Restore the handlers of the signals that a test uses."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        yield
        for number, handler in before.items():
            signal.signal(number, handler)

    def interrupt(self, kernels: Kernels, number: int, expected: type[BaseException]) -> None:
        """Send a signal within a kernel's first call and within a hit."""
        sent: list[int] = []

        def raised() -> BaseException:
            sent.append(number)
            os.kill(os.getpid(), number)
            time.sleep(1)
            return RuntimeError("the signal did not arrive")

        kernels.raised = raised
        for _ in range(2):
            kernels.failing = {"first"}
            with pytest.raises(expected):
                kernels.gemm.mm(X, WEIGHT)
            kernels.failing = set()
            kernels.gemm.mm(X, WEIGHT)
        assert len(sent) == 2 and kernels.chosen == FIRST

    def test_of_the_keyboard(self, kernels: Kernels) -> None:
        """Ctrl-C is a KeyboardInterrupt, as everywhere."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.interrupt(kernels, signal.SIGINT, KeyboardInterrupt)

    def test_of_a_server(self, kernels: Kernels) -> None:
        """A server's handler may end it by SystemExit, as vLLM's does, or by an error."""
        for exception in (SystemExit, GeneratorExit, TimeoutError):

            def handler(number: int, frame: object, exception: type[BaseException] = exception) -> None:
                del number, frame
                raise exception

            signal.signal(signal.SIGTERM, handler)
            self.interrupt(kernels, signal.SIGTERM, exception)

    def test_of_a_handler_that_is_used_once(self, kernels: Kernels) -> None:
        """A handler may have removed itself, be a method, or a partial."""

        class Handler:
            def once(self, number: int, frame: object) -> None:
                signal.signal(number, signal.SIG_DFL)
                raise KeyboardInterrupt

            def leave(self, reason: str, number: int, frame: object) -> None:
                del frame
                raise SystemExit(reason)

        kernels.raised = lambda: os.kill(os.getpid(), signal.SIGTERM) or RuntimeError("the signal did not arrive")  # type: ignore[func-returns-value]
        for handler, exception in ((Handler().once, KeyboardInterrupt), (functools.partial(Handler().leave, "end"), SystemExit)):
            signal.signal(signal.SIGTERM, handler)
            kernels.failing = {"first"}
            with pytest.raises(exception):
                kernels.gemm.mm(X, WEIGHT)
        assert kernels.chosen == FIRST

    def test_in_a_hook(self, tmp_path: Path) -> None:
        """Ctrl-C passes while a plugin binds, and the next call binds again."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        plugin = Exiting("bind", lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(1) or RuntimeError())  # type: ignore[func-returns-value]
        gemm = TunedGemm(fake_registry(fake_backend("alpha", hooks=plugin)), settings=Settings(untuned=("alpha",)))
        with pytest.raises(KeyboardInterrupt):
            gemm.mm(X, WEIGHT)
        plugin._hook = ""
        gemm.mm(X, WEIGHT)
        assert gemm.dispatcher.bound(SHAPE, device_of(-1)).offer.solution == FIRST


def test_calls_amid_reloads_and_failures(kernels: Kernels, hasty_switches: None) -> None:
    """Threads that call while tables are reloaded and kernels start and stop to fail are served."""
    over, faults, reloads = threading.Event(), [], 60
    routed = routed_linear(kernels.gemm.dispatcher)
    calls = (kernels.gemm.mm, kernels.gemm.dispatcher.call, routed)

    def serve(number: int) -> None:
        x = X if number % 2 else X.view(2, 2, 32)
        while not over.is_set():
            try:
                out = calls[number % 3](x, WEIGHT).view(4, 16)
                if not torch.allclose(out, EXPECTED, atol=1e-5):
                    faults.append("wrong")
            except BaseException as error:
                faults.append(repr(error))

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for index in range(reloads):
        kernels.failing = [set(), {"first"}, {"second"}, {"first", "second"}][index % 4]
        kernels.gemm.dispatcher.reload()
        time.sleep(0.01)
    over.set()
    for thread in threads:
        thread.join()
    assert faults == []

"""Measure the host time of one call: of dispatch, of capture, of each way into the tables, and of
the launchers behind a table.

    # all questions that need no table
    python benchmarks/host_time.py -o host
    # the command of `make bench`
    python benchmarks/host_time.py --only dispatch --check
    # on a GPU
    python benchmarks/host_time.py --only launch --table tuned.csv -o host

dispatch
    The entry points of a16w16 over a bare launcher that returns a preallocated tensor. What is left
    of a call is dispatch.
capture
    The same call with ``AITER_TUNE_GEMM=1`` and without. On a GPU also while a graph is captured: a
    recorded call asks the driver whether it is recorded, once, and never at a replay. That case has
    no budget.
metrics
    The same call with ``TUNEDGEMM_METRICS=1`` and without, between windows, as 39 of 40 calls are.
calls
    Each way into the tables, next to torch's own call, `torch.library.custom_op` and, on a GPU,
    TunableOp. No table answers and no backend but torch's is asked, so that every way ends in the
    same product. On a GPU a graph of a hundred routed calls is replayed next to one of torch's own
    calls: their ratio must include 1.
launch
    The launchers of a table's rows alone and through dispatch, next to F.linear and
    ``torch.empty``, and binding a known solution at another M. The queue is empty at the start and
    holds no more than 50 calls. Rows of torch and kernels from 40 us are left out.

Subjects take turns in random order within every round. The cost of a subject is the median over the
rounds of its difference to its baseline in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import random
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import tunedgemm
from harness import Interval, add_check, add_only, add_rounds, head, parser_of, ratio, save
from host_launch import launches
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import device_of
from tunedgemm.dispatch.counters import PAUSE, WINDOW
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.plugin import Launcher, Solution, hookimpl

Tensor = torch.Tensor
#: Microseconds that a call may cost over its baseline, by whether it has a bias; that capture and
#: counting may add.
BUDGET_US, CAPTURE_US, METRICS_US = {False: 1.2, True: 1.5}, 0.3, 0.02
#: x is [M, K], or [2, M/2, K]: sizes at which F.linear itself is nearly all overhead.
M, N, K = 4, 32, 64
F_LINEAR, MM = torch.nn.functional.linear, torch.mm
WITHOUT, WITH = "without capture", "with capture"
#: Ways into the tables that have a budget.
BUDGETED = ("routed F.linear", "gemm_a16w16", "routed torch.mm")
#: A CPU's product in bf16 takes longer than what is measured here.
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
#: Calls in a graph, and replays of it that are timed together.
CAPTURED, REPLAYS = 100, 5


@attrs.frozen
class Subject:
    """A function that is timed.

    Attributes:
        call: the function.
        operands: its arguments.
        baseline: the subject that it is compared with.
        budget_us: what it may cost over its baseline, None if that is only shown.
        inside: context that is entered before it is timed.
    """

    call: Callable[..., Any]
    operands: tuple[Any, ...]
    baseline: str
    budget_us: float | None = None
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def timer(self) -> timeit.Timer:
        """Return a timer of the call, whose operands are names in the statement, as in a program."""
        names = [f"o{index}" for index in range(len(self.operands))]
        return timeit.Timer(f"f({', '.join(names)})", globals={"f": self.call, **dict(zip(names, self.operands, strict=True))})


@attrs.frozen
class Case:
    """Host times of the subjects of one question: nanoseconds a call by subject, one sample a
    round.
    """

    question: str
    device: str
    call: str
    samples: dict[str, list[float]]
    baselines: dict[str, str]
    budgets: dict[str, float | None]

    def over_us(self, subject: str) -> float:
        """Return what a call costs over its baseline, in microseconds."""
        pairs = zip(self.samples[subject], self.samples[self.baselines[subject]], strict=True)
        return statistics.median(ours - theirs for ours, theirs in pairs) / 1e3

    @property
    def within(self) -> bool:
        """Return whether every subject keeps to its budget."""
        return all(budget is None or self.over_us(subject) <= budget for subject, budget in self.budgets.items())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each subject."""
        for subject, samples in self.samples.items():
            yield {
                "question": self.question, "device": self.device, "call": self.call, "subject": subject,
                "us": statistics.median(samples) / 1e3, "baseline": self.baselines[subject], "over_us": self.over_us(subject),
                "budget_us": self.budgets[subject], "samples_ns": samples,
            }  # fmt: skip


@attrs.frozen
class Graph:
    """A graph of routed calls next to one of torch's own: microseconds a call on the device, one
    sample a round.
    """

    device: str
    call: str
    samples: dict[str, list[float]]

    @property
    def ratio(self) -> Interval:
        """Return the routed time over torch's own."""
        return ratio(self.samples["routed"], self.samples["torch"])

    @property
    def within(self) -> bool:
        """Return whether the interval of the ratio includes 1."""
        _, low, high = self.ratio
        return low <= 1 <= high

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield its row."""
        yield {
            "question": "calls", "device": self.device, "call": self.call, "subject": "captured, routed", "baseline": "captured, torch",
            "us": statistics.median(self.samples["routed"]), "ratio": self.ratio, "samples_us": self.samples,
        }  # fmt: skip


@attrs.frozen(eq=False)
class Preallocated:
    """Hooks whose one launcher returns *out*."""

    out: Tensor

    @hookimpl
    def supports(self) -> None:
        """Accept every shape."""

    @hookimpl
    def enumerate_solutions(self) -> list[Solution]:
        """Return the one solution."""
        return [Solution("preallocated", "out")]

    @hookimpl
    def heuristic_fallback(self) -> Solution:
        """Return the one solution."""
        return Solution("preallocated", "out")

    @hookimpl
    def bind(self) -> Launcher:
        """Return a launcher that launches nothing."""
        out = self.out
        return Launcher(lambda *_: out)


def over_preallocated(x: Tensor, weight: Tensor, *, capture: bool = False, metrics: bool = False) -> tuple[TunedGemm, Callable[..., Any]]:
    """Return a TunedGemm over the backend that launches nothing, and its launcher."""
    hooks = Preallocated(torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device))
    registry = Registry([])
    backend = Backend("preallocated", hooks, ops=("a16w16",))
    registry.add(backend)
    gemm = TunedGemm(registry, settings=Settings(capture=capture, metrics=metrics, untuned=("preallocated",)))
    shape = gemm.dispatcher.op.shape_of(x, weight)
    chosen = gemm.dispatcher.explain(shape, device_of(x.get_device()))
    if chosen.libtype != "preallocated":
        raise RuntimeError(f"dispatch: chose another backend than the one under test (got {chosen})")
    return gemm, backend.bind(chosen.offer.solution, shape, chosen.device).call


def timed(question: str, device: str, call: str, subjects: dict[str, Subject], *, rounds: int, calls: int, graph: bool = False) -> Case:
    """Time all subjects in each round, with gradients off as in serving."""
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" and not graph else lambda: None
    timers = {name: subject.timer() for name, subject in subjects.items()}
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    with torch.no_grad():
        for name, subject in subjects.items():
            with subject.inside():
                timers[name].timeit(calls)  # load and bind, outside of a graph
        with _recording() if graph else contextlib.nullcontext():
            for _ in range(rounds):
                for name in random.sample(list(subjects), len(subjects)):
                    with subjects[name].inside():
                        timers[name].timeit(3)
                        wait()  # an idle queue, so that no call waits for room in it
                        samples[name].append(timers[name].timeit(calls) / calls * 1e9)
    baselines = {name: subject.baseline for name, subject in subjects.items()}
    return Case(question, device, call, samples, baselines, {name: subject.budget_us for name, subject in subjects.items()})


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Capture a graph, which begins with one small kernel since an empty one is refused."""
    x = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x + 1
        yield


def devices() -> tuple[str, ...]:
    """Return the kinds of devices that are present."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def operands_of(device: str, *, bias: bool, dimensions: int = 2) -> tuple[Tensor, ...]:
    """Return x, weight and, if asked for, a bias, in bf16."""
    x = torch.randn(*((M, K) if dimensions == 2 else (2, M // 2, K)), dtype=torch.bfloat16, device=device)
    weight = torch.nn.Parameter(torch.randn(N, K, dtype=torch.bfloat16, device=device))
    return (x, weight, torch.randn(N, dtype=torch.bfloat16, device=device)) if bias else (x, weight)


def dispatch(rounds: int, calls: int) -> Iterator[Case]:
    """Yield the cost of dispatch over a bare launcher."""
    for device in devices():
        for dimensions in (2, 3):
            for bias in (False, True):
                operands = operands_of(device, bias=bias, dimensions=dimensions)
                gemm, launcher = over_preallocated(*operands[:2])
                named = {"launcher": launcher, "gemm_a16w16": gemm.gemm_a16w16, "tgemm.mm": gemm.mm, "F.linear": F_LINEAR}
                budgets = {"gemm_a16w16": BUDGET_US[bias]}
                subjects = {name: Subject(call, operands, "launcher", budgets.get(name)) for name, call in named.items()}
                call = f"{dimensions}-D{', bias' if bias else ''}"
                yield timed("dispatch", device, call, subjects, rounds=rounds, calls=calls)


def capture(rounds: int, calls: int) -> Iterator[Case]:
    """Yield what capture adds to a call."""
    for device, graph in [(device, False) for device in devices()] + [("cuda", True)] * torch.cuda.is_available():
        for bias in (False, True):
            operands = operands_of(device, bias=bias)
            budgets = {WITH: None if graph else CAPTURE_US}
            subjects = {}
            for name in (WITHOUT, WITH):
                gemm, _ = over_preallocated(*operands[:2], capture=name == WITH)
                subjects[name] = Subject(gemm.gemm_a16w16, operands, WITHOUT, budgets.get(name))
            call = f"{'into a graph' if graph else 'eager'}{', bias' if bias else ''}"
            yield timed("capture", device, call, subjects, rounds=rounds, calls=calls, graph=graph)


@torch.no_grad()
def counting(rounds: int, calls: int) -> Iterator[Case]:
    """Yield what counting adds to a call."""
    for device in devices():
        for bias in (False, True):
            operands, subjects = operands_of(device, bias=bias), {}
            for name, budget in (("not counted", None), ("counted", METRICS_US)):
                gemm, _ = over_preallocated(*operands[:2], metrics=name == "counted")
                gemm.gemm_a16w16(*operands)
                subjects[name] = Subject(gemm.gemm_a16w16, operands, "not counted", budget)
            time.sleep(2 * PAUSE + 2 * WINDOW)  # a new launcher is counted up to the end of a window
            yield timed("metrics", device, "bias" if bias else "", subjects, rounds=rounds, calls=calls)


def as_custom_op() -> Callable[..., Tensor]:
    """Return `tunedgemm.linear` as an op by `torch.library.custom_op`, the short way to make one."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return tunedgemm.linear(x, weight, bias)  # type: ignore[no-any-return]

    linear.__annotations__ = {"x": Tensor, "weight": Tensor, "bias": Tensor | None, "return": Tensor}
    return torch.library.custom_op("tunedgemm_host_time::linear", linear, mutates_args=())


@contextlib.contextmanager
def tunable() -> Iterator[None]:
    """Switch TunableOp on, which tunes at its first call."""
    torch.cuda.tunable.set_filename(str(Path(tempfile.gettempdir()) / "tunableop.csv"))
    torch.cuda.tunable.enable(True)
    try:
        yield
    finally:
        torch.cuda.tunable.enable(False)


def ways(device: str, bias: bool, custom_op: Callable[..., Tensor]) -> dict[str, Subject]:
    """Return each way into the tables and torch's own calls, by name."""
    x = torch.randn(M, K, dtype=DTYPE[device], device=device)
    module = torch.nn.Linear(K, N, bias=bias, dtype=DTYPE[device], device=device)
    weight = module.weight
    operands, full = ((x, weight, module.bias) if bias else (x, weight)), (x, weight, module.bias)
    converted = copy.deepcopy(module)
    tunedgemm.convert(converted)
    subjects = {
        "F.linear": Subject(F_LINEAR, operands, "F.linear"),
        "routed F.linear": Subject(tunedgemm.linear, operands, "F.linear"),
        "gemm_a16w16": Subject(tunedgemm.gemm_a16w16, operands, "F.linear"),
        "op of torch.library": Subject(torch.ops.tunedgemm.linear.default, full, "F.linear"),
        "custom_op": Subject(custom_op, full, "F.linear"),
        "nn.Linear": Subject(module, (x,), "nn.Linear"),
        "routed nn.Linear": Subject(module, (x,), "nn.Linear", inside=tunedgemm.patched),
        "converted nn.Linear": Subject(converted, (x,), "nn.Linear"),
    }
    if not bias:
        other = weight.detach().t().contiguous()
        with tunedgemm.patched():
            routed = torch.mm
        subjects |= {
            "torch.mm": Subject(MM, (x, weight.t()), "torch.mm"),
            "routed torch.mm": Subject(routed, (x, weight.t()), "torch.mm"),
            "torch.mm of [K, N]": Subject(MM, (x, other), "torch.mm of [K, N]"),
            "routed torch.mm of [K, N]": Subject(routed, (x, other), "torch.mm of [K, N]"),
        }
    if device == "cuda":
        subjects["F.linear, TunableOp"] = Subject(F_LINEAR, operands, "F.linear", inside=tunable)
    return {name: attrs.evolve(subject, budget_us=BUDGET_US[bias] if name in BUDGETED else None) for name, subject in subjects.items()}


def routes(rounds: int, calls: int) -> Iterator[Case | Graph]:
    """Yield the cost of each way into the tables over torch's own call."""
    os.environ["TUNEDGEMM_FALLBACK"] = ""
    torch.set_num_threads(1)  # waking others takes longer than what is measured here
    tunedgemm.reload()
    custom_op = as_custom_op()
    for device in devices():
        for bias in (False, True):
            yield timed("calls", device, "bias" if bias else "", ways(device, bias, custom_op), rounds=rounds, calls=calls)
    if torch.cuda.is_available():
        yield from (replayed(bias, rounds) for bias in (False, True))


@torch.no_grad()
def replayed(bias: bool, rounds: int) -> Graph:
    """Capture the same hundred calls of torch and of the routed function, and replay both in each
    round.
    """
    x = torch.randn(M, K, dtype=torch.bfloat16, device="cuda")
    module = torch.nn.Linear(K, N, bias=bias, dtype=torch.bfloat16, device="cuda")
    graphs = {}
    for name, call in (("torch", F_LINEAR), ("routed", tunedgemm.linear)):
        call(x, module.weight, module.bias)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CAPTURED):
                call(x, module.weight, module.bias)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graphs[name].replay()
            start.record()
            for _ in range(REPLAYS):
                graphs[name].replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / REPLAYS / CAPTURED)
    return Graph("cuda", "bias" if bias else "", samples)


def show(case: Case | Graph) -> None:
    """Print a case: a table of its subjects, or a line for graphs."""
    if isinstance(case, Graph):
        verdict = "{:.4f} ({:.4f} to {:.4f})".format(*case.ratio)
        Console().print(f"{case.device} {case.call}: a captured call, routed over torch's own: {verdict}")
        return
    title = f"{case.question} on {case.device} {case.call}, host us of a call (x of {M} rows, weight [{N}, {K}])"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    for column in ("subject", "median", "over baseline", "budget"):
        table.add_column(column, justify="left" if column == "subject" else "right", no_wrap=True)
    for row in case.rows():
        over = "" if row["baseline"] == row["subject"] else f"{row['over_us']:+.2f}"
        budget = "" if row["budget_us"] is None else f"{row['budget_us']:.1f}{' missed' if row['over_us'] > row['budget_us'] else ''}"
        table.add_row(row["subject"], f"{row['us']:.2f}", over, budget)
    Console().print(table)


#: Question -> its measurement, and the rounds and calls by default.
QUESTIONS: dict[str, tuple[Callable[[int, int], Iterator[Case | Graph]], int, int]] = {
    "dispatch": (dispatch, 101, 400),
    "capture": (capture, 201, 1000),
    "metrics": (counting, 201, 1000),
    "calls": (routes, 61, 400),
}


def main(words: list[str] | None = None) -> int:
    """Measure, print and keep every sample; with ``--check`` exit 1 if a case is over its budget."""
    parser = parser_of(__doc__)
    add_only(parser, (*QUESTIONS, "launch"), tuple(QUESTIONS))
    add_rounds(parser, 0)
    parser.add_argument("--calls", type=int, default=0, help="calls of each subject in a round (default: the question's own)")
    parser.add_argument("--table", type=Path, help="tuned table whose launchers are timed, for launch")
    add_check(parser)
    arguments = parser.parse_args(words)
    if "launch" in arguments.only and not (arguments.table and torch.cuda.is_available()):
        parser.error("--only launch: needs a GPU and a table; name one with --table")
    rows, fine = measure(arguments)
    save(arguments.output, head("host_time", rows=rows))
    return 1 if arguments.check and not fine else 0


def measure(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of all questions, and whether all budgets are kept."""
    for name in [name for name in os.environ if name.startswith("AITER_CONFIG_")]:
        del os.environ[name]  # no table may answer for the backend under test
    rows, fine = [], True
    with tempfile.TemporaryDirectory() as home:
        os.environ["TUNEDGEMM_HOME"] = home
        for question in (question for question in arguments.only if question in QUESTIONS):
            cases, rounds, calls = QUESTIONS[question]
            for case in cases(arguments.rounds or rounds, arguments.calls or calls):
                show(case)
                fine &= case.within
                rows += case.rows()
        for row in launches(arguments.table) if "launch" in arguments.only else ():
            print({name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
            rows.append(row)
    return rows, fine


if __name__ == "__main__":
    sys.exit(main())

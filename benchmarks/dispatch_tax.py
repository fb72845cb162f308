"""What dispatch costs: host time of tunedgemm's entry points over the bare launcher that they call.

A backend of one solution, whose launcher returns a tensor made beforehand, stands behind a TunedGemm of its own, so
that what is left of a call is dispatch. Subjects take turns within every round; the tax is the median over the rounds
of the difference to the bare launcher in the same round. F.linear, which launches a real product, is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tunedgemm.backends.registry import Registry, make_backend
from tunedgemm.device import device_of
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.plugin import Launcher, Solution, hookimpl

#: Microseconds that one call may cost over its launcher, by whether it has a bias.
BUDGET_US = {False: 1.2, True: 1.5}

#: x is [M, K], or [2, M/2, K]: sizes at which F.linear itself is nearly all overhead
M, N, K = 4, 32, 64


@attrs.frozen(eq=False)
class Preallocated:
    """A backend whose one launcher returns *out*."""

    out: torch.Tensor
    OPS = ("a16w16",)

    @hookimpl
    def supports(self) -> bool:
        """Everything."""
        return True

    @hookimpl
    def enumerate_solutions(self) -> list[Solution]:
        """The one solution."""
        return [Solution("preallocated", "out")]

    @hookimpl
    def heuristic_fallback(self) -> Solution:
        """The one solution."""
        return Solution("preallocated", "out")

    @hookimpl
    def bind(self) -> Launcher:
        """A launcher that does nothing."""
        out = self.out
        return Launcher(lambda *_: out)


@attrs.frozen
class Case:
    """One line of the result: where, how many dimensions, with a bias or not; nanoseconds a call by subject, one per round."""

    device: str
    dimensions: int
    bias: bool
    samples: dict[str, list[float]]

    def us(self, subject: str) -> float:
        """The median host time of one call in microseconds."""
        return statistics.median(self.samples[subject]) / 1e3

    def tax_us(self, subject: str) -> float:
        """The median over the rounds of what a call costs over the bare launcher, in microseconds."""
        pairs = zip(self.samples[subject], self.samples["launcher"], strict=True)
        return statistics.median(ours - bare for ours, bare in pairs) / 1e3

    @property
    def within(self) -> bool:
        """Whether gemm_a16w16 keeps to the budget."""
        return self.tax_us("gemm_a16w16") <= BUDGET_US[self.bias]


def over_preallocated(x: torch.Tensor, weight: torch.Tensor, *, capture: bool = False) -> tuple[TunedGemm, Callable[..., Any]]:
    """A TunedGemm over the backend whose launcher does nothing, and that launcher."""
    backend = make_backend("preallocated", Preallocated(torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)))
    registry = Registry([])
    registry.add(backend)
    gemm = TunedGemm(registry, settings=Settings(capture=capture, untuned=("preallocated",)))
    shape = gemm.dispatcher.op.shape_of(x, weight)
    chosen = gemm.dispatcher.explain(shape, device_of(x.get_device()))
    if chosen.libtype != "preallocated":
        raise RuntimeError(f"the backend under test is not what dispatch chose:\n{chosen}")
    return gemm, backend.bind(chosen.offer.solution, shape, chosen.device).call


def subjects(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[..., Any]]:
    """What takes turns, by name."""
    gemm, launcher = over_preallocated(x, weight)
    return {"launcher": launcher, "gemm_a16w16": gemm.gemm_a16w16, "tgemm.mm": gemm.mm, "F.linear": torch.nn.functional.linear}


def measure(device: str, *, dimensions: int, bias: bool, rounds: int, calls: int) -> Case:
    """Time every subject in each round, in random order, with gradients off as in serving."""
    sizes = (M, K) if dimensions == 2 else (2, M // 2, K)
    x = torch.randn(*sizes, dtype=torch.bfloat16, device=device)
    weight = torch.nn.Parameter(torch.randn(N, K, dtype=torch.bfloat16, device=device))
    operands = {"x": x, "w": weight, "b": torch.randn(N, dtype=torch.bfloat16, device=device)}
    statement = "f(x, w, b)" if bias else "f(x, w)"
    timers = {name: timeit.Timer(statement, globals={**operands, "f": f}) for name, f in subjects(x, weight).items()}
    samples: dict[str, list[float]] = {name: [] for name in timers}
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    order = list(timers)
    with torch.no_grad():
        for timer in timers.values():
            timer.timeit(calls)
        for _ in range(rounds):
            random.shuffle(order)
            for name in order:
                wait()  # an idle queue, so that no call waits for room in it
                samples[name].append(timers[name].timeit(calls) / calls * 1e9)
    return Case(device, dimensions, bias, samples)


def cases(rounds: int, calls: int) -> Iterator[Case]:
    """Every case on the devices that are present."""
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for dimensions in (2, 3):
            for bias in (False, True):
                yield measure(device, dimensions=dimensions, bias=bias, rounds=rounds, calls=calls)


def show(found: list[Case]) -> None:
    """Print one line a case."""
    names = ("launcher", "gemm_a16w16", "tgemm.mm", "F.linear")
    table = Table(title=f"Host time of one call, median, us (x of {M} rows, weight [{N}, {K}], bf16)", box=SIMPLE_HEAD, padding=0)
    for column in ("device", "call"):
        table.add_column(column)
    for column in (*names, "tax / budget"):
        table.add_column(column, justify="right", no_wrap=True)
    for case in found:
        verdict = f"{case.tax_us('gemm_a16w16'):.2f} / {BUDGET_US[case.bias]:.1f}{'' if case.within else ' over'}"
        times = (f"{case.us(name):.2f}" for name in names)
        table.add_row(case.device, f"{case.dimensions}-D{' + bias' if case.bias else ''}", *times, verdict)
    Console().print(table)


def line(case: Case) -> dict[str, Any]:
    """A case with all samples, for --json."""
    return {**attrs.asdict(case), "tax_us": case.tax_us("gemm_a16w16"), "budget_us": BUDGET_US[case.bias]}


def run(
    about: str,
    cases: Callable[[int, int], Iterator[Any]],
    show: Callable[[list[Any]], None],
    line: Callable[[Any], dict[str, Any]],
    *,
    rounds: int,
    calls: int,
) -> int:
    """The command line of a benchmark of calls: measure, print, and with --json keep every sample.

    Args:
        about: what it measures, in its first line.
        cases: the cases, from the numbers of rounds and of calls; each tells by ``within`` whether it is within its budget.
        show: prints them.
        line: one of them with all its samples.
        rounds, calls: the defaults of those numbers.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds in which the subjects take turns (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=calls, help="calls of each subject in a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--check", action="store_true", help="exit 1 where a case is over its budget")
    arguments = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("AITER_CONFIG_")]:
        del os.environ[name]  # no table may answer for the backend under test
    with tempfile.TemporaryDirectory() as home:
        os.environ["TUNEDGEMM_HOME"] = home
        found = list(cases(arguments.rounds, arguments.calls))
    show(found)
    if arguments.json:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        where = {"python": platform.python_version(), "torch": torch.__version__, "gpu": gpu, "machine": platform.machine()}
        report = {**where, "unit": "ns a call, one sample a round", "cases": [line(case) for case in found]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if arguments.check and not all(case.within for case in found) else 0


if __name__ == "__main__":
    sys.exit(run(__doc__, cases, show, line, rounds=101, calls=400))  # fewer calls than a GPU queues

"""What capture costs: host time of gemm_a16w16 while shapes are captured (AITER_TUNE_GEMM=1) over the same call without.

Both stand over the backend of dispatch_tax.py, whose launcher returns a tensor made beforehand, and take turns within every
round after their first calls; the tax is the median over the rounds of their difference. On a GPU the calls are timed a second
time while a graph is captured, which counts them apart and asks the driver of each whether it is recorded: once for every call
that is recorded, never at a replay, and so without a budget.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import timeit
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from dispatch_tax import K, M, N, over_preallocated, run
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

#: Nanoseconds that capture may cost a call that runs at once.
BUDGET_NS = 300.0

WITHOUT, WITH = "without capture", "with capture"


@attrs.frozen
class Case:
    """One line of the result: where, whether into a graph, with a bias or not; nanoseconds a call by subject, one per round."""

    device: str
    graph: bool
    bias: bool
    samples: dict[str, list[float]]

    @property
    def tax_ns(self) -> float:
        """The median over the rounds of what capture adds to a call, in nanoseconds."""
        pairs = zip(self.samples[WITH], self.samples[WITHOUT], strict=True)
        return statistics.median(ours - bare for ours, bare in pairs)

    @property
    def budget_ns(self) -> float | None:
        """What that may be; None where it is only shown."""
        return None if self.graph else BUDGET_NS

    @property
    def within(self) -> bool:
        """Whether it is no more than that."""
        return self.budget_ns is None or self.tax_ns <= self.budget_ns


@contextlib.contextmanager
def recording(x: torch.Tensor) -> Iterator[None]:
    """Capture a graph, of one small kernel lest it be empty."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x + 1
        yield


def measure(device: str, *, graph: bool, bias: bool, rounds: int, calls: int) -> Case:
    """Time both subjects in each round, in random order, with gradients off as in serving."""
    x = torch.randn(M, K, dtype=torch.bfloat16, device=device)
    weight = torch.nn.Parameter(torch.randn(N, K, dtype=torch.bfloat16, device=device))
    operands = {"x": x, "w": weight, "b": torch.randn(N, dtype=torch.bfloat16, device=device)}
    statement = "f(x, w, b)" if bias else "f(x, w)"
    functions = {name: over_preallocated(x, weight, capture=name == WITH)[0].gemm_a16w16 for name in (WITHOUT, WITH)}
    timers = {name: timeit.Timer(statement, globals={**operands, "f": f}) for name, f in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in timers}
    order = list(timers)
    with torch.no_grad():
        for timer in timers.values():
            timer.timeit(calls)
        with recording(x) if graph else contextlib.nullcontext():
            for _ in range(rounds):
                random.shuffle(order)
                for name in order:
                    samples[name].append(timers[name].timeit(calls) / calls * 1e9)
    return Case(device, graph, bias, samples)


def cases(rounds: int, calls: int) -> Iterator[Case]:
    """Every case on the devices that are present."""
    for device, graph in (("cpu", False), ("cuda", False), ("cuda", True)) if torch.cuda.is_available() else (("cpu", False),):
        for bias in (False, True):
            yield measure(device, graph=graph, bias=bias, rounds=rounds, calls=calls)


def show(found: list[Case]) -> None:
    """Print one line a case."""
    table = Table(title=f"Host time of one call, median, ns (x [{M}, {K}], weight [{N}, {K}], bf16)", box=SIMPLE_HEAD, padding=0)
    table.add_column("device")
    table.add_column("call")
    for column in (WITHOUT, WITH, "tax / budget"):
        table.add_column(column, justify="right", no_wrap=True)
    for case in found:
        times = (f"{statistics.median(case.samples[name]):.0f}" for name in (WITHOUT, WITH))
        budget = "" if case.budget_ns is None else f" / {case.budget_ns:.0f}{'' if case.within else ' over'}"
        call = f"{'into a graph' if case.graph else 'at once'}{' + bias' if case.bias else ''}"
        table.add_row(case.device, call, *times, f"{case.tax_ns:.0f}{budget}")
    Console().print(table)


def line(case: Case) -> dict[str, Any]:
    """A case with all samples, for --json."""
    return {**attrs.asdict(case), "tax_ns": case.tax_ns, "budget_ns": case.budget_ns}


if __name__ == "__main__":
    sys.exit(run(__doc__, cases, show, line, rounds=201, calls=1000))

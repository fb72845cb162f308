"""Host time of one call through each way into the tables, beside torch's own calls and what else could stand there.

No table answers and no backend but torch's is asked, so that every way ends in the same product: what is over torch's own call is the way
itself. Subjects take turns in random order within every round; what a subject costs is the median over the rounds of its difference to
torch's own call in the same round. On a GPU, a graph of a hundred routed calls is replayed beside one of torch's own, too.
"""

from __future__ import annotations

import contextlib
import copy
import os
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
import tunedgemm
from dispatch_tax import BUDGET_US, K, M, N, run
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from speed import interval

F_LINEAR, MM = torch.nn.functional.linear, torch.mm
#: Calls in a graph, and replays of it that are timed at once.
CAPTURED, REPLAYS = 100, 5
#: Those that a budget is stated for.
BUDGETED = ("routed F.linear", "gemm_a16w16", "routed torch.mm")
#: What a device multiplies at once; a CPU's product in bf16 takes longer than what is measured here.
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


@attrs.frozen
class Subject:
    """Something that is called.

    Attributes:
        call: the function.
        operands: its arguments.
        own: the subject that is torch's own call for the same.
        inside: what is entered before it is timed.
    """

    call: Callable[..., Any]
    operands: tuple[Any, ...]
    own: str
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def timer(self) -> timeit.Timer:
        """Times the call, its operands being names of the statement, as a program has them."""
        names = [f"o{place}" for place in range(len(self.operands))]
        return timeit.Timer(f"f({', '.join(names)})", globals={"f": self.call, **dict(zip(names, self.operands, strict=True))})


@attrs.frozen
class Case:
    """Host times on one device, with a bias or without: nanoseconds a call by subject, one sample a round."""

    device: str
    bias: bool
    samples: dict[str, list[float]]
    own: dict[str, str]

    def over_us(self, subject: str) -> float:
        """What a call costs over torch's own, in microseconds."""
        pairs = zip(self.samples[subject], self.samples[self.own[subject]], strict=True)
        return statistics.median(ours - torchs for ours, torchs in pairs) / 1e3

    @property
    def within(self) -> bool:
        """Whether all that have a budget keep to it."""
        return all(self.over_us(subject) <= BUDGET_US[self.bias] for subject in BUDGETED if subject in self.samples)


@attrs.frozen
class Graph:
    """A graph of routed calls beside one of torch's own: microseconds a call on the device, one sample a round."""

    device: str
    bias: bool
    samples: dict[str, list[float]]

    @property
    def ratio(self) -> tuple[float, float, float]:
        """Routed over torch's own: the median, and its 95 % interval."""
        pairs = zip(self.samples["routed"], self.samples["torch"], strict=True)
        return interval([routed / torchs for routed, torchs in pairs])

    @property
    def within(self) -> bool:
        """Whether no difference can be told."""
        _, low, high = self.ratio
        return low <= 1 <= high


def as_custom_op() -> Callable[..., torch.Tensor]:
    """`tunedgemm.linear` as an op by `torch.library.custom_op`, which is the short way to make one."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return tunedgemm.linear(x, weight, bias)  # type: ignore[no-any-return]

    linear.__annotations__ = {"x": torch.Tensor, "weight": torch.Tensor, "bias": torch.Tensor | None, "return": torch.Tensor}
    return torch.library.custom_op("tunedgemm_call_time::linear", linear, mutates_args=())


@contextlib.contextmanager
def tunable() -> Iterator[None]:
    """With TunableOp on, which tunes at its first call."""
    torch.cuda.tunable.set_filename(str(Path(tempfile.gettempdir()) / "tunableop.csv"))
    torch.cuda.tunable.enable(True)
    try:
        yield
    finally:
        torch.cuda.tunable.enable(False)


def subjects(device: str, bias: bool, custom_op: Callable[..., torch.Tensor]) -> dict[str, Subject]:
    """What takes turns, by name."""
    x = torch.randn(M, K, dtype=DTYPE[device], device=device)
    module = torch.nn.Linear(K, N, bias=bias, dtype=DTYPE[device], device=device)
    weight = module.weight
    operands = (x, weight, module.bias) if bias else (x, weight)
    full = (x, weight, module.bias)
    converted = copy.deepcopy(module)
    tunedgemm.convert(converted)
    found = {
        "F.linear": Subject(F_LINEAR, operands, "F.linear"),
        "routed F.linear": Subject(tunedgemm.linear, operands, "F.linear"),
        "gemm_a16w16": Subject(tunedgemm.gemm_a16w16, operands, "F.linear"),
        "op of torch.library": Subject(torch.ops.tunedgemm.linear.default, full, "F.linear"),
        "custom_op": Subject(custom_op, full, "F.linear"),
        "nn.Linear": Subject(module, (x,), "nn.Linear"),
        "routed nn.Linear": Subject(module, (x,), "nn.Linear", tunedgemm.patched),
        "converted nn.Linear": Subject(converted, (x,), "nn.Linear"),
    }
    if not bias:
        other = weight.detach().t().contiguous()
        with tunedgemm.patched():
            routed = torch.mm
        found |= {
            "torch.mm": Subject(MM, (x, weight.t()), "torch.mm"),
            "routed torch.mm": Subject(routed, (x, weight.t()), "torch.mm"),
            "torch.mm of [K, N]": Subject(MM, (x, other), "torch.mm of [K, N]"),
            "routed torch.mm of [K, N]": Subject(routed, (x, other), "torch.mm of [K, N]"),
        }
    if device == "cuda":
        found["F.linear, TunableOp"] = Subject(F_LINEAR, operands, "F.linear", tunable)
    return found


def measure(device: str, bias: bool, rounds: int, calls: int, custom_op: Callable[..., torch.Tensor]) -> Case:
    """Time every subject in each round, with gradients off as in serving."""
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    with torch.no_grad():
        asked = subjects(device, bias, custom_op)
        timers = {name: subject.timer() for name, subject in asked.items()}
        samples: dict[str, list[float]] = {name: [] for name in asked}
        for number in range(rounds + 1):
            for name in random.sample(list(asked), len(asked)):
                with asked[name].inside():
                    timers[name].timeit(3)
                    wait()  # an idle queue, so that no call waits for room in it
                    taken = timers[name].timeit(calls) / calls * 1e9
                if number:  # the first round loads and binds
                    samples[name].append(taken)
    return Case(device, bias, samples, {name: subject.own for name, subject in asked.items()})


@torch.no_grad()
def replayed(bias: bool, rounds: int) -> Graph:
    """Capture the same hundred calls of torch and of the routed function, and replay both in each round."""
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
    return Graph("cuda", bias, samples)


def cases(rounds: int, calls: int) -> Iterator[Case | Graph]:
    """Every case on the devices that are present."""
    os.environ["TUNEDGEMM_FALLBACK"] = ""
    torch.set_num_threads(1)  # waking others takes longer than what is measured here
    tunedgemm.reload()
    custom_op = as_custom_op()
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for bias in (False, True):
            yield measure(device, bias, rounds, calls, custom_op)
    if torch.cuda.is_available():
        yield from (replayed(bias, rounds) for bias in (False, True))


def show(found: list[Case | Graph]) -> None:
    """Print a table of the calls, and a line a graph."""
    console = Console()
    for case in found:
        where = f"{case.device}{', bias' if case.bias else ''}"
        if isinstance(case, Graph):
            ratio, low, high = case.ratio
            console.print(f"{where}: a captured call, routed over torch's own: {ratio:.4f} ({low:.4f} to {high:.4f})")
            continue
        table = Table(title=f"Host time of one call on {where}, us (x [{M}, {K}], weight [{N}, {K}])", box=SIMPLE_HEAD, padding=0)
        for column in ("call", "median", "over torch's own", "budget"):
            table.add_column(column, justify="left" if column == "call" else "right", no_wrap=True)
        for name, samples in case.samples.items():
            over = "" if case.own[name] == name else f"{case.over_us(name):+.2f}"
            budget = f"{BUDGET_US[case.bias]:.1f}" if name in BUDGETED else ""
            table.add_row(name, f"{statistics.median(samples) / 1e3:.2f}", over, budget)
        console.print(table)


def line(case: Case | Graph) -> dict[str, Any]:
    """A case with all samples, for --json."""
    if isinstance(case, Graph):
        return {**attrs.asdict(case), "unit": "us a captured call", "ratio": case.ratio, "within": case.within}
    return {**attrs.asdict(case), "over_us": {name: case.over_us(name) for name in case.samples}, "within": case.within}


if __name__ == "__main__":
    sys.exit(run(__doc__, cases, show, line, rounds=61, calls=400))  # fewer calls than a GPU queues

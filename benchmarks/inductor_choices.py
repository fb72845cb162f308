"""What torch.compile's max-autotune makes of a linear layer: from ATen's products, from ATen's and Triton's, and with ours on offer.

    python benchmarks/inductor_choices.py --json choices.json
    python benchmarks/inductor_choices.py --shapes 1,4096,4096 256,4096,14336

Every arm is compiled for each shape, M, N and K, and takes turns with the others in random order. On a GPU a call is one of a captured
graph, whose weights alternate so that none is in the cache; on a CPU it is a call. A ratio is the median of the rounds', ATen's time
over the arm's, with its 95 % interval. "took" names what Inductor chose in the arm, "our op" for ours.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import attrs
import torch
import tunedgemm
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from speed import interval
from tunedgemm.integrations import inductor

console = Console()
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: arm -> what is compiled, each with code of its own, by which the compiler keeps what it made; and the backends, "" for no max-autotune
ARMS: dict[str, tuple[Product, str]] = {
    "ATEN": (lambda x, weight: torch.nn.functional.linear(x, weight, None), "ATEN"),
    "ATEN,TRITON": (lambda x, weight: torch.nn.functional.linear(x, weight, None), "ATEN,TRITON"),
    "offered": (lambda x, weight: tunedgemm.linear(x, weight, None), "ATEN,TRITON"),
    "our op": (lambda x, weight: tunedgemm.linear(x, weight, None), ""),
}
#: Decoding one and 32 sequences and a prefill, through Llama 3.1 8B's widest layer; on a CPU something small.
SHAPES = {"cuda": ("1,14336,4096", "32,14336,4096", "1024,14336,4096"), "cpu": ("8,48,64",)}
#: Bytes of weights that a graph goes through: more than any cache holds; and its calls at least.
BEYOND_CACHE, CALLS = 512 << 20, 8


@attrs.frozen
class Cell:
    """One shape: microseconds of a call by arm, one sample a round, and what Inductor took."""

    shape: tuple[int, int, int]
    samples: dict[str, list[float]]
    took: dict[str, str]
    seconds: float

    def over(self, arm: str) -> tuple[float, float, float]:
        """ATen's time over that of an arm: the median over the rounds and its 95 % interval."""
        return interval([before / after for before, after in zip(self.samples["ATEN"], self.samples[arm], strict=True)])


def compiled(arm: str, x: torch.Tensor, weight: torch.Tensor) -> tuple[Product, str]:
    """An arm's product, compiled and run once, and the last choice that Inductor made for it."""
    from torch._inductor.select_algorithm import add_feedback_saver, clear_feedback_savers

    function, backends = ARMS[arm]
    taken: list[str] = []

    def keep(timings: dict[Any, float], *_: Any, **__: Any) -> None:
        if timings:
            taken.append(min(timings, key=timings.__getitem__).name)

    add_feedback_saver(keep)
    inductor.offer() if arm == "offered" else inductor.withdraw()
    options: dict[str, Any] = {"max_autotune_gemm": True, "max_autotune_gemm_backends": backends} if backends else {}
    try:
        run = torch.compile(function, fullgraph=True, dynamic=False, options=options)
        out = run(x, weight)
    finally:
        inductor.withdraw()
        clear_feedback_savers()
    wanted = torch.nn.functional.linear(x.float(), weight.float())
    if (out.float() - wanted).norm() > 0.02 * wanted.norm():
        raise AssertionError(f"{arm}: the product of {tuple(x.shape)} and {tuple(weight.shape)} is wrong")
    if not backends or any(name.startswith("tunedgemm_") and "fallback" in name for name in taken):
        return run, "our op"
    return run, next((name for name in reversed(taken) if not name.startswith("tunedgemm_")), "ATen's")


def timer(run: Product, x: torch.Tensor, weights: list[torch.Tensor]) -> Callable[[], float]:
    """What takes a sample: microseconds of one call."""
    if not x.is_cuda:

        def called() -> float:
            start = time.perf_counter()
            for weight in weights:
                run(x, weight)
            return (time.perf_counter() - start) * 1e6 / len(weights)

        return called
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(x, weight)

    def replayed() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / len(weights)

    return replayed


@torch.inference_mode()
def measured(shape: tuple[int, int, int], device: str, rounds: int) -> Cell:
    """Compile all arms for a shape, and time them in turns."""
    torch._dynamo.reset()
    begin, (m, n, k) = time.perf_counter(), shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, weight = torch.randn(m, k, dtype=dtype, device=device), torch.randn(n, k, dtype=dtype, device=device)
    copies = max(CALLS, math.ceil(BEYOND_CACHE / weight.nbytes)) if device == "cuda" else CALLS
    weights = [weight, *(weight.clone() for _ in range(copies - 1))]
    ready, took = {}, {}
    for arm in ARMS:
        run, took[arm] = compiled(arm, x, weight)
        ready[arm] = timer(run, x, weights)
    samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(rounds + 1):
        for arm in random.sample(list(ARMS), len(ARMS)):
            taken = ready[arm]()
            if number:  # the first round fills caches
                samples[arm].append(taken)
    return Cell(shape, samples, took, time.perf_counter() - begin)


def show(cells: list[Cell]) -> None:
    """Print a line a shape and arm."""
    table = Table(title="A linear layer by max-autotune: us of a call, ATen's time over it", box=SIMPLE_HEAD, padding=0)
    for column in ("M, N, K", "arm", "us", "gain", "95 %", "took"):
        table.add_column(column, justify="right" if column in ("us", "gain", "95 %") else "left", no_wrap=True)
    for cell in cells:
        for arm, samples in cell.samples.items():
            gain, low, high = cell.over(arm)
            times = f"{interval(samples)[0]:.2f}", f"{gain:.3f}", f"{low:.3f} to {high:.3f}"
            table.add_row(", ".join(map(str, cell.shape)), arm, *times, cell.took[arm][:20])
    console.print(table)


def main() -> int:
    """Measure each shape, print all, keep all."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES[device], metavar="M,N,K", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=31, help="rounds in which the arms take turns (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # what was chosen before a table changed is not to be found
        for text in arguments.shapes:
            m, n, k = map(int, text.split(","))
            cells.append(measured((m, n, k), device, arguments.rounds))
            console.print(f"{text}: {cells[-1].seconds:.1f} s")
    show(cells)
    if arguments.json:
        where = {
            "date": datetime.now(timezone.utc).date().isoformat(), "gpu": torch.cuda.get_device_name() if device == "cuda" else "",
            "machine": platform.machine(), "torch": torch.__version__, "tables": tunedgemm.fingerprint(), "unit": "us",
        }  # fmt: skip
        lines = [{**attrs.asdict(cell), "gain": {arm: cell.over(arm) for arm in ARMS}} for cell in cells]
        arguments.json.write_text(json.dumps({**where, "cells": lines}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Fit the rates by which a plugin orders its kernels for Hopper to measured times.

    tunedgemm tune --op a8w8 -i shapes.csv -o tuned.csv -o2 a8w8-profile.csv --libtype asm
    python benchmarks/cost_fit.py a8w8-profile.csv [...] [--steps 400] [--leave-out] [-o FOLDER]

A file's name begins with the op of its profile, up to a hyphen. The rates are those of
`tunedgemm_asm/ptx/cost.py`, or with ``--libtype triton`` of `tunedgemm_triton/cost.py`. The loss of
a set of rates is the error of the predicted times, with fast kernels counting more. To it are added
the losses of the first kernel in their order and of the best of the first eight. Only listed
kernels count for the order, not neighbours that a tuning added. Steps change one rate at random and
are kept if the loss falls.

Large products are raced at a lower clock than that of the screening, since few kernels that all
keep the chip busy warm it. Times of a race are therefore divided by their shape's slowdown: the
median ratio of measured to predicted times near the best, of raced kernels over screened ones.
``--as-timed`` leaves times unchanged. Of a compressed table of trials (``.csv.gz``) all count as
screened.

``--leave-out`` fits without each shape in turn and prints what that shape then loses: whether the
fit generalises.
"""

from __future__ import annotations

import functools
import math
import random
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
from harness import head, parser_of, save
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import read_rows
from tunedgemm.testing.replay import read_times
from tunedgemm_asm.ptx import cost as asm_cost
from tunedgemm_asm.ptx.names import KernelConfig
from tunedgemm_asm.ptx.names import parse_name as parse_asm
from tunedgemm_asm.ptx.space import enumerate_configs
from tunedgemm_triton import cost as triton_cost
from tunedgemm_triton.families import DENSE
from tunedgemm_triton.names import Gemm, Tma
from tunedgemm_triton.names import parse_name as parse_triton

HOPPER = Device("sm_90", 132)


def _timed_triton(name: str) -> Gemm | Tma:
    """Return the kernel of a timed name. Times of two groups of specialised warps are of revision 1,
    whose host made both descriptors.
    """
    return parse_triton(re.sub(r"^tma_r1(_m(?:128|256).*_ws)$", r"tma_r2\1", name))


@attrs.frozen
class Model:
    """The cost model of a backend.

    Attributes:
        module: holds the rates.
        rates: their names.
        parse: function from a kernel's name to the kernel.
        listed: function from a shape to its kernels, neighbours left out.
        predict: function from a kernel, splits and a shape to microseconds.
        kinds: types of kernels that the model predicts.
    """

    module: ModuleType
    rates: tuple[str, ...]
    parse: Callable[[str], Any]
    listed: Callable[[Shape], Iterable[Any]]
    predict: Callable[[Any, int, Shape], float]
    kinds: tuple[type, ...] = (object,)


def _asm_us(kernel: KernelConfig, splits: int, shape: Shape) -> float:
    """Return asm's predicted time by the rates of now, which its cache does not compare."""
    asm_cost._step_us.cache_clear()
    return asm_cost.cost_of(kernel, splits, shape, HOPPER.cu_num)


MODELS = {
    "asm": Model(
        asm_cost,
        (
            *("_CYCLES_A_US", "_SHARED_BYTES", "_MEMORY", "_L2", "_SM", "_LATENCY", "_MEETING", "_STORED", "_GIVING"),
            *("_TURN", "_SHOWN_BY_ROW", "_SHOWN_BY_BLOCK", "_SHOWN_OVERLAPPED", "_FACTOR", "_WAITED", "_TOGETHER"),
        ),
        parse_asm,
        enumerate_configs,
        _asm_us,
    ),
    "triton": Model(
        triton_cost,
        (
            *("_MEMORY", "_L2", "_MULTIPROCESSOR", "_DESCRIBED", "_POINTERS", "_SPECIALISED", "_EIGHT_WARPS"),
            *("_LATENCY", "_STEP", "_LAUNCH", "_STORED", "_MEETING", "_ADDED"),
        ),
        _timed_triton,
        lambda shape: (parse_triton(solution.kernel_name) for solution in DENSE.enumerate_solutions(shape, HOPPER)),
        lambda kernel, splits, shape: triton_cost.hopper_us(kernel, splits, shape, HOPPER),
        (Gemm, Tma),
    ),
}
#: Fields of the shapes of an op's trials.
LIKE = {"a16w16": Shape("a16w16", 1, 1, 1), "a8w8": Shape("a8w8", 1, 1, 1, "fp8_e4m3fn", "bf16", scale="row")}
#: Solutions from the beginning of a list of which the best counts; what it loses, and what the very
#: first does, over the error of times.
FIRST, OF_FIRST, OF_GUESS = 8, 0.5, 0.2
#: Standard deviation of a step, of the logarithm of a rate.
REACH = 0.25
#: Kernels count as near the best up to this multiple of its time; so many of each kind tell at
#: which clock a race was run.
NEAR, ENOUGH = 1.25, 5


@attrs.frozen
class Timed:
    """A kernel's time on a shape in microseconds, whether a race took it, and whether the kernel
    may be on the shape's list.
    """

    kernel: Any
    splits: int
    us: float
    raced: bool = False
    listed: bool = True
    model: Model = MODELS["asm"]


@attrs.frozen
class Product:
    """A shape in one profile; other profiles are of other days."""

    run: str
    shape: Shape


Times = dict[Product, list[Timed]]


def read(paths: Sequence[Path], libtype: str = "asm") -> Times:
    """Return the times of the backend's kernels; lines without a time, such as of a fault, are
    left out.

    Raises:
        UnknownOpError: a file's name begins with no op.
        TableError: a file cannot be read.
    """
    times: Times = {}
    model = MODELS[libtype]
    listed = functools.lru_cache(lambda shape: frozenset(model.listed(shape)))
    for path in paths:
        for shape, name, splits, us, raced in _lines(path, libtype):
            kernel = model.parse(name)
            if isinstance(kernel, model.kinds):
                timed = Timed(kernel, splits or 1, us, raced, kernel in listed(shape), model)
                times.setdefault(Product(str(path), shape), []).append(timed)
    return times


def _lines(path: Path, libtype: str) -> Iterable[tuple[Shape, str, int, float, bool]]:
    """Yield shape, kernel, splits, microseconds, and whether a race took the time."""
    op = path.name.partition("-")[0]
    if path.suffix == ".gz":
        for shape, own in read_times(path, LIKE[op]).items():
            yield from ((shape, name, splits, us, False) for (of, name, splits), us in own.items() if of == libtype)
        return
    for row in read_rows(path, op_named(op))[0]:
        if row.solution.libtype == libtype and row.valid:
            yield row.shape, row.solution.kernel_name, row.solution.split_k, row.us, dict(row.extra).get("status") == "ok"


def predicted(shape: Shape, timed: Timed) -> float:
    """Return the microseconds that the current rates predict for a kernel."""
    return timed.model.predict(timed.kernel, timed.splits, shape)


def slower(shape: Shape, times: list[Timed]) -> float:
    """Return how many times as long as screened kernels raced ones took; 1 if too few are near the
    best to tell.
    """
    least = min(timed.us for timed in times)
    near = [(timed.raced, math.log(timed.us / predicted(shape, timed))) for timed in times if timed.us < NEAR * least]
    raced, screened = ([error for race, error in near if race == kind] for kind in (True, False))
    if min(len(raced), len(screened)) < ENOUGH:
        return 1.0
    return max(1.0, math.exp(statistics.median(raced) - statistics.median(screened)))


def at_one_clock(times: Times) -> Times:
    """Return the times, those of races scaled as if they had been screened."""
    factors = {product: slower(product.shape, own) for product, own in times.items()}
    return {
        product: [attrs.evolve(timed, us=timed.us / factors[product]) if timed.raced else timed for timed in own]
        for product, own in times.items()
    }


def judged(shape: Shape, times: list[Timed]) -> tuple[float, float, float]:
    """Return, for the current rates, the error of the times, and what the best of the first and the
    first guess lose.
    """
    best = min(timed.us for timed in times)
    guesses = [(predicted(shape, timed), timed.us, timed.listed) for timed in times]
    error = sum(abs(math.log(guess / us)) * (best / us) ** 2 for guess, us, _ in guesses) / len(times)
    first = [us for _, us, _ in sorted(guess for guess in guesses if guess[2])[:FIRST]]
    return error, min(first) / best - 1, first[0] / best - 1


def worth(shape: Shape, times: list[Timed]) -> float:
    """Return the loss of the current rates for one shape; 0 is perfect."""
    error, first, guess = judged(shape, times)
    return error + OF_FIRST * first + OF_GUESS * guess


def loss(times: Times) -> float:
    """Return the loss of the current rates; 0 is perfect."""
    return sum(worth(product.shape, own) for product, own in times.items())


def fit(times: Times, steps: int, seed: int = 0) -> None:
    """Change the rates so that the loss falls."""
    chance, least = random.Random(seed), loss(times)
    for _ in range(steps if times else 0):
        model = model_of(times)
        name = chance.choice(model.rates)
        before = getattr(model.module, name)
        setattr(model.module, name, before * math.exp(chance.gauss(0, REACH)))
        now = loss(times)
        if now < least:
            least = now
        else:
            setattr(model.module, name, before)


def model_of(times: Times) -> Model:
    """Return the model of the timed kernels."""
    return next(iter(times.values()))[0].model


def without(times: Times, shape: Shape, steps: int) -> list[tuple[Product, tuple[float, float, float]]]:
    """Judge the products of a shape by rates that are fitted to the other shapes; restore the
    rates.
    """
    model = model_of(times)
    start = {name: getattr(model.module, name) for name in model.rates}
    try:
        fit({product: own for product, own in times.items() if product.shape != shape}, steps)
        return [(product, judged(shape, own)) for product, own in times.items() if product.shape == shape]
    finally:
        for name, rate in start.items():
            setattr(model.module, name, rate)


def show(product: Product, count: int, judgement: tuple[float, float, float]) -> None:
    """Print a line for a product."""
    error, first, guess = judgement
    verdict = f"error {error:.3f}, best of the first {FIRST} +{first:.1%}, first guess +{guess:.1%}"
    print(f"{product.run}: {product.shape}: {count} times, {verdict}", flush=True)


def show_means(verdicts: dict[Product, tuple[float, float, float]]) -> None:
    """Print a line for each profile, and one for all."""
    runs = {product.run: [verdict for other, verdict in verdicts.items() if other.run == product.run] for product in verdicts}
    for run, judgements in (*runs.items(), ("all", list(verdicts.values()))):
        error, first, guess = (statistics.mean(column) for column in zip(*judgements, strict=True))
        _, most_first, most_guess = (max(column) for column in zip(*judgements, strict=True))
        lost = f"best of the first {FIRST} +{first:.1%}, at most {most_first:.1%}, first guess +{guess:.1%}, at most {most_guess:.1%}"
        print(f"{run}: {len(judgements)} shapes, error {error:.3f}, {lost}", flush=True)


def main(words: list[str] | None = None) -> None:
    """Fit and print."""
    parser = parser_of(__doc__)
    parser.add_argument("profiles", type=Path, nargs="+", metavar="PROFILE")
    parser.add_argument("--libtype", choices=MODELS, default="asm", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=400, help="0 judges the current rates (default: %(default)d)")
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--as-timed", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="processes that fit without a shape each (default: %(default)d)")
    arguments = parser.parse_args(words)
    times = read(arguments.profiles, arguments.libtype)
    times = times if arguments.as_timed else at_one_clock(times)
    if arguments.leave_out:
        shapes = list(dict.fromkeys(product.shape for product in times))
        with ProcessPoolExecutor(arguments.jobs) as pool:
            waiting = [pool.submit(without, times, shape, arguments.steps) for shape in shapes]
            verdicts = {product: verdict for future in waiting for product, verdict in future.result()}
    else:
        fit(times, arguments.steps)
        verdicts = {product: judged(product.shape, own) for product, own in times.items()}
    for product, verdict in verdicts.items():
        show(product, len(times[product]), verdict)
    show_means(verdicts)
    model = model_of(times)
    rates = [f"{name} = {getattr(model.module, name):.4g}" for name in model.rates]
    if not arguments.leave_out:
        print(", ".join(rates))
    rows = [
        {"profile": product.run, "shape": str(product.shape), "times": len(times[product]), "error": error, "first": first, "guess": guess}
        for product, (error, first, guess) in verdicts.items()
    ]
    save(arguments.output, head("cost_fit", libtype=arguments.libtype, leave_out=arguments.leave_out, summary=rates, rows=rows))


if __name__ == "__main__":
    main()

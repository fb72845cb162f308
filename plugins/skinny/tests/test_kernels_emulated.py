"""The kernels' source in the emulator with 16-bit operands, warps of 32 and of 64."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
import torch

pytestmark = pytest.mark.nightly

both = pytest.mark.parametrize("machine", [32, 64], indirect=True, ids=["nvidia", "amd"])
nvidia = pytest.mark.parametrize("machine", [32], indirect=True, ids=["nvidia"])
families = pytest.mark.cases("family", ["rows", "tiles"])


@attrs.frozen
class Edited:
    """A program with a changed text."""

    program: Any
    text: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def source(self) -> str:
        return self.text


#: Macros that differ from the defaults; in `tiles` m counts the instruction's columns.
ROWS: list[dict[str, Any]] = [
    {},
    {"m": 8, "n_each": 8, "vec": 8},
    {"m": 3, "n_each": 2, "warps_n": 4, "unroll": 4, "vec": 4, "bias": "bf16"},
    {"m": 5, "n_each": 4, "warps_k": 4, "unroll": 2, "vec": 2, "dtype": "fp16", "out": "fp16", "bias": "fp16"},
    {"m": 2, "n_each": 1, "warps_n": 2, "warps_k": 2, "vec": 1, "out": "fp32", "bias": "fp32"},
    {"m": 4, "n_each": 4, "warps_n": 2, "warps_k": 4, "x_shared": True},
    {"m": 7, "n_each": 2, "warps_k": 2, "unroll": 2, "vec": 1, "x_shared": True, "dtype": "fp16", "out": "fp32"},
    {"m": 6, "n_each": 8, "warps_n": 2, "warps_k": 2, "unroll": 8, "dtype": "fp16", "out": "bf16", "bias": "fp32"},
    {"m": 1, "n_each": 1, "warps_n": 8, "warps_k": 2, "unroll": 8, "vec": 2},
    {"m": 3, "x_shared": True, "dtype": "fp16"},
]
TILES: list[dict[str, Any]] = [
    {},
    {"m": 4, "n_each": 4},
    {"m": 2, "n_each": 2, "warps_n": 2, "unroll": 4, "vec": 4, "dtype": "fp16", "out": "fp16", "bias": "fp16"},
    {"m": 1, "n_each": 1, "warps_k": 8, "unroll": 2, "vec": 2, "bias": "fp32"},
    {"m": 3, "n_each": 2, "warps_n": 2, "warps_k": 4, "vec": 1, "out": "fp32", "bias": "bf16"},
    {"m": 1, "n_each": 4, "warps_k": 2, "unroll": 8, "dtype": "fp16", "out": "fp32"},
    {"m": 2, "n_each": 2, "warps_n": 2, "warps_k": 4, "unroll": 2, "x_shared": True},
    {"m": 3, "n_each": 1, "warps_n": 4, "vec": 1, "x_shared": True, "bias": "fp32", "dtype": "fp16"},
]
#: Programs with a ring of asynchronous copies; AMD has none.
RINGS: list[tuple[str, dict[str, Any]]] = [
    ("rows", {"m": 3, "n_each": 2, "warps_k": 2, "unroll": 2, "stages": 2}),
    ("rows", {"m": 8, "n_each": 4, "warps_n": 2, "stages": 3, "vec": 2, "bias": "bf16"}),
    ("rows", {"m": 2, "n_each": 1, "warps_k": 4, "unroll": 4, "stages": 4, "x_shared": True, "vec": 4}),
    ("rows", {"stages": 3}),
    ("tiles", {"m": 2, "n_each": 2, "warps_k": 2, "unroll": 2, "stages": 2, "dtype": "fp16", "out": "fp16"}),
    ("tiles", {"m": 1, "n_each": 1, "warps_n": 4, "stages": 3, "vec": 4}),
    ("tiles", {"m": 4, "n_each": 1, "warps_k": 4, "unroll": 4, "stages": 4, "vec": 2, "bias": "fp32"}),
    ("tiles", {"m": 2, "n_each": 2, "warps_n": 4, "warps_k": 2, "unroll": 2, "stages": 3, "x_shared": True}),
    ("tiles", {"m": 8, "n_each": 1, "warps_n": 2, "stages": 2, "vec": 4, "x_shared": True, "dtype": "fp16", "bias": "fp32"}),
    ("wgmma", {"m": 8, "stages": 2}),
    ("wgmma", {"m": 16, "n_each": 2, "warps_k": 2, "stages": 3, "vec": 4, "dtype": "fp16", "out": "fp32", "bias": "bf16"}),
    ("wgmma", {"m": 32, "warps_n": 2, "unroll": 2, "stages": 4, "vec": 2, "out": "fp16"}),
    ("wgmma", {"m": 64, "warps_k": 4, "stages": 2, "bias": "fp32"}),
]
#: Programs whose splits meet in a cluster.
CLUSTERS: list[tuple[str, dict[str, Any]]] = [
    ("rows", {"m": 3, "n_each": 2, "warps_k": 2, "cluster": 2}),
    ("rows", {"m": 1, "n_each": 4, "warps_n": 2, "unroll": 2, "stages": 2, "vec": 2, "cluster": 5, "bias": "bf16"}),
    ("tiles", {"m": 2, "n_each": 1, "warps_n": 2, "warps_k": 2, "cluster": 3, "out": "fp32"}),
    ("tiles", {"m": 1, "n_each": 2, "warps_n": 2, "stages": 3, "x_shared": True, "cluster": 8, "vec": 4}),
    ("wgmma", {"m": 16, "warps_n": 2, "unroll": 2, "stages": 3, "cluster": 4, "bias": "fp16"}),
]


def program(programs: Any, wave: int, family: str, **given: Any) -> Any:
    """Make a program; in the family `tiles` *m* counts the instruction's columns, up to 64 rows."""
    if family == "tiles":
        columns = programs.COLUMNS[wave]
        given["m"] = min(columns * given.get("m", 1), 64)
    return programs.Program(family, wave, **given)


def rows_of(kernel: Any, programs: Any) -> list[int]:
    """List values of M of a program: the most, in `tiles` the least and one between."""
    return [kernel.m] if kernel.family == "rows" else [kernel.m, kernel.m - programs.COLUMNS[kernel.wave] + 1, kernel.m - 3]


def wrong(machine: Any, kernel: Any, case: Any, seed: int) -> bool:
    """Check whether a launch fails or gives a wrong output."""
    try:
        return machine.fault(kernel, case, seed) != ""
    except AssertionError:
        return True


def faults(machine: Any, programs: Any, kernel: Any) -> list[str]:
    """List the faults for N around a block, K around an iteration, and even and ragged splits."""
    vec, span = kernel.vec, kernel.span
    ks = sorted({vec, span - vec, span, span + vec, 2 * span + 3 * vec, 3 * kernel.cluster * span})
    outcomes = []
    for turn, k in enumerate(k for k in ks if k > 0):
        for n in (1, kernel.per_block, kernel.per_block + 1, 2 * kernel.per_block - 1):
            m = rows_of(kernel, programs)[(turn + n) % len(rows_of(kernel, programs))]
            for splits in {1, min(1 + (turn + n) % 4, k // kernel.vec)} if not kernel.cluster else {kernel.cluster}:
                case = programs.whole(kernel, m, n, k, splits, seed=k + n)
                if kernel.cluster and case.splits != kernel.cluster:  # K is too short for so many
                    continue
                outcomes.append(machine.fault(kernel, case, seed=n))
    return [fault for fault in outcomes if fault]


@both
@pytest.mark.cases("given", ROWS)
def test_rows(machine: Any, programs: Any, given: dict[str, Any]) -> None:
    """The family `rows` gives the rounded sum at the edges of N, K and the splits."""
    assert faults(machine, programs, program(programs, machine.wave, "rows", **given)) == []


@both
@pytest.mark.cases("given", TILES)
def test_tiles(machine: Any, programs: Any, given: dict[str, Any]) -> None:
    """The family `tiles` gives the rounded sum at the edges of M, N, K and the splits."""
    assert faults(machine, programs, program(programs, machine.wave, "tiles", **given)) == []


@nvidia
@pytest.mark.cases(("family", "given"), RINGS)
def test_rings(machine: Any, programs: Any, family: str, given: dict[str, Any]) -> None:
    """A weight through a ring of asynchronous copies gives the rounded sum."""
    assert faults(machine, programs, program(programs, 32, family, **given)) == []


@nvidia
@pytest.mark.cases(("family", "given"), CLUSTERS)
def test_clusters(machine: Any, programs: Any, family: str, given: dict[str, Any]) -> None:
    """Splits that meet in a cluster give the rounded sum without partials and counters."""
    assert faults(machine, programs, program(programs, 32, family, **given)) == []


@both
@pytest.mark.cases(("family", "m"), [*(("rows", m) for m in range(1, 9)), *(("tiles", m) for m in range(1, 65))])
def test_every_number_of_rows(machine: Any, programs: Any, family: str, m: int) -> None:
    """Every M that a family serves is right, in two splits."""
    columns = programs.COLUMNS[machine.wave]
    kernel = programs.Program(family, machine.wave, m=m if family == "rows" else programs.up(m, columns), n_each=2, warps_k=2)
    assert machine.fault(kernel, programs.whole(kernel, m, 37, 264, splits=2, seed=m)) == ""


@both
@pytest.mark.cases("seed", range(24))
def test_random_programs(machine: Any, programs: Any, seed: int) -> None:
    """Random programs are right for random sizes, splits and orders of threads and blocks."""
    chosen = random.Random(programs.seed_of(seed, machine.wave))
    kernel = programs.drawn(chosen, machine.wave)
    for _ in range(3):
        m = kernel.m if kernel.family == "rows" else chosen.randint(1, kernel.m)
        n, k = chosen.randint(1, 2 * kernel.per_block + 5), kernel.vec * chosen.randint(1, min(3 * kernel.span, 4096) // kernel.vec)
        case = programs.whole(kernel, m, n, k, chosen.choice([1, 1, 2, 3, min(16, k // kernel.vec)]), chosen.randint(0, 999))
        assert machine.fault(kernel, case, chosen.randint(0, 999)) == ""


@both
@families
@pytest.mark.cases(("dtype", "out"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32")])
def test_normal_numbers(machine: Any, programs: Any, family: str, dtype: str, out: str) -> None:
    """Normal numbers have the error of float32 sums and one rounding."""
    kernel = program(programs, machine.wave, family, n_each=2, warps_k=4, unroll=2, dtype=dtype, out=out, bias=out)
    case = programs.normal(kernel, kernel.m, 50, 3000, splits=2)
    wanted = case.reference()
    rounding = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 0.0}[out]
    error = (machine.run(kernel, case).double() - wanted).abs()
    assert (error <= rounding * wanted.abs() + 2.0**-20 * case.size()).all()


@both
@pytest.mark.cases("out", ["bf16", "fp16"])
@pytest.mark.cases("bits", [0x7FFFFFFF, 0x7FC00000, -1, 0x7FC00001])
def test_every_nan_stays_one(machine: Any, programs: Any, out: str, bits: int) -> None:
    """A NaN stays a NaN when its fraction is rounded away."""
    kernel = program(programs, machine.wave, "rows", out=out, bias="fp32")
    bias = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert machine.run(kernel, attrs.evolve(programs.whole(kernel, 1, 1, 8), bias=bias)).isnan().all()


@both
@families
@pytest.mark.cases("out", ["bf16", "fp16"])
def test_outputs_round_to_even(machine: Any, programs: Any, family: str, out: str) -> None:
    """Every sum is rounded once, to nearest even, the largest to infinity."""
    kernel = program(programs, machine.wave, family, out=out, bias="fp32")
    digits = {"bf16": 8, "fp16": 11}[out]
    bits = torch.arange(64) * 2.0 ** (6 - digits) / 64
    values = torch.cat([1 + bits, -1 - bits, (1 + bits) * 2.0**15, torch.tensor([65504.0, 65519.0, 65520.0, 65536.0, 3.39e38, -3.4e38])])
    values = torch.cat(
        [values, (1 + bits) * 2.0**-14, (1 + bits) * 2.0**-15, (1 + bits) * 2.0**-24, bits * 2.0**-24, (1 + bits) * 2.0**-126]
    )
    x, weight = (torch.zeros(rows, 8, dtype=torch.bfloat16) for rows in (kernel.m, len(values)))
    got = machine.run(kernel, programs.Case(x, weight, values, 8))
    assert torch.equal(got, values.to(programs.DTYPES[out]).expand(got.shape))


@both
@families
def test_the_weight_is_read_once(machine: Any, programs: Any, family: str) -> None:
    """Full blocks load each weight byte once and store each output and partial once."""
    kernel = program(programs, machine.wave, family, n_each=2, warps_n=2, warps_k=2, bias="bf16")
    case = programs.whole(kernel, kernel.m, 2 * kernel.per_block, 1048, splits=3)
    assert machine.fault(kernel, case) == ""
    moved, sums = machine.driver.moved(), 4 * 3 * kernel.m * case.weight.shape[0]
    assert moved["weight"] == (case.weight.nbytes, 0)
    assert moved["partial"] == (sums, sums)
    assert moved["out"] == (0, 2 * kernel.m * case.weight.shape[0])


#: Programs that together need every barrier.
BARRIERS: dict[str, list[dict[str, Any]]] = {
    "rows": [{"m": 4, "n_each": 4, "warps_k": 2, "x_shared": True}, {"m": 2, "warps_k": 2, "cluster": 3}],
    "tiles": [
        {"n_each": 2, "warps_n": 2, "warps_k": 2, "x_shared": True},
        {"n_each": 2, "warps_n": 2, "warps_k": 2, "x_shared": True, "stages": 2},
        {"n_each": 2, "warps_n": 2, "warps_k": 2, "cluster": 3},
    ],
    "wgmma": [{"m": 8, "warps_k": 2, "stages": 2}, {"m": 8, "warps_k": 2, "stages": 3, "cluster": 3}],
}


@nvidia
@pytest.mark.cases("family", BARRIERS)
@pytest.mark.cases("barrier", ["    sync_block();", "    sync_cluster();"])
def test_every_barrier_is_needed(machine: Any, programs: Any, family: str, barrier: str) -> None:
    """A kernel without any one of its barriers is wrong in some order of its threads."""
    kernels = [program(programs, 32, family, **given) for given in BARRIERS[family]]
    cases = [programs.whole(kernel, kernel.m, 40, 1048, splits=3) for kernel in kernels]
    text = kernels[0].source()
    own = 0 if family == "tiles" else text.index("DEVICE float bias_at")  # only `tiles` uses the barrier of portable.h
    offsets = [offset for offset in range(own, len(text)) if text.startswith(barrier, offset)]
    assert offsets
    for offset in offsets:
        broken = text[:offset] + text[offset + len(barrier) :]
        pairs = list(zip(kernels, cases, strict=True))
        fails = any(wrong(machine, Edited(kernel, broken), case, seed) for seed in range(250) for kernel, case in pairs)
        assert fails, f"no fault without: {text[offset - 200 : offset + 40]}"

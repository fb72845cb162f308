"""Look-ups in an index of numbers against a search through all rows, and what the index costs."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import pytest
from tunedgemm.device import Device
from tunedgemm.libtypes import rank
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.op import Op
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table import index
from tunedgemm.table.csvfile import read_rows, write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row
from tunedgemm.table.scan import scan

OP = op_named("a16w16")
DEVICES = [Device("sm_90", 132, "nvidia-h200"), Device("sm_90", 132, "nvidia-h100"), Device("gfx942", 304, "mi300x"), Device("gfx942", 80)]

#: an op that also takes rows of another output dtype and of a plain layout, after its own
WITH_KIN = attrs.evolve(
    OP,
    equivalent_shapes=lambda shape: tuple(dict.fromkeys((shape, attrs.evolve(shape, outdtype="fp32"), attrs.evolve(shape, layout="row")))),
)


def of_an_op(op: Op) -> list[Shape]:
    """Shapes of an op, some of them equivalent to others."""
    shapes = [*op.examples[:4]]
    return list(dict.fromkeys(kin for shape in shapes for kin in op.equivalent_shapes(attrs.evolve(shape, m=0))))


def plain(op: Op) -> list[Shape]:
    base = Shape("a16w16", 0, 64, 128)
    return [base, attrs.evolve(base, n=4352), attrs.evolve(base, outdtype="fp32"), attrs.evolve(base, layout="aiter16x16", epilogue="bias")]


def random_rows(draw: random.Random, shapes: Sequence[Shape], count: int) -> list[Row]:
    """Rows of few keys, times and solutions, so that ties, duplicates and pins are common."""
    places = [("sm_90", 132, "nvidia-h200"), ("sm_90", 132, "nvidia-h100"), ("sm_90", 132, ""), ("", 132, ""), ("sm_90", 114, "")]
    places += [("gfx942", 304, "mi300x"), ("gfx942", 304, ""), ("gfx942", 80, ""), ("gfx942", 0, ""), ("gfx950", 304, "")]
    found = []
    for _ in range(count):
        gfx, cu_num, device = draw.choice(places)
        libtype = draw.choice(["asm", "triton", "torch", "someone"])
        found.append(
            Row(
                shape=attrs.evolve(draw.choice(shapes), m=draw.choice([0, 1, 16, 17, 32, 288, 512, 8192, 32768])),
                gfx=gfx,
                cu_num=cu_num,
                device=device,
                solution=Solution(libtype, draw.choice(["a", "b"]), draw.choice([0, 2])),
                us=draw.choice([1.0, 2.0, 2.0, 3.5, 0.0, -1.0, math.inf]),
                libver=draw.choice(["", "1.0"]),
            )
        )
    return found


def search(op: Op, layers: Sequence[Sequence[Row]], shape: Shape, device: Device) -> list[tuple[Row, str, bool]]:
    """Return the result of `Table.candidates`, by a search through all rows for each place of the order."""
    padded = {m: word for m, word in op.padded_m(shape.m, shape.n).items() if m}
    if device.gfx == "sm_90":
        padded = {m: word for m, word in padded.items() if not (128 < shape.m < m if word == "coarse" else shape.m <= 4 < m)}
        padded = {m: padded[m] for m in sorted(padded, key=lambda m: abs(m - shape.m))}
    rungs = [(0, "pinned"), *padded.items()]
    keys = [(word, attrs.evolve(kin, m=m, bias_dtype="")) for m, word in rungs for kin in op.equivalent_shapes(shape)]
    found = []
    for same in (True, False):
        for word, key in keys:
            offered = set()
            for units in dict.fromkeys((device.cu_num, 0)):
                for layer in layers:
                    here = [row for row in layer if row.cu_num == units and row.shape == key and row.valid]
                    here.sort(key=lambda row: (row.us, rank(row.solution.libtype), identity(row), row.gfx, row.device))
                    for row in here:
                        fits = row.gfx in ("", device.gfx) and (row.device in ("", device.name)) is same
                        if fits and (units, row.gfx, row.device, identity(row)) not in offered:
                            offered.add((units, row.gfx, row.device, identity(row)))
                            found.append((row, word, same))
    return found


def identity(row: Row) -> tuple[object, ...]:
    return row.solution.libtype, row.solution.kernel_name, row.solution.split_k, row.solution.extra, row.libver


def answers(table: Table, shape: Shape, device: Device) -> list[tuple[Row, str, bool]]:
    return [(match.row, match.granularity, match.same_device) for match in table.candidates(shape, device)]


def compare(op: Op, layers: Sequence[Sequence[Row]], table: Table, shapes: Sequence[Shape]) -> int:
    """Compare every look-up, the second time from memory; returns how many rows were found."""
    count = 0
    for kind in shapes:
        for m in (0, 1, 2, 16, 17, 31, 257, 300, 9000, 40000):
            for device in DEVICES:
                shape = attrs.evolve(kind, m=m)
                expected = search(op, layers, shape, device)
                assert answers(table, shape, device) == expected
                assert answers(table, shape, device) == expected
                count += len(expected)
    return count


@pytest.mark.no_cover
def test_candidates_are_those_of_a_search(faults_of):
    """For random layers the rows that answer, and their order, are those of a search through all rows."""

    def check(seed: int, pair: tuple[Op, Callable[[Op], list[Shape]]]):
        op, shapes = pair
        draw = random.Random(seed)
        kinds = shapes(op)
        layers = [random_rows(draw, kinds, draw.choice([0, 5, 120])) for _ in range(draw.randint(1, 3))]
        assert compare(op, layers, Table(op, layers), kinds) > 0 or not any(layers)

    assert not faults_of(
        check, itertools.product(range(1), [(OP, plain), (WITH_KIN, plain), *((op, of_an_op) for op in ops().values() if op.examples)])
    )


def test_files_answer_as_their_rows_do(tmp_path, monkeypatch, faults_of):
    """Tables of several files and layers answer like a search through their rows."""

    def check(seed):
        draw = random.Random(100 + seed)
        files = [tmp_path / f"{name}.csv" for name in "abcd"]
        for file in files:
            write_rows(file, OP, random_rows(draw, plain(OP), draw.choice([3, 60, 150])))
        monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", f"{files[2]}:{files[3]}")
        rows = [read_rows(file, OP)[0] for file in files]
        layers = [rows[0] + rows[1], rows[2] + rows[3]]
        table = Table.load(OP, above=files[:2])
        assert compare(OP, layers, table, plain(OP)) > 0
        assert table.rows == tuple(layers[0] + layers[1])
        assert table.fingerprint() == Table(OP, layers).fingerprint()

    assert not faults_of(check, [(seed,) for seed in range(2)])


def test_many_answers_are_made_one_by_one():
    """Of thousands of rows for one shape only those are made that the caller walks on to."""
    rows = [Row(Shape("a16w16", 16, 64, 128), "sm_90", 132, "", Solution("triton", f"k{n}"), us=1.0 + n) for n in range(2000)]
    table = Table(OP, [rows])
    made: list[int] = []
    row_of = table._index.row
    table._index.row = lambda number, **more: made.append(number) or row_of(number, **more)
    walk = table.candidates(Shape("a16w16", 16, 64, 128), DEVICES[0])
    assert [next(walk).row.us, next(walk).row.us] == [1.0, 2.0]
    assert len(made) == 2
    assert [match.row.us for match in table.candidates(Shape("a16w16", 16, 64, 128), DEVICES[0])] == [1.0 + n for n in range(2000)]


@pytest.mark.no_cover
def test_keys_of_equal_hash_are_distinguished(monkeypatch):
    """Look-ups find only their own rows even where the keys of all kinds collide."""
    monkeypatch.setattr(index, "stamp_of", lambda units, kind: 7)
    draw = random.Random(8)
    for op in (OP, WITH_KIN):
        layers = [random_rows(draw, plain(OP), 150), random_rows(draw, plain(OP), 20)]
        assert compare(op, layers, Table(op, layers), plain(OP)) > 0


def test_memory_of_answers_is_bounded(monkeypatch):
    """A table forgets its answers rather than remember without end, and answers on."""
    from tunedgemm.table import lookup as module

    monkeypatch.setattr(module, "_REMEMBERED", 10)
    table = Table(OP, [random_rows(random.Random(1), plain(OP), 50)])
    for m in range(1, 100):
        list(table.candidates(attrs.evolve(plain(OP)[0], m=m), DEVICES[0]))
    assert len(table._answers) <= 10


def test_shapes_that_one_row_pads_share_its_answer():
    """A row is looked at once for each way in which it answers, not once for each M."""
    table = Table(OP, [[Row(Shape("a16w16", 64, 64, 128), "sm_90", 132, "", Solution("triton", "k"), us=1.0)]])
    words = {
        m: [match.granularity for match in table.candidates(Shape("a16w16", m, 64, 128), DEVICES[0])] for m in (32, 33, 48, 49, 63, 64)
    }
    assert words == {32: [], 33: ["coarse"], 48: ["coarse"], 49: ["fine"], 63: ["fine"], 64: ["exact"]}
    assert len(table._answers) == 3


def large(path: Path, rows: int) -> None:
    """A table with that many rows, no two alike."""
    draw = random.Random(rows)
    header = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n"
    with path.open("w") as file:
        file.write(header)
        for number in range(rows):
            key = f"sm_90,132,{1 + number % 500},{64 * (1 + number // 500)},4096,False,torch.bfloat16,torch.bfloat16,False,False"
            file.write(
                f"{key},triton,{draw.randint(0, 40)},{draw.randint(0, 8)},{draw.uniform(1, 900):.4f},k{draw.randint(0, 20)},0.0,1.0,2.0\n"
            )


def quickest(call: Callable[[], object], times: int = 3) -> float:
    """The least processor time of a call, in seconds."""
    best = math.inf
    for _ in range(times):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.timing
def test_a_scan_costs_a_fraction_of_reading(tmp_path):
    """Scanning 10,000 rows takes under a third of the time of reading them, and a fifth of the memory."""
    file = tmp_path / "t.csv"
    large(file, 10_000)
    content = file.read_bytes()
    assert quickest(lambda: scan(file, OP, content)) < quickest(lambda: read_rows(file, OP), 1) / 3  # about a tenth
    peaks = []
    for call in (lambda: scan(file, OP, content), lambda: read_rows(file, OP)):
        tracemalloc.start()
        call()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < peaks[1] / 5


@pytest.mark.timing
def test_look_ups_do_not_grow_with_the_table(tmp_path):
    """A look-up among 40,000 rows takes at most twice as long as among 400, found or not, first or again."""
    times = []
    for rows in (400, 40_000):
        file = tmp_path / f"{rows}.csv"
        large(file, rows)
        shapes = [Shape("a16w16", m, 64, 4096) for m in range(1, 401)]
        missing = [Shape("a16w16", m, 64, 4096) for m in range(10**6, 10**6 + 400)]
        table = Table.load(OP, above=[file])

        def ask(asked: list[Shape], table: Table = table) -> int:
            return sum(next(table.candidates(shape, DEVICES[0]), None) is not None for shape in asked)

        def anew(asked: list[Shape], table: Table = table) -> int:
            table._answers.clear()
            return ask(asked)

        assert (ask(shapes), ask(missing)) == (400, 0)
        times.append([quickest(lambda: ask(shapes), 9), quickest(lambda: anew(missing), 9)])  # noqa: B023
    assert all(many < 2 * few + 1e-3 for few, many in zip(*times, strict=True))


@pytest.mark.timing
def test_the_benchmark_runs(tmp_path):
    """The benchmark of a million rows runs with few, checks what it finds, and writes every figure."""
    script, out = Path(__file__).parents[2] / "benchmarks" / "table_index.py", tmp_path / "table_index.json"
    command = [sys.executable, str(script), "--rows", "3000", "--repeats", "1", "-o", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    tables = json.loads(out.read_text())["tables"]
    assert list(tables) == ["plain", "adversarial"]
    for table in tables.values():
        assert {"csv_s", "csv_mib", "first_us", "hit_us", "equal_us", "miss_us"} <= set(table["best"])
        assert table["best"]["hit_us"] < table["best"]["first_us"] / 5  # about a three hundredth

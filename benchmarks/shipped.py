"""Time shipped rows against what would serve without them, and drop those that gain little.

    python benchmarks/shipped.py --part 1/4 -o shipped

    python benchmarks/shipped.py --drop 0.02 -o shipped

The first command runs on a GPU. In the same rounds it times the kernels of all shipped rows of a
shape, the untuned guess and torch. It appends a line for each shape to
``shipped/DEVICE-1.jsonl``; the same command resumes.

The second needs no GPU. It rewrites the shipped tables without the rows that gain less than
``--drop`` over what then serves: another row, the guess, or torch. That must hold on every device
that the row serves and guesses were measured on. Either what then serves is the row's own kernel,
or the logs have the times of both. ``--logs`` adds trial logs of ``benchmarks/results``, as in
`search.py`, where ``-o`` has none: their noise favours the row.

Engines route to kernels without a row at the M of `UNTUNED_M` alone, and to torch's call at none.
So rows at other M stay, and those of torch's call, unless it has 16 bits and is the engine's.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import attrs
from harness import add_rounds, interval, parser_of, read_log
from search import LIKE, RESULTS
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.backends.untuned import choices, untuned_libtypes
from tunedgemm.device import Device, current_device
from tunedgemm.dispatch.offer import NATIVE
from tunedgemm.ops import ops
from tunedgemm.ops.op import Op
from tunedgemm.products import measured_near
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.folders import SHIPPED_WORD, shipped_layers
from tunedgemm.table.lookup import Table
from tunedgemm.table.published import Provenance, provenance_of, published_text
from tunedgemm.table.row import Row
from tunedgemm.table.sheet import locked, replace_text
from tunedgemm.testing.replay import read_times
from tunedgemm_engines.rows import UNTUNED_M

REGISTRY, KIND = Registry(), "shipped"
#: Device and shape -> the microseconds of solutions, by log.
Logs = dict[tuple[str, str], list[dict[str, float]]]


def rows_of(op: Op) -> list[Row]:
    """Return the rows of an op's shipped tables."""
    paths = [path for layer in shipped_layers(op) for path in layer.paths if path.exists()]
    return [row for path in paths for row in read_rows(path, op)[0]]


def table_of(op: Op, rows: list[Row]) -> Table:
    """Return the table of some shipped rows."""
    return Table(op, [rows], labels=[SHIPPED_WORD])


@functools.lru_cache(maxsize=1 << 14)
def guess(shape: Shape, device: Device) -> Solution:
    """Return the solution of an untuned call."""
    for solution in choices(shape, device, REGISTRY, untuned_libtypes()):
        backend = REGISTRY.get(solution.libtype)
        if isinstance(backend, Backend) and not backend.lacks(solution, shape, device):
            return solution
    return NATIVE


def serving(table: Table, shape: Shape, device: Device) -> Solution:
    """Return the solution that serves a shape with these rows."""
    match = next(table.candidates(shape, device), None)
    return match.row.solution if match else guess(shape, device)


def text_of(shape: Shape) -> str:
    """Return the text of a shape in the logs."""
    return json.dumps(shape.to_dict(), sort_keys=True)


def identity(solution: Solution) -> str:
    """Return the text of a solution in the logs."""
    return f"{solution.libtype}:{solution.kernel_name}:{solution.split_k}"


def timed(op: Op, shape: Shape, device: Device, rounds: int) -> dict[str, list[float]]:
    """Return the samples of all rows' kernels, the guess and torch on a shape."""
    from tunedgemm.tuner.rounds import Workload
    from tunedgemm.tuner.trial import Samples

    subjects = [match.row.solution for match in table_of(op, rows_of(op)).candidates(shape, device)]
    launchers: dict[Solution, Launcher] = {}
    for solution in dict.fromkeys((*subjects, guess(shape, device), NATIVE)):
        backend = REGISTRY.get(solution.libtype)
        bound = backend.bind(solution, shape, device) if isinstance(backend, Backend) else None
        launchers |= {solution: bound} if isinstance(bound, Launcher) else {}
    workload = Workload(op, shape, device, seed=1)
    workload(launchers, 3)
    answers = workload(launchers, rounds)
    return {identity(key): [round(us, 4) for us in answer.us] for key, answer in answers.items() if isinstance(answer, Samples)}


def measure(part: str, folder: Path, rounds: int) -> None:
    """Time the shapes of a part of the rows that serve this device; skip those in the log."""
    device, (number, parts) = current_device(), map(int, part.split("/"))
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{device.name}-{number}.jsonl"
    done = read_log(log, [KIND])[KIND]
    here = [(op, row.shape) for op in ops().values() for row in table_of(op, rows_of(op)).rows_for(device)]
    for op, shape in list(dict.fromkeys(here))[number - 1 :: parts]:
        if text_of(shape) in done:
            continue
        samples = timed(op, shape, device, rounds)
        us = {key: interval(values)[0] for key, values in samples.items()}
        record = {"kind": KIND, "device": device.name, "shape": shape.to_dict(), "guess": identity(guess(shape, device)), "us": us}
        with log.open("a") as file:
            file.write(json.dumps({**record, "samples": samples}) + "\n")
        print(shape, *(f"{key}={value:.2f}" for key, value in us.items()), flush=True)


def logged(folder: Path | None, trials: list[str]) -> Logs:
    """Return the microseconds of a folder's logs, then of trial logs, by device and shape."""
    logs: Logs = {}
    records = [record for log in sorted(folder.glob("*.jsonl")) for record in read_log(log, [KIND])[KIND].values()] if folder else []
    for record in records:
        logs.setdefault((record["device"], json.dumps(record["shape"], sort_keys=True)), []).append(record["us"])
    for file in trials:
        name = "nvidia-h100-80gb-hbm3" if file.startswith("h100") else "nvidia-h200"
        for shape, us in read_times(RESULTS / file, LIKE[Path(file).name.partition("-")[0]]).items():
            logs.setdefault((name, text_of(shape)), []).append({":".join(map(str, key)): value for key, value in us.items()})
    return logs


def gain(row: Row, after: Solution, device: Device, logs: Logs) -> float | None:
    """Return how much faster a row is than what serves without it, less one; None if unknown."""
    if after == row.solution:
        return 0.0
    pairs = ((us.get(identity(after)), us.get(identity(row.solution))) for us in logs.get((device.name, text_of(row.shape)), ()))
    return next((then / before - 1 for then, before in pairs if then and before), None)


def may_go(op: Op, row: Row, rows: list[Row], devices: list[Device], least: float, logs: Logs) -> bool:
    """Check whether a row gains less than *least* on each device that it serves."""
    if row.shape.scale != "none" if row.solution == NATIVE else row.shape.m not in UNTUNED_M:
        return False
    before, after = table_of(op, rows), table_of(op, [other for other in rows if other is not row])
    below = row.shape.with_m(max(1, row.shape.m - 1))
    for device in devices:
        match, padded = (next(before.candidates(shape, device), None) for shape in (row.shape, below))
        if match is None or match.row is not row:
            continue
        then = serving(after, row.shape, device)
        found = gain(row, then, device, logs)
        if found is None or found >= least:
            return False
        if padded is not None and padded.row is row and serving(after, below, device).libtype != then.libtype:
            return False
    return True


def drop(least: float, logs: Logs) -> None:
    """Rewrite the shipped tables without the rows that gain little."""
    for op in ops().values():
        rows = kept = rows_of(op)
        # Rows of larger M may serve smaller ones, never the other way round.
        for row in sorted(rows, key=lambda row: -row.shape.m):
            near = [Device(known.gfx, known.units, known.name) for known in measured_near(Device(row.gfx, row.cu_num))]
            if may_go(op, row, kept, near, least, logs):
                kept = [other for other in kept if other is not row]
        for path in sorted({row.source for row in rows if row.source}):
            rewrite(path, op, rows, {row.line for row in kept if row.source == path}, least)


def rewrite(path: Path, op: Op, rows: list[Row], lines: set[int], least: float) -> None:
    """Leave these lines in a file, with its provenance and the number of rows left out."""
    own = [row for row in rows if row.source == path]
    gone = {row.line for row in own} - lines
    print(f"{path.name}: {len(own)} rows, {len(gone)} dropped", flush=True)
    if not gone:
        return
    text = path.read_text().splitlines(keepends=True)
    body = "".join(line for number, line in enumerate(text, 1) if not line.startswith("#") and number not in gone)
    known = provenance_of(path) or Provenance(op.name)
    facts = {"rows": str(len(lines)), "dropped": f"rows that gain less than {100 * least:g} % over what serves without them"}
    with locked(path):
        replace_text(path, published_text(attrs.evolve(known, facts={**known.facts, **facts}), body))


def main(words: list[str] | None = None) -> int:
    """Time the rows, or drop some of them."""
    parser = parser_of(__doc__)
    parser.add_argument("--part", default="1/1", metavar="I/N", help="time each N-th shape from the I-th (default: %(default)s)")
    parser.add_argument("--drop", type=float, metavar="GAIN", help="drop rows that gain less, as 0.02 for 2 %%")
    add_rounds(parser, 21)
    parser.add_argument("--logs", nargs="+", default=[], metavar="LOG", help="trial logs, for --drop")
    arguments = parser.parse_args(words)
    if arguments.drop is not None:
        drop(arguments.drop, logged(arguments.output, arguments.logs))
    elif arguments.output is None:
        parser.error("-o FOLDER is required: it keeps what is done")
    else:
        measure(arguments.part, arguments.output, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Implement ``tunedgemm triton``: tune kernels into JSON files, check and convert such files."""

from __future__ import annotations

import argparse
import functools
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tunedgemm.plugin import Command, UserError
from tunedgemm.tools.files import expanded

from tunedgemm_triton.jsonfiles import buckets, files, space

#: Values of M in AITER's guide to tuning Triton kernels.
ROWS = (16, 32, 64, 128, 256, 512, 2048, 4096)
#: Options of the tuner with flags of the same name.
_SAME_FLAGS = (
    "atol", "rtol", "errRatio", "mp", "device", "cache", "timing", "seconds", "budget", "candidates", "topk", "timeout", "kernel_timeout",
    "jobs", "resume", "all",
)  # fmt: skip


def _numbers(text: str) -> tuple[int, ...]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"must be whole numbers such as 1024,4096 (got {text!r})")
    return tuple(int(part) for part in text.split(","))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (text, add, work) in _ACTIONS.items():
        sub = actions.add_parser(name, help=text, description=text)
        sub.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="print every solution's status")
        sub.set_defaults(work=work)
        sub.add_argument("--libtype", default="triton", help="the backend: triton, or one made with tunedgemm_triton.author")
        add(sub)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--op", required=True, help="op family, such as a8w8_blockscale")
    add("--n", type=_numbers, required=True, metavar="N,N", help="N of each weight, in the order of --k")
    add("--k", type=_numbers, required=True, metavar="K,K", help="K of each weight; a single number here or in --n applies to all")
    add("--m", type=_numbers, default=ROWS, metavar="M,M", help=f"values of M to tune (default: {','.join(map(str, ROWS))})")
    space_help = f"JSON file of parameters and values, or {space.AITER} for the 5832 of AITER's guide; default: the backend's list"
    add("--search-space", default="", metavar="FILE", help=space_help)
    add("--num-iters", type=int, default=10, help="most rounds of timing a finalist (default: %(default)s)")
    add("--atol", type=float, default=1e-2, help="absolute tolerance of an element (default: %(default)g)")
    add("--rtol", type=float, default=1e-2, help="relative tolerance of an element (default: %(default)g)")
    add("--errRatio", type=float, default=0.05, help="largest share of elements outside them (default: %(default)g)")
    add("--out-dtype", default="", help="dtype of the output: bf16, fp16 or fp32 (default: bf16)")
    columns = "another column of the op's table, such as q_dtype_w=fp8 or B=16; repeatable"
    add("--set", action="append", default=[], metavar="COLUMN=TEXT", help=columns)
    add("--save-path", type=expanded, metavar="DIR", help="folder of the files; default: triton/gemm in the user folder, which calls read")
    add("--keys", choices=(buckets.NEW, buckets.LEGACY), default=buckets.NEW, help="M_LEQ_64 ..., or small, medium_M64 ... (default: new)")
    _add_run(parser.add_argument_group("flags of `tunedgemm tune`"))


def _add_run(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--mp", type=int, default=0, help="GPUs to tune on in parallel; 0 is all (default: %(default)s)")
    add("--device", default="", metavar="I,J|cpu", help="GPUs by index, or the CPU")
    add("--cache", default="cold", metavar="cold|hot", help="read weights from memory or from the cache (default: cold)")
    add("--timing", default="graph", metavar="graph|eager", help="replay captured calls, or launch each call (default: graph)")
    add("--seconds", type=float, default=4.0, help="device seconds of the accurate phase of a shape (default: %(default)g)")
    add("--budget", type=float, default=0.0, metavar="SECONDS", help="wall time of the whole run")
    add("--candidates", type=int, default=0, help="number of first configurations to try; 0 is all (default: %(default)s)")
    add("--topk", type=int, default=20, help="configurations in the accurate phase (default: %(default)s)")
    add("--timeout", type=float, default=1800.0, help="most seconds of one compilation (default: %(default)g)")
    add("--kernel_timeout", type=float, default=30.0, help="seconds after which a kernel counts as hung (default: %(default)g)")
    add("--jobs", type=int, default=0, help="compiler processes; 0 is one for each core (default: %(default)s)")
    add("--no-resume", dest="resume", action="store_false", help="do not reuse the trials of an interrupted run")
    add("--all", action="store_true", help="time shapes again that an earlier run timed")


def _add_check(parser: argparse.ArgumentParser) -> None:
    where = f"files or folders; default: those that calls read: ${files.VARIABLE}, the user's, the shipped ones"
    parser.add_argument("paths", nargs="*", type=expanded, metavar="PATH", help=where)


def _add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "paths",
        nargs="+",
        type=expanded,
        metavar="PATH",
        help="tuned CSV files to convert to JSON files; with -o: JSON files or folders",
    )
    add("--op", required=True, help="op family of the table")
    add("-o", "--output", type=expanded, metavar="CSV", help="convert JSON files to rows of this table, one for every timed M")
    add(
        "--times",
        nargs="+",
        type=expanded,
        default=[],
        metavar="FILE",
        help="with -o: trial logs or tuned CSVs; default: tuning/ next to each file",
    )
    add("--save-path", type=expanded, metavar="DIR", help="folder of the JSON files; default: triton/gemm in the user folder")
    add("--keys", choices=(buckets.NEW, buckets.LEGACY), default=buckets.NEW, help="style of keys, as in `triton tune` (default: new)")


def _pairs(arguments: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """Return the (N, K) of each weight.

    Raises:
        UserError: --n and --k have different lengths, neither of them 1.
    """
    n, k = arguments.n, arguments.k
    if len(n) != len(k) and 1 not in (len(n), len(k)):
        raise UserError(f"--n and --k must have the same length, or one of them length 1 (got {len(n)} and {len(k)})")
    count = max(len(n), len(k))
    return tuple(dict.fromkeys(zip(n * (count // len(n)), k * (count // len(k)), strict=True)))


def _columns(arguments: argparse.Namespace, op: Any) -> dict[str, str]:
    from tunedgemm.tools.tables import stated_cells

    from tunedgemm_triton.jsonfiles.tune import sizes_in

    has_outdtype = "outdtype" in (*op.columns.key, *op.columns.own)
    columns = {"outdtype": arguments.out_dtype or "bf16"} if has_outdtype or arguments.out_dtype else {}
    cells = stated_cells(arguments.set)
    if sizes := [column for column in cells if column in sizes_in(op)]:
        raise UserError(f"--set {sizes[0]}={cells[sizes[0]]}: set sizes with --m, --n and --k")
    return columns | cells


def _tune(arguments: argparse.Namespace) -> int:
    from tunedgemm.tools.tables import Options, Progress, console, op_named, summary

    from tunedgemm_triton.jsonfiles.dialect import dialect_of
    from tunedgemm_triton.jsonfiles.tune import Request, run

    op, dialect = op_named(arguments.op), dialect_of(arguments.libtype)
    options = Options(libtype=dialect.libtype, iters=arguments.num_iters, **{name: getattr(arguments, name) for name in _SAME_FLAGS})
    folder = arguments.save_path or files.user_folder()
    request = Request(
        dialect, op.name, _pairs(arguments), arguments.m, _columns(arguments, op), folder, options, arguments.search_space, arguments.keys
    )
    output = console()
    progress = Progress(verbose=arguments.verbose, budget=options.budget, output=output)

    def say(text: str) -> None:
        output.print(text, soft_wrap=True)

    try:
        with progress:
            result = run(request, progress, say)
    except KeyboardInterrupt as stop:
        number = signal.SIGINT if type(stop) is KeyboardInterrupt else signal.SIGTERM
        say(f"interrupted: files of finished weights are in {folder}, all trials in {request.table().parent}")
        say("run the same command to resume" + ("" if arguments.resume else "; omit --no-resume to reuse the trials"))
        return 128 + number
    summary(result.report, arguments.verbose)
    for line in result.shared:
        say(line)
    for name in result.missing:
        say(f"not written: {name.text}: no configuration passed")
    for name in result.unfinished:
        say(f"not written: {name.text}: some M are not timed; run the same command to resume")
    for path in result.files:
        say(f"written: {path}")
    if os.path.realpath(folder) not in map(os.path.realpath, files.folders()):
        print(f"calls do not read {folder}: name it in {files.VARIABLE}, or move the files to {files.user_folder()}")
    return 1 if result.missing or result.report.failed or result.report.lost else 0


def _files(paths: Iterable[Path]) -> list[Path]:
    """Return the JSON files of paths: files themselves, and all files below folders.

    Raises:
        UserError: a path does not exist.
    """
    listed: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: file or folder not found")
        listed += files.listed(path) if path.is_dir() else [path]
    return listed


def _check(arguments: argparse.Namespace) -> int:
    from tunedgemm_triton.jsonfiles.check import Finding, check
    from tunedgemm_triton.jsonfiles.dialect import OURS, dialect_of

    dialects = list({dialect.libtype: dialect for dialect in (OURS, dialect_of(arguments.libtype))}.values())
    paths = _files(arguments.paths or [folder for folder in files.folders() if folder.exists()])
    absent = [] if arguments.paths else [folder for folder in files.named_folders() if not folder.is_dir()]
    findings = [Finding(folder, f"folder of {files.VARIABLE} not found") for folder in absent]
    findings += [finding for path in paths for finding in check(path, dialects)]
    faults = [finding for finding in findings if finding.wrong]
    for finding in findings:
        print(finding)
    print(f"{len(paths)} files, {len(faults)} faults, {len(findings) - len(faults)} notes")
    return 1 if faults else 0


def _to_files(arguments: argparse.Namespace) -> int:
    """Convert tuned tables to JSON files."""
    from tunedgemm.tools.tables import op_named, read_rows

    from tunedgemm_triton.jsonfiles import export
    from tunedgemm_triton.jsonfiles.dialect import dialect_of

    op, dialect = op_named(arguments.op), dialect_of(arguments.libtype)
    folder = arguments.save_path or files.user_folder()
    rows: list[Any] = []
    times: dict[Any, dict[Any, dict[Any, float]]] = {}
    for path in arguments.paths:
        if path.suffix == ".json" or path.is_dir():
            raise UserError(f"{path}: must be a table; convert JSON files to rows with -o CSV")
        rows += read_rows(path, op)[0]
        for device, by_shape in export.timed_by_log_of(path, op).items():
            for shape, us in by_shape.items():
                times.setdefault(device, {}).setdefault(shape, {}).update(us)
    exported = export.files_of(rows, dialect, arguments.keys, times)
    for text in exported.left:
        print(f"left out: {text}")
    written = []
    for name, entries in exported.files.items():
        files.write(folder / name.text, entries)
        written.append(folder / name.text)
    for name in dict.fromkeys(files.Name(name.gfx, name.tag) for name in exported.files):
        files.write(folder / name.text, export.default_of(export.neighbours_of(folder, name, arguments.keys)))
        written.append(folder / name.text)
    for path in written:
        print(f"written: {path}")
    print(f"{len(rows) - len(exported.left)} rows in {len(written)} files, {len(exported.left)} left out")
    if not written:
        raise UserError(f"nothing written: none of {len(rows)} rows has libtype {dialect.libtype}")
    return 0


def _to_table(arguments: argparse.Namespace) -> int:
    """Convert JSON files to rows of a table."""
    from tunedgemm.tools.tables import op_named, upsert

    from tunedgemm_triton.jsonfiles import export
    from tunedgemm_triton.jsonfiles.dialect import dialect_of, sizes_of

    op, dialect = op_named(arguments.op), dialect_of(arguments.libtype)
    paths = [path for path in _files(arguments.paths) if (name := files.name_of(path)) and dialect.tags.get(name.tag) == op.name]
    timed = functools.cache(lambda log: export.timed(log, op))  # files of one folder share their logs
    rows, left = [], []
    for path in paths:
        name = files.name_of(path)
        for log in arguments.times or sorted(path.parent.glob("tuning/*.trials.jsonl")):
            for device, times in timed(log).items():
                here = {
                    shape: us
                    for shape, us in times.items()
                    if name and (device.gfx, dialect.tag_of(shape), sizes_of(shape)) == (name.gfx, name.tag, name.sizes)
                }
                fresh, refused = export.rows_of(files.read(path), dialect, device, here)
                rows += fresh
                left += [f"left out: {text} ({path})" for text in refused]
    print("".join(f"{text}\n" for text in left), end="")
    if not rows:
        raise UserError(
            f"{arguments.output}: no row has a time; name trial logs or tables with --times (read {len(paths)} files of {op.name})"
        )
    upsert(arguments.output, op, rows)
    print(f"{len(rows)} rows in {arguments.output}, {len(left)} left out")
    return 0


_ACTIONS = {
    "tune": ("time configurations for several M of each (N, K) and write the best of each bucket of M to JSON files", _add_tune, _tune),
    "check": ("find wrong, unread and ineffective parts of JSON files", _add_check, _check),
    "export": (
        "convert tuned tables to JSON files, or JSON files to rows of a table",
        _add_export,
        lambda arguments: _to_table(arguments) if arguments.output else _to_files(arguments),
    ),
}


command = Command(
    "triton",
    "tune Triton kernels into JSON files by buckets of M; check and convert such files",
    _add_arguments,
    lambda arguments: arguments.work(arguments),
)

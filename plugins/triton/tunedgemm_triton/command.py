"""``tunedgemm triton``: tune kernels into JSON files, check such files, and turn them into tables and back."""

from __future__ import annotations

import argparse
import functools
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tunedgemm.plugin import Command, UserError

from tunedgemm_triton import buckets, jsonfile, searchspace

#: Values of M of AITER's guide to tuning Triton kernels.
ROWS = (16, 32, 64, 128, 256, 512, 2048, 4096)
#: Options of the tuner that are flags of the same name.
_SAME = (
    "atol", "rtol", "errRatio", "mp", "device", "cache", "timing", "seconds", "budget", "candidates", "topk", "timeout", "kernel_timeout",
    "jobs", "resume", "all",
)  # fmt: skip


def _numbers(text: str) -> tuple[int, ...]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected whole numbers as 1024,4096, got {text!r}")
    return tuple(int(part) for part in text.split(","))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (text, add, work) in _ACTIONS.items():
        sub = actions.add_parser(name, help=text, description=text)
        sub.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="say more: every solution's status")
        sub.set_defaults(work=work)
        sub.add_argument("--libtype", default="triton", help="the backend: triton, or one made with tunedgemm_triton.author")
        add(sub)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--op", required=True, help="op family, as a8w8_blockscale")
    add("--n", type=_numbers, required=True, metavar="N,N", help="N of each weight; with --k the pairs, by place")
    add("--k", type=_numbers, required=True, metavar="K,K", help="K of each weight; one number for all, here or in --n")
    add("--m", type=_numbers, default=ROWS, metavar="M,M", help=f"rows to test (default: {','.join(map(str, ROWS))})")
    space = f"JSON: parameters and their values, or {searchspace.AITER}: the 5832 of AITER's guide; default: what the backend lists"
    add("--search-space", default="", metavar="FILE", help=space)
    add("--num-iters", type=int, default=10, help="rounds that a finalist is timed in, at most (default: %(default)s)")
    add("--atol", type=float, default=1e-2, help="absolute tolerance of an element (default: %(default)g)")
    add("--rtol", type=float, default=1e-2, help="relative tolerance of an element (default: %(default)g)")
    add("--errRatio", type=float, default=0.05, help="largest share of elements outside them (default: %(default)g)")
    add("--out-dtype", default="", help="dtype of the output: bf16, fp16 or fp32 (default: bf16)")
    columns = "another column of the op's table, as it is written there: dtype=fp8_e4m3fnuz, B=16; again for more"
    add("--set", action="append", default=[], metavar="COLUMN=TEXT", help=columns)
    add("--save-path", type=Path, metavar="DIR", help="folder of the files; default: triton/gemm in the user folder, where they are read")
    add("--keys", choices=(buckets.NEW, buckets.LEGACY), default=buckets.NEW, help="M_LEQ_64 ..., or small, medium_M64 ... (default: new)")
    _add_run(parser.add_argument_group("as in `tunedgemm tune`"))


def _add_run(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--mp", type=int, default=0, help="GPUs to tune on at once; 0 is all of them (default: %(default)s)")
    add("--device", default="", metavar="I,J|cpu", help="these GPUs, or the CPU")
    add("--cache", default="cold", metavar="cold|hot", help="weights from memory, or from the cache (default: cold)")
    add("--timing", default="graph", metavar="graph|eager", help="replay captured calls, or launch them one by one (default: graph)")
    add("--seconds", type=float, default=4.0, help="device seconds of the accurate phase of a shape (default: %(default)g)")
    add("--budget", type=float, default=0.0, metavar="SECONDS", help="wall time of the whole run")
    add("--candidates", type=int, default=0, help="configurations to try, the first ones; 0 is all (default: %(default)s)")
    add("--topk", type=int, default=20, help="configurations in the accurate phase (default: %(default)s)")
    add("--timeout", type=float, default=1800.0, help="seconds that one compilation may take (default: %(default)g)")
    add("--kernel_timeout", type=float, default=30.0, help="seconds after which a kernel counts as hung (default: %(default)g)")
    add("--jobs", type=int, default=0, help="processes that compile ahead; 0 is one for each core (default: %(default)s)")
    add("--no-resume", dest="resume", action="store_false", help="do not reuse the trials of an interrupted run")
    add("--all", action="store_true", help="time again what was timed before")


def _add_check(parser: argparse.ArgumentParser) -> None:
    where = f"files or folders; default: those that are read: ${jsonfile.VARIABLE}, the user's, the shipped ones"
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help=where)


def _add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="tuned CSV files to make JSON files of; or JSON files, or a folder of them, with -o",
    )
    add("--op", required=True, help="op family of the table")
    add(
        "-o", "--output", type=Path, metavar="CSV", help="make rows of JSON files, for every M that was timed, and put them into this table"
    )
    add(
        "--times",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="with -o: trial logs or tuned CSVs; default: tuning/ beside each file",
    )
    add("--save-path", type=Path, metavar="DIR", help="folder of the JSON files; default: triton/gemm in the user folder")
    add("--keys", choices=(buckets.NEW, buckets.LEGACY), default=buckets.NEW, help="as in `triton tune` (default: new)")


def _pairs(arguments: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """(N, K) by place.

    Raises:
        UserError: there are several of both, and not as many.
    """
    n, k = arguments.n, arguments.k
    if len(n) != len(k) and 1 not in (len(n), len(k)):
        raise UserError(f"--n names {len(n)} weights and --k {len(k)}: as many of both, by place, or one of either for all")
    count = max(len(n), len(k))
    return tuple(dict.fromkeys(zip(n * (count // len(n)), k * (count // len(k)), strict=True)))


def _columns(arguments: argparse.Namespace, op: Any) -> dict[str, str]:
    from tunedgemm_triton.jsontune import sizes_in

    has = "outdtype" in (*op.columns.key, *op.columns.own)
    columns = {"outdtype": arguments.out_dtype or "bf16"} if has or arguments.out_dtype else {}
    for text in arguments.set:
        column, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set takes COLUMN=TEXT, as --set dtype=fp8_e4m3fnuz; got {text!r}")
        if column.strip() in sizes_in(op):
            raise UserError(f"--set {text}: the sizes come with --m, --n and --k")
        columns[column.strip()] = value.strip()
    return columns


def _tune(arguments: argparse.Namespace) -> int:
    from tunedgemm.tools import Options, Progress, console, op_named, summary

    from tunedgemm_triton.dialect import dialect_of
    from tunedgemm_triton.jsontune import Request, run

    op, dialect = op_named(arguments.op), dialect_of(arguments.libtype)
    options = Options(libtype=dialect.libtype, iters=arguments.num_iters, **{name: getattr(arguments, name) for name in _SAME})
    folder = (arguments.save_path or jsonfile.user_folder()).expanduser()
    request = Request(
        dialect, op.name, _pairs(arguments), arguments.m, _columns(arguments, op), folder, options, arguments.search_space, arguments.keys
    )
    output = console()
    progress = Progress(verbose=arguments.verbose, budget=options.budget, output=output)

    def say(text: str) -> None:
        output.print(text, soft_wrap=True, markup=False)

    try:
        with progress:
            result = run(request, progress, say)
    except KeyboardInterrupt as stop:
        number = signal.SIGINT if type(stop) is KeyboardInterrupt else signal.SIGTERM
        say(f"interrupted: the files of the weights that were done are in {folder}, every trial in {request.table().parent}")
        say("the same command goes on from here" + ("" if arguments.resume else "; without --no-resume it reuses the trials"))
        return 128 + number
    summary(result.report, arguments.verbose)
    for line in result.shared:
        say(line)
    for name in result.missing:
        say(f"no configuration passed for {name.text}, which was not written")
    for name in result.unfinished:
        say(f"not every M of {name.text} is timed: it is left as it was; the same command goes on with it")
    for path in result.files:
        say(f"written: {path}")
    _say_unread(folder)
    return 1 if result.missing or result.report.failed or result.report.lost else 0


def _say_unread(folder: Path) -> None:
    if folder.resolve() not in [known.resolve() for known in jsonfile.folders()]:
        print(f"calls read these files where {jsonfile.VARIABLE} names the folder, or from {jsonfile.user_folder()}")


def _files(paths: Iterable[Path]) -> list[Path]:
    """The JSON files that are meant: themselves, or all below folders.

    Raises:
        UserError: there is no such file or folder.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"no such file or folder: {path}")
        found += [path] if path.is_file() else jsonfile.listed(path)
    return found


def _check(arguments: argparse.Namespace) -> int:
    from tunedgemm_triton.check import Finding, check
    from tunedgemm_triton.dialect import OURS, dialect_of

    dialects = list({dialect.libtype: dialect for dialect in (OURS, dialect_of(arguments.libtype))}.values())
    files = _files(arguments.paths or [folder for folder in jsonfile.folders() if folder.exists()])
    absent = [] if arguments.paths else [folder for folder in jsonfile.named_folders() if not folder.is_dir()]
    found = [Finding(folder, f"{jsonfile.VARIABLE} names it, and there is no such folder") for folder in absent]
    found += [finding for path in files for finding in check(path, dialects)]
    wrong = [finding for finding in found if finding.wrong]
    for finding in found:
        print(finding)
    print(f"{len(files)} files, {len(wrong)} things to mend, {len(found) - len(wrong)} notes")
    return 1 if wrong else 0


def _export(arguments: argparse.Namespace) -> int:
    return _to_table(arguments) if arguments.output else _to_files(arguments)


def _to_files(arguments: argparse.Namespace) -> int:
    """JSON files from tuned tables."""
    from tunedgemm.tools import op_named, read_rows

    from tunedgemm_triton import export
    from tunedgemm_triton.dialect import dialect_of

    op, dialect = op_named(arguments.op), dialect_of(arguments.libtype)
    folder = (arguments.save_path or jsonfile.user_folder()).expanduser()
    rows: list[Any] = []
    times: dict[Any, dict[Any, dict[Any, float]]] = {}
    for path in arguments.paths:
        if path.suffix == ".json" or path.is_dir():
            raise UserError(f"{path}: is no table; JSON files become rows of a table with -o CSV")
        rows += read_rows(path, op)[0]
        for device, by_shape in export.timed_beside(path, op).items():
            for shape, us in by_shape.items():
                times.setdefault(device, {}).setdefault(shape, {}).update(us)
    found = export.files_of(rows, dialect, arguments.keys, times)
    for text in found.left:
        print(f"left out: {text}")
    written = []
    for name, entries in found.files.items():
        jsonfile.write(folder / name.text, entries)
        written.append(folder / name.text)
    for name in dict.fromkeys(jsonfile.Name(name.gfx, name.tag) for name in found.files):
        jsonfile.write(folder / name.text, export.default_of(export.neighbours_of(folder, name, arguments.keys)))
        written.append(folder / name.text)
    for path in written:
        print(f"written: {path}")
    print(f"{len(rows) - len(found.left)} rows in {len(written)} files, {len(found.left)} left out")
    if not written:
        raise UserError(f"none of the {len(rows)} rows is of {dialect.libtype}: nothing was written")
    return 0


def _to_table(arguments: argparse.Namespace) -> int:
    """Rows of a table from JSON files."""
    from tunedgemm.tools import op_named, upsert

    from tunedgemm_triton import export
    from tunedgemm_triton.dialect import dialect_of, sizes_of

    op, dialect = op_named(arguments.op), dialect_of(arguments.libtype)
    files = [path for path in _files(arguments.paths) if (name := jsonfile.name_of(path)) and dialect.tags.get(name.tag) == op.name]
    timed = functools.cache(lambda log: export.timed(log, op))  # files of one folder share their logs
    rows, left = [], []
    for path in files:
        name = jsonfile.name_of(path)
        for log in arguments.times or sorted(path.parent.glob("tuning/*.trials.jsonl")):
            for device, times in timed(log).items():
                here = {
                    shape: us
                    for shape, us in times.items()
                    if name and (device.gfx, dialect.tag_of(shape), sizes_of(shape)) == (name.gfx, name.tag, name.sizes)
                }
                fresh, refused = export.rows_of(jsonfile.read(path), dialect, device, here)
                rows += fresh
                left += [f"left out: {text} ({path})" for text in refused]
    print("".join(f"{text}\n" for text in left), end="")
    if not rows:
        raise UserError(
            f"no row for {arguments.output}: a row needs a time, and JSON files have none; --times names trial logs or tables that have "
            f"(looked at: {len(files)} files of {op.name})"
        )
    upsert(arguments.output, op, rows)
    print(f"{len(rows)} rows in {arguments.output}, {len(left)} left out")
    return 0


_ACTIONS = {
    "tune": ("time configurations for several M of each (N, K), and write the best of each bucket of M to JSON files", _add_tune, _tune),
    "check": ("say what of JSON files is wrong, never looked at, or without effect", _add_check, _check),
    "export": ("make JSON files of tuned tables, or rows of a table of JSON files", _add_export, _export),
}


def _run(arguments: argparse.Namespace) -> int:
    code: int = arguments.work(arguments)
    return code


command = Command("triton", "tune Triton kernels into JSON files by buckets of M; check and convert such files", _add_arguments, _run)

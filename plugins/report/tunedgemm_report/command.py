"""``tunedgemm report``: the results of tuning as one HTML page that opens from disk."""

from __future__ import annotations

import argparse
from pathlib import Path

from tunedgemm.plugin import Command, UserError
from tunedgemm.tools.files import expanded, open_regular, replace_file

#: How a page begins; -o replaces no other file.
_BEGINNING = b"<!doctype html>"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE",
        help="tables (with the trial log next to each), trial logs, profiles of `tune -o2`, and lists of captured shapes, "
        "logs and profiles also packed with gzip; default: every tuned table of the user folder")  # fmt: skip
    add("--against", action="append", default=[], metavar="FILE",
        help="a file of earlier results, which is shown side by side; repeat for its other files. "
        "Of two tables, or two logs, that share a shape, the first is that by itself")  # fmt: skip
    add("--ab", action="append", default=[], type=expanded, metavar="FILE",
        help="a document of `tunedgemm ab -o`, which is shown in its section; repeatable")  # fmt: skip
    add("--replays", default="1", metavar="N|M:N,M:N", help="number of replays of captured graphs, or by their M (default: 1)")
    add("--plots", type=expanded, metavar="DIR", help="also draw each plot as PNG and SVG into a folder")
    add("-o", "--output", type=expanded, default=Path("report.html"), metavar="FILE", help="the page (default: %(default)s)")
    add("--op", default="", help="op of the files; default: that of each file's columns and name")
    add("--device", default="", metavar="GFX:CU:NAME", help="the device of lines that name none, such as sm_90:132:nvidia-h200")


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.analysis.results import covered, device_of_text, number_of, read_sides

    from tunedgemm_report.ab import read_ab
    from tunedgemm_report.document import document
    from tunedgemm_report.page import page, vega
    from tunedgemm_report.plots import write_plots

    vega()  # a missing library is an error before minutes of reading
    _check_output(arguments.output)
    ab = [read_ab(path) for path in arguments.ab]
    device = device_of_text(arguments.device) if arguments.device else None
    first, second = read_sides(arguments.files, arguments.against, op=arguments.op, device=device, replays=arguments.replays)
    made = document(second, against=first, coverage=covered(second, arguments.op, arguments.replays), ab=ab)
    try:
        replace_file(arguments.output, page(made).encode())
    except OSError as error:
        raise UserError(f"{arguments.output}: cannot be written: {error.strerror or error}; name another file with -o") from error
    faults = [each for findings in (first, second) if findings is not None for each in findings.faults]
    for each in faults:
        print(f"left out: {each.path}: {number_of(each.count, 'line')}; the page names the first: {each.named[0]}")
    summary, compared = made["summary"], made["compare"]
    gain = f", geometric mean {summary['gain']['mean']:.3f}x torch" if summary["gain"] else ""
    print(f"{arguments.output}: {number_of(summary['shapes'], 'shape')}, {number_of(second.timings, 'timing')}{gain}")
    if compared:
        counts = ", ".join(f"{count} {word}" for word, count in compared["counts"].items())
        print(f"{compared['second']} against {compared['first']}: {counts}")
    if arguments.plots is not None:
        print(f"{arguments.plots}: {number_of(len(write_plots(made, arguments.plots)), 'picture')}")
    return 1 if faults else 0


def _check_output(path: Path) -> None:
    """Raise UserError if the output is another kind of file, which would be lost."""
    if not path.exists():
        return
    try:
        with open_regular(path) as file:
            begins = file.read(len(_BEGINNING))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; name another file with -o") from error
    if begins and begins != _BEGINNING:
        raise UserError(f"{path}: exists and is not a report; name another file with -o")


command = Command("report", "write the results of tuning as one HTML page: gains, roofline, candidates, cost", _add_arguments, _run)

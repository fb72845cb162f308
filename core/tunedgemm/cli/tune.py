"""``tunedgemm tune``: AITER's flags, names and defaults."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tunedgemm.command import Command
from tunedgemm.errors import UserError

if TYPE_CHECKING:
    from tunedgemm.tuner import Outcome, Report


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--op", default="a16w16", help="op family to tune (default: %(default)s)")
    captured = "those captured with AITER_TUNE_GEMM=1"
    add("-i", "--untune_file", "--input_file", dest="input", help=f"shapes: a file, or the bare name of a shipped one; default: {captured}")
    add("-o", "--tune_file", "--tuned_file", dest="output", type=Path, help="table to write; default: the op's in the user folder")
    add("-o2", "--profile_file", dest="profile", default="", help="CSV that gets every candidate's result")
    add("--libtype", default="all", help="comma list of libtypes, also the order that decides ties (default: %(default)s)")
    add("--errRatio", type=float, default=0.05, help="largest share of wrong elements (default: %(default)s)")
    add("--all", action="store_true", help="tune shapes that the table already has, too")
    add("--batch", type=int, default=100, help="shapes whose kernels are compiled ahead together (default: %(default)s)")
    add("--warmup", type=int, default=5, help="rounds that are not counted (default: %(default)s)")
    add("--iters", type=int, default=101, help="most rounds that a solution is timed in (default: %(default)s)")
    add("--topk", type=int, default=20, help="solutions of each libtype in the accurate phase (default: %(default)s)")
    add("--timeout", type=float, default=1800.0, help="seconds that one compilation may take, 0 for no limit (default: %(default)g)")
    add("--jobs", type=int, default=0, help="processes that compile ahead; 0 is one for each core (default: %(default)s)")
    add("--sort", nargs="?", const=True, default=True, type=_boolean, help="sort the table by its key, N before M: flag or True/False")

    add("--mp", type=int, default=1, help="devices to tune on at once; this version takes one (default: %(default)s)")
    add("--splitK", action="store_true", help="accepted for AITER's scripts: split-K solutions are always candidates")
    add("--with-hipblaslt", action="store_true", help="accepted for AITER's scripts: every installed backend is in --libtype all")


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.folders import named_file
    from tunedgemm.tuner import Options, tune

    options = Options(
        libtype=arguments.libtype,
        errRatio=arguments.errRatio,
        warmup=arguments.warmup,
        iters=arguments.iters,
        topk=arguments.topk,
        batch=arguments.batch,
        timeout=arguments.timeout,
        all=arguments.all,
        sort=arguments.sort,
        jobs=arguments.jobs,
        profile=Path(arguments.profile) if arguments.profile else None,
    )
    if arguments.mp != 1:
        raise UserError(
            f"--mp {arguments.mp}: one device at a time; for more run one process a GPU (CUDA_VISIBLE_DEVICES) on parts of the file"
        )
    source = named_file(arguments.input) if arguments.input else None
    if source is not None and not source.exists():
        raise UserError(f"no such file: {source}; -i takes a CSV with the columns M,N,K (bias, dtype, outdtype ... may follow)")
    report = tune(arguments.op, source, arguments.output, options, progress=lambda o: _progress(o, arguments.verbose))
    _summary(report, arguments.verbose)
    return 1 if report.failed else 0


def _progress(outcome: Outcome, verbose: bool) -> None:
    if verbose:
        for timing in sorted(outcome.timings, key=lambda timing: (timing.status != "ok", timing.us)):
            us = f"{timing.us:9.2f} us" if timing.us else " " * 12
            print(f"  {us}  {timing.status:16} {timing.solution}  {timing.detail}")
        print("  seconds: " + ", ".join(f"{activity} {seconds:.1f}" for activity, seconds in outcome.seconds))
    winner = outcome.winner
    if winner is None:
        print(f"{outcome.task.shape}: nothing passed", flush=True)
    else:
        print(f"{outcome.task.shape}: {winner.solution} {winner.us:.2f} us, {outcome.gain:.2f}x torch", flush=True)


def _summary(report: Report, verbose: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(report.outcomes)} shapes on {report.device}", title_justify="left")
    for heading in ("shape", "winner", "us", "± %", "torch us", "gain", "tied"):
        table.add_column(heading, justify="left" if heading in ("shape", "winner") else "right", overflow="fold")
    for outcome in report.outcomes:
        winner, torch_us = outcome.winner, outcome.reference.us if outcome.reference else 0.0
        if winner is None:
            table.add_row(str(outcome.task.shape), "nothing passed", "", "", f"{torch_us:.2f}", "", "")
            continue
        cells = (f"{winner.us:.2f}", f"{winner.noise:.1%}"[:-1], f"{torch_us:.2f}", f"{outcome.gain:.2f}x", str(outcome.tied))
        table.add_row(str(outcome.task.shape), str(winner.solution), *cells)
    if report.outcomes:
        Console().print(table)
    _verdict(report)
    for shape in report.skipped if verbose else ():
        print(f"skipped: {shape} (in the table already, or empty)")


def _verdict(report: Report) -> None:
    gains = [
        (outcome.gain, outcome.task.count * (outcome.reference.us if outcome.reference else 0.0))
        for outcome in report.outcomes
        if outcome.gain
    ]
    if gains:
        before = sum(weight for _, weight in gains)
        after = sum(weight / gain for gain, weight in gains)
        product = 1.0
        for gain, _ in gains:
            product *= gain ** (1 / len(gains))
        print(f"geometric mean {product:.3f}x torch; weighted by count and time {before / after:.3f}x")
        slower = [outcome for outcome in report.outcomes if 0 < outcome.gain < 1 / 1.02]
        for outcome in slower:
            print(f"slower than torch (not among the libtypes asked for): {outcome.task.shape}, {outcome.gain:.2f}x")
    for outcome in report.failed:
        reasons = {f"{timing.solution.libtype}: {timing.status}: {timing.detail}" for timing in outcome.timings}
        print(f"failed: {outcome.task.shape}\n  " + "\n  ".join(sorted(reasons)[:10]))
    skipped = f", {len(report.skipped)} skipped (tuned already; --all tunes them again)" if report.skipped else ""
    print(f"{len(report.outcomes) - len(report.failed)} tuned, {len(report.failed)} failed{skipped}: {report.output}")


command = Command("tune", "time every backend's solutions on the shapes of a file and store the winners", _add_arguments, _run)

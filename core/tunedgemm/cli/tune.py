"""``tunedgemm tune``: times the solutions of shapes, one op after the other."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.backends.command import Command
from tunedgemm.cli.flags import SHUFFLED
from tunedgemm.cli.output import give_up_output
from tunedgemm.cli.tuneflags import add_flags, tables
from tunedgemm.errors import UserError
from tunedgemm.process.paths import expanded

if TYPE_CHECKING:
    from tunedgemm.analysis.compare import Served
    from tunedgemm.device import Device
    from tunedgemm.tuner import Options
    from tunedgemm.tuner.campaign import Campaign
    from tunedgemm.tuner.plan import Source
    from tunedgemm.tuner.progress import Progress
    from tunedgemm.workload.lists import ShapeOverrides

#: Exit codes of signals begin here, as a shell's.
_SIGNALS = 128


@attrs.frozen
class _TuneRequest:
    """One run of the tuner.

    Attributes:
        op: the op's name.
        source: its shapes.
        captured: neither op nor source was named, so captured shapes of other ops are listed, too.
        output: the table to write, and tables whose rows count; None for the op's.
    """

    op: str
    source: Source
    captured: bool = False
    output: Path | tuple[Path, ...] | None = None


def _add_late(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    from tunedgemm.cli.optionflags import add_options

    for line in add_options(parser, _libtypes_in(words)):
        print(f"tunedgemm: {line}", file=sys.stderr)


def _libtypes_in(words: Sequence[str]) -> str:
    """Read ``--libtype`` before its backends' options are known; "all" for a help or without a value."""
    if any(word.startswith(("-h", "--h")) for word in words):
        return "all"
    alone = argparse.ArgumentParser(add_help=False)
    alone.add_argument("--libtype", nargs="?")
    return alone.parse_known_args(words)[0].libtype or "all"


def _run(arguments: argparse.Namespace) -> int:
    from tunedgemm.cli.optionflags import option_variables

    with option_variables(arguments):
        return _run_all(arguments)


def _run_all(arguments: argparse.Namespace) -> int:
    from tunedgemm.cli.flags import default
    from tunedgemm.tuner import Options

    arguments.profile = expanded(arguments.profile) if arguments.profile else None
    options = Options(**{option.name: getattr(arguments, option.name) for option in attrs.fields(Options)})
    _check(arguments)
    arguments.output = default(arguments.output, "GTUNE_TUNED", str, "")
    requests = _with_outputs(_requests(arguments, options), arguments.output)
    if arguments.last and not options.all:
        requests, options = [_last_of(request) for request in requests], attrs.evolve(options, all=True)
    if len(requests) > 1:
        _check_several(arguments, requests)
    if arguments.live is None:
        return _run_requests(arguments, requests, options, None)
    from tunedgemm.process.plugin_guard import load_extra

    with load_extra("tunedgemm.live", "report", "--live")(arguments.live) as live:
        code = _run_requests(arguments, requests, options, live)
        live.end("Interrupted; the same command resumes." if code >= _SIGNALS else "Finished." if code == 0 else "Finished with failures.")
    return code


def _run_requests(arguments: argparse.Namespace, requests: list[_TuneRequest], options: Options, live: Any) -> int:
    """Run one request after the other; return the exit code."""
    from tunedgemm.tuner import stopped_by_sigterm
    from tunedgemm.tuner.progress import Progress

    work = _run_config if arguments.run_config is not None else _compare if arguments.compare else _tune
    progress, done, refused, code = Progress(), list[str](), set[str](), 0
    several = len(requests) > 1 or arguments.models or (arguments.input and Path(arguments.input).is_dir())
    campaign = _campaign_of(requests, options, refused) if several and work is _tune else None
    parts = _waves(campaign, requests, options) if campaign else _in_turn(requests, options)
    try:
        with stopped_by_sigterm():
            for request, budget in parts:
                progress = Progress(verbose=arguments.verbose, budget=budget, then=live.receive if live else None)
                if live is not None:
                    live.watch(progress, request.op, _lists_of(request))
                try:
                    code = max(code, work(arguments, request, attrs.evolve(options, budget=budget), progress))
                except UserError as error:
                    refused.add(request.op)
                    if refused == {request.op for request in requests}:
                        raise
                    print(f"tunedgemm: {request.op}: left out: {error}", file=sys.stderr)
                done.append(request.op)
    except KeyboardInterrupt as stop:
        return _report_interrupt(stop, arguments, progress, list(dict.fromkeys(done)))
    if campaign:
        print(f"campaign: {campaign.summary()}")
    return max(code, int(bool(refused)))


def _lists_of(request: _TuneRequest) -> list[Path]:
    """Return the list of shapes that a request tunes, where it is a file; tuned tables have no calls."""
    from tunedgemm.analysis.results.files import kind_of
    from tunedgemm.ops import op_named
    from tunedgemm.table.folders import untuned_path

    path = untuned_path(op_named(request.op)) if request.source is None else request.source
    with contextlib.suppress(UserError):  # the tuner names what is wrong with it
        return [path] if isinstance(path, Path) and path.is_file() and kind_of(path) == "list" else []
    return []


def _last_of(request: _TuneRequest) -> _TuneRequest:
    from tunedgemm.ops import op_named
    from tunedgemm.tuner.plan import requested

    asked = requested(op_named(request.op), request.source)
    return attrs.evolve(request, source=attrs.evolve(asked, shapes=asked.shapes[-1:], last=True))


def _campaign_of(requests: list[_TuneRequest], options: Options, refused: set[str]) -> Campaign | None:
    """Return the campaign of requests with a budget; None where rows do not show what is done."""
    from tunedgemm.backends.registry import Registry
    from tunedgemm.ops import op_named
    from tunedgemm.table.folders import table_paths, tuned_path
    from tunedgemm.tuner.campaign import Campaign, Part
    from tunedgemm.tuner.plan import requested

    whole = options.all or options.stale or options.whole or options.batch_invariant or options.shard != (1, 1)
    if not options.budget or whole or options.executor != "local":
        return None
    parts, device = [], _first_device(options)
    for request in requests:
        op = op_named(request.op)
        parts.append(Part(op, requested(op, request.source).on(op, device), table_paths(request.output) or (tuned_path(op),)))
    return Campaign(tuple(parts), device, options, Registry(), refused)


def _first_device(options: Options) -> Device:
    """Return the device that tunes, the first of several; of a cluster the one here."""
    from tunedgemm.device import current_device, device_of
    from tunedgemm.tuner.executors.local import devices

    return device_of(devices(attrs.evolve(options, mp=0))[0]) if options.device and options.executor == "local" else current_device()


def _waves(campaign: Campaign, requests: list[_TuneRequest], options: Options) -> Iterator[tuple[_TuneRequest, float]]:
    by_op = {request.op: request for request in requests}
    for wave in campaign.waves(time.monotonic() + options.budget):
        yield attrs.evolve(by_op[wave.part.op.name], source=wave.shapes), wave.budget


def _in_turn(requests: list[_TuneRequest], options: Options) -> Iterator[tuple[_TuneRequest, float]]:
    """Yield each request with its share of the seconds left, by its number of shapes; 0 without a budget."""
    end = time.monotonic() + options.budget
    for index, request in enumerate(requests):
        counts = [len(each.source) if isinstance(each.source, Mapping) else 1 for each in requests[index:]]
        share = max((end - time.monotonic()) * counts[0] / sum(counts), 0.001)
        yield request, share if options.budget and len(requests) > 1 else options.budget


def _check(arguments: argparse.Namespace) -> None:
    """Raise UserError for flags that contradict each other; name those that change nothing here."""
    for flag in ("grouped_gemm", "mxfp4_flydsl"):
        if getattr(arguments, flag):
            print(f"tunedgemm: --{flag.replace('_', '-')}: fmoe is tuned with every installed backend", file=sys.stderr)
    if arguments.update_improved and not arguments.compare:
        raise UserError("--update_improved: requires --compare, which finds the improved rows")
    if arguments.compare and arguments.run_config is not None:
        raise UserError("--run_config and --compare: are mutually exclusive; --run_config tunes nothing; choose one of them")
    if arguments.live is not None and arguments.run_config is not None:
        raise UserError("--live: shows a run of tuning, and --run_config tunes nothing; leave one of them out")
    if arguments.run_config and (arguments.model_dir or arguments.models):
        flag = "--model_dir" if arguments.model_dir else "--models"
        raise UserError(f"--run_config with a table: takes the table's shapes; leave out {flag} or the table")
    if not arguments.min_improvement_pct >= 0:
        raise UserError(f"--min_improvement_pct: must be at least 0 (got {arguments.min_improvement_pct:g})")


def _check_several(arguments: argparse.Namespace, requests: list[_TuneRequest]) -> None:
    """Raise UserError for flags that name one file for several ops."""
    names = ", ".join(request.op for request in requests)
    one_file = len({request.output for request in requests}) == 1 and requests[0].output
    files = {"-o (or GTUNE_TUNED)": one_file and arguments.output, "-o2": arguments.profile}
    remedy = {
        "-o (or GTUNE_TUNED)": f"name a folder, as {arguments.output}/, or pick one with --op",
        "-o2": "pick one with --op, or leave it out",
    }
    for flag, file in files.items():
        if file and arguments.run_config is None:
            raise UserError(f"{flag} {file}: is one file, and the shapes are of several ops ({names}); {remedy[flag]}")


def _with_outputs(requests: list[_TuneRequest], text: str) -> list[_TuneRequest]:
    """Return the requests with their tables: those of the text, or one for each op in its folder."""
    from tunedgemm.ops import op_named

    if not text:
        return requests
    if not text.endswith("/"):
        return [attrs.evolve(request, output=tables(text)) for request in requests]
    return [attrs.evolve(request, output=expanded(text) / op_named(request.op).columns.tuned_file) for request in requests]


def _requests(arguments: argparse.Namespace, options: Options) -> list[_TuneRequest]:
    """Return a request for each op: for the shapes of a file or a model, or the captured ones."""
    from tunedgemm.cli.flags import default, listed, models_of, overrides_of

    of_model = arguments.model_dir or arguments.models
    input_path = arguments.input or ("" if of_model else default(None, "GTUNE_INPUT", str, ""))
    if models := {} if arguments.run_config else models_of(arguments, input_path):
        selected = listed(models, arguments, lambda: _first_device(options))
        with _tolerate_closed_output():
            print(selected, flush=True)
        for note in selected.notes:
            print(f"tunedgemm: note: {note}", file=sys.stderr)
        for line in selected.commands:
            print(f"serve with: {line}", file=sys.stderr)
        return [_TuneRequest(name, {row.shape: row.calls for row in rows}) for name, rows in selected.by_op.items()]
    source = _existing_file(input_path, "-i takes a CSV with the columns of the op's key, such as M,N,K,bias,dtype,outdtype")
    sources = _lists_in(source, arguments.op) if source is not None and source.is_dir() else {_op(arguments, source): source}
    overrides = overrides_of(arguments)
    return [_changed(name, path, overrides, captured=path is None and not arguments.op) for name, path in sources.items()]


def _lists_in(folder: Path, only: str) -> dict[str, Path | None]:
    """Return the lists of shapes in a folder by op, as `tunedgemm shapes -o FOLDER/` names them."""
    from tunedgemm.ops import ops
    from tunedgemm.table.sheet import present

    names = [op for op in ops().values() if only in ("", op.name)]
    found: dict[str, Path | None] = {op.name: path for op in names if present(path := folder / op.columns.untuned_file)}
    if not found:
        raise UserError(f"{folder}: no list of shapes of {only or 'any op'}; `tunedgemm shapes --models … -o {folder}/` writes them")
    return found


def _changed(name: str, source: Path | None, overrides: ShapeOverrides | None, *, captured: bool) -> _TuneRequest:
    """Return the request for a file's shapes, or the captured ones, with the changes of the flags."""
    from tunedgemm.ops import op_named
    from tunedgemm.tuner.plan import requested
    from tunedgemm.workload.lists import override_shapes

    if overrides is None:
        return _TuneRequest(name, source, captured=captured)
    op = op_named(name)
    request = requested(op, source)
    return _TuneRequest(name, attrs.evolve(request, shapes=override_shapes(op, request.shapes, overrides), path=None))


def _op(arguments: argparse.Namespace, source: Path | None) -> str:
    """Return the op of the command line, else the one that the columns of the file fit."""
    from tunedgemm.ops import DEFAULT_OP, ops
    from tunedgemm.table.folders import named_file
    from tunedgemm.workload.lists import op_of_file

    read = source or (named_file(arguments.run_config.split(os.pathsep)[0]) if arguments.run_config else None)
    name: str = arguments.op or (op_of_file(read).name if read else DEFAULT_OP)
    if arguments.preshuffle and not name.endswith(SHUFFLED):
        if name + SHUFFLED not in ops():
            raise UserError(f"--preshuffle: the op {name} has no op for shuffled weights; set the column layout, or name another --op")
        name += SHUFFLED
    return name


def _existing_file(text: str | None, hint: str) -> Path | None:
    """Return the file that a text names, None without a text; raise UserError if it is missing."""
    from tunedgemm.table.folders import named_file

    path = named_file(text) if text else None
    if path is not None and not path.exists():
        raise UserError(f"{path}: no such file; {hint}")
    return path


def _tune(arguments: argparse.Namespace, request: _TuneRequest, options: Options, progress: Progress) -> int:
    from tunedgemm.ops import op_named
    from tunedgemm.tuner import tune
    from tunedgemm.tuner.plan import captured_ops
    from tunedgemm.tuner.report import summary

    with progress:
        report = tune(request.op, request.source, request.output, options, progress=progress)
    with _tolerate_closed_output():
        summary(report, arguments.verbose, stale=options.stale)
        if request.captured and (others := captured_ops(op_named(request.op))):
            print(f"not tuned: captured shapes of {', '.join(others)}; name one with --op")
    without_class = any(chosen.reason for chosen in report.classes)
    return 1 if report.failed or report.lost or report.left_out or without_class else 0


def _compare(arguments: argparse.Namespace, request: _TuneRequest, options: Options, progress: Progress) -> int:
    """Tune into a candidate table, and time the op with the present table and with the candidate."""
    from tunedgemm.analysis.compare import compare, print_compared
    from tunedgemm.text.console import console

    update, percent = arguments.update_improved, arguments.min_improvement_pct
    with progress:
        compared = compare(
            request.op, request.source, request.output, options, update=update, min_improvement_pct=percent, progress=progress
        )
    with _tolerate_closed_output():
        print_compared(compared, console())
    return 1 if compared.failed or compared.left_out else 0


def _run_config(arguments: argparse.Namespace, request: _TuneRequest, options: Options, progress: Progress) -> int:
    """Time and check the op as it runs in production; print a line a shape as progress."""
    from tunedgemm.analysis.compare import print_checked, run_config
    from tunedgemm.text.console import console

    def print_served(served: Served) -> None:
        with _tolerate_closed_output():
            print(f"{served.shape}: {served.us:.2f} us, {served.status}", flush=True)

    del progress
    hint = "--run_config takes tuned CSVs, as A:B, or nothing for the configured tables"
    named = [_existing_file(text, hint) for text in arguments.run_config.split(os.pathsep) if text]
    with _tolerate_closed_output():
        print(f"=== Running production operator benchmark ({'tuned' if named else 'default'}) ===")
    checked = run_config(request.op, request.source, [table for table in named if table], options, progress=print_served)
    with _tolerate_closed_output():
        print_checked(checked, console())
    return 1 if checked.failed or checked.left_out else 0


@contextlib.contextmanager
def _tolerate_closed_output() -> Iterator[None]:
    """Drop output that cannot be written inside: the work is done, and its exit code holds."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        give_up_output(error)


def _report_interrupt(stop: KeyboardInterrupt, arguments: argparse.Namespace, progress: Progress, before: list[str]) -> int:
    """Print what is kept and how to resume; return 128 plus the signal, as a shell does.

    Args:
        before: the ops whose runs had finished.
    """
    from tunedgemm.tuner import Terminated

    number = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
    lines = [f"interrupted by {number.name}" + (f" after the runs of {', '.join(before)}" if before else "")]
    if arguments.run_config is not None:
        lines = [f"{lines[0]}; --run_config keeps nothing, and the tables are unchanged"]
    elif progress.planned is None:
        lines = [
            f"{lines[0]} before anything {'more ' if before else ''}was measured"
            if not arguments.compare
            else f"{lines[0]}; the table is unchanged"
        ]
    elif arguments.compare:
        lines = [f"{lines[0]} while tuning into {progress.planned.output}; the table is unchanged, and the same command resumes"]
    else:
        done, total, output = len(progress.outcomes), len(progress.planned.tasks), progress.planned.output
        kept = sum(1 for outcome in progress.outcomes if outcome.winner is not None)
        lines += [f"{done} of {total} shapes are done, {kept} with a winner: kept in {output}, and every trial in its trial log"]
        lines += ["the same command resumes" + ("" if arguments.resume else "; without --no-resume it reuses the trials")]
    for line in lines:
        print(f"tunedgemm: {line}", file=sys.stderr)
    return _SIGNALS + number


command = Command("tune", "time every backend's solutions on the shapes of a file and store the winners", add_flags, _run, _add_late)

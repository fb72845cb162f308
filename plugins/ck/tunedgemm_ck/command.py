"""Implement ``tunedgemm ck``: build the instances that tables name, and print sources."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs
from tunedgemm.plugin import Command, Device, Op, PluginError, Shape, TunedGemmError, UserError
from tunedgemm.tools.launching import switched_on
from tunedgemm.tools.tables import Row, Table, named_file, op_of_file, ops, read_rows, shape_of_texts, stated_cells

from tunedgemm_ck import Templates, ck, cktile, cutlass
from tunedgemm_ck.build import REBUILD, CompiledObject, Target, build_object, find_object, targets_of
from tunedgemm_ck.problem import problem_of
from tunedgemm_ck.xdl.limits import ACCEPTS, DTYPES

#: Usual sizes of untuned calls.
_USUAL_M, _USUAL = tuple(1 << power for power in range(11)), (512, 1024, 2048, 3072, 4096, 7168, 8192, 16384, 28672)
#: The template libraries by libtype.
_LIBRARIES: dict[str, Templates] = {backend.libtype: backend.hooks for backend in (ck, cktile, cutlass)}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="prebuild|source", required=True)
    add = _action(actions, "prebuild", "compile exactly what tables name into the artifact cache; needs no GPU")
    add("tables", metavar="TABLE", nargs="*", help="tuned CSV files; default: the tables in effect, of every op")
    add("--untuned", metavar="GFX:UNITS", default="", help="compile what usual untuned calls of a device take, such as gfx942:304")
    add("--gfx", default="", help="architecture of rows that state none; rows of others are skipped")
    add("--jobs", type=int, default=0, help="compilers at a time; 0 is one per core (default: %(default)s)")
    add("--rebuild", action="store_true", help="recompile stored objects, as AITER_REBUILD=1 does")
    add = _action(actions, "source", "print the source of an instance")
    add("name", metavar="KERNELNAME", help="as in a table")
    add("--libtype", required=True, help="ck, cktile or cutlass")
    add("--op", required=True, help="op family, such as a16w16")
    add("--gfx", required=True, help="architecture, such as sm_90 or gfx942")
    columns = "a column of the op's table as written there: dtype=fp16, bias=True; repeatable"
    add("--set", action="append", default=[], metavar="COLUMN=TEXT", help=columns)


def _action(actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, says: str):  # type: ignore[no-untyped-def]
    parser = actions.add_parser(name, help=says, description=says)
    parser.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="print also how many objects were stored")
    return parser.add_argument


def _run(arguments: argparse.Namespace) -> int:
    if arguments.action == "source":
        return _source(arguments)
    if arguments.jobs < 0:
        raise UserError(f"--jobs must be at least 0 (got {arguments.jobs})")
    rows = list(_untuned_rows(arguments.untuned)) if arguments.untuned else []
    rows += _load_rows(arguments.tables) if arguments.tables or not arguments.untuned else []
    fresh = arguments.rebuild or switched_on(REBUILD)
    return prebuild(rows, arguments.gfx, arguments.jobs, fresh=fresh, verbose=getattr(arguments, "verbose", False))


def _untuned_rows(text: str) -> Iterator[Row]:
    """Yield rows of the solutions that untuned calls of usual sizes take on a device.

    Raises:
        UserError: the text is not an architecture with its compute units.
    """
    gfx, _, units = text.partition(":")
    if gfx not in DTYPES or not units.isdecimal():
        raise UserError(f"--untuned must be an architecture of {', '.join(DTYPES)} and compute units, such as gfx942:304 (got {text})")
    device = Device(gfx, int(units))
    kinds = [(op, each, dtype) for op, each in ACCEPTS.items() for dtype in each.dtypes if dtype in DTYPES[gfx]]
    for (op, accepts, dtype), m, n, k in itertools.product(kinds, _USUAL_M, _USUAL, _USUAL):
        shape = Shape(op, m, n, k, dtype, "bf16", scale=accepts.scale, layout=accepts.layout)
        if (chosen := ck.heuristic_fallback(shape, device)) is not None:
            yield Row(shape, gfx, device.cu_num, "", chosen, 1.0)


def _load_rows(tables: Sequence[str]) -> list[Row]:
    """Return the rows of the given files, or of all tables in effect.

    Raises:
        UserError: a file cannot be read, or has invalid lines.
    """
    if not tables:
        return [row for op in ops().values() for row in Table.load(op).rows]
    rows: list[Row] = []
    for name in tables:
        path = named_file(name)
        read, problems = read_rows(path, op_of_file(path))
        if problems:
            raise UserError(f"{problems[0]}; `tunedgemm table check {path}` lists all faults")
        rows += read
    return rows


@attrs.frozen(eq=False)
class _Selection:
    """What rows name: targets, and the reasons why other rows cannot be built."""

    targets: tuple[Target, ...]
    refused: tuple[str, ...]


def _select(rows: Iterable[Row], gfx: str) -> _Selection:
    """Return the targets of rows of these backends, each once."""
    targets: dict[tuple[object, ...], Target] = {}
    refused: dict[str, None] = {}
    for row in rows:
        library = _LIBRARIES.get(row.solution.libtype)
        if library is None or row.shape.op not in library.family.ops or (gfx and row.gfx not in ("", gfx)):
            continue
        location = f"{row.source}:{row.line}"
        if not (arch := row.gfx or gfx):
            refused[f"{location}: the row has no gfx; pass --gfx"] = None
            continue
        try:
            instance = library.family.parse(row.solution.kernel_name, row.shape.op)
        except PluginError as error:
            refused[f"{location}: {error}"] = None
            continue
        for target in targets_of(library.family, instance, problem_of(row.shape, arch), library.finder):
            targets[library.family.libtype, target.instance, target.problem] = target
    return _Selection(tuple(targets.values()), tuple(refused))


def prebuild(rows: Iterable[Row], gfx: str = "", jobs: int = 0, *, fresh: bool = False, verbose: bool = False) -> int:
    """Compile the kernels of rows, several at a time, and print each when it is done.

    Args:
        gfx: build only rows of this architecture, and rows that state none.
        jobs: compilers at a time; 0 is one per core.
        fresh: compile even what is stored.
        verbose: also print how many objects were stored already.

    Returns:
        0, or 1 where a build failed.
    """
    selection = _select(rows, gfx)
    missing = [target for target in selection.targets if fresh or not _is_current(target)]
    for line in selection.refused:
        print(f"refused: {line}", flush=True)
    stored = len(selection.targets) - len(missing)
    if verbose and stored:
        print(f"{stored} already stored", flush=True)
    failed = len(selection.refused)
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        for done, (target, answer) in enumerate(pool.map(lambda target: (target, _build(target, fresh=fresh)), missing), start=1):
            failed += isinstance(answer, str)
            line = answer if isinstance(answer, str) else f"{target}: {answer.seconds:.1f} s, {len(answer.code) / 1e6:.1f} MB"
            print(f"[{done}/{len(missing)}] {line}", flush=True)
    print(f"{len(selection.targets)} instances: {stored} stored, {len(missing) - failed + len(selection.refused)} built, {failed} failed")
    return 1 if failed else 0


def _is_current(target: Target) -> bool:
    """Return whether this machine's toolchain, or without one any other, has built it."""
    try:
        return find_object(target).toolchain == target.finder(target.problem).identity
    except PluginError:
        return False


def _build(target: Target, *, fresh: bool) -> CompiledObject | str:
    try:
        return build_object(target, fresh=fresh)
    except TunedGemmError as error:
        return str(error)


def _source(arguments: argparse.Namespace) -> int:
    """Print the source of one instance.

    Raises:
        UserError: the backend, op or instance does not exist.
    """
    if arguments.libtype not in _LIBRARIES:
        raise UserError(f"--libtype must be one of {', '.join(sorted(_LIBRARIES))} (got {arguments.libtype})")
    library, op = _LIBRARIES[arguments.libtype], _op(arguments.op)
    sizes = {"B": ["1", "1", "4096", "4096"], "token": ["1", "4096", "4096", "8", "2"]}.get(op.columns.key[0], ["1", "4096", "4096"])
    shape = shape_of_texts(op, sizes, stated_cells(arguments.set), arguments.gfx)
    try:
        instance = library.family.parse(arguments.name, op.name)
    except PluginError as error:
        raise UserError(str(error)) from None
    for target in targets_of(library.family, instance, problem_of(shape, arguments.gfx), library.finder):
        print(target.source, end="")
    return 0


def _op(name: str) -> Op:
    if name not in ops():
        raise UserError(f"--op must be one of {', '.join(ops())} (got {name})")
    return ops()[name]


def prebuild_at_install() -> int:
    """Build the kernels of the tables in effect, for ``PREBUILD_KERNELS=1 pip install``."""
    return prebuild(_load_rows([]))


command = Command("ck", "build the kernels that tables name (ck, cktile, cutlass), and show their sources", _add_arguments, _run)

__all__ = ["command", "prebuild", "prebuild_at_install"]

"""Implement ``tunedgemm asm``: list installed packs, check packs, and build the generator's pack."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import attrs
from tunedgemm.plugin import Command, PluginError, UserError
from tunedgemm.tools.files import expanded

from tunedgemm_asm import packs
from tunedgemm_asm.manifest import PackError
from tunedgemm_asm.packs import Pack


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="list|check|build", required=True)

    listing = _action(actions, "list", "list installed packs and refusals; with -v their kernels")
    listing.add_argument("--gfx", default="", help="only this architecture, such as gfx942")

    check = _action(actions, "check", "check packs; exit 1 if one has a fault")
    check.add_argument("folders", metavar="DIR", nargs="+", type=expanded, help="a pack, a folder with packs, or AITER's hsa tree")

    build = _action(actions, "build", "build this plugin's kernels as a pack, without a GPU")
    build.add_argument("--gfx", required=True, help="architecture: gfx942 or gfx950")
    build.add_argument("-o", "--output", metavar="DIR", type=expanded, required=True, help="the pack's folder; created if missing")


def _action(actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, says: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=says, description=says)
    parser.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="show every kernel")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    actions = {"list": _list, "check": _check, "build": _build}
    return actions[arguments.action](arguments)


def _list(arguments: argparse.Namespace) -> int:
    every, _ = packs.installed()
    wanted = [arguments.gfx] if arguments.gfx else sorted({pack.gfx for pack in every})
    lines: list[str] = []
    for gfx in wanted:
        catalog = packs.catalog_of(gfx)
        lines += [
            f"{gfx}: {len(catalog.kernels)} kernels in {len(catalog.packs)} packs",
            *(f"  {packs.line_of(pack)}" for pack in catalog.packs),
        ]
        lines += [f"    {line}" for pack_kernel in catalog.kernels.values() if arguments.verbose for line in _kernel(pack_kernel)]
    problems = dict.fromkeys(problem for gfx in wanted or ["gfx942"] for problem in packs.catalog_of(gfx).problems)
    lines += [f"refused: {problem}" for problem in problems]
    print("\n".join(lines or [packs.NONE]))
    return 0


def _kernel(pack_kernel: packs.PackKernel) -> Iterator[str]:
    kernel = pack_kernel.kernel
    marks = [
        f"{kernel.tile_m}x{kernel.tile_n}",
        f"prefetch {kernel.prefetch}" if kernel.prefetch else "",
        "shuffled weights" if kernel.shuffled else "plain weights",
        "splits K" if kernel.splits else "",
        "bias" if kernel.bias else "",
        " ".join(kernel.outputs),
    ]
    try:
        checked = pack_kernel.checked()
    except PackError:
        return  # listed among the refusals
    marks += [f"{checked.metadata.vgprs} VGPRs", f"{checked.metadata.lds_bytes} bytes of LDS", f"sha256 {checked.sha256[:12]}"]
    yield f"{kernel.name}: {', '.join(filter(None, marks))}"


def _check(arguments: argparse.Namespace) -> int:
    faults: list[str] = []
    for folder in arguments.folders:
        if not os.path.isdir(folder):  # noqa: PTH112  false also for names that are too long
            raise UserError(f"folder not found: {folder}")
    for verdict in verdicts(arguments.folders):
        faults += verdict.faults
        print("\n".join([*verdict.faults, *_verdict(verdict, arguments.verbose)]))
    return 1 if faults else 0


def _verdict(verdict: Verdict, verbose: bool) -> Sequence[str]:
    lines = [f"note: {note}" for note in verdict.notes]
    for pack in verdict.packs:
        lines.append(packs.line_of(pack))
        lines += [f"  {line}" for pack_kernel in pack.pack_kernels if verbose for line in _kernel(pack_kernel)]
    return lines if verdict.faults else [*lines, f"{verdict.folder}: no fault"]


def _build(arguments: argparse.Namespace) -> int:
    generator = next(iter(entry_points(group="tunedgemm_asm.generators", name="gcn")), None)
    if generator is None:
        raise UserError("asm build: the generator is not installed (got no tunedgemm-asm-gcn); pip install 'tunedgemm-asm[gcn]'")
    try:
        built = generator.load()(arguments.gfx, arguments.output)
    except (PluginError, OSError) as error:
        raise UserError(f"asm build: {error}") from error
    print(f"{arguments.output}: {len(built.names)} kernels for {arguments.gfx}, assembled by {built.assembler}")
    return _check(argparse.Namespace(folders=[arguments.output], verbose=arguments.verbose))


command = Command("asm", "list, check or build packs of code objects", _add_arguments, _run)


@attrs.frozen
class Verdict:
    """Result of checking one folder.

    Attributes:
        folder: the folder.
        packs: packs in and below it.
        faults: what must be fixed.
        notes: oddities that are not faults.
    """

    folder: Path
    packs: tuple[Pack, ...]
    faults: tuple[str, ...]
    notes: tuple[str, ...]


def verdicts(folders: Iterable[Path]) -> Iterator[Verdict]:
    """Yield the verdict on each folder.

    A kernel that two packs give for one architecture is a fault of the later pack.
    """
    owners: dict[tuple[str, str], Pack] = {}
    for folder in folders:
        usable, problems = packs.in_folder(folder)
        faults, notes = list(problems), []
        for pack in usable:
            where = f"pack {pack.name} ({pack.folder})"
            faults += [f"{where}: {name}: {reason}" for name, reason in pack.refused.items()]
            faults += [f"{where}: {remark}" for remark in pack.remarks]
            faults += [f"{where}: {reason}" for reason in _of_hashes(pack)]
            faults += filter(None, (pack_kernel.unfit() for pack_kernel in pack.pack_kernels))
            for kernel in pack.kernels:
                if (owner := owners.setdefault((pack.gfx, kernel.name), pack)) is not pack:
                    faults.append(f"{where}: {kernel.name} is already given by {owner.name} ({owner.folder})")
            notes += [f"{where}: {note}" for note in _notes(pack)]
        yield Verdict(folder, usable, tuple(faults), tuple(notes))


def _of_hashes(pack: Pack) -> Iterator[str]:
    files = {kernel.file for kernel in pack.kernels}
    for file in pack.descriptor.sha256:
        if file not in (*files, pack.descriptor.manifest):
            yield f"pack.json has a sha256 of {file}, which has no usable kernel"
    if pack.descriptor.sha256:
        yield from (f"pack.json has no sha256 of {file}" for file in sorted(files - set(pack.descriptor.sha256)))


def _notes(pack: Pack) -> Iterator[str]:
    listed = {kernel.file for kernel in pack.kernels}
    spare = [path.name for path in sorted(pack.folder.rglob("*.co")) if path.relative_to(pack.folder).as_posix() not in listed]
    if spare:
        yield f"no usable kernel in {', '.join(spare[:5])}{f' and {len(spare) - 5} more' if len(spare) > 5 else ''}"
    if not pack.kernels:
        yield "it has no kernel"
    for pack_kernel in pack.pack_kernels:
        if not pack_kernel.fault and pack_kernel.checked().metadata.spills:
            yield f"{pack_kernel.kernel.name} spills {pack_kernel.checked().metadata.spills} registers"

"""``tunedgemm asm``: list the packs found, judge a pack before it is shipped, and build the pack of the generator."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from tunedgemm.plugin import Command, PluginError, UserError

from tunedgemm_asm import judge, packs
from tunedgemm_asm.manifest import PackError
from tunedgemm_asm.sources import is_folder


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="list|check|build", required=True)

    listing = _action(actions, "list", "the packs that are found, with -v their kernels, and what was refused")
    listing.add_argument("--gfx", default="", help="only those for this architecture, such as gfx942")

    check = _action(actions, "check", "read everything of packs and exit 1 if anything is wrong with them")
    check.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="a pack, a folder with packs, or AITER's hsa tree")

    build = _action(actions, "build", "generate and assemble the kernels of this plugin, as a pack; needs no GPU")
    build.add_argument("--gfx", required=True, help="architecture: gfx942 or gfx950")
    build.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="the pack's folder; made where it is missing")


def _action(actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, says: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=says, description=says)
    parser.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="say more: every kernel")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    actions = {"list": _list, "check": _check, "build": _build}
    return actions[arguments.action](arguments)


def _list(arguments: argparse.Namespace) -> int:
    every, _ = packs.installed()
    wanted = [arguments.gfx] if arguments.gfx else sorted({pack.gfx for pack in every})
    lines: list[str] = []
    for gfx in wanted:
        found = packs.found(gfx)
        lines += [f"{gfx}: {len(found.kernels)} kernels in {len(found.packs)} packs", *map(_indented, packs.described_packs(found))]
        lines += [f"    {line}" for loaded in found.kernels.values() if arguments.verbose for line in _kernel(loaded)]
    problems = dict.fromkeys(problem for gfx in wanted or ["gfx942"] for problem in packs.found(gfx).problems)
    lines += [f"refused: {problem}" for problem in problems]
    print("\n".join(lines or [packs.NONE]))
    return 0


def _indented(line: str) -> str:
    return f"  {line}"


def _kernel(loaded: packs.Loaded) -> Iterator[str]:
    kernel = loaded.kernel
    marks = [
        f"{kernel.tile_m}x{kernel.tile_n}",
        f"prefetch {kernel.prefetch}" if kernel.prefetch else "",
        "shuffled weights" if kernel.shuffled else "plain weights",
        "splits K" if kernel.splits else "",
        "bias" if kernel.bias else "",
        " ".join(kernel.outputs),
    ]
    try:
        seen, sha256 = loaded.metadata(), loaded.sha256
    except PackError:
        return  # told among what was refused
    marks += [f"{seen.vgprs} VGPRs", f"{seen.lds_bytes} bytes of LDS", f"sha256 {sha256[:12]}"]
    yield f"{kernel.name}: {', '.join(filter(None, marks))}"


def _check(arguments: argparse.Namespace) -> int:
    faults: list[str] = []
    for folder in arguments.folders:
        if not is_folder(folder):
            raise UserError(f"there is no folder {folder}")
    for verdict in judge.verdicts(arguments.folders):
        faults += verdict.faults
        print("\n".join([*verdict.faults, *_verdict(verdict, arguments.verbose)]))
    return 1 if faults else 0


def _verdict(verdict: judge.Verdict, verbose: bool) -> Sequence[str]:
    lines = [f"note: {note}" for note in verdict.notes]
    for pack in verdict.packs:
        lines.append(f"{packs.line_of(pack)}")
        lines += [f"  {line}" for loaded in pack.loaded if verbose for line in _kernel(loaded)]
    return lines if verdict.faults else [*lines, f"{verdict.folder}: no fault"]


def _build(arguments: argparse.Namespace) -> int:
    from tunedgemm_asm.gcn.pack import build

    try:
        built = build(arguments.gfx, arguments.output)
    except (PluginError, OSError) as error:
        raise UserError(f"asm build: {error}") from error
    print(f"{arguments.output}: {len(built.names)} kernels for {arguments.gfx}, assembled by {built.assembler}")
    return _check(argparse.Namespace(folders=[arguments.output], verbose=arguments.verbose))


command = Command("asm", "list, check or build packs of code objects", _add_arguments, _run)

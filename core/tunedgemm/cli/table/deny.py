"""``table deny``: entries of deny lists."""

from __future__ import annotations

import argparse

from tunedgemm.errors import UserError
from tunedgemm.ops import DEFAULT_OP
from tunedgemm.process.variables import BadValue, Libtypes
from tunedgemm.table.deny import ANY, Denial, DenyList, add_denial, deny_paths, user_list
from tunedgemm.workload.lists import stated_cells


def run(arguments: argparse.Namespace) -> int:
    """Add an entry to a deny list, or print all entries; return 1 if a line of a list is unusable."""
    if not any((arguments.libtype, arguments.kernel, arguments.set, arguments.op, arguments.gfx, arguments.libver, arguments.reason)):
        return _show()
    try:
        Libtypes().parse("" if arguments.libtype == ANY else arguments.libtype)
    except BadValue as error:
        raise UserError(f"--libtype: {error}") from None
    if arguments.kernel and not arguments.libtype:
        raise UserError(f"--kernel: needs the backend of {arguments.kernel}; add --libtype")
    if not arguments.reason.strip():
        raise UserError("--reason: is empty; state why, because others will read the list")
    cells = stated_cells(arguments.set)
    if empty := [column for column, value in cells.items() if not value]:
        raise UserError(f"--set: must be COLUMN=TEXT (got no text for {empty[0]}); leave the column out")
    denial = Denial(
        arguments.op or DEFAULT_OP, tuple(cells.items()), arguments.libtype.replace(ANY, ""), arguments.kernel,
        libver=arguments.libver, gfx=arguments.gfx,
        reason=arguments.reason.strip(),
    )  # fmt: skip
    path = arguments.output or user_list()
    print(f"{path}: {'added' if add_denial(path, denial) else 'already has this entry'}: {denial.text()}")
    if path not in deny_paths():
        print(f"no process reads it yet: name it in TUNEDGEMM_DENY, or leave out -o to write {user_list()}")
    return 0


def _show() -> int:
    listed = DenyList.load()
    for entry in listed.entries:
        print(f"{entry.source}: {entry.text()}: {entry.why()}")
    for problem in listed.problems:
        print(f"denies nothing: {problem}")
    if not listed.entries and not listed.problems:
        print(f"nothing is denied; `tunedgemm table deny --libtype NAME --kernel NAME --reason TEXT` adds to {user_list()}")
    return 1 if listed.problems else 0

"""``table deny``: entries of deny lists."""

from __future__ import annotations

import argparse

from tunedgemm.errors import UserError
from tunedgemm.ops import DEFAULT_OP
from tunedgemm.process.variables import BadValue, Libtypes
from tunedgemm.table.deny import ANY, Denial, DenyList, add_denial, deny_paths, user_list


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
    fields = [tuple(part.strip() for part in text.partition("=")[::2]) for text in arguments.set]
    if bare := [text for text, (_, value) in zip(arguments.set, fields, strict=True) if not value]:
        raise UserError(f"--set: must be COLUMN=TEXT, such as M=16 (got {bare[0]!r})")
    if twice := [column for column, _ in fields if [name for name, _ in fields].count(column) > 1]:
        raise UserError(f"--set: {twice[0]} is given twice; add an entry for each value")
    denial = Denial(
        arguments.op or DEFAULT_OP, tuple(fields), arguments.libtype.replace(ANY, ""), arguments.kernel,
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

"""``tunedgemm table``: one file an action in this folder."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from tunedgemm.backends.command import Command
from tunedgemm.cli.document import add_json
from tunedgemm.cli.flags import per_cent, positive_number
from tunedgemm.process.paths import expanded

_FILE = "a tuned CSV, or the bare name of a shipped one"
_COLLECTION = "a folder, oci://HOST/NAME:TAG or hf://OWNER/NAME"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="show|check|merge|diff|export|publish|put|get|deny", required=True)

    show = _action(actions, "show", "print the rows of a table")
    show.add_argument("file", nargs="?", help=f"{_FILE}; default: the merged layers that dispatch uses")
    show.add_argument("--here", action="store_true", help="only the rows of the present device")
    add_json(show)

    check = _action(actions, "check", "exit 1 if a file has any fault")
    check.add_argument("file", help=_FILE)
    check.add_argument("--bits", action="store_true", help="also run the kernels of rows with a bit class: do they still have its bits?")
    add = check.add_argument
    add("--remeasure", action="store_true", help="time the rows that carry most time again, in pairs with torch's call; exit 1 if slower")
    add("--top", type=positive_number, metavar="N", help="with --remeasure: most rows to time (default: 20)")
    add("--threshold", type=per_cent, metavar="PCT", help="with --remeasure: the slow-down that counts (default: 3%%)")
    add("--stale", action="store_true", help="with --remeasure: tune the rows again that are slower, or do not run")
    add_json(check)

    merge = _action(actions, "merge", "add the rows of tables (of shards, of machines) to one")
    merge.add_argument("output", metavar="OUT", type=expanded, help="the table that gets the rows; it keeps its own")
    merge.add_argument("inputs", metavar="IN", nargs="+", help=f"{_FILE}; it is not changed")
    merge.add_argument("--no-sort", dest="sort", action="store_false", help="keep the order of OUT's rows; default: sort by the key")

    diff = _action(actions, "diff", "compare the best rows of two tables; exit 1 if they differ")
    diff.add_argument("first", metavar="A", help=_FILE)
    diff.add_argument("second", metavar="B", help=_FILE)
    add_json(diff)

    export = _action(actions, "export", "write a table that AITER reads: its columns, its libtypes, one row a key")
    export.add_argument("--aiter", metavar="OUT", type=expanded, required=True, help="the new table, which must not exist")
    export.add_argument("inputs", metavar="IN", nargs="*", help=f"{_FILE}; default: the merged layers that dispatch uses")

    deny = _action(actions, "deny", "deny a kernel that must serve no call; without a kernel or a shape, list what is denied")
    deny.add_argument("--libtype", default="", help="the backend; default: every backend but torch")
    deny.add_argument("--kernel", default="", metavar="NAME", help="the kernel's name, as in tables; default: every kernel")
    deny.add_argument("--set", action="append", default=[], metavar="COLUMN=TEXT", help="a column that the shape must have; repeatable")
    deny.add_argument("--gfx", default="", help="the architecture; default: any")
    deny.add_argument("--libver", default="", metavar="START", help="start of the library's version; default: any")
    deny.add_argument("--reason", default="", help="why, for messages")
    deny.add_argument("-o", "--output", metavar="FILE", type=expanded, help="the deny list; default: deny.csv in the user folder")

    publish = _action(actions, "publish", "write a table with its provenance and a checksum, as one file to share")
    publish.add_argument("file", help=f"{_FILE}; it is not changed")
    publish.add_argument("-o", "--output", metavar="FILE", type=expanded, help="the new file; default: named for the device and the op")
    publish.add_argument("--least_gain", type=float, metavar="SHARE", help="name torch's call in rows that gain less over it: 0.01 is 1 %%")
    logs = "a trial log of the rows; repeat for several; default: the one next to the table"
    publish.add_argument("--trials", action="append", default=[], type=expanded, metavar="LOG", help=logs)

    put = _action(actions, "put", "add a published table to a collection")
    put.add_argument("file", type=expanded, help="a published table, with its signature FILE.minisig")
    put.add_argument("collection", metavar="COLLECTION", help=_COLLECTION)
    put.add_argument(
        "--coverage", action="append", default=[], metavar="MODEL=FILE", help="a model's report of `coverage --json`; repeatable"
    )
    put.add_argument("--unsigned", action="store_true", help="put it without a signature")

    get = _action(actions, "get", "list a collection of published tables, or get one of them")
    get.add_argument("collection", metavar="COLLECTION", help=_COLLECTION)
    get.add_argument("table", nargs="?", default="", metavar="TABLE", help="name or digest of the table; default: list all")
    get.add_argument("-o", "--output", metavar="FOLDER", type=expanded, default=Path(), help="the folder that gets it; default: this one")
    get.add_argument("--unsigned", action="store_true", help="do not check the signature: trust the collection")


def _action(actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=summary, description=summary)
    parser.add_argument("--op", default="", help="op; default: by the files' columns and names, else a16w16")
    parser.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="also print full errors")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    code: int = importlib.import_module(f"{__name__}.{arguments.action}").run(arguments)
    return code


command = Command("table", "show, check, compare, merge, export, publish, put or get tuned tables", _add_arguments, _run)

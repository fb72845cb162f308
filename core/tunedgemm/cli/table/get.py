"""``table get``: list a collection of published tables, or get one of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from tunedgemm.backends.signed_files import SUFFIX
from tunedgemm.errors import TableError
from tunedgemm.process.files import read_regular, replace_file
from tunedgemm.table.collection import INDEX, MAX_INDEX, Entry, Measured, chosen, entries_of, fetch
from tunedgemm.table.places import place_of
from tunedgemm.table.published import checked_body, is_published
from tunedgemm.table.sheet import locked, present
from tunedgemm.text.printable import printable_line


def run(arguments: argparse.Namespace) -> int:
    """Print the tables of a collection, or write one with its signature after all checks."""
    where = arguments.collection
    place = place_of(where)
    index = place.read(INDEX, MAX_INDEX)
    if index is None:
        raise TableError(f"{where}: no collection of tables (got no {INDEX}); `tunedgemm table put` makes one")
    entries = entries_of(where, index)
    if not arguments.table:
        for entry in entries:
            print("\n".join(_lines(entry)))
        return 0
    entry = chosen(where, entries, arguments.table)
    content, signature = fetch(place, where, entry, unsigned=arguments.unsigned)
    out = arguments.output / entry.name
    if not is_published(content):
        raise TableError(f"{where}: {entry.name} is not a published table; its author publishes it with `tunedgemm table publish`")
    checked_body(out, content)
    _write(out, content, signature)
    print(f"{out}: {entry.rows} rows of {printable_line(entry.op)}, {'unchecked' if arguments.unsigned else 'signed by a trusted key'}")
    return 0


def _write(out: Path, content: bytes, signature: bytes) -> None:
    """Write a table and its signature; leave other files of their names."""
    files = {Path(f"{out}{SUFFIX}"): signature, out: content} if signature else {out: content}
    with locked(out):
        try:
            for path, new in files.items():
                if present(path) and read_regular(path) != new:
                    raise TableError(f"{path}: exists already, with another content; name another folder with -o, or delete this file")
            for path, new in files.items():
                replace_file(path, new)
        except OSError as error:
            raise TableError(f"{out}: cannot be written: {error.strerror or error}; name another folder with -o") from error


def _lines(entry: Entry) -> list[str]:
    """Describe a table: what it has, and how it served models."""
    signed = "signed" if entry.signature else "unsigned"
    devices = ", ".join(entry.devices)
    lines = [f"{entry.name} {entry.sha256[:12]}: {entry.rows} rows of {entry.op} for {devices}, {signed}"]
    return [printable_line(line) for line in [*lines, *(f"  {_served(measured)}" for measured in entry.measured)]]


def _served(measured: Measured) -> str:
    regrets = [("rows of another M", measured.padded_regret), ("no row", measured.untuned_regret)]
    times = "".join(f"; {words}: {regret:.1%} slower than the best known" for words, regret in regrets if regret is not None)
    return (
        f"{measured.model} on {measured.device}: {measured.exact:.1%} of calls by rows of their M, {measured.padded:.1%} of another{times}"
    )

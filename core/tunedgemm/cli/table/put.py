"""``table put``: add a published table to a collection."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunedgemm.analysis.coverage.result import PADDED, TUNED
from tunedgemm.backends.signed_files import SUFFIX
from tunedgemm.cli.table.files import op_of
from tunedgemm.errors import TableError, UserError
from tunedgemm.process.files import read_regular
from tunedgemm.process.paths import expanded
from tunedgemm.table.collection import Entry, Measured, digest_of, put, require_signature
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.places import place_of
from tunedgemm.table.published import is_published
from tunedgemm.table.sheet import read_raw

#: Largest coverage report, in MiB.
_REPORT_MIB = 64


def run(arguments: argparse.Namespace) -> int:
    """Add the table, its signature and the coverage of models."""
    file: Path = arguments.file
    content = read_raw(file)
    if not is_published(content):
        raise TableError(f"{file}: not a published table; publish it with `tunedgemm table publish {file}`")
    rows, problems = read_rows(file, op := op_of(arguments, [file]))
    if problems or not rows:
        raise TableError(f"{problems[0] if problems else f'{file}: has no rows'}; publish the table again")
    signature = b"" if arguments.unsigned else _signature(file, content)
    devices = dict.fromkeys(f"{row.gfx}:{row.cu_num}:{row.device}" for row in rows)
    measured = tuple(_measured(text) for text in arguments.coverage)
    try:
        entry = Entry(
            file.name, digest_of(content), len(content), digest_of(signature) if signature else "", op.name, len(rows),
            tuple(devices), measured,
        )  # fmt: skip
    except ValueError as error:
        remedy = "rename it to letters, digits and ._+- before it is signed"
        raise TableError(f"{file}: not a name for other machines (got {file.name!r}); {remedy}") from error
    put(place_of(arguments.collection), arguments.collection, entry, [content, *([signature] if signature else [])])
    print(f"{arguments.collection}: {entry.name}, {entry.rows} rows of {entry.op}, sha256 {entry.sha256}")
    return 0


def _signature(file: Path, content: bytes) -> bytes:
    """Return the signature next to a table, which a trusted key must have made."""
    place = Path(f"{file}{SUFFIX}")
    try:
        signature = read_regular(place, 1)
    except FileNotFoundError:
        raise TableError(f"{file}: unsigned; sign it with `minisign -Sm {file.name}`, or pass --unsigned") from None
    except OSError as error:
        raise TableError(f"{place}: cannot be read: {error.strerror or error}") from error
    require_signature(str(file), content, signature)
    return signature


def _measured(text: str) -> Measured:
    """Return the measurement that MODEL=FILE names: a report of ``tunedgemm coverage --json``."""
    model, _, name = text.partition("=")
    if not (model.strip() and name):
        raise UserError(f"--coverage: must be MODEL=FILE (got {text!r:.80})")
    file = expanded(name)
    try:
        report = json.loads(read_regular(file, _REPORT_MIB))
        device, shares = {"tunedgemm.coverage 1": report["device"]}[f"{report['schema']} {report['version']}"], report["served_by"]
        return Measured(
            model.strip(), f"{device['gfx']}:{device['cu_num']}:{device['name']}", _share(shares, TUNED), _share(shares, PADDED),
            _regret(report["regrets"]["padded"]), _regret(report["regrets"]["untuned"]),
        )  # fmt: skip
    except OSError as error:
        raise TableError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise TableError(f"{file}: not a report of `tunedgemm coverage --json` (got {error!s:.80}); write it again") from error


def _share(served_by: Mapping[str, Any], words: tuple[str, ...]) -> float:
    return sum(float(served_by[word]["shares"]["calls"]) for word in words if word in served_by)


def _regret(regret: Mapping[str, float] | None) -> float | None:
    return None if regret is None else float(regret["weighted"])

"""Published tables: CSV files whose comment lines above the header state provenance and a checksum.

The checksum covers every other line, those of the provenance as well, with line ends as newlines.
Reading a published table checks it, so that a changed file serves no call. Torch-free.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from tunedgemm.errors import TableError
from tunedgemm.process.files import open_regular
from tunedgemm.text.number import whole_number
from tunedgemm.text.printable import printable_line

#: Version of the format; a later one is refused.
FORMAT = 1

_BOM = b"\xef\xbb\xbf"
_MARK = b"# tunedgemm-table: "
_FACT = re.compile(r"# ([a-z0-9_]+): (.+)")
#: Name of the fact that holds the checksum, and the remedy for a wrong one.
_SUM, _REMEDY = "sha256", "get the file again, or publish the table again with `tunedgemm table publish`"
#: Bytes that hold the longest provenance.
_HEAD = 1 << 16


@attrs.frozen
class Provenance:
    """The stated origin of a published table.

    Attributes:
        op: name of the op.
        facts: further facts by name, such as ``device``, ``driver`` and ``tuned``.
    """

    op: str
    facts: Mapping[str, str] = attrs.field(factory=dict)


def is_published(content: bytes) -> bool:
    """Tell whether a file's bytes begin as those of a published table do, even below other comments."""
    head = _split(content.removeprefix(_BOM))[0] if content.removeprefix(_BOM).startswith(b"#") else []
    return any(line.startswith(_MARK) for line in head)


def checked_body(path: Path, content: bytes) -> bytes:
    """Return a table's bytes without the provenance of a published one; line numbers stay.

    Raises:
        TableError: the provenance is damaged or of a later version, or the checksum is wrong.
    """
    if not is_published(content):
        return content
    content = content.removeprefix(_BOM)
    head, body = _split(content)
    stated = _facts(path, head).get(_SUM, "")
    actual = _checksum(head, body)
    if stated != actual:
        found = f"states {stated[:12]}" if stated else "states none"
        raise TableError(f"{path}: the checksum is not that of its content (got {actual[:12]}, the file {found}); {_REMEDY}")
    return b"\n" * len(head) + body


def provenance_of(path: Path) -> Provenance | None:
    """Return what a published table states, without checking it; None for another or unreadable file.

    Raises:
        TableError: the provenance is damaged, or of a later version.
    """
    try:
        with open_regular(path) as file:
            content = file.read(_HEAD)
    except OSError:
        return None
    if not is_published(content):
        return None
    facts = _facts(path, _split(content.removeprefix(_BOM))[0])
    op = facts.pop("op", "")
    return Provenance(op, {name: text for name, text in facts.items() if name not in (_SUM, "tunedgemm-table")})


def refuse_published(path: Path) -> None:
    """Raise TableError if a file to be changed is a published table, whose checksum would be wrong."""
    try:
        with open_regular(path) as file:
            published = is_published(file.read(_HEAD))
    except OSError:
        return
    if published:
        raise TableError(f"{path}: a published table, which does not change; copy its rows with `tunedgemm table merge OUT {path}`")


def published_text(provenance: Provenance, table: str) -> str:
    """Return the text of a published table: the provenance, the checksum, then the CSV *table*."""
    facts = {"op": provenance.op, **provenance.facts}
    head = [_MARK.decode() + str(FORMAT), *(f"# {name}: {printable_line(' '.join(text.split()))}" for name, text in facts.items() if text)]
    lines = [line.encode() for line in head]
    return "\n".join([*head, f"# {_SUM}: {_checksum(lines, table.encode())}", table])


def _split(content: bytes) -> tuple[list[bytes], bytes]:
    """Split a published table into the lines of its provenance and the rest."""
    start = 0
    while content.startswith(b"#", start) and (end := content.find(b"\n", start)) >= 0:
        start = end + 1
    return content[:start].splitlines(), content[start:]


def _facts(path: Path, head: list[bytes]) -> dict[str, str]:
    text = head[0].removeprefix(_MARK).decode("utf-8", "replace").strip() if head else ""
    if (version := whole_number(text)) is None:
        raise TableError(f"{path}: damaged provenance in its first line (got {text[:40]!r}); {_REMEDY}")
    if version > FORMAT:
        remedy = "install a newer tunedgemm, or ask for an older file"
        raise TableError(f"{path}: published in a later format (got {version}; this tunedgemm reads {FORMAT}); {remedy}")
    facts: dict[str, str] = {}
    for number, line in enumerate(head[1:], 2):
        text = line.decode("utf-8", "replace").strip()
        parsed = _FACT.fullmatch(text)
        if parsed is None or parsed[1] in facts:
            raise TableError(f"{path}: damaged provenance in line {number} (got {text[:40]!r}); {_REMEDY}")
        facts[parsed[1]] = parsed[2]
    return facts


def _checksum(head: list[bytes], body: bytes) -> str:
    """Return the SHA-256 of all lines but that of the checksum."""
    prefix = f"# {_SUM}: ".encode()
    lines = [line.rstrip() for line in head if not line.startswith(prefix)]
    return hashlib.sha256(b"\n".join([*lines, body.replace(b"\r\n", b"\n")])).hexdigest()

"""Published tables: CSV files with provenance and a checksum in comments above the header.

The checksum covers all other lines, including the provenance, with normalised line ends. It is
checked on reading, so that a modified file is not used. Torch-free.
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

#: Version of the format; later ones are rejected.
FORMAT = 1

_BOM = b"\xef\xbb\xbf"
_MARK = b"# tunedgemm-table: "
_FACT = re.compile(r"# ([a-z0-9_]+): (.+)")
#: Name of the checksum line, and the remedy for a wrong checksum.
_SUM, _REMEDY = "sha256", "get the file again, or publish the table again with `tunedgemm table publish`"
#: Most bytes of a provenance.
_HEAD = 1 << 16


@attrs.frozen
class Provenance:
    """Origin of a published table.

    Attributes:
        op: name of the op.
        facts: further facts by name, such as ``device``, ``driver`` and ``tuned``.
    """

    op: str
    facts: Mapping[str, str] = attrs.field(factory=dict)


def is_published(content: bytes) -> bool:
    """Check whether content is that of a published table, also below other comments."""
    head = _split(content.removeprefix(_BOM))[0] if content.removeprefix(_BOM).startswith(b"#") else []
    return any(line.startswith(_MARK) for line in head)


def checked_body(path: Path, content: bytes) -> bytes:
    """Check a published table, and blank out its provenance, keeping line numbers.

    Raises:
        TableError: the provenance is invalid or of a later version, or the checksum is wrong.
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
    """Return the unchecked provenance of a file; None if it is not published or unreadable.

    Raises:
        TableError: the provenance is invalid, or of a later version.
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
    """Raise TableError for a published table, whose checksum a change would break."""
    try:
        with open_regular(path) as file:
            published = is_published(file.read(_HEAD))
    except OSError:
        return
    if published:
        raise TableError(f"{path}: a published table, which does not change; copy its rows with `tunedgemm table merge OUT {path}`")


def published_text(provenance: Provenance, table: str) -> str:
    """Format a published table: provenance, checksum, then the CSV text *table*."""
    facts = {"op": provenance.op, **provenance.facts}
    head = [_MARK.decode() + str(FORMAT), *(f"# {name}: {printable_line(' '.join(text.split()))}" for name, text in facts.items() if text)]
    lines = [line.encode() for line in head]
    return "\n".join([*head, f"# {_SUM}: {_checksum(lines, table.encode())}", table])


def _split(content: bytes) -> tuple[list[bytes], bytes]:
    """Split content into leading comment lines and the rest."""
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
    """Return the SHA-256 of all lines except the checksum."""
    prefix = f"# {_SUM}: ".encode()
    lines = [line.rstrip() for line in head if not line.startswith(prefix)]
    return hashlib.sha256(b"\n".join([*lines, body.replace(b"\r\n", b"\n")])).hexdigest()

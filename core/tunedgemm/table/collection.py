"""Collections of published tables: an index, and files named by their SHA-256. Torch-free.

The index states what each table has and how it did; the digest and the signature decide whether a
table is the author's. `tunedgemm.table.places` has the kinds of places.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
from attrs.converters import optional
from attrs.validators import deep_iterable, ge, instance_of, matches_re

from tunedgemm.backends.signed_files import SignatureError, verify_signature
from tunedgemm.errors import TableError
from tunedgemm.process.files import largest_file

#: Version of the index; later ones are rejected.
FORMAT = 1
INDEX = "tunedgemm-index.json"
#: Largest index and largest signature, in bytes.
MAX_INDEX, _MAX_SIGNATURE = 1 << 24, 1 << 16
#: Least number of digits that name a table by its digest.
_DIGITS = 8

_digest = matches_re(r"[0-9a-f]{64}")


class Place(Protocol):
    """Protocol of the places of collections, which hold files by name."""

    def read(self, name: str, most: int) -> bytes | None:
        """Return a file, or the start of one of more than *most* bytes; None without one."""

    def update(self, files: Mapping[str, bytes], change: Callable[[bytes | None], bytes]) -> None:
        """Add files and then replace the index, if *change* of the present one raises nothing."""


@attrs.frozen
class Measured:
    """How a table served a model's calls, by `tunedgemm coverage`.

    Attributes:
        model, device: names of the model and of the device.
        exact, padded: shares of the calls that rows of their M and of another M served.
        padded_regret, untuned_regret: extra time of the calls by rows of another M, and without a
            row, over the best known solution; None if it was not measured.
    """

    model: str = attrs.field(validator=instance_of(str))
    device: str = attrs.field(validator=instance_of(str))
    exact: float = attrs.field(converter=float, validator=ge(0.0))
    padded: float = attrs.field(converter=float, validator=ge(0.0))
    padded_regret: float | None = attrs.field(default=None, converter=optional(float))
    untuned_regret: float | None = attrs.field(default=None, converter=optional(float))


@attrs.frozen
class Entry:
    """A table of a collection.

    Attributes:
        name: file name, by which it was signed.
        sha256, size: digest and size of the file.
        signature: digest of its signature by minisign; "" if it has none.
        op, rows, devices: its op, number of rows, and their devices as gfx:cu_num:name.
        measured: how it served models.
    """

    name: str = attrs.field(validator=matches_re(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}\.csv"))
    sha256: str = attrs.field(validator=_digest)
    size: int = attrs.field(validator=[instance_of(int), ge(1)])
    signature: str = attrs.field(validator=lambda *given: None if given[2] == "" else _digest(*given))
    op: str = attrs.field(validator=instance_of(str))
    rows: int = attrs.field(validator=[instance_of(int), ge(1)])
    devices: tuple[str, ...] = attrs.field(validator=deep_iterable(instance_of(str)))
    measured: tuple[Measured, ...] = ()


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of a file's bytes."""
    return hashlib.sha256(content).hexdigest()


def file_name(digest: str) -> str:
    """Return the name of the file with a digest."""
    return f"sha256/{digest}"


def entries_of(where: str, content: bytes | None) -> tuple[Entry, ...]:
    """Return the tables of an index; none of an absent one.

    Raises:
        TableError: the index is damaged, or of a later version.
    """
    if content is None:
        return ()
    try:
        document = json.loads(content)
        version = document["format"]
        if not isinstance(version, int) or version <= FORMAT:
            return tuple(_entry(fields) for fields in document["tables"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise TableError(f"{where}: damaged index (got {error!s:.120}); ask its author to put the tables again") from error
    remedy = "install a newer tunedgemm, or ask for an older collection"
    raise TableError(f"{where}: an index of a later format (got {version}; this tunedgemm reads {FORMAT}); {remedy}")


def _entry(fields: Mapping[str, Any]) -> Entry:
    known = {field.name: fields[field.name] for field in attrs.fields(Entry)}
    names = [field.name for field in attrs.fields(Measured)]
    measured = tuple(Measured(**{name: part[name] for name in names if name in part}) for part in known["measured"])
    return Entry(**{**known, "devices": tuple(known["devices"]), "measured": measured})


def index_text(entries: Sequence[Entry]) -> bytes:
    """Format an index."""
    return json.dumps({"format": FORMAT, "tables": [attrs.asdict(entry) for entry in entries]}, indent=1).encode() + b"\n"


def put(place: Place, where: str, entry: Entry, files: Sequence[bytes]) -> None:
    """Add a table with its signature.

    An entry of the same file is replaced, but for what other models measured.

    Raises:
        TableError: the index is damaged, of a later version, or would be too large to be read.
    """

    def change(index: bytes | None) -> bytes:
        entries = entries_of(where, index)
        kept = [other for other in entries if other.sha256 != entry.sha256]
        earlier = [part for other in entries if other.sha256 == entry.sha256 for part in other.measured]
        measured = {(part.model, part.device): part for part in [*earlier, *entry.measured]}
        text = index_text([*kept, attrs.evolve(entry, measured=tuple(measured.values()))])
        if len(text) > MAX_INDEX:
            raise TableError(f"{where}: its index is full (got {len(text)} bytes, may have {MAX_INDEX}); name another collection")
        return text

    place.update({file_name(digest_of(content)): content for content in files}, change)


def chosen(where: str, entries: Sequence[Entry], text: str) -> Entry:
    """Return the last table of a name, or the one whose digest begins so.

    Raises:
        TableError: no table or several have it.
    """
    of_name = [entry for entry in entries if entry.name == text]
    by_digest = [entry for entry in entries if len(text) >= _DIGITS and entry.sha256.startswith(text.lower())]
    found = of_name[-1:] or by_digest
    if len(found) != 1:
        fault = "several tables begin so" if found else "no such table"
        raise TableError(f"{where}: {fault} (got {text!r:.80}); `tunedgemm table get {where}` lists them")
    return found[0]


def fetch(place: Place, where: str, entry: Entry, *, unsigned: bool) -> tuple[bytes, bytes]:
    """Return a table and its signature, b"" without one, both checked.

    Args:
        unsigned: take it without a check of its signature.

    Raises:
        TableError: a file is missing or not the one in the index, or no trusted key signed it.
    """
    if entry.size > largest_file():
        raise TableError(f"{entry.name}: too large (got {entry.size} bytes); raise TUNEDGEMM_MAX_FILE_MIB to get it")
    content = _checked(place, where, entry.sha256, entry.size, entry.name)
    signature = _checked(place, where, entry.signature, _MAX_SIGNATURE, f"{entry.name}.minisig") if entry.signature else b""
    if not unsigned:
        if not signature:
            raise TableError(f"{entry.name}: unsigned; ask its author to sign it, or pass --unsigned to trust the collection")
        require_signature(entry.name, content, signature)
    return content, signature


def require_signature(name: str, content: bytes, signature: bytes) -> None:
    """Require that a trusted key signed a table; raise TableError if none did."""
    try:
        verify_signature(Path(name), content, signature)
    except SignatureError as error:
        raise TableError(str(error)) from error


def _checked(place: Place, where: str, digest: str, most: int, name: str) -> bytes:
    """Read a file of at most so many bytes, and check its digest."""
    content = place.read(file_name(digest), most)
    if content is None:
        raise TableError(f"{where}: {name} is missing (got no file of sha256 {digest[:12]}); ask its author to put it again")
    if digest_of(content) != digest:
        got = f"{len(content)} bytes of sha256 {digest_of(content)[:12]}, the index states {digest[:12]}"
        raise TableError(f"{where}: {name} is not the file of the index (got {got}); get it again, or tell its author")
    return content

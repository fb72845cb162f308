"""Indexfile: an on-disk cache of the scan of a large tuned file. Torch-free.

One file of numbers per tuned file, in the folder of the artifact cache: its digest, a line of
JSON, arrays. It is valid for one content of the tuned file, one op, one version of the parsing
code, and one interpreter's way to hash numbers. The content is read and hashed each time: a copy or
a quick edit can keep both time and size.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import sys
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunedgemm.backends.artifact import read_cached, write_cached
from tunedgemm.backends.signature import SignatureError, check_signature
from tunedgemm.errors import TableError
from tunedgemm.table import scan
from tunedgemm.table.columns import foreign_columns
from tunedgemm.table.csvfile import Problem, rows_of_content
from tunedgemm.table.folders import SHIPPED
from tunedgemm.table.index import PARTS, RowSource, unread
from tunedgemm.table.published import checked_body
from tunedgemm.table.sheet import read_raw

if TYPE_CHECKING:
    from tunedgemm.ops.op import Op

#: Bytes of the smallest file worth a cache; smaller ones are scanned in about a tenth of a second.
LARGE = 8 << 20

_FORMAT = 3
_DIGEST = 32
_ARRAYS = (("keys", "q"), ("us", "d"), ("device_numbers", "I"), ("starts", "q"), ("lines", "I"))

#: folders whose code determines how a line is read, next to the op's own file
_READERS = (Path(__file__).parent, Path(__file__).parents[1], Path(__file__).parents[1] / "ops")


def open_source(path: Path, op: Op) -> RowSource:
    """Return the rows of a tuned file, from the cache where it matches the current content.

    Raises:
        TableError: the file cannot be read, lacks a column that every row needs, or is another
            op's.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size >= LARGE:
            return _open_cached(path, op)
    content = _signed(path)
    source = scan.scan(path, op, scan.normalise(content))
    if source is not None and (len(source) or not source.problems):
        return source
    return _read(path, op, content)


def _signed(path: Path) -> bytes:
    """Return the bytes of a table below any provenance; check its checksum and a required signature.

    Raises:
        TableError: it cannot be read, its checksum is wrong, or a required signature is missing or
            wrong. Tables of the package need no signature.
    """
    target = Path(os.path.realpath(path))
    shipped = SHIPPED.resolve() in target.parents
    content = read_raw(target if shipped else path)  # a link may change after it was followed
    if not shipped:
        try:
            check_signature(path, content)
        except SignatureError as error:
            raise TableError(str(error)) from error
    return checked_body(path, content)


def _read(path: Path, op: Op, content: bytes) -> RowSource:
    """Read every row at once: for small, special or broken files, whose error this raises."""
    rows, problems = rows_of_content(path, op, content)
    source = RowSource.of(rows)
    source.problems = problems
    return source


def _open_cached(path: Path, op: Op) -> RowSource:
    """Return the rows of a large file; write the cache where it did not match."""
    about = _validity(op)
    place = _place(path, op)
    with ThreadPoolExecutor(1) as pool:
        content = pool.submit(_content, path)  # reading and hashing release the GIL
        cached = _load(place, about) if about is not None else None
        raw, text, digest = content.result()
    if cached is not None and cached[1] == digest:
        source, problems = cached[0], cached[2]
        head = scan.head_of(path, op, text)
        if head is not None:
            source.content, source.read = text, head[0].rows
            source.problems = [Problem(path, line, reason) for line, reason in problems]
            return source
    del cached
    source = scan.scan(path, op, text) or _read(path, op, raw)
    if about is not None and source.content:
        _save(place, source, {**about, "content": digest})
    return source


def _content(path: Path) -> tuple[bytes, bytes, str]:
    raw = _signed(path)
    return raw, scan.normalise(raw), hashlib.blake2b(raw, digest_size=_DIGEST).hexdigest()


def _place(path: Path, op: Op) -> str:
    """Return the path in the cache: one per tuned file and op, so that edits do not fill the disk."""
    name = hashlib.sha256(f"{os.path.realpath(path)}\n{op.name}\n{sys.implementation.cache_tag}".encode()).hexdigest()
    return f"tables/{name[:32]}.index"


def _validity(op: Op) -> dict[str, Any] | None:
    """Return what an index depends on next to the file's content; None where the op's code is not found."""
    code = hashlib.sha256()
    try:
        functions = (inspect.unwrap(op.columns.parse), op.columns.format, op.problem, op.canonical)
        sources = [Path(inspect.getfile(function)) for function in functions]
        for source in (*(file for folder in _READERS for file in sorted(folder.glob("*.py"))), *sources):
            code.update(source.read_bytes())
    except (TypeError, OSError):
        return None
    hashing = [sys.implementation.cache_tag, sys.hash_info.width, sys.byteorder, *(array(kind).itemsize for kind in "qdI")]
    columns = [op.name, op.columns.key, op.columns.own, op.columns.values, foreign_columns(op)]
    return {"format": _FORMAT, "code": code.hexdigest(), "hashing": hashing, "columns": json.loads(json.dumps(columns))}


def _save(place: str, source: RowSource, about: dict[str, Any]) -> None:
    """Write a source's numbers; a failure only costs the cache."""
    head = about | {
        "kinds": [[kind, units] for kind, stamps in source.kinds.items() for units in stamps],
        "devices": source.devices,
        "problems": [[problem.line, problem.reason] for problem in source.problems],
        "sorted": source.sorted,
        "pinned": source.pinned,
        "rows": len(source),
        "parts": list(map(len, source.split())),
    }
    arrays = [*(getattr(source, name) for name, _ in _ARRAYS), *source.split()]
    parts = [json.dumps(head).encode() + b"\n", *(numbers.tobytes() for numbers in arrays)]
    with contextlib.suppress(OSError):
        write_cached(place, [_digest(parts), *parts])


def _digest(parts: Sequence[bytes | memoryview]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _load(place: str, about: dict[str, Any]) -> tuple[RowSource, str, list[tuple[int, str]]] | None:
    """Load a source without its content, its digest and its problems; None for an unusable cache file."""
    try:
        content = read_cached(place)
    except OSError:
        return None
    whole, end = memoryview(content), content.find(b"\n", _DIGEST)
    if end < 0 or _digest([whole[_DIGEST:]]) != content[:_DIGEST]:
        return None
    try:
        head = json.loads(content[_DIGEST:end])
        if any(head.get(name) != value for name, value in about.items()):
            return None
        source, digest = _source_of(head, whole[end + 1 :]), _checked(head["content"], str)
        problems = [(_number(line), _checked(reason, str)) for line, reason in _checked(head["problems"], list)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):  # whoever can write here can forge the digest
        return None
    source.cached = place
    return source, digest, problems


def _source_of(head: dict[str, Any], numbers: memoryview) -> RowSource:
    """Return the source of a head and its arrays; raise ValueError or TypeError where they are no index."""
    source = RowSource(unread, sorted=_checked(head["sorted"], bool), pinned=_checked(head["pinned"], bool))
    source.devices = [(_checked(gfx, str), _checked(device, str), _number(units)) for gfx, device, units in _checked(head["devices"], list)]
    for (*words, extra), units in _checked(head["kinds"], list):
        pairs = tuple((_checked(name, str), _checked(value, str, int, bool)) for name, value in extra)
        dtype, outdtype, epilogue, scale, layout = (_checked(word, str) for word in words)
        source.stamp(_number(units), (dtype, outdtype, epilogue, scale, layout, pairs))
    rows, sizes = _number(head["rows"]), [_number(size) for size in head["parts"]]
    source.parts = [array("I") for _ in sizes]
    arrays = [*(getattr(source, name) for name, _ in _ARRAYS), *source.parts]
    start = 0
    for part, size in zip(arrays, [rows] * len(_ARRAYS) + sizes, strict=True):
        stop = start + size * part.itemsize
        part.frombytes(numbers[start:stop])
        start = stop
    if start != len(numbers) or len(sizes) != PARTS or sum(sizes) != rows:
        raise ValueError("another number of rows than it says")
    if rows and (max(source.device_numbers) >= len(source.devices) or max(max(part, default=0) for part in source.parts) >= rows):
        raise ValueError("a device or a row that it does not have")
    return source


def _checked(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise ValueError(f"a value of another type (got {type(value).__name__})")
    return value


def _number(value: Any) -> int:
    number: int = _checked(value, int)
    if number < 0:
        raise ValueError(f"a negative number (got {number})")
    return number

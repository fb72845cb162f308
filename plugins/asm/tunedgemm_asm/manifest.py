"""Manifests: which kernels a pack has, from a CSV file, as values. A manifest is data: parsed against closed lists, and never believed.

Both of AITER's dialects are read: ``knl_name,co_name,tn,tileM,tileN,pf,bPreshuffle,splitK,subK,bias`` of its bf16 kernels and
``tile_m,tile_n,splitK,bpreshuffle,knl_name,co_name`` of the others, with their comments (``#``, ``//``, ``;``, ``/* */``).
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import attrs
from tunedgemm.plugin import PluginError

from tunedgemm_asm.abi import Abi

#: Bytes of a manifest at most.
MAX_BYTES = 4 << 20
#: Elements along a side of a tile, and other numbers of a manifest, at most.
MAX_NUMBER = 4096

#: Letters of a kernel's name at most.
MAX_NAME = 512

_SYMBOL = re.compile(rf"[A-Za-z_$.][\w$.]{{0,{MAX_NAME - 1}}}", re.ASCII)
_REQUIRED = ("knl_name", "co_name", "tilem", "tilen")
#: Columns by their names in small letters without "_" but for the two names.
_KNOWN = (*_REQUIRED, "tn", "pf", "bpreshuffle", "splitk", "subk", "bias", "outputs")


class PackError(PluginError):
    """A pack, a manifest or a code object that cannot be used: names it and the reason."""


class UnreadableError(PackError):
    """A file that cannot be read: that may pass, so it is worth another try."""


@attrs.frozen
class KernelConfig:
    """One kernel, as its manifest describes it.

    Attributes:
        name: its symbol in the code object, which is the kernelName of tables.
        file: the code object, relative to the manifest's folder.
        abi: name of the layout of its arguments.
        tile_m, tile_n: elements of the output that a workgroup computes.
        prefetch: tiles along K that it loads ahead, 0 where the manifest does not say.
        shuffled: whether it reads the weight in the ABI's layout; else plain [N, K].
        splits: whether it can split K over workgroups.
        sub_k: elements along K of which a split has a multiple.
        bias: whether it can add one.
        outputs: the dtypes that it can write.
    """

    name: str
    file: str
    abi: str
    tile_m: int
    tile_n: int
    prefetch: int = 0
    shuffled: bool = False
    splits: bool = False
    sub_k: int = 64
    bias: bool = False
    outputs: tuple[str, ...] = ()


@attrs.frozen
class Manifest:
    """What a manifest gives.

    Attributes:
        kernels: those that can be used, in its order.
        refused: name of a kernel (or the line, where it has none) -> why it is not among them.
        remarks: what is odd and does no harm.
    """

    kernels: tuple[KernelConfig, ...]
    refused: Mapping[str, str]
    remarks: tuple[str, ...] = ()


def read(path: Path, abi: Abi) -> Manifest:
    """The kernels of a manifest, whose arguments have this layout.

    Raises:
        PackError: it cannot be read, is too large, or lacks a column; a bad line costs its own kernel alone.
    """
    return decoded(content_of(path.parent, path.name, MAX_BYTES), path.name, abi)


def decoded(content: bytes, name: str, abi: Abi) -> Manifest:
    """`read`, from bytes; *name* is the file's, for messages."""
    try:
        return parse(content.decode("utf-8-sig"), name, abi)
    except UnicodeDecodeError as error:
        raise PackError(f"{name}: {error}") from error


def parse(text: str, name: str, abi: Abi) -> Manifest:
    """`read`, from text; *name* is the file's, for messages."""
    lines = [(number, line) for number, line in enumerate(_without_comments(text).splitlines(), 1) if line.strip(", \t")]
    if not lines:
        raise PackError(f"{name}: empty; the first line must name the columns")
    try:
        titles = _cells(lines[0][1])
    except PackError as error:
        raise PackError(f"{name} line {lines[0][0]}: {error}") from error
    header = [_column(title) for title in titles]
    missing = [column for column in _REQUIRED if column not in header]
    doubled = [column for column, count in Counter(header).items() if count > 1]
    if missing or doubled:
        raise PackError(f"{name} line {lines[0][0]}: the column {(missing or doubled)[0]} is {'missing' if missing else 'there twice'}")
    unknown = [title for title, column in zip(titles, header, strict=True) if column not in _KNOWN]
    remarks = (f"{name}: columns that are not known: {', '.join(unknown)}",) if unknown else ()
    return _kernels(lines[1:], header, name, abi, remarks)


def _cells(line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise PackError(str(error)) from error


def _kernels(lines: Iterable[tuple[int, str]], header: list[str], name: str, abi: Abi, remarks: tuple[str, ...]) -> Manifest:
    kernels: list[KernelConfig] = []
    refused: dict[str, str] = {}
    places: dict[str, list[int]] = {}
    for line, text in lines:
        try:
            cells = _cells(text)
        except PackError as error:
            refused[f"line {line}"] = f"{name} line {line}: {error}"
            continue
        row = dict(zip(header, cells, strict=False))
        label = " ".join(row.get("knl_name", "").split())[:MAX_NAME] or f"line {line}"
        places.setdefault(label, []).append(line)
        try:
            _check_width(cells, header)
            kernels.append(_kernel(row, abi))
        except PackError as error:
            refused[label] = f"{name} line {line}: {error}"
    for label, found in places.items():
        if len(found) > 1:
            refused[label] = f"{name}: listed {len(found)} times, in lines {', '.join(map(str, found))}"
    return Manifest(tuple(kernel for kernel in kernels if kernel.name not in refused), refused, remarks)


def _check_width(cells: list[str], header: list[str]) -> None:
    if len(cells) != len(header):
        raise PackError(f"it has {len(cells)} cells, the header {len(header)}")


def _kernel(row: Mapping[str, str], abi: Abi) -> KernelConfig:
    if not _SYMBOL.fullmatch(row["knl_name"]):
        raise PackError(f"column knl_name: {row['knl_name'][:80]!r} is no symbol")
    if _number(row, "tn", 1) != 1:
        raise PackError(f"column tn: {row['tn']!r}; only 1 is known: x [M, K] by weight [N, K]")
    allowed = abi.dtypes["out"]
    outputs = tuple(row.get("outputs", "").split()) or allowed
    if not set(outputs) <= set(allowed):
        raise PackError(f"column outputs: {row['outputs']!r}; {abi.name} has {' '.join(allowed)}")
    return KernelConfig(
        name=row["knl_name"],
        file=inside(row["co_name"], "column co_name"),
        abi=abi.name,
        tile_m=_number(row, "tilem", least=1),
        tile_n=_number(row, "tilen", least=1),
        prefetch=_number(row, "pf", 0),
        shuffled=bool(_number(row, "bpreshuffle", 0, most=1)),
        splits=bool(_number(row, "splitk", 0, most=1)),
        sub_k=_number(row, "subk", abi.sub_k, least=1),
        bias=bool(_number(row, "bias", int(abi.bias), most=1)),
        outputs=outputs,
    )


def inside(text: str, where: str) -> str:
    """The relative path of a file below a folder.

    Raises:
        PackError: it is none, or leads out of the folder.
    """
    path = PurePosixPath(text)
    if not text or "\\" in text or "\0" in text or ":" in text:
        raise PackError(f"{where}: {text[:80]!r} is no relative path with / between folders")
    if path.is_absolute() or ".." in path.parts or path.name in ("", "."):
        raise PackError(f"{where}: {text[:80]!r} leads out of the pack's folder")
    return str(path)


def place_of(folder: Path, file: str) -> Path:
    """Where a file of a pack lies, links resolved.

    Raises:
        PackError: out of the pack's folder; names the file, as the others do.
        UnreadableError: there is no such file, or it cannot be told.
    """
    try:
        place = (folder / file).resolve()
        within, exists = place.is_relative_to(folder.resolve()), place.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself is a RuntimeError up to Python 3.12
        raise UnreadableError(f"{file[:80]}: {_reason(error)}") from error
    if not within:
        raise PackError(f"{file} leads out of the pack's folder, to {place}")
    if not exists:
        raise UnreadableError(f"there is no file {file}")
    return place


def content_of(folder: Path, file: str, most: int) -> bytes:
    """The bytes of a file of a pack; raises as `place_of`, and where there are more than *most*."""
    try:
        with place_of(folder, file).open("rb") as opened:
            content = opened.read(most + 1)
    except OSError as error:
        raise UnreadableError(f"{file}: {_reason(error)}") from error
    if len(content) > most:
        raise PackError(f"{file}: more than {most} bytes")
    return content


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _number(row: Mapping[str, str], column: str, default: int | None = None, *, least: int = 0, most: int = MAX_NUMBER) -> int:
    text = row.get(column, "")
    if not text and default is not None:
        return default
    if not text.isascii() or not text.isdigit() or not least <= int(text[:9]) <= most:
        raise PackError(f"column {column}: {text[:40]!r} is no number from {least} to {most}")
    return int(text)


def _column(cell: str) -> str:
    small = cell.lower()
    return small if small in ("knl_name", "co_name") else small.replace("_", "")


def _without_comments(text: str) -> str:
    """The text with its comments blanked out; lines keep their numbers."""
    text = re.sub(r"/\*.*?(?:\*/|\Z)", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    return re.sub(r"(?://|#|;).*", "", text)

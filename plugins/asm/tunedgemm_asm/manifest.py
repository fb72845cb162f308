"""Parse manifests: CSV files that list the kernels of a pack.

A manifest is untrusted data, checked against closed lists. Both of AITER's dialects are read, with
their comments (``#``, ``//``, ``;``, ``/* */``):
``knl_name,co_name,tn,tileM,tileN,pf,bPreshuffle,splitK,subK,bias`` of its bf16 kernels and
``tile_m,tile_n,splitK,bpreshuffle,knl_name,co_name`` of the others.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.files import read_trusted

from tunedgemm_asm.abi import Abi

#: Most bytes of a manifest.
MAX_BYTES = 4 << 20
#: Largest tile side and other number of a manifest.
MAX_NUMBER = 4096

#: Most letters of a kernel's name.
MAX_NAME = 512

_SYMBOL = re.compile(rf"[A-Za-z_$.][\w$.]{{0,{MAX_NAME - 1}}}", re.ASCII)
_REQUIRED = ("knl_name", "co_name", "tilem", "tilen")
#: Known columns in lower case, without "_" except in the two names.
_KNOWN = (*_REQUIRED, "tn", "pf", "bpreshuffle", "splitk", "subk", "bias", "outputs")


class PackError(PluginError):
    """Error of an unusable pack, manifest or code object; names it and the reason."""


class UnreadableError(PackError):
    """Error of reading a file; may be transient, so reading is retried."""


@attrs.frozen
class KernelConfig:
    """Parameters of one kernel in its manifest.

    Attributes:
        name: symbol in the code object, and kernelName of tables.
        file: code object, relative to the manifest's folder.
        abi: name of its argument layout.
        tile_m, tile_n: output tile of a workgroup.
        prefetch: tiles along K loaded ahead, 0 where unstated.
        shuffled: whether it reads the weight in the ABI's layout; else plain [N, K].
        splits: whether it can split K over workgroups.
        sub_k: granularity of a split along K, in elements.
        bias: whether it can add a bias.
        outputs: output dtypes.
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
    """Content of a manifest.

    Attributes:
        kernels: usable kernels, in the manifest's order.
        refused: kernel, or line without a name -> why it is unusable.
        remarks: harmless oddities.
    """

    kernels: tuple[KernelConfig, ...]
    refused: Mapping[str, str]
    remarks: tuple[str, ...] = ()


def read(path: Path, abi: Abi) -> Manifest:
    """Read the kernels of a manifest with this argument layout.

    Raises:
        PackError: the file is unreadable, too large or lacks a column; a bad line costs only its
            kernel.
    """
    return decoded(content_of(path.parent, path.name, MAX_BYTES), path.name, abi)


def decoded(content: bytes, name: str, abi: Abi) -> Manifest:
    """Parse the bytes of a manifest; messages name the file *name*."""
    try:
        return parse(content.decode("utf-8-sig"), name, abi)
    except UnicodeDecodeError as error:
        raise PackError(f"{name}: {error}") from error


def parse(text: str, name: str, abi: Abi) -> Manifest:
    """Parse the text of a manifest; messages name the file *name*."""
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
        raise PackError(f"{name} line {lines[0][0]}: column {(missing or doubled)[0]} is {'missing' if missing else 'duplicate'}")
    unknown = [title for title, column in zip(titles, header, strict=True) if column not in _KNOWN]
    remarks = (f"{name}: unknown columns: {', '.join(unknown)[:200]}",) if unknown else ()
    return _kernels(lines[1:], header, name, abi, remarks)


def _cells(line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise PackError(str(error)) from error


def _kernels(lines: Iterable[tuple[int, str]], header: list[str], name: str, abi: Abi, remarks: tuple[str, ...]) -> Manifest:
    kernels: list[KernelConfig] = []
    refused: dict[str, str] = {}
    lines_of: dict[str, list[int]] = {}
    for line, text in lines:
        try:
            cells = _cells(text)
        except PackError as error:
            refused[f"line {line}"] = f"{name} line {line}: {error}"
            continue
        row = dict(zip(header, cells, strict=False))
        label = " ".join(row.get("knl_name", "").split())[:MAX_NAME] or f"line {line}"
        lines_of.setdefault(label, []).append(line)
        if len(cells) != len(header):
            refused[label] = f"{name} line {line}: expected {len(header)} cells (got {len(cells)})"
            continue
        try:
            kernels.append(_kernel(row, abi))
        except PackError as error:
            refused[label] = f"{name} line {line}: {error}"
    for label, numbers in lines_of.items():
        if len(numbers) > 1:
            more = ", ..." if len(numbers) > 9 else ""
            refused[label] = f"{name}: listed {len(numbers)} times, in lines {', '.join(map(str, numbers[:9]))}{more}"
    return Manifest(tuple(kernel for kernel in kernels if kernel.name not in refused), refused, remarks)


def _kernel(row: Mapping[str, str], abi: Abi) -> KernelConfig:
    if not _SYMBOL.fullmatch(row["knl_name"]):
        raise PackError(f"column knl_name: invalid symbol {row['knl_name'][:80]!r}")
    if _number(row, "tn", 1) != 1:
        raise PackError(f"column tn: {row['tn']!r}; expected 1: x [M, K] by weight [N, K]")
    allowed = abi.dtypes["out"]
    outputs = tuple(row.get("outputs", "").split()) or allowed
    if not set(outputs) <= set(allowed):
        raise PackError(f"column outputs: unsupported {row['outputs']!r}; {abi.name} has {' '.join(allowed)}")
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
    """Return the relative path of a file inside a folder.

    Raises:
        PackError: the text is not such a path.
    """
    path = PurePosixPath(text)
    if not text or "\\" in text or "\0" in text or ":" in text:
        raise PackError(f"{where}: {text[:80]!r} is not a relative path with / between folders")
    if path.is_absolute() or ".." in path.parts or path.name in ("", "."):
        raise PackError(f"{where}: {text[:80]!r} is outside the pack's folder")
    return str(path)


def place_of(folder: Path, file: str) -> Path:
    """Return the path of a pack's file with links resolved.

    Raises:
        PackError: it is outside the pack's folder.
        UnreadableError: it does not exist or cannot be examined.
    """
    try:
        path = (folder / file).resolve()
        within, exists = path.is_relative_to(folder.resolve()), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself raises RuntimeError up to Python 3.12
        raise UnreadableError(f"{file[:80]}: {_reason(error)}") from error
    if not within:
        raise PackError(f"{file} is outside the pack's folder: {path}")
    if not exists:
        raise UnreadableError(f"file not found: {file}")
    return path


def content_of(folder: Path, file: str, most: int) -> bytes:
    """Return the bytes of a pack's file; raises as `place_of`, and above *most* bytes.

    A file that others may change is refused, because its code is run.
    """
    try:
        content = read_trusted(place_of(folder, file), most + 1)
    except OSError as error:
        if error.errno is None:  # readable, and not trusted
            raise PackError(f"{file}: {error}; copy the pack to a folder that only you or root may write") from error
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
    if not text.isascii() or not text.isdigit() or len(text) > len(str(MAX_NUMBER)) or not least <= int(text) <= most:
        raise PackError(f"column {column}: {text[:40]!r} is not a number from {least} to {most}")
    return int(text)


def _column(cell: str) -> str:
    small = cell.lower()
    return small if small in ("knl_name", "co_name") else small.replace("_", "")


def _without_comments(text: str) -> str:
    """Blank out comments; lines keep their numbers."""
    text = re.sub(r"/\*.*?(?:\*/|\Z)", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    return re.sub(r"(?://|#|;).*", "", text)

"""JSON files of tuned parameters: their names, where they lie, reading and writing.

``gfx942-GEMM-A8W8_BLOCKSCALE-N=2112-K=7168.json`` is of one weight's sizes, ``gfx942-GEMM-A8W8_BLOCKSCALE.json`` of all others. A folder
has them side by side, or as AITER does now: ``gfx942/triton/gemm/gemm_a8w8_blockscale/DEFAULT.json``, and
``GEMM-A8W8_BLOCKSCALE-N=2112-K=7168.json`` beside it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import UserError
from tunedgemm.tools import home_folder

from tunedgemm_triton.parameters import Entry

#: Further folders, before the user's: AITER's, or a colleague's.
VARIABLE = "TUNEDGEMM_TRITON_JSON"
#: Files that come with this package.
SHIPPED = Path(__file__).parent / "configs"
DEFAULT = "DEFAULT.json"

#: (letter, size), as ("N", 2112).
Sizes = tuple[tuple[str, int], ...]

_NAME = re.compile(r"(?:(?P<gfx>gfx[0-9a-f]+|sm_\d+|cpu-[a-z0-9_]+)-)?(?P<tag>[A-Z][^=]*?)(?P<sizes>(?:-[A-Z]\w*=\d+)*)\.json")
_NESTED = ("triton", "gemm")


@attrs.frozen
class Name:
    """What a file's name says: architecture, the kernel's tag (``GEMM-A8W8``), and the sizes it is for, () for all."""

    gfx: str
    tag: str
    sizes: Sizes = ()

    @property
    def text(self) -> str:
        """The name of the file in a flat folder."""
        return f"{self.gfx}-{self.tag}{suffix(self.sizes)}.json"

    @property
    def nested(self) -> Path:
        """The path of the file in AITER's newer folders."""
        folder = Path(self.gfx, *_NESTED, self.tag.lower().replace("-", "_"))
        return folder / (f"{self.tag}{suffix(self.sizes)}.json" if self.sizes else DEFAULT)


def suffix(sizes: Sizes) -> str:
    """Sizes as a name ends: ``-N=2112-K=7168``."""
    return "".join(f"-{letter}={size}" for letter, size in sizes)


def name_of(path: Path) -> Name | None:
    """What the name of a file says; None for a name that no file of this kind has."""
    gfx, folder = "", path.parent
    if folder.parent.name == _NESTED[1] and folder.parent.parent.name == _NESTED[0]:
        gfx = folder.parent.parent.parent.name
        if path.name == DEFAULT:
            kind, _, rest = folder.name.upper().rpartition("GEMM_")
            return Name(gfx, f"{kind}GEMM-{rest}") if rest else None
    found = _NAME.fullmatch(path.name)
    if not found or not (found["gfx"] or gfx):
        return None
    sizes = tuple((letter, int(size)) for letter, size in re.findall(r"-([A-Z]\w*)=(\d+)", found["sizes"]))
    return Name(found["gfx"] or gfx, found["tag"], sizes)


def user_folder() -> Path:
    """Where the tuner writes, and what is read before the shipped files."""
    folder: Path = home_folder() / "triton" / "gemm"
    return folder


def named_folders() -> list[Path]:
    """The folders of `VARIABLE`."""
    return [Path(text.strip()).expanduser() for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text.strip()]


def folders() -> list[Path]:
    """Where files are looked for, the first first: the named ones, the user's, the shipped ones."""
    return [*named_folders(), user_folder(), SHIPPED]


def find(gfx: str, tag: str, sizes: Sizes) -> Path | None:
    """The file that answers for a weight: the first folder that has one for it or for all decides.

    Args:
        sizes: with the batch's or the experts' first where there are any; one file may be for N and K alone.
    """
    for folder in folders():
        if folder.is_dir():  # often it is not, and every shape that is met asks
            found = next((path for path in _places(folder, gfx, tag, sizes) if path.is_file()), None)
            if found is not None:
                return found
    return None


@functools.lru_cache(maxsize=4096)
def _places(folder: Path, gfx: str, tag: str, sizes: Sizes) -> tuple[Path, ...]:
    """Where a folder may have the file of a weight, the first first."""
    names = [Name(gfx, tag, sizes), *([Name(gfx, tag, sizes[-2:])] if len(sizes) > 2 else []), Name(gfx, tag)]
    flat = [at / name.text for at in (folder, folder / "gemm") for name in names]
    return (*(folder / name.nested for name in names), *flat)


def listed(folder: Path) -> Iterator[Path]:
    """Every JSON file below a folder, in a fixed order."""
    yield from sorted(path for path in folder.rglob("*.json") if path.is_file())


def read(path: Path) -> Mapping[str, Entry]:
    """The entries of a file by their keys, as they were when it was last written.

    Raises:
        UserError: it cannot be read, is no JSON, or no object of objects.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    return _read(path, (state.st_mtime_ns, state.st_size, state.st_ino))


@functools.lru_cache(maxsize=1024)
def _read(path: Path, _state: tuple[int, ...]) -> Mapping[str, Entry]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_object)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: is no JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no JSON file of parameters: {error}") from None
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path}: must be an object of buckets, as {{'M_LEQ_64': {{'BLOCK_SIZE_M': 64, ...}}, 'any': ...}}")
    for key, entry in found.items():
        if not isinstance(entry, dict) or not entry:
            raise UserError(f"{path}: {key!r} must be an object of parameters (got {json.dumps(entry)[:60]})")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def text_of(entries: Mapping[str, Entry]) -> str:
    """A file's text, in the form of AITER's."""
    return json.dumps(entries, indent=4) + "\n"


def write(path: Path, entries: Mapping[str, Entry]) -> None:
    """Write a file at once: whoever reads it sees the old one or the new one.

    Raises:
        UserError: the folder or the file cannot be written.
    """
    check_writable(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text_of(entries), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}; choose another folder with --save-path") from None
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Make the folder.

    Raises:
        UserError: that fails, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}; choose another folder with --save-path") from None

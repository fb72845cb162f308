"""Find, read and write files of tuned parameters.

``gfx942-GEMM-A8W8_BLOCKSCALE-N=2112-K=7168.json`` is for one weight's sizes, and
``gfx942-GEMM-A8W8_BLOCKSCALE.json`` for all others. A folder is flat, or nested as AITER's newer
ones: ``gfx942/triton/gemm/gemm_a8w8_blockscale/`` with ``DEFAULT.json`` and
``GEMM-A8W8_BLOCKSCALE-N=2112-K=7168.json``.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import UserError
from tunedgemm.tools.files import SignatureError, check_signature, expanded, home_folder, read_regular, replace_file, signature_required

from tunedgemm_triton.jsonfiles.entries import Entry

#: Environment variable of further folders, searched before the user's.
VARIABLE = "TUNEDGEMM_TRITON_JSON"
#: Folder of the files that come with this package.
SHIPPED = Path(__file__).parents[1] / "configs"
DEFAULT = "DEFAULT.json"
#: Most MiB of a JSON file.
MOST_MIB = 64

#: (letter, size), as ("N", 2112).
Sizes = tuple[tuple[str, int], ...]

_NAME = re.compile(r"(?:(?P<gfx>gfx[0-9a-f]+|sm_\d+|cpu-[a-z0-9_]+)-)?(?P<tag>[A-Z][^=]*?)(?P<sizes>(?:-[A-Z]\w*=[0-9]{1,10})*)\.json")
_NESTED = ("triton", "gemm")


@attrs.frozen
class Name:
    """Parts of a file's name: architecture, the kernel's tag (``GEMM-A8W8``) and the weight's
    sizes, () for all.
    """

    gfx: str
    tag: str
    sizes: Sizes = ()

    @property
    def text(self) -> str:
        """Return the name of the file in a flat folder."""
        return f"{self.gfx}-{self.tag}{suffix(self.sizes)}.json"

    @property
    def nested(self) -> Path:
        """Return the path of the file in AITER's newer folders."""
        folder = Path(self.gfx, *_NESTED, self.tag.lower().replace("-", "_"))
        return folder / (f"{self.tag}{suffix(self.sizes)}.json" if self.sizes else DEFAULT)


def suffix(sizes: Sizes) -> str:
    """Return the end of a name with sizes: ``-N=2112-K=7168``."""
    return "".join(f"-{letter}={size}" for letter, size in sizes)


def name_of(path: Path) -> Name | None:
    """Return the parts of a file's name; None for the name of another kind of file."""
    gfx, folder = "", path.parent
    if folder.parent.name == _NESTED[1] and folder.parent.parent.name == _NESTED[0]:
        gfx = folder.parent.parent.parent.name
        if path.name == DEFAULT:
            kind, _, rest = folder.name.upper().rpartition("GEMM_")
            return Name(gfx, f"{kind}GEMM-{rest}") if rest else None
    match = _NAME.fullmatch(path.name)
    if not match or not (match["gfx"] or gfx):
        return None
    sizes = tuple((letter, int(size)) for letter, size in re.findall(r"-([A-Z]\w*)=([0-9]+)", match["sizes"]))
    return Name(match["gfx"] or gfx, match["tag"], sizes)


def user_folder() -> Path:
    """Return the folder that the tuner writes, which is read before the shipped files."""
    folder: Path = home_folder() / "triton" / "gemm"
    return folder


def named_folders() -> list[Path]:
    """Return the folders of `VARIABLE`."""
    return [expanded(text.strip(), VARIABLE) for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text.strip()]


def folders() -> list[Path]:
    """Return the folders of files in their order of search: the named ones, the user's, the shipped
    one.
    """
    return [*named_folders(), user_folder(), SHIPPED]


def find(gfx: str, tag: str, sizes: Sizes) -> Path | None:
    """Return the file for a weight: the first folder with a file for this weight or for all
    decides.

    Args:
        sizes: of the weight, those of the batch or the experts first; a file may be for N and K
            alone.
    """
    for folder in folders():
        if folder.is_dir():  # every new shape searches here, and the folder is often missing
            existing = next((path for path in _candidates(folder, gfx, tag, sizes) if path.is_file()), None)
            if existing is not None:
                return existing
    return None


@functools.lru_cache(maxsize=4096)
def _candidates(folder: Path, gfx: str, tag: str, sizes: Sizes) -> tuple[Path, ...]:
    """Return the paths that a weight's file may have in a folder, in their order of search."""
    names = [Name(gfx, tag, sizes), *([Name(gfx, tag, sizes[-2:])] if len(sizes) > 2 else []), Name(gfx, tag)]
    flat = [at / name.text for at in (folder, folder / "gemm") for name in names]
    return (*(folder / name.nested for name in names), *flat)


def listed(folder: Path) -> Iterator[Path]:
    """Yield every JSON file below a folder, in a fixed order."""
    found = (Path(root, name) for root, _, names in os.walk(folder) for name in names if name.endswith(".json"))
    yield from sorted(path for path in found if os.path.isfile(path))  # noqa: PTH113  never raises


def read(path: Path, *, serving: bool = False) -> Mapping[str, Entry]:
    """Return the current entries of a file by their keys.

    Args:
        serving: the entries serve calls, so a file that is not shipped needs a required signature.

    Raises:
        UserError: the file cannot be read, is not valid JSON, or not an object of objects, or a
            required signature is missing or wrong.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    target = Path(os.path.realpath(path))
    shipped = SHIPPED.resolve() in target.parents
    signed = serving and signature_required() and not shipped
    place = target if shipped else path  # a link may change after it was followed
    return _read(place, (state.st_mtime_ns, state.st_size, state.st_ino), signed)


@functools.lru_cache(maxsize=1024)
def _read(path: Path, _state: tuple[int, ...], signed: bool) -> Mapping[str, Entry]:
    try:
        raw = read_regular(path, MOST_MIB)
        if signed:
            check_signature(path, raw)
        content = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object)
    except SignatureError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: invalid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: invalid file of parameters: {error}") from None
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path}: must be an object of buckets, as {{'M_LEQ_64': {{'BLOCK_SIZE_M': 64, ...}}, 'any': ...}}")
    for key, entry in content.items():
        if not isinstance(entry, dict) or not entry:
            raise UserError(f"{path}: {key!r} must be an object of parameters (got {json.dumps(entry)[:60]})")
        for name, value in entry.items():
            if isinstance(value, list | dict):
                raise UserError(f"{path}: {key!r}: {name!r} must be a number, a text or null (got {json.dumps(value)[:60]})")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"duplicate key {twice[:80]!r}")
    return content


def write(path: Path, entries: Mapping[str, Entry]) -> None:
    """Write a file atomically: readers see the old file or the new one.

    Raises:
        UserError: the folder or the file cannot be written.
    """
    check_writable(path.parent)
    try:
        replace_file(path, (json.dumps(entries, indent=4) + "\n").encode())  # in the form of AITER's
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}; choose another folder with --save-path") from None


def check_writable(folder: Path) -> None:
    """Create the folder and check that it is writable.

    Raises:
        UserError: the folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}; choose another folder with --save-path") from None

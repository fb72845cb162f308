"""Read ``pack.json``, the descriptor of a pack; define descriptors for AITER's tree, which has
none.

::

    {"abi": "tunedgemm-bf16", "gfx": "gfx942", "manifest": "manifest.csv",
     "dtypes": {"x": "bf16", "out": ["bf16", "fp32"]}, "sha256": {"kernel.co": "..."}, "name":
     "my-pack"}

The first three keys are required. ``dtypes`` narrows the dtypes of the ABI. A hash in ``sha256`` is
checked before the manifest or code object is used. A signature covers the descriptor, and so all
files whose hash it has.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
from tunedgemm.tools.files import SignatureError, check_signature, signature_required

from tunedgemm_asm.abi import ABIS, FP8, Abi
from tunedgemm_asm.manifest import PackError, content_of, inside

NAME = "pack.json"
#: Most bytes of a descriptor; most levels of folders searched below a source.
MAX_BYTES, MAX_DEPTH = 1 << 20, 3

_NEEDED = ("abi", "gfx", "manifest")
_TEXTS = ("name", "version", "license", "description")
_GFX = re.compile(r"gfx[0-9a-f]{3,5}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

#: AITER's families: folder below ``hsa/<gfx>`` -> manifest, ABI.
AITER: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "bf16gemm": ("bf16gemm_fp32bf16.csv", "aiter-bf16gemm"),
        "i8gemm": ("i8gemm_bf16_perTokenI8.csv", "aiter-i8gemm"),
        "f4gemm": ("f4gemm_bf16_per1x32Fp4.csv", "aiter-f4gemm"),
        "fp8gemm_blockscale": ("fp8gemm_bf16_blockscale.csv", "aiter-fp8gemm-blockscale"),
    }
)


@attrs.frozen
class Descriptor:
    """Descriptor of a pack.

    Attributes:
        name: name of the pack.
        gfx: its architecture.
        abi: argument layout of its kernels.
        manifest: file that lists its kernels.
        dtypes: supported dtypes by operand.
        sha256: required hash by file; may omit files.
        of_aiter: whether the pack is part of AITER's tree; never set by a ``pack.json``.
        digest: SHA-256 of the ``pack.json``; empty without one.
    """

    name: str
    gfx: str
    abi: str
    manifest: str
    dtypes: Mapping[str, tuple[str, ...]] = attrs.field(converter=MappingProxyType, hash=False)
    sha256: Mapping[str, str] = attrs.field(factory=dict, converter=MappingProxyType, hash=False)
    of_aiter: bool = False
    digest: str = ""

    def check_hash(self, file: str, digest: str) -> None:
        """Check the SHA-256 of a file against the descriptor's.

        Raises:
            PackError: they differ, or the file is not covered by a required signature.
        """
        if file not in self.sha256 and signature_required():
            raise PackError(f"{file}: unsigned; its sha256 is not in a signed {NAME}")
        if self.sha256.get(file, digest) != digest:
            raise PackError(f"{file}: sha256 mismatch (got {digest}); {NAME} has {self.sha256[file]}")


def read(folder: Path) -> Descriptor:
    """Read the descriptor in a folder.

    Raises:
        PackError: it is missing or invalid; the message names folder, key and reason.
    """
    try:
        check_signature(folder / NAME, content := content_of(folder, NAME, MAX_BYTES))
    except (PackError, SignatureError) as error:
        raise PackError(f"pack {folder}: {error}") from error
    try:
        return attrs.evolve(_descriptor(json.loads(content.decode()), folder.name), digest=hashlib.sha256(content).hexdigest())
    except (PackError, ValueError, RecursionError) as error:
        raise PackError(f"pack {folder}: {NAME}: {error}") from error


def _descriptor(said: Any, name: str) -> Descriptor:
    if not isinstance(said, dict):
        raise PackError("expected an object with the keys abi, gfx and manifest")
    for key in said:
        if key not in (*_NEEDED, *_TEXTS, "dtypes", "sha256"):
            raise PackError(f"unknown key {str(key)[:40]!r}; known: {', '.join((*_NEEDED, 'dtypes', 'sha256', *_TEXTS))}")
    for key in (*_NEEDED, *(key for key in _TEXTS if key in said)):
        if not isinstance(said.get(key), str) or not said[key].isprintable():
            raise PackError(f"{key} must be text")
    if said["abi"] not in ABIS:
        raise PackError(f"unknown abi {said['abi'][:80]!r}; known: {', '.join(ABIS)}")
    if not _GFX.fullmatch(said["gfx"]):
        raise PackError(f"invalid gfx {said['gfx'][:80]!r}; expected an architecture such as gfx942")
    return Descriptor(
        name=said.get("name") or name,
        gfx=said["gfx"],
        abi=said["abi"],
        manifest=inside(said["manifest"], "manifest"),
        dtypes=_dtypes(said.get("dtypes", {}), ABIS[said["abi"]]),
        sha256=_hashes(said.get("sha256", {})),
    )


def _dtypes(said: Any, abi: Abi) -> Mapping[str, tuple[str, ...]]:
    if not isinstance(said, dict) or not set(said) <= set(abi.dtypes):
        raise PackError(f"dtypes must be an object with some of the keys {', '.join(abi.dtypes)}")
    narrowed = dict(abi.dtypes)
    for operand, value in said.items():
        wanted = tuple(value) if isinstance(value, list) else (value,)
        if not set(map(str, wanted)) <= set(abi.dtypes[operand]):
            raise PackError(f"dtypes: {operand} {value!r}; {abi.name} has {' '.join(abi.dtypes[operand]) or 'none'}")
        narrowed[operand] = wanted
    return narrowed


def _hashes(said: Any) -> Mapping[str, str]:
    if not isinstance(said, dict) or not all(isinstance(value, str) and _SHA256.fullmatch(value) for value in said.values()):
        raise PackError("sha256 must be an object of files and 64 hexadecimal digits each")
    return {inside(file, "sha256"): value for file, value in said.items()}


def below(folder: Path) -> Iterator[tuple[Path, Descriptor | PackError]]:
    """Yield each folder with a pack and its descriptor or error, in the order of names."""
    yield from _below(folder, MAX_DEPTH)


def _below(folder: Path, depth: int) -> Iterator[tuple[Path, Descriptor | PackError]]:
    inner: list[Path] = []
    try:
        if (folder / NAME).is_file():
            yield folder, read(folder)
        elif folder.name in AITER and _GFX.fullmatch(folder.parent.name) and (folder / AITER[folder.name][0]).is_file():
            yield folder, _aiter(folder)
        elif depth:
            inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    except PackError as error:
        yield folder, error
    except (OSError, RuntimeError, ValueError) as error:
        yield folder, PackError(f"{folder}: cannot be searched: {error}")
    for path in inner:
        yield from _below(path, depth - 1)


def _aiter(folder: Path) -> Descriptor:
    family, gfx = folder.name, folder.parent.name
    listed, name = AITER[family]
    dtypes = dict(ABIS[name].dtypes)
    if gfx in FP8 and FP8[gfx] in dtypes["x"]:
        dtypes["x"] = dtypes["weight"] = (FP8[gfx],)
    return Descriptor(f"aiter-{gfx}-{family}", gfx, name, listed, dtypes, of_aiter=True)

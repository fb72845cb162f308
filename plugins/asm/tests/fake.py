"""Compile the fake HIP runtime in ``fake/`` and write packs for it. Its settings (``FAKE_*``) are
described in ``hip.c``; a symbol's name says what the kernel computes.
"""

from __future__ import annotations

import atexit
import csv
import ctypes
import functools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCES = Path(__file__).with_name("fake")
FLAGS = ("-O3", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden")
#: Folder of a family below ``hsa/<gfx>`` -> its manifest, bytes of arguments that its code objects
#: declare.
FAMILIES = {
    "bf16gemm": ("bf16gemm_fp32bf16.csv", 352),
    "i8gemm": ("i8gemm_bf16_perTokenI8.csv", 256),
    "fp8gemm_blockscale": ("fp8gemm_bf16_blockscale.csv", 256),
    "f4gemm": ("f4gemm_bf16_per1x32Fp4.csv", 384),
}
#: AITER's manifests, where available.
MANIFESTS = Path(__file__).parents[4] / "shared" / "aiter" / "manifests"

_BF16 = ["knl_name", "co_name", "tn", "tileM", "tileN", "pf", "bPreshuffle", "splitK", "subK", "bias"]
_SCALED = ["tile_m", "tile_n", "splitK", "bpreshuffle", "knl_name", "co_name"]
_FP4 = ["tile_M", "tile_N", "splitK", "bpreshuffle", "knl_name", "co_name"]


class NoCompilerError(RuntimeError):
    """Error of a missing C compiler or a failed compilation."""


@functools.cache
def folder() -> Path:
    """Return a temporary folder that is removed with the process."""
    made = tempfile.mkdtemp(prefix="tunedgemm-fake-hip-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@functools.cache
def build() -> Path:
    """Compile the fake library once in a process.

    Raises:
        NoCompilerError: ``cc`` is missing or refuses the source, with what it said.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise NoCompilerError("the fake HIP runtime is compiled with `cc`, which is not on PATH; install a C compiler")
    target = folder() / "libfake_hip.so"
    words = [compiler, *FLAGS, *map(str, sorted(SOURCES.glob("*.c"))), "-o", str(target), "-lm", "-lpthread"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompilerError(f"{compiler} cannot compile the fake HIP runtime: {done.stderr[-2000:]}")
    return target


def copy_of() -> Path:
    """Copy the fake library, so that its counters are not shared."""
    return Path(shutil.copy(build(), Path(tempfile.mkdtemp(dir=folder()), "libhip.so")))


class Launch(ctypes.Structure):
    """Arguments of the last launch of this thread."""

    _fields_ = [
        ("name", ctypes.c_char * 256), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("arguments", ctypes.c_ubyte * 4096),
    ]  # fmt: skip

    @property
    def content(self) -> bytes:
        """Return the argument buffer."""
        return bytes(self.arguments[: self.bytes])

    def u32(self, offset: int) -> int:
        """Return the 32-bit number at an offset."""
        return int.from_bytes(self.content[offset : offset + 4], "little")

    def u64(self, offset: int) -> int:
        """Return the address at an offset."""
        return int.from_bytes(self.content[offset : offset + 8], "little")


def native(path: str | Path) -> Any:
    """Load the fake library with ctypes, with its functions for tests."""
    found = ctypes.CDLL(str(path))
    found.fake_last.restype = ctypes.POINTER(Launch)
    found.fake_last_reason.restype = ctypes.c_char_p
    found.fake_loads.restype = found.fake_launches.restype = ctypes.c_long
    found.fake_register.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
    return found


def symbol(text: str) -> str:
    """Mangle a name in the namespace of AITER's kernels."""
    return f"_ZN5aiter{len(text)}{text}E"


def bf16(tile_m: int, tile_n: int = 64, *, shuffled: bool, splits: bool = False, prefetch: int = 0) -> dict[str, Any]:
    """Return a row of AITER's bf16 manifest."""
    if tile_n == 256:
        stem = f"bf16gemm_bf16_tn_{tile_m}x{tile_n}{'_bpreshuffle' if shuffled else ''}"
    else:
        middle = "_bshuffle" if shuffled else f"_pf{prefetch}" if prefetch else ""
        stem = f"bf16gemm_fp32bf16_tn_{tile_m}x{tile_n}{middle}_splitk{'_clean' if splits else ''}"
    bias = int(tile_n != 256)
    return dict(zip(_BF16, (symbol(stem), f"{stem}.co", 1, tile_m, tile_n, prefetch, int(shuffled), int(splits), 64, bias), strict=True))


def scaled(stem: str, tile_m: int, tile_n: int, splits: int, header: list[str], shuffled: int = 1) -> dict[str, Any]:
    """Return a row of AITER's other manifests."""
    name = f"{stem}_{'BpreShuffle' if shuffled else 'noBpreShuffle'}_{tile_m}x{tile_n}"
    return dict(zip(header, (tile_m, tile_n, splits, shuffled, symbol(name), f"{name}.co"), strict=True))


_I8, _FP8, _F4 = "I8gemm_bf16_perTokenI8", "fp8gemm_bf16_blockscale", "f4gemm_bf16_per1x32Fp4"
#: A few of AITER's kernels of every kind.
ROWS: Mapping[str, list[dict[str, Any]]] = {
    "bf16gemm": [
        *(bf16(tile, shuffled=shuffled, splits=True) for tile in (32, 64, 96) for shuffled in (True, False)),
        *(bf16(tile, shuffled=True) for tile in (32, 128)),
        *(bf16(tile, shuffled=False, prefetch=3) for tile in (32, 64)),
        *(bf16(256, 256, shuffled=shuffled) for shuffled in (True, False)),
    ],
    "i8gemm": [scaled(_I8, 32, 128, 1, _SCALED), scaled(_I8, 128, 128, 1, _SCALED), scaled(_I8, 112, 256, 0, _SCALED)],
    "fp8gemm_blockscale": [scaled(_FP8, 32, 128, 1, _SCALED), scaled(_FP8, 128, 128, 1, _SCALED)],
    "f4gemm": [
        scaled(_F4, 32, 128, 0, _FP4), scaled(_F4, 128, 512, 1, _FP4), scaled(_F4, 256, 256, 1, _FP4), scaled(_F4, 256, 256, 0, _FP4, 0),
    ],
}  # fmt: skip
#: Kernels of the plugin's layout.
OWN = [
    dict(zip(_BF16, (stem, f"{stem}.co", 1, tile, tile, 2, int("bshuffle" in stem), int("splitk" in stem), 64, 1), strict=True))
    for tile in (32, 64)
    for stem in (f"tunedgemm_bf16_{tile}x{tile}{middle}_pf2{end}" for middle in ("", "_bshuffle") for end in ("", "_splitk"))
]


def write(place: Path, manifest: str, rows: Iterable[Mapping[str, Any]], objects: ModuleType, gfx: str, kernarg_bytes: int) -> None:
    """Write a manifest and a made-up code object for each of its rows."""
    place.mkdir(parents=True)
    rows = list(rows)
    with (place / manifest).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else _FP4)
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        (place / row["co_name"]).write_bytes(objects.made([row["knl_name"]], gfx, kernarg_bytes))


def tree(place: Path, objects: ModuleType, rows: Mapping[str, Mapping[str, list[dict[str, Any]]]] | None = None) -> Path:
    """Write AITER's tree with these *rows*, `ROWS` if absent, and kernels of the plugin's layout
    next to it.
    """
    for gfx in ("gfx942", "gfx950"):
        for family, (manifest, size) in FAMILIES.items():
            listed = rows[gfx].get(family, []) if rows is not None else ROWS[family] if gfx == "gfx950" or family != "f4gemm" else []
            write(place / gfx / family, manifest, listed, objects, gfx, size)
        own = place.with_name(f"{place.name}-own") / gfx
        if rows is None:
            write(own, "manifest.csv", OWN, objects, gfx, 96)
            (own / "pack.json").write_text(json.dumps({"abi": "tunedgemm-bf16", "gfx": gfx, "manifest": "manifest.csv"}))
    return place


def published() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return all rows of AITER's manifests, by architecture and family; empty where they are
    missing.
    """
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for path in sorted(MANIFESTS.glob("*.csv")):
        gfx, _, manifest = path.name.partition("_")
        [family] = [family for family, (name, _) in FAMILIES.items() if name == manifest]
        found.setdefault(gfx, {})[family] = list(csv.DictReader(path.read_text().splitlines()))
    return found

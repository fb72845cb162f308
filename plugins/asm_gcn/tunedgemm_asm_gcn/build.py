"""Assemble text to code objects, and write packs of them.

The first assembler that knows the architecture is used: that of ``TUNEDGEMM_ASM_CLANG``, ROCm's
clang, a clang on PATH (gfx950: LLVM 20 and later), Triton's LLVM.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.files import expanded

from tunedgemm_asm_gcn.frame import ABI
from tunedgemm_asm_gcn.kernel import text_of
from tunedgemm_asm_gcn.names import STEP, KernelConfig
from tunedgemm_asm_gcn.resources import target_of
from tunedgemm_asm_gcn.space import enumerate_configs

CLANG = "TUNEDGEMM_ASM_CLANG"
#: Timeout of a run in seconds; one run of Triton's LLVM assembles all kernels of a pack, < 1 s
#: each.
_SECONDS = 1200
_NEWEST, _OLDEST = 26, 17
_PROBE = """    .amdgcn_target "amdgcn-amd-amdhsa--{gfx}"
    .text
    .globl probe
probe:
    {product} a[0:3], v[0:{last}], v[0:{last}], a[0:3]
    s_endpgm
"""
# Triton's LLVM aborts the process at an error, so it runs in a child process.
_TRITON = """
import json, pathlib, sys
from triton._C.libtriton import llvm
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
gfx, folder = sys.argv[1:]
llvm.init_targets()
backend = HIPBackend(GPUTarget("hip", gfx, 64))
for name, text in json.load(sys.stdin).items():
    code = backend.make_hsaco(text, {}, backend.parse_options({}))
    pathlib.Path(folder, name).write_bytes(code)
"""


@attrs.frozen
class Assembler:
    """Assembler of code objects for an architecture.

    Attributes:
        gfx: the architecture.
        name: name and version.
        clang: path of the program; empty for Triton's LLVM.
    """

    gfx: str
    name: str
    clang: str = ""

    def assemble(self, texts: Mapping[str, str], folder: Path) -> None:
        """Write a code object for each text, by file name.

        Raises:
            PluginError: the assembler rejects a text; includes its message.
        """
        if not self.clang:
            command = [sys.executable, "-c", _TRITON, self.gfx, str(folder)]
            _run(command, json.dumps(dict(texts)), f"Triton's LLVM, {len(texts)} kernels for {self.gfx}")
            return
        options = ("-x", "assembler", "-target", "amdgcn-amd-amdhsa", f"-mcpu={self.gfx}", "-nogpulib", "-")
        for name, text in texts.items():
            _run([self.clang, *options, "-o", str(folder / name)], text, f"{self.clang}, {name}")


def _run(command: list[str], given: str, what: str) -> str:
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"{what}: {error}") from error
    if done.returncode:
        raise PluginError(f"{what}: {' '.join(done.stderr.split())[:500] or f'exit code {done.returncode}'}")
    return done.stdout


def assembler_for(gfx: str) -> Assembler:
    """Return the first assembler that makes code objects for an architecture.

    Raises:
        PluginError: the generator does not know the architecture, or no assembler does; lists all
            tried.
    """
    target, refused = target_of(gfx), []
    probe = _PROBE.format(gfx=gfx, product=target.product, last=target.depth // 8 - 1)
    for clang in _candidates():
        try:
            version = _run([clang, "--version"], "", clang).partition("\n")[0] if clang else _triton()
            assembler = Assembler(gfx, version, clang)
            with tempfile.TemporaryDirectory() as folder:
                assembler.assemble({"probe.co": probe}, Path(folder))
                Path(folder, "probe.co").stat()
        except (PluginError, OSError) as error:
            refused.append(str(error))
            continue
        return assembler
    raise PluginError(f"no assembler for {gfx}; set {CLANG} to a clang that knows it. Tried: {'; '.join(refused) or 'none'}")


def _candidates() -> Iterator[str]:
    """Yield programs in order of preference; an empty name means Triton's LLVM."""
    if named := os.environ.get(CLANG):
        yield str(expanded(named, CLANG))
        return
    for root in dict.fromkeys((os.environ.get("ROCM_PATH"), "/opt/rocm")):
        if root and (clang := shutil.which(str(Path(root, "llvm", "bin", "clang")))):
            yield clang
    for name in ("amdclang", "clang", *(f"clang-{version}" for version in range(_NEWEST, _OLDEST, -1))):
        if clang := shutil.which(name):
            yield clang
    yield ""


def _triton() -> str:
    return "Triton " + _run([sys.executable, "-c", "import triton; print(triton.__version__)"], "", "Triton").strip()


MANIFEST = "manifest.csv"


@attrs.frozen
class Built:
    """Names of the kernels in a written pack, and the assembler."""

    names: tuple[str, ...]
    assembler: str


def build_pack(gfx: str, folder: Path, chosen: Sequence[KernelConfig] = ()) -> Built:
    """Write manifest, descriptor and code objects of kernels for an architecture.

    Args:
        gfx: the architecture.
        folder: the pack's folder; created if missing.
        chosen: the kernels; all if empty.

    Raises:
        PluginError: the generator or every assembler lacks the architecture.
    """
    configs = tuple(chosen) or tuple(enumerate_configs(gfx))
    assembler = assembler_for(gfx)
    folder.mkdir(parents=True, exist_ok=True)
    assembler.assemble({f"{config.name}.co": text_of(config) for config in configs}, folder)
    rows = [
        {"knl_name": config.name, "co_name": f"{config.name}.co", "tn": 1, "tileM": config.tile_m, "tileN": config.tile_n,
         "pf": config.prefetch, "bPreshuffle": int(config.shuffled), "splitK": int(config.split), "subK": STEP, "bias": 1}
        for config in configs
    ]  # fmt: skip
    with (folder / MANIFEST).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    files = (MANIFEST, *(f"{config.name}.co" for config in configs))
    hashes = {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in files}
    described = {"name": f"tunedgemm-{gfx}", "abi": ABI.name, "gfx": gfx, "manifest": MANIFEST, "sha256": hashes}
    (folder / "pack.json").write_text(json.dumps(described, indent=2) + "\n")
    return Built(tuple(config.name for config in configs), assembler.name)

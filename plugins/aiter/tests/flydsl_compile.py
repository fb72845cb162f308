"""Compile the FlyDSL kernels of AITER's rows without a GPU, through this plugin's own calls.

    python flydsl_compile.py --aiter CHECKOUT --configs TABLES --python VENV/bin/python -o FILE

The interpreter VENV needs flydsl, triton, a CPU build of torch and what tunedgemm needs. Each row's
operands are fake tensors, so that AITER's functions compile and launch nothing. One kernel of each
tile that gfx942 may have is compiled for it as well. The file has what the code objects say, and
which other shapes AITER takes and refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import attrs

if TYPE_CHECKING:
    from tunedgemm.plugin import Shape

#: Columns of the file.
FIELDS = (
    *("gfx", "name", "m", "n", "k", "result", "lds", "vgprs", "agprs", "scratch", "spills"),
    *("threads", "wave", "arguments", "argument_bytes", "seconds", "takes", "refuses"),
)
#: A kernel of AITER's list; no row has one of its family.
_EIGHT_WAVES = "flydsl_bpreshuffle_8w_128x256x128_F8_F8_B16_2x4"
_PLUGINS = Path(__file__).parents[2]
_PATHS = [_PLUGINS.parent / "core", _PLUGINS / "aiter", _PLUGINS / "asm"]


class Stream(NamedTuple):
    """A stream of a GPU that is not there."""

    device: Any
    cuda_stream: int = 0


def cases_of(configs: Path) -> list[dict[str, Any]]:
    """Return each kernel of each architecture with the shape of its first row."""
    from tunedgemm.plugin import Device, Shape
    from tunedgemm.tools.tables import op_of_file, read_rows
    from tunedgemm_aiter.names import parse, unfit

    cases: dict[tuple[str, str], dict[str, Any]] = {}
    tiles = set()
    for path in sorted(path for path in configs.rglob("*tuned_gemm*.csv") if "untuned" not in path.name):
        for row in read_rows(path, op_of_file(path))[0]:
            if row.solution.libtype == "flydsl":
                name, shape = row.solution.kernel_name, row.shape.to_dict()
                cases.setdefault((row.gfx, name), {"gfx": row.gfx, "name": name, "shape": shape})
                kernel = parse("flydsl", row.shape.op, name)
                if "gfx942" in kernel.gfx:
                    shape = {**shape, "dtype": shape["dtype"].replace("e4m3fn", "e4m3fnuz")}
                elif row.shape.op == "a16w16":  # AITER's names of gfx942 have no asynchronous copies
                    name = name.replace("gfx950", "gfx942").replace("async_copyTrue", "async_copyFalse")
                else:
                    continue
                tile = (kernel.tile, kernel.split, _stages(name))
                if tile in tiles or unfit(parse("flydsl", row.shape.op, name), 0, Shape.from_dict(shape), Device("gfx942", 304)):
                    continue
                tiles.add(tile)
                cases.setdefault(("gfx942", name), {"gfx": "gfx942", "name": name, "shape": shape})
    eight = Shape("a8w8_bpreshuffle", 128, 512, 1024, dtype="fp8_e4m3fn", outdtype="bf16", scale="row", layout="aiter16x16")
    cases["gfx950", _EIGHT_WAVES] = {"gfx": "gfx950", "name": _EIGHT_WAVES, "shape": eight.to_dict()}
    return sorted(cases.values(), key=lambda case: (case["gfx"], case["name"]))


def _stages(name: str) -> int:
    """Return how many tiles a kernel keeps in LDS, as its name says."""
    found = re.match(r"flydsl_gemm(\d+)_", name) or re.search(r"_\d+x\d+x\d+x(\d+)_\w+$", name)
    return int(found[1]) if found else 2


def probes_of(shape: Shape, tile: tuple[int, int, int], split: int) -> Iterator[Shape]:
    """Yield shapes near the limits of a kernel with a tile and splits of K."""
    shape = attrs.evolve(shape, bias_dtype="")
    m, n, step = tile[0], tile[1] if tile[1] > 16 else 256, max(split, 1) * tile[2]
    deep = 8 * step
    sizes = [(m, n, k) for k in (step, 2 * step, 3 * step, 4 * step, deep + tile[2], deep + 16)]
    sizes += [(m, width, deep) for width in (n // 2, n + 16, 3 * n)] + [(1, n, deep), (300 * m, n, deep)]
    sizes += [(4096, -(-4096 // n) * n, -(-4096 // step) * step), (1 << 22, n, -(-1024 // step) * step)]
    for size in sizes:
        yield attrs.evolve(shape, m=size[0], n=size[1], k=size[2])
    if shape.op != "a16w16":
        yield attrs.evolve(shape, m=m, n=n, k=deep, outdtype="fp16")


def text_of(shape: Shape) -> str:
    """Return a probe as a cell has it."""
    return f"{shape.m}x{shape.n}x{shape.k}" + (":fp16" if shape.outdtype == "fp16" else "")


def prepare(checkout: Path) -> ModuleType:
    """Import AITER's modules without its native library, and return those of its launches."""
    import torch

    location = checkout / "aiter"
    spec = importlib.util.spec_from_file_location("aiter", location / "__init__.py", submodule_search_locations=[str(location)])
    package = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    package.logger = logging.getLogger("aiter")  # type: ignore[attr-defined]
    sys.modules |= {"aiter": package, "aiter.ops.enum": mock.MagicMock()}  # its enumerations are native
    importlib.import_module("aiter.jit.core")
    for name in ("gemm_a16w16_asm", "hipb_create_extension", "hipb_mm"):
        setattr(package, name, None)
    package.dtypes = importlib.import_module("aiter.utility.dtypes")  # type: ignore[attr-defined]
    torch.cuda.current_stream = lambda device=None: Stream(torch.device("cuda", 0))  # type: ignore[assignment,misc]
    memory = importlib.import_module("flydsl.utils.smem_allocator")
    if not hasattr(memory, "SMEM_CAPACITY_MAP"):  # AITER imports it from where flydsl had it before 0.4
        device = importlib.import_module("flydsl.runtime.device")
        memory.SMEM_CAPACITY_MAP, memory.check_smem_capacity = device.SMEM_CAPACITY_MAP, device.check_smem_capacity
    importlib.import_module("aiter.tuned_gemm")
    return importlib.import_module("aiter.ops.flydsl.gemm_kernels")


def call(name: str, shape: Shape) -> None:
    """Call a kernel as the plugin does, with fake operands."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from tunedgemm.plugin import Solution
    from tunedgemm_aiter import launch, names

    run = launch._MAKERS["flydsl", shape.op](names.parse("flydsl", shape.op, name), Solution("flydsl", name), shape)
    with FakeTensorMode():
        dtype = launch.torch_dtype(shape.dtype)
        operands = [torch.empty(rows, shape.k, dtype=dtype, device="cuda") for rows in (shape.m, shape.n)]
        operands += [torch.empty(sizes, device="cuda") for sizes in launch._scale_sizes(shape)]
        operands += [torch.empty(shape.n, dtype=launch.torch_dtype(shape.bias_dtype), device="cuda")] if shape.bias else []
        out = run(*operands)
    assert out.shape == (shape.m, shape.n) and out.dtype == launch.torch_dtype(shape.outdtype)


def facts_of(text: str, gfx: str) -> dict[str, Any]:
    """Return what the first code object of a compiled module says of its kernel."""
    from tunedgemm_asm import codeobject

    escaped = re.search(r'bin = "((?:[^"\\]|\\.)*)"', text)[1]  # type: ignore[index]
    content = re.sub(
        rb"\\([0-9A-F]{2}|\\)", lambda found: b"\\" if found[1] == b"\\" else bytes.fromhex(found[1].decode()), escaped.encode()
    )
    code = codeobject.read(content)
    [seen] = code.kernels.values()
    dynamic = re.search(r"dynamic_shared_memory_size %(\w+)", text)
    extra = re.search(rf"%{dynamic[1]} = llvm\.mlir\.constant\((\d+) ", text) if dynamic else None
    return {
        "result": "ok" if code.gfx == gfx else f"compiled for {code.gfx}",
        "lds": seen.lds_bytes + (int(extra[1]) if extra else 0),
        "vgprs": seen.vgprs,
        "agprs": seen.agprs if seen.agprs < 1 << 31 else 0,
        "scratch": seen.scratch_bytes,
        "spills": seen.spills,
        "threads": math.prod(seen.required) or seen.workgroup,
        "wave": seen.wavefront,
        "arguments": len(seen.args),
        "argument_bytes": seen.kernarg_bytes,
    }


def judge(name: str, shape: Shape, modules: list[ModuleType]) -> dict[str, str]:
    """Return the probes that AITER takes and refuses before it compiles."""
    from tunedgemm_aiter import names

    kernel = names.parse("flydsl", shape.op, name)
    cells: dict[str, list[str]] = {"takes": [], "refuses": []}
    with contextlib.ExitStack() as stack:
        for module in modules:
            replaced = [each for each in ("_run_compiled", "_launch_gemm_a8w8") if hasattr(module, each)]
            stack.enter_context(mock.patch.multiple(module, **dict.fromkeys(replaced, mock.DEFAULT)))
        for probe in probes_of(shape, kernel.tile, kernel.split):
            try:
                call(name, probe)
                cells["takes"].append(text_of(probe))
            except (ValueError, RuntimeError, AssertionError) as error:
                logging.getLogger(__name__).info("%s %s: %s", name, text_of(probe), error)
                cells["refuses"].append(text_of(probe))
    return {key: " ".join(value) for key, value in cells.items()}


def child(checkout: Path) -> None:
    """Read cases, and print a line of JSON for each."""
    from tunedgemm.plugin import Shape

    logging.basicConfig(filename=os.environ.get("FLYDSL_COMPILE_LOG", os.devnull), level=logging.INFO)
    kernels = prepare(checkout)
    names = ("gemm_a8w8_bpreshuffle_8wave", "bpreshuffle_gemm_gfx1250")
    modules = [kernels, *(importlib.import_module(f"aiter.ops.flydsl.{name}") for name in names)]
    for module in modules[1:]:
        module._lazy_import()
    executor = importlib.import_module("flydsl.compiler.jit_executor")
    compiled: list[Any] = []
    begin = executor.CompiledArtifact.__init__

    def noted(self: Any, *words: Any, **options: Any) -> None:
        begin(self, *words, **options)
        compiled.append(self)

    executor.CompiledArtifact.__init__ = noted
    for case in json.load(sys.stdin):
        compiled.clear()
        name, shape = case["name"], Shape.from_dict(case["shape"])
        answer: dict[str, Any] = {"gfx": case["gfx"], "name": name, "m": shape.m, "n": shape.n, "k": shape.k}
        started = time.monotonic()
        try:
            call(name, shape)
            answer |= facts_of(compiled[0]._ir_text, case["gfx"])
        except Exception as error:
            answer["result"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        answer["seconds"] = f"{time.monotonic() - started:.1f}"
        print("\n@" + json.dumps({**answer, **judge(name, shape, modules)}), flush=True)


def stubbed_rocm(folder: Path, gfx: str) -> Path:
    """Write what AITER and FlyDSL ask of a ROCm installation: a version, an architecture and a linker."""
    for name in ("bin", "llvm/bin", ".info"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / ".info" / "version").write_text("7.1.0\n")
    for name in ("rocminfo", "hipcc"):
        (folder / "bin" / name).write_text(f"#!/bin/sh\necho '  Name: {gfx}'\n")
        (folder / "bin" / name).chmod(0o755)
    linker = next((found for name in ("ld.lld", "ld.lld-20", "ld.lld-19", "ld.lld-18") if (found := shutil.which(name))), None)
    if linker is None:
        raise SystemExit("linker: ld.lld not found; install lld")
    (folder / "llvm" / "bin" / "ld.lld").symlink_to(linker)
    return folder


def environment_of(arguments: argparse.Namespace, gfx: str, folder: Path) -> dict[str, str]:
    """Return the variables of a child."""
    rocm = str(stubbed_rocm(folder / "rocm", gfx))
    paths = [str(Path(path).resolve()) for path in (*arguments.path, arguments.aiter, *_PATHS)]
    return os.environ | {
        "AITER_LOG_LEVEL": "WARNING",
        "COMPILE_ONLY": "1",
        "FLYDSL_GPU_ARCH": gfx,
        "FLYDSL_RUNTIME_CACHE_DIR": str(folder / "cache"),
        "GPU_ARCHS": gfx,
        "PYTHONPATH": os.pathsep.join(paths),
        "ROCM_HOME": rocm,
        "ROCM_PATH": rocm,
        "TUNEDGEMM_CACHE": str(folder / "artifacts"),
    }


def answers(arguments: argparse.Namespace, gfx: str, cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the answer to each case of an architecture; a compiler that aborts costs its case alone."""
    while cases:
        with tempfile.TemporaryDirectory() as name:
            environment = environment_of(arguments, gfx, Path(name))
            command = [arguments.python, __file__, "--aiter", str(arguments.aiter), "--child"]
            done = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert done.stdin is not None and done.stdout is not None
            done.stdin.write(json.dumps(cases))
            done.stdin.close()
            count = 0
            for line in done.stdout:
                if line.startswith("@"):
                    count += 1
                    yield json.loads(line[1:])
            status = done.wait()
        if count < len(cases):
            yield {"gfx": gfx, "name": cases[count]["name"], "result": f"the compiler ended with {status}"}
        cases = cases[count + 1 :]


def main() -> int:
    """Compile every kernel and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiter", type=Path, required=True, help="AITER's checkout")
    parser.add_argument("--configs", type=Path, help="AITER's tables")
    parser.add_argument("--python", default=sys.executable, help="interpreter with flydsl (default: this)")
    parser.add_argument("--path", action="append", default=[], help="folder of another flydsl, before the interpreter's")
    parser.add_argument("--only", default="", help="part of the kernels' names")
    parser.add_argument("-o", "--output", type=Path, help="the CSV")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.aiter)
        return 0
    sys.path[:0] = map(str, _PATHS)
    cases = [case for case in cases_of(arguments.configs) if arguments.only in case["name"]]
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for gfx in sorted({case["gfx"] for case in cases}):
            for answer in answers(arguments, gfx, [case for case in cases if case["gfx"] == gfx]):
                writer.writerow(answer)
                file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

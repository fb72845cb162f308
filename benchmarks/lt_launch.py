"""What a launch of an Lt library costs the host, by the C extension and by ctypes.

    python benchmarks/lt_launch.py --json lt-launch.json

Both call the same C functions, compiled here, that do nothing: what is left is the way there. The library's own time, the output's
allocation and the rest of a call come on top; `benchmarks/host_time.py` times whole calls on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

from tunedgemm_hipblaslt import native
from tunedgemm_hipblaslt.abi import CUBLASLT
from tunedgemm_hipblaslt.descriptors import Found
from tunedgemm_hipblaslt.library import ARGUMENTS, Library

SOURCE = """
#include <stddef.h>
int Matmul(void *handle, void *desc, void *alpha, void *a, void *al, void *b, void *bl, void *beta, void *c, void *cl, void *d, void *dl,
           void *algo, void *workspace, size_t bytes, void *stream) { return 0; }
int MatmulDescSetAttribute(void *desc, int attribute, void *value, size_t bytes) { return 0; }
"""
CASES = {"plain": (-1, -1, -1), "bias": (8, -1, -1), "bias and scales": (8, 17, 18)}
ADDRESSES = tuple(1 << shift for shift in range(40, 48))
CALLS, ROUNDS = 20_000, 11


def compiled(folder: Path) -> Library:
    """A library of two functions that do nothing."""
    path = folder / "nothing.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=SOURCE, text=True, check=True)
    loaded, functions = ctypes.CDLL(str(path)), {}
    for name in ("Matmul", "MatmulDescSetAttribute"):
        functions[name] = loaded[name]
        functions[name].argtypes = ARGUMENTS[name]
    return Library(CUBLASLT, str(path), functions)


def microseconds(launch: native.Launch) -> float:
    """Of one launch: the median of a few rounds."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            launch(*ADDRESSES)
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return round(statistics.median(times), 3)


def main() -> int:
    """Time each way with each number of pointers to set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        described = SimpleNamespace(library=compiled(Path(folder)), addresses=(1, 2, 3, 4, 5, 5), problem=SimpleNamespace(compute="32f"))
        found, rows = Found(bytes(CUBLASLT.algo_bytes), 0, 0.0), []
        for name, attributes in CASES.items():
            by = {"extension": native.by_extension, "ctypes": native.by_ctypes}
            rows.append({"case": name} | {way: microseconds(make(described, found, attributes)) for way, make in by.items()})  # type: ignore[arg-type]
            print(f"{name}: extension {rows[-1]['extension']} us, ctypes {rows[-1]['ctypes']} us", flush=True)
    head = {"date": datetime.now(timezone.utc).date().isoformat(), "machine": platform.machine(), "python": platform.python_version()}
    if arguments.json:
        arguments.json.write_text(json.dumps({**head, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

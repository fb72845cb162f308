"""Run generated kernels under compute-sanitizer's memcheck on a Hopper GPU."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Shape, Solution
from tunedgemm_asm.ptx.limits import unfit
from tunedgemm_asm.ptx.names import KernelConfig

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]

#: Sizes with all tails: of one tile, or several tiles for each SM with ping-pong.
TAILS, SEVERAL_TAILS = {"m": 37, "n": 105, "k": 336}, {"m": 1037, "n": 4105, "k": 336}
#: Run the solutions of a file under memcheck; with another argument, a kernel that stores
#: beyond the output's last row.
PROGRAM = """
import pickle, re, sys, torch
from pathlib import Path
from tunedgemm.plugin import device_of
from tunedgemm.testing.launching import plain_weight
from tunedgemm.tools.tables import ops
from tunedgemm_asm import asm
from tunedgemm_asm.ptx import build
if len(sys.argv) > 2:
    plain = build.text_of
    build.text_of = lambda variant: re.sub(r"setp\\.lt\\.u32 (%p\\d+), (%r\\d+), %r0;", r"setp.ge.u32 \\1, \\2, 0;", plain(variant))
for solution, shape in pickle.loads(Path(sys.argv[1]).read_bytes()):
    made = ops()[shape.op].make_inputs(shape, torch.device("cuda", 0), 0)
    asm.bind(solution, shape, device_of(0)).call(*(plain_weight(each) for each in made if each is not None))
    torch.cuda.synchronize()
"""


def tails(config: KernelConfig) -> dict[str, int]:
    """Return sizes with all tails of a configuration."""
    return SEVERAL_TAILS if config.turns else TAILS | {"n": 104} if config.panels else TAILS


def fitting(name: str, kinds: dict[str, Any]) -> list[tuple[Solution, Shape]]:
    """Return the solutions and shapes of one list that fit."""
    found = []
    for shape, config, *rest in kinds.values():
        tailed = attrs.evolve(shape, **tails(config)) if name == "plain" else shape
        splits = rest[0] if rest else 1
        if not unfit(config, splits, tailed):
            found.append((Solution("asm", config.name, splits), tailed))
    return found


def memcheck(listed: list[tuple[Solution, Shape]], folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run kernels under memcheck, each tensor in its own allocation."""
    usual = "/usr/local/cuda/bin/compute-sanitizer"
    tool = shutil.which("compute-sanitizer") or (usual if os.access(usual, os.X_OK) else None)
    if tool is None:
        pytest.skip("compute-sanitizer not found")
    path = folder / "kernels.pickle"
    path.write_bytes(pickle.dumps(listed))
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TUNEDGEMM_CACHE": str(folder)}
    options = ["--tool", "memcheck", "--error-exitcode", "99", "--report-api-errors", "no"]
    program = [sys.executable, "-c", PROGRAM, str(path), *more]
    return subprocess.run([tool, *options, *program], env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize("name", ["plain", "columns", "stream-K"])
def test_accesses_stay_inside_buffers(name: str, gpu_kinds: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """No kernel accesses memory outside operands, output and workspace."""
    done = memcheck(fitting(name, gpu_kinds[name]), tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_a_wrong_kernel_is_found(gpu_kinds: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """memcheck finds a kernel that stores outside its output."""
    done = memcheck(fitting("plain", gpu_kinds["plain"])[:1], tmp_path, "wrong")
    assert done.returncode == 99, done.stdout[-3000:] + done.stderr[-2000:]

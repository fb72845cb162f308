"""Run kernels of installed libraries under compute-sanitizer's memcheck on a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import current_device
from tunedgemm.testing.shapes import shapes_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

#: Shapes of which each library serves one.
SHAPES = (*shapes_of("a16w16"), *shapes_of("a8w8"))
#: Call the first solution of each kind of shape that a backend serves; print how many.
PROGRAM = """
import sys
import torch
from tunedgemm.backends.registry import Registry
from tunedgemm.device import current_device
from tunedgemm.ops import ops
from tunedgemm.plugin import Launcher
from tunedgemm.testing.launching import output_fault
from tunedgemm.testing.shapes import shapes_of

device, backend = current_device(), Registry().get(sys.argv[1])
assert backend, backend
served = [shape for op in ops() for shape in shapes_of(op) if shape.m and backend.refusal(shape, device) is None]
kinds = {(shape.op, shape.dtype, shape.scale, shape.layout, shape.bias): shape for shape in served}
for shape in kinds.values():
    op, solution = ops()[shape.op], backend.solutions(shape, device)[0]
    backend.prepare(solution, shape, device)
    launcher = backend.bind(solution, shape, device)
    assert isinstance(launcher, Launcher), (solution, launcher)
    operands = op.make_inputs(shape, device.torch_device, 0)
    out = launcher.call(*operands)
    torch.cuda.synchronize()
    fault = output_fault(shape, out, op.reference(shape, operands))
    assert not fault, (solution, shape, fault)
print(f"called {len(kinds)}")
"""


def tool() -> str:
    """Return the path of compute-sanitizer."""
    usual = "/usr/local/cuda/bin/compute-sanitizer"
    found = shutil.which("compute-sanitizer") or (usual if os.access(usual, os.X_OK) else None)
    if found is None:
        pytest.skip("compute-sanitizer not found")
    return found


@pytest.mark.parametrize("libtype", ["deepgemm", "quack", "vllm"])
def test_accesses_stay_inside_buffers(libtype: str, tmp_path: Path) -> None:
    """Let no kernel of an installed library access memory outside operands, output and workspace."""
    backend = Registry().get(libtype)
    if not isinstance(backend, Backend) or not any(backend.refusal(shape, current_device()) is None for shape in SHAPES):
        pytest.skip(f"{libtype}: not usable here")
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TUNEDGEMM_CACHE": str(tmp_path), "TUNEDGEMM_QUACK_COMPILE": "1"}
    program, options = (
        [sys.executable, "-c", PROGRAM, libtype],
        ["--tool", "memcheck", "--error-exitcode", "99", "--report-api-errors", "no"],
    )
    # Compilers of kernels run before, outside the tool.
    for command in (program, [tool(), *options, *program]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
        assert re.search(r"called [1-9]", done.stdout)

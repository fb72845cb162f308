"""The library of an installed vLLM on a GPU: loads, captures, streams, and large sizes."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import attrs
import pytest
import torch
from tunedgemm.plugin import Launcher, Shape, device_of
from tunedgemm.tools.tables import op_named
from tunedgemm_vllm import library, vllm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None, reason="vLLM's CUTLASS products are for NVIDIA's GPUs"),
    pytest.mark.skipif(library.folder_of("vllm") is None, reason="needs an installed vLLM"),
]

ROW = Shape("a8w8", 48, 4096, 4096, dtype="fp8_e4m3fn", outdtype="bf16", scale="row")
BLOCK = attrs.evolve(ROW, op="a8w8_blockscale", scale="block", extra={"scale_order": "m_major"})


def bound(shape: Shape) -> Launcher:
    """Bind the one solution on the current GPU; skip where the device has no such product."""
    device = device_of(torch.cuda.current_device())
    if answer := vllm.refusal(shape, device):
        pytest.skip(str(answer))
    launcher = vllm.bind(*vllm.solutions(shape, device), shape, device)
    assert isinstance(launcher, Launcher), launcher
    return launcher


def error(shape: Shape, out: torch.Tensor, operands: tuple[torch.Tensor, ...]) -> float:
    """Return the relative error by norm."""
    exact = op_named(shape.op).reference(shape, operands).double()
    return float((out.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", [ROW, attrs.evolve(ROW, dtype="int8"), BLOCK], ids=["row", "int8", "block"])
@pytest.mark.parametrize("m", [1, 15, 64, 130, 1000, 8192])
def test_every_kernel_of_the_dispatch(shape: Shape, m: int) -> None:
    """M selects the kernel within the operator: each range of it is right, swapped operands included."""
    shape = attrs.evolve(shape, m=m, k=6144)
    operands = op_named(shape.op).make_inputs(shape, torch.device("cuda"), 0)
    assert error(shape, bound(shape).call(*operands), operands) < 0.005


def test_calls_follow_the_current_stream() -> None:
    """A call on a side stream waits for its operands there, not for those of the default stream."""
    launcher, stream = bound(ROW), torch.cuda.Stream()
    operands = op_named("a8w8").make_inputs(ROW, torch.device("cuda"), 0)
    wanted = launcher.call(*operands)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.empty_like(operands[0])
        torch.cuda._sleep(50_000_000)
        late.copy_(operands[0])
        out = launcher.call(late, *operands[1:])
    stream.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("op", ["a8w8", "a8w8_blockscale"])
def test_the_first_call_of_a_process_may_be_captured(op: str) -> None:
    """The library loads without vLLM, and a kernel that no call has loaded yet is captured."""
    bound(ROW if op == "a8w8" else BLOCK)  # skips
    code = f"""
        import sys, torch
        from tunedgemm.plugin import Shape, Solution, device_of
        from tunedgemm.tools.tables import op_named
        from tunedgemm_vllm import vllm
        extra = {{}} if {op!r} == "a8w8" else {{"scale_order": "m_major"}}
        scale = "block" if extra else "row"
        shape = Shape({op!r}, 48, 512, 1024, dtype="fp8_e4m3fn", outdtype="bf16", scale=scale, extra=extra)
        operands = op_named({op!r}).make_inputs(shape, torch.device("cuda"), 0)
        launcher = vllm.bind(Solution("vllm", "cutlass_scaled_mm"), shape, device_of(0))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = launcher.call(*operands)
        graph.replay()
        exact = op_named({op!r}).reference(shape, operands).float()
        assert (out.float() - exact).norm() < 0.005 * exact.norm()
        assert "vllm" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]

"""Routes of a16w16; the conformance suite is in test_routes.py."""

import re

import attrs
import pytest
import torch
import tunedgemm
from tunedgemm.backends import builtin
from tunedgemm.backends.builtin import hooks
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.listed import listed

GPU = Device("sm_90", 132)
OP = op_named("a16w16")


def names(shape, device):
    return [(solution.kernel_name, solution.split_k) for solution in hooks.enumerate_solutions(shape, device)]


def bound(solution, shape, device):
    """Bind a route as on a device that is present."""
    return builtin.backend.bind_unwrapped(solution, shape, attrs.evolve(device, emulated=True))


def test_the_first_route_is_the_users_own_call(shape, cpu):
    """`native` is `F.linear` itself, also under the empty name of AITER's rows."""
    for name in ("native", ""):
        launcher = bound(Solution(BUILTIN, name), shape, cpu)
        assert launcher.call is torch.nn.functional.linear
    assert hooks.heuristic_fallback() == Solution(BUILTIN, "native")


def test_routes_fit_the_shape(cpu):
    """One row has a matrix-vector route, a bias a separate addition, long K on a GPU split products."""
    assert ("mv", 0) in names(Shape("a16w16", 1, 64, 64), GPU)
    assert ("mv", 0) not in names(Shape("a16w16", 2, 64, 64), GPU)
    assert ("mm_add", 0) in names(Shape("a16w16", 2, 64, 64, epilogue="bias"), GPU)
    assert [split for name, split in names(Shape("a16w16", 8, 256, 8192), GPU) if name == "splitk_bmm"] == [2, 4, 8, 16]
    assert ("onednn", 0) not in names(Shape("a16w16", 8, 256, 8192), GPU)
    assert names(Shape("a16w16", 2, 64, 64, outdtype="fp32"), GPU) == [("native", 0)]
    assert names(Shape("a16w16", 2, 64, 64, epilogue="bias", bias_dtype="fp32"), GPU) == [("native", 0)]
    assert names(Shape("a16w16", 2, 64, 64, "fp8_e4m3fn", "bf16", scale="tensor"), GPU) == [("native", 0), ("float32", 0)]
    assert names(Shape("a16w16", 2, 64, 64, "fp8_e4m3fn", "bf16"), GPU) == [("native", 0), ("float32", 0)]
    assert names(Shape("a16w16", 0, 64, 64), cpu) == [("native", 0)]


@listed("outdtype", ["bf16", "fp16", "fp32"])
def test_fp8_without_scales(cpu, outdtype):
    """Absent scales of fp8 operands are ones, as in AITER, in every output dtype and with a bias."""
    for epilogue in ("none", "bias"):
        shape = Shape("a16w16", 8, 32, 64, "fp8_e4m3fn", outdtype, epilogue, outdtype)
        operands = OP.make_inputs(shape, torch.device("cpu"), 0)
        out = tunedgemm.gemm_a16w16(*operands[:2], *(operands[2:] or [None]), torch_dtype(outdtype))
        assert worst_row_error(out, OP.reference(shape, operands)) <= OP.tolerance(shape).row_error, shape


def test_the_scale_of_the_output(cpu):
    """`scale_c` multiplies the output."""
    scaled = Shape("a16w16", 4, 8, 16, scale="tensor")
    launcher = bound(Solution(BUILTIN, "native"), scaled, cpu)
    x, weight = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(8, 16, dtype=torch.bfloat16)
    out = launcher.call(x, weight, None, None, None, torch.tensor([0.5]))
    assert torch.equal(out, torch.full((4, 8), 8.0, dtype=torch.bfloat16))


#: a solution, fields of the shape and the reason of its refusal on a CPU
REFUSALS = (
    (Solution(BUILTIN, "cublas_42"), {}, "torch has no route 'cublas_42' for a16w16; use native, linear, mm"),
    (Solution(BUILTIN, "mm"), {"scale": "tensor"}, "mm takes neither fp8 nor scales"),
    (Solution(BUILTIN, "linear"), {"outdtype": "fp32"}, "linear needs bias and output in bf16"),
    (Solution(BUILTIN, "mm_add"), {}, "mm_add needs a bias"),
    (Solution(BUILTIN, "splitk_bmm", 2), {}, "multiplies bf16 or fp16 on a GPU, not bf16 on cpu"),
    (Solution(BUILTIN, "native"), {"op": "of_others"}, r"op of_others is not covered \(covers a16w16, "),
    (Solution(BUILTIN, "mv"), {}, "mv takes one row, not M=4"),
)


def test_refusals(shape, cpu):
    """An unusable route is refused with its requirement; so is a split product of unequal parts."""
    faults = []
    for solution, fields, reason in REFUSALS:
        answer = bound(solution, attrs.evolve(shape, **fields), cpu)
        faults += [] if isinstance(answer, Unsupported) and re.search(reason, answer.reason) else [f"{solution} {fields}: {answer}"]
    assert not faults
    for split in (1, 3):
        answer = bound(Solution(BUILTIN, "splitk_bmm", split), shape, GPU)
        assert answer == Unsupported(f"splitk_bmm needs K divisible by its split (K=64, splitK={split})")


def test_builds_without_onednn(monkeypatch, shape, cpu):
    """Without oneDNN its route is neither listed nor bound."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert ("onednn", 0) not in names(shape, cpu)
    assert "oneDNN" in bound(Solution(BUILTIN, "onednn"), shape, cpu).reason


def test_processors_without_the_instructions(monkeypatch, shape, cpu):
    """Where oneDNN cannot multiply the dtype, its route is refused before a launch."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert bound(Solution(BUILTIN, "onednn"), shape, cpu) == Unsupported("oneDNN has no bf16 linear on this processor")


def test_the_version_is_torchs(cpu):
    """The library version is torch's own; an absent device has none."""
    assert hooks.library_version(cpu) == torch.__version__
    assert hooks.library_version(GPU) == ""

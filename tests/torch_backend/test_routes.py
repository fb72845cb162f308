"""The built-in backend over every op: the conformance suite, and what holds for all routes."""

import math
import re

import attrs
import pytest
import torch
from tunedgemm import torch_backend
from tunedgemm.accuracy import MAX_ERROR_RATIO, error_ratio, worst_row_error
from tunedgemm.device import Device
from tunedgemm.launcher import Launcher
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import op_named, ops
from tunedgemm.solution import Solution
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.shapes import DEVICES, shapes_of
from tunedgemm.weights import plain_weight

QUANTISED = [name for name in torch_backend.OPS if name != "a16w16"]
SHAPES = [shape for name in QUANTISED for shape in shapes_of(name)]
H200 = Device("sm_90", 132, "nvidia-h200")


class TestConformance(BackendConformance):
    """The built-in backend passes the checks of every other, for every op."""

    libtype = BUILTIN
    max_solutions = 16


def plain_operands(shape):
    """Random operands as a launcher gets them, and the exact result."""
    op = op_named(shape.op)
    operands = op.make_inputs(shape, torch.device("cpu"), 3)
    return tuple(None if o is None else plain_weight(o) for o in operands), op.reference(shape, operands)


def fault(shape, out, exact):
    tolerance = op_named(shape.op).tolerance(shape)
    ratio, row = error_ratio(out, exact, tolerance), worst_row_error(out, exact)
    return "" if ratio <= MAX_ERROR_RATIO and row <= tolerance.row_error else f"ratio {ratio}, row {row}"


def test_every_op_of_ours_is_covered():
    """An op of the core without a route of torch would have no last answer."""
    assert set(ops()) <= set(torch_backend.OPS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_listed_binds_and_native_is_first(shape):
    """On devices that are not there, too: each route listed is bound, and `native` leads, alone for no rows."""
    for device in DEVICES:
        found = list(torch_backend.enumerate_solutions(shape, device))
        assert found[0].kernel_name == "native"
        if shape.m == 0:
            assert len(found) == 1
        for solution in found:
            answer = torch_backend.bind(solution, shape, device)
            assert isinstance(answer, Launcher), f"{solution} on {device}: {answer}"


def test_all_routes_are_met():
    """The examples reach every route of every op on one of the devices, so that no route is left untested by the suite."""
    devices = (*DEVICES, H200)
    for name in QUANTISED:
        family = torch_backend._FAMILIES[name]
        met = {family.native(shape, device) for shape in shapes_of(name) for device in devices if shape.m}
        met |= {s.kernel_name for shape in shapes_of(name) for device in devices for s in torch_backend.enumerate_solutions(shape, device)}
        # Some routes are for other dtypes, or for sizes that examples for a CPU do not have.
        large = {s.kernel_name for shape in op_named(name).large for d in devices for s in torch_backend.enumerate_solutions(shape, d)}
        large |= {family.native(shape, device) for shape in op_named(name).large for device in devices}
        assert met | large | {"native"} >= set(family.routes), name


@pytest.mark.parametrize("name", QUANTISED)
def test_no_rows_give_an_empty_output(name, cpu):
    """M = 0 is an output without rows, of the right dtype, on any route."""
    shape = attrs.evolve(shapes_of(name)[0], m=0)
    operands, exact = plain_operands(shape)
    for solution in torch_backend.enumerate_solutions(shape, cpu):
        out = torch_backend.bind(solution, shape, cpu).call(*operands)
        assert out.numel() == 0
        assert out.reshape(-1, shape.n).shape == exact.reshape(-1, shape.n).shape


@pytest.mark.parametrize("name", QUANTISED)
def test_unknown_routes_are_refused(name, cpu):
    """A name from another version, or of another op, is refused with those there are."""
    shape = next(shape for shape in shapes_of(name) if shape.m)
    answer = torch_backend.bind(Solution(BUILTIN, "cublas_42"), shape, cpu)
    assert not answer
    assert f"no route 'cublas_42' for {name}; it has native, " in str(answer)


@pytest.mark.parametrize("setting", ["high", "medium"])
@pytest.mark.parametrize("name", ["a8w8", "a8w8_blockscale", "a4w4_blockscale", "batched_a8w8"])
def test_what_a_process_chose_for_float32_does_not_matter(name, setting, cpu):
    """Quantised values are exact in TF32 and bf16: a lower precision of float32 products changes nothing but blockscale's rounding."""
    shape = max((s for s in shapes_of(name) if s.outdtype == "bf16"), key=lambda s: math.prod((s.m, s.n, s.k)))
    operands, exact = plain_operands(shape)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        for solution in torch_backend.enumerate_solutions(shape, cpu):
            out = torch_backend.bind(solution, shape, cpu).call(*operands)
            assert not fault(shape, out, exact), solution
    finally:
        torch.set_float32_matmul_precision(before)


def made(name, shape, device):
    """A route's function whatever it says of the device: a CPU's torch computes what a GPU's does."""
    family = torch_backend._FAMILIES[shape.op]
    call = family.routes[name].make(shape, device, 0)
    return call if shape.layout == "row" else family.in_order(shape, call)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.op == "fmoe" and s.m and s.n % 8 == 0 and s.k % 8 == 0], ids=str)
def test_groups_of_a_gpu_on_a_cpu(shape, cpu):
    """grouped_mm's order of pairs and their way back is right, here with the loop that a CPU has behind it."""
    operands, exact = plain_operands(shape)
    assert not fault(shape, made("grouped_mm", shape, cpu)(*operands), exact)


@pytest.mark.parametrize("op", ["a8w8", "a8w8_bpreshuffle"])
def test_few_rows_are_padded_for_int8(op, cpu):
    """The rows that a GPU's product is padded with do not show."""
    for shape in (s for s in shapes_of(op) if s.dtype == "int8" and 0 < s.m <= 16):
        operands, exact = plain_operands(shape)
        out = made("int_mm_padded", shape, cpu)(*operands)
        assert out.shape[0] == shape.m
        assert not fault(shape, out, exact)


def test_pairs_of_no_expert_add_nothing(cpu):
    """Ids outside of 0 .. E-1 are left out by every route, as by the reference, whatever lies where their products would."""
    op = op_named("fmoe")
    for shape in (s for s in op.examples if s.m > 2 and s.layout == "row"):
        operands = list(op.make_inputs(shape, torch.device("cpu"), 1))
        operands[4] = operands[4].clone()
        operands[4][0, 0], operands[4][1, -1], operands[4][2] = -1, int(shape["expert"]), -7
        exact = op.reference(shape, tuple(operands))
        assert not exact[2].any()
        for solution in torch_backend.enumerate_solutions(shape, cpu):
            out = torch_backend.bind(solution, shape, cpu).call(*operands)
            assert not fault(shape, out, exact), f"{solution} {shape}"


def test_experts_hit_by_no_token_and_twice_by_one(cpu):
    """All tokens to one expert, and both pairs of a token to the same one."""
    op = op_named("fmoe")
    for shape in (s for s in op.examples if s.m and int(s["topk"]) > 1 and s.layout == "row"):
        operands = list(op.make_inputs(shape, torch.device("cpu"), 1))
        operands[4] = torch.full_like(operands[4], int(shape["expert"]) - 1)
        exact = op.reference(shape, tuple(operands))
        for solution in torch_backend.enumerate_solutions(shape, cpu):
            out = torch_backend.bind(solution, shape, cpu).call(*operands)
            assert not fault(shape, out, exact), f"{solution} {shape}"


def test_routes_of_an_h200():
    """What is known of that device is what is listed for it."""
    a8w8 = attrs.evolve(shapes_of("a8w8")[0], m=4, n=256, k=512, dtype="fp8_e4m3fn", outdtype="bf16", scale="row", epilogue="none")
    family = torch_backend._FAMILIES["a8w8"]
    assert family.native(a8w8, H200) == "scaled_mm"
    assert family.native(attrs.evolve(a8w8, n=255), H200) == "bf16"
    assert family.native(attrs.evolve(a8w8, dtype="int8", m=16), H200) == "int_mm_padded"
    assert family.native(attrs.evolve(a8w8, dtype="int8", m=17), H200) == "int_mm"
    assert family.native(attrs.evolve(a8w8, dtype="fp8_e4m3fnuz"), H200) == "bf16"
    assert family.native(attrs.evolve(a8w8, dtype="fp8_e4m3fnuz"), Device("gfx942", 304)) == "scaled_mm"
    assert family.native(a8w8, Device("sm_80", 108)) == "bf16"
    block = attrs.evolve(a8w8, op="a8w8_blockscale", scale="block")
    assert torch_backend._FAMILIES["a8w8_blockscale"].native(block, H200) == "scaled_mm"
    assert torch_backend._FAMILIES["a8w8_blockscale"].native(attrs.evolve(block, n=192), H200) == "bf16"


@pytest.mark.parametrize(
    ("op", "fields", "name", "reason"),
    [
        ("a8w8", {"dtype": "int8"}, "scaled_mm", "multiplies fp8, not int8"),
        ("a8w8", {"dtype": "fp8_e4m3fn"}, "int_mm", "multiplies int8, not fp8_e4m3fn"),
        ("a8w8", {"dtype": "int8", "m": 4}, "int_mm", r"needs more than 16 rows \(M=4\)"),
        ("a8w8", {"dtype": "int8", "n": 12}, "int_mm", r"needs N and K divisible by 8 \(N=12"),
        ("a8w8", {"dtype": "fp8_e4m3fn", "outdtype": "fp32"}, "scaled_mm_fast", "fp32"),
        ("a8w8_blockscale", {"n": 192}, "scaled_mm", "N divisible by 128"),
        ("a8w8_blockscale", {"k": 130}, "blocks_bmm", r"needs K divisible by 128 \(K=130\)"),
        ("a8w8_blockscale", {"outdtype": "fp32"}, "float32", "too coarse for fp32"),
        ("a8w8_blockscale", {"outdtype": "fp16"}, "bf16", "too coarse for fp16"),
        ("fmoe", {"dtype": "fp16"}, "grouped_mm", "is a loop over the experts for fp16"),
    ],
)
def test_refusals_of_an_h200(op, fields, name, reason):
    """A route says what it would need."""
    base = attrs.evolve(next(s for s in shapes_of(op) if s.m), m=32, n=256, k=512, epilogue="none", layout="row")
    answer = torch_backend.bind(Solution(BUILTIN, name), attrs.evolve(base, **fields), H200)
    assert not answer
    assert re.search(reason, str(answer)), answer

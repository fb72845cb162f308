"""The built-in backend over every op: the conformance suite, and promises of all routes."""

import itertools
import math
import re

import attrs
import pytest
import torch
from tunedgemm.backends import builtin, kept_weights
from tunedgemm.backends.builtin import blockscale, both_sides, hooks
from tunedgemm.backends.builtin.product import aligned, rescale
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.accuracy import MAX_ERROR_RATIO, error_ratio, worst_row_error
from tunedgemm.ops.formats.shuffle import plain_weight
from tunedgemm.solution import Solution
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.shapes import DEVICES, shapes_of

QUANTISED = [name for name in builtin.backend.ops if name != "a16w16"]
SHAPES = [shape for name in QUANTISED for shape in shapes_of(name)]
H200, B200 = Device("sm_90", 132, "nvidia-h200"), Device("sm_100", 148, "nvidia-b200")


class TestConformance(BackendConformance):
    """The built-in backend passes the checks that every backend passes, for every op."""

    libtype = BUILTIN
    max_solutions = 16

    @classmethod
    def every_shape(cls):
        """List the suite's shapes, of a16wn one of each format and layout: its own tests have each group."""
        shapes = super().every_shape()
        kept = {(shape["w_format"], shape.layout): shape for shape in shapes if shape.op == "a16wn" and shape.m}
        return tuple(shape for shape in shapes if shape.op != "a16wn" or not shape.m or shape in kept.values())


def bound(solution, shape, device):
    """Bind a route as on a device that is present."""
    return builtin.backend.bind_unwrapped(solution, shape, attrs.evolve(device, emulated=True))


def plain_operands(shape):
    """Draw operands as a launcher gets them, and compute the exact result."""
    op = op_named(shape.op)
    operands = op.make_inputs(shape, torch.device("cpu"), 3)
    return tuple(None if o is None else plain_weight(o) for o in operands), op.reference(shape, operands)


def fault(shape, out, exact):
    tolerance = op_named(shape.op).tolerance(shape)
    ratio, row = error_ratio(out, exact, tolerance), worst_row_error(out, exact)
    return "" if ratio <= MAX_ERROR_RATIO and row <= tolerance.row_error else f"ratio {ratio}, row {row}"


def test_every_op_of_ours_is_covered():
    """An op of the core without a route of torch would have no last answer."""
    assert set(ops()) <= set(builtin.backend.ops)


def test_listed_routes_bind_and_native_is_first():
    """Every listed route binds on every device, present or not; `native` leads, alone for an empty batch."""
    faults = []
    for shape, device in itertools.product(SHAPES, DEVICES):
        solutions = list(hooks.enumerate_solutions(shape, device))
        names = [solution.kernel_name for solution in solutions]
        faults += [] if names[0] == "native" else [f"{shape} on {device}: {names[0]} is first"]
        faults += [f"{shape} on {device}: {names}"] if shape.m == 0 and len(names) > 1 else []
        answers = {solution: bound(solution, shape, device) for solution in solutions}
        faults += [f"{shape} on {device}: {s}: {answer}" for s, answer in answers.items() if not isinstance(answer, Launcher)]
    assert not faults


def test_all_routes_are_reached(monkeypatch):
    """The examples reach every route of every op on one of the devices, so that all are tested."""
    monkeypatch.setenv(kept_weights.LIMIT, "1TiB")
    monkeypatch.setenv(both_sides.OPTION.variable, "quantised")
    devices = (*DEVICES, H200, B200)
    for name in QUANTISED:
        family = hooks.FAMILIES[name]
        met = {family.native(shape, device) for shape in shapes_of(name) for device in devices if shape.m}
        met |= {s.kernel_name for shape in shapes_of(name) for device in devices for s in hooks.enumerate_solutions(shape, device)}
        # Some routes are for other dtypes, or for sizes that examples for a CPU do not have.
        large = {s.kernel_name for shape in op_named(name).large for d in devices for s in hooks.enumerate_solutions(shape, d)}
        large |= {family.native(shape, device) for shape in op_named(name).large for device in devices}
        assert met | large | {"native"} >= set(family.routes), name


def test_no_rows_give_an_empty_output(cpu):
    """M = 0 gives an output without rows, of the right size, on any route of any op."""
    faults = []
    for name in QUANTISED:
        shape = attrs.evolve(shapes_of(name)[0], m=0)
        operands, exact = plain_operands(shape)
        for solution in hooks.enumerate_solutions(shape, cpu):
            out = bound(solution, shape, cpu).call(*operands)
            same = out.reshape(-1, shape.n).shape == exact.reshape(-1, shape.n).shape
            faults += [] if same and out.numel() == 0 else [f"{shape}: {solution}: {tuple(out.shape)}"]
    assert not faults


def test_unknown_routes_are_refused(cpu):
    """A name from another version, or of another op, is refused with the known names."""
    answers = {}
    for name in QUANTISED:
        shape = next(shape for shape in shapes_of(name) if shape.m)
        answers[name] = bound(Solution(BUILTIN, "cublas_42"), shape, cpu)
    assert not [name for name, answer in answers.items() if f"no route 'cublas_42' for {name}; use native, " not in str(answer)]


def test_the_precision_of_float32_products_does_not_matter(cpu):
    """Quantised values are exact in TF32 and bf16, so lower float32 precision stays in tolerance."""
    faults, before = [], torch.get_float32_matmul_precision()
    try:
        for name in ("a8w8", "a8w8_blockscale", "a4w4_blockscale", "a16w4_blockscale", "batched_a8w8", "a8w8_mxfp8", "a4w4_nvfp4"):
            shape = max((s for s in shapes_of(name) if s.outdtype == "bf16"), key=lambda s: math.prod((s.m, s.n, s.k)))
            operands, exact = plain_operands(shape)
            for setting, solution in itertools.product(("high", "medium"), hooks.enumerate_solutions(shape, cpu)):
                torch.set_float32_matmul_precision(setting)
                found = fault(shape, bound(solution, shape, cpu).call(*operands), exact)
                faults += [f"{shape}: {solution} with {setting}: {found}"] if found else []
    finally:
        torch.set_float32_matmul_precision(before)
    assert not faults


def made(name, shape, device):
    """Return a route's function for any device: a CPU's torch computes what a GPU's does."""
    family = hooks.FAMILIES[shape.op]
    call = family.routes[name].make(shape, device)
    return call if shape.layout == "row" else family.in_order(shape, call)


def test_groups_of_a_gpu_on_a_cpu(cpu):
    """grouped_mm's order of pairs and its inverse are right, checked with the CPU's loop."""
    faults = []
    for shape in (s for s in SHAPES if s.op == "fmoe" and s.m and s.n % 8 == 0 and s.k % 8 == 0):
        operands, exact = plain_operands(shape)
        found = fault(shape, made("grouped_mm", shape, cpu)(*operands), exact)
        faults += [f"{shape}: {found}"] if found else []
    assert not faults


def test_halves_of_fp16_lose_nothing(cpu):
    """Two parts in bf16 hold all bits of any fp16 number; an infinity stays one."""
    shapes = [shape for shape in SHAPES if shape.op == "a16w4_blockscale" and shape.dtype == "fp16"]
    for shape in shapes:
        operands, exact = plain_operands(shape)
        assert not fault(shape, made("halves", shape, cpu)(*operands), exact), shape
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).view(-1, 32)
    one = torch.zeros(32, 16, dtype=torch.uint8)
    one[torch.arange(32), torch.arange(32) // 2] = torch.tensor([0x02, 0x20], dtype=torch.uint8).repeat(16)
    square = attrs.evolve(shapes[0], m=len(every), n=32, k=32, outdtype="fp32", epilogue="none", bias_dtype="", layout="row")
    finite = every.isfinite().all(-1)
    out = made("halves", square, cpu)(every[finite], one, torch.full((32, 1), 127, dtype=torch.uint8))
    assert torch.equal(out, every[finite].float())
    infinite = torch.full((1, 32), torch.inf).half()
    weight = torch.full((32, 16), 0x22, dtype=torch.uint8)
    assert made("halves", attrs.evolve(square, m=1), cpu)(infinite, weight, torch.full((32, 1), 127, dtype=torch.uint8)).isposinf().all()


def test_long_sums_of_int8_do_not_overflow(cpu):
    """From 2^17 products of the least values on, `native` sums in float32."""
    for op in ("a8w8", "batched_a8w8"):
        shape = next(s for s in shapes_of(op) if s.dtype == "int8" and s.m and s.scale == "row" and not s.bias)
        shape = attrs.evolve(shape, m=2, n=16, k=1 << 17, outdtype="fp32")
        x, weight, *scales = op_named(op).make_inputs(shape, torch.device("cpu"), 0)
        launcher = builtin.torch_launcher(shape, cpu)
        assert isinstance(launcher, Launcher)
        out = launcher.call(x.fill_(-128), weight.fill_(-128), *(scale.fill_(1) for scale in scales))
        assert (out == 1 << 31).all()


@pytest.mark.parametrize("op", ["a16w16", "a8w8", "a8w8_blockscale", "batched_a8w8", "batched_bf16"])
def test_the_smallest_products_are_right(op, cpu):
    """torch's usual route and every other multiply sizes of 1 to 3 right, in each dtype."""
    plain = {shape.dtype: shape for shape in shapes_of(op) if not shape.bias}.values()
    for shape, (m, n, k) in itertools.product(plain, itertools.product((1, 2, 3), repeat=3)):
        small = attrs.evolve(shape, m=m, n=n, k=k)
        operands, exact = plain_operands(small)
        launcher = builtin.torch_launcher(small, cpu)
        assert isinstance(launcher, Launcher)
        assert not fault(small, launcher.call(*operands), exact), small


def test_few_rows_are_padded_for_int8(cpu):
    """The rows that a GPU's product is padded with do not show."""
    for shape in (s for op in ("a8w8", "a8w8_bpreshuffle") for s in shapes_of(op) if s.dtype == "int8" and 0 < s.m <= 16):
        operands, exact = plain_operands(shape)
        out = made("int_mm_padded", shape, cpu)(*operands)
        assert out.shape[0] == shape.m
        assert not fault(shape, out, exact)


def test_pairs_of_no_expert_add_nothing(cpu):
    """Every route leaves out ids outside of 0 .. E-1, as the reference does."""
    op = op_named("fmoe")
    for shape in (s for s in op.examples if s.m > 2 and s.layout == "row"):
        operands = list(op.make_inputs(shape, torch.device("cpu"), 1))
        operands[4] = operands[4].clone()
        operands[4][0, 0], operands[4][1, -1], operands[4][2] = -1, int(shape["expert"]), -7
        exact = op.reference(shape, tuple(operands))
        assert not exact[2].any()
        for solution in hooks.enumerate_solutions(shape, cpu):
            out = bound(solution, shape, cpu).call(*operands)
            assert not fault(shape, out, exact), f"{solution} {shape}"


def test_experts_hit_by_no_token_and_twice_by_one(cpu):
    """Every route serves all tokens of one expert, and both pairs of a token at the same one."""
    op = op_named("fmoe")
    for shape in (s for s in op.examples if s.m and int(s["topk"]) > 1 and s.layout == "row"):
        operands = list(op.make_inputs(shape, torch.device("cpu"), 1))
        operands[4] = torch.full_like(operands[4], int(shape["expert"]) - 1)
        exact = op.reference(shape, tuple(operands))
        for solution in hooks.enumerate_solutions(shape, cpu):
            out = bound(solution, shape, cpu).call(*operands)
            assert not fault(shape, out, exact), f"{solution} {shape}"


def test_routes_of_an_h200():
    """`native` is the fastest route known for each dtype and size of an H200, and of older devices."""
    a8w8 = attrs.evolve(shapes_of("a8w8")[0], m=4, n=256, k=512, dtype="fp8_e4m3fn", outdtype="bf16", scale="row", epilogue="none")
    family = hooks.FAMILIES["a8w8"]
    assert family.native(a8w8, H200) == "scaled_mm"
    assert family.native(attrs.evolve(a8w8, n=255), H200) == "bf16"
    assert family.native(attrs.evolve(a8w8, dtype="int8", m=16), H200) == "int_mm_padded"
    assert family.native(attrs.evolve(a8w8, dtype="int8", m=17), H200) == "int_mm"
    assert family.native(attrs.evolve(a8w8, dtype="fp8_e4m3fnuz"), H200) == "bf16"
    assert family.native(attrs.evolve(a8w8, dtype="fp8_e4m3fnuz"), Device("gfx942", 304)) == "scaled_mm"
    assert family.native(a8w8, Device("sm_80", 108)) == "bf16"
    block = attrs.evolve(a8w8, op="a8w8_blockscale", scale="block")
    native = hooks.FAMILIES["a8w8_blockscale"].native
    for fields in ({}, {"m": 1}, {"n": 192}, {"outdtype": "fp16"}, {"outdtype": "fp32"}):
        assert native(attrs.evolve(block, **fields), H200) == "scaled_mm", fields
    ragged = attrs.evolve(block, n=200)
    assert native(ragged, H200) == "blocks_bmm"
    assert native(attrs.evolve(ragged, m=64), H200) == "bf16"
    assert native(attrs.evolve(ragged, m=64, outdtype="fp16"), H200) == "blocks_bmm"
    assert native(block, attrs.evolve(H200, versions=(("cuda", "12.8"),))) == "blocks_bmm"


def test_routes_of_weights_in_mxfp4_on_an_h200(cpu):
    """bf16 is multiplied unchanged, fp16 in two parts.

    A CPU sums both in float32 unless the output is bf16 as well.
    """
    native = hooks.FAMILIES["a16w4_blockscale"].native
    bf16 = next(s for s in shapes_of("a16w4_blockscale") if s.dtype == s.outdtype == "bf16")
    fp16 = attrs.evolve(bf16, dtype="fp16")
    assert [native(shape, H200) for shape in (bf16, attrs.evolve(bf16, outdtype="fp32"), fp16)] == ["bf16", "bf16", "halves"]
    assert [native(shape, cpu) for shape in (bf16, attrs.evolve(bf16, outdtype="fp32"), fp16)] == ["bf16", "float32", "float32"]


def test_fp8_in_float32_takes_one_scale_a_row_where_it_is_more_exact():
    """One scale a tensor becomes one a row on an H200, but not with older CUDA, which gives bf16 alone."""
    native = hooks.FAMILIES["a8w8"].native
    row = attrs.evolve(
        shapes_of("a8w8")[0], m=4, n=256, k=512, dtype="fp8_e4m3fn", outdtype="fp32", scale="row", epilogue="none", bias_dtype=""
    )
    tensor, old = attrs.evolve(row, scale="tensor"), attrs.evolve(H200, versions=(("torch", "2.9.0"), ("cuda", "12.8")))
    assert (native(row, H200), native(tensor, H200)) == ("scaled_mm", "scaled_mm_rows")
    assert (native(row, old), native(tensor, old)) == ("scaled_mm_rows", "scaled_mm")
    assert native(attrs.evolve(row, outdtype="bf16"), old) == "scaled_mm"


def test_batches_of_an_h200():
    """fp8 is multiplied unchanged; int8 one by one where that is cheaper than widening the operands."""
    native = hooks.FAMILIES["batched_a8w8"].native
    base = next(s for s in shapes_of("batched_a8w8") if s.m and not s.bias and s.layout == "row")
    small = attrs.evolve(base, m=7, n=48, k=64, dtype="int8", outdtype="bf16")
    large = attrs.evolve(small, m=512, n=1280, k=8192)
    assert (native(small, H200), native(large, H200)) == ("bf16", "int_mm_loop")
    assert native(attrs.evolve(large, m=64, n=512, k=512), H200) == "bf16"
    assert native(attrs.evolve(small, dtype="fp8_e4m3fn"), H200) == "scaled_grouped_mm"
    assert native(attrs.evolve(small, dtype="fp8_e4m3fn", outdtype="fp32"), H200) == "bf16"
    assert native(attrs.evolve(large, dtype="fp8_e4m3fn", outdtype="fp32"), H200) == "scaled_mm_loop"


def test_rows_of_block_scales_are_padded_for_cublaslt():
    """Rows are padded with zeros to fours, and scales have M innermost, as cuBLASLt reads them."""
    for m, transposed in itertools.product((1, 2, 3, 4, 5, 127), (False, True)):
        x, kept = torch.randn(m, 256).to(torch.float8_e4m3fn), torch.rand(m, 2) + 0.5
        scale = kept.t().contiguous().t() if transposed else kept
        padded, scales = blockscale.padded_rows(x, scale, -m % 4)
        assert len(padded) % 4 == 0
        assert len(padded) < m + 4
        assert padded.dtype == x.dtype
        assert torch.equal(padded[:m].float(), x.float())
        assert not padded[m:].float().any()
        assert torch.equal(scales[:m], kept)
        assert scales.shape[0] == len(padded)
        assert scales.stride(0) == 1
        assert scales.t().is_contiguous()


def test_rows_of_a_weights_block_scales_are_multiples_of_four(monkeypatch):
    """Each row of 128x128 scales begins at a multiple of four scales, as cuBLASLt reads them."""
    given = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda x, w, a, b, **_: given.append(b))
    monkeypatch.setattr(torch, "_scaled_mm_v2", lambda x, w, a, ra, sa, b, *_: given.append(b[0]), raising=False)
    for k, blocks in ((512, 4), (640, 8), (528, 8), (128, 4), (1408, 12)):
        x, weight = torch.zeros(4, k), torch.zeros(256, k)
        scales = torch.rand(2, -(-k // 128))
        blockscale.scaled_blocks(k, torch.bfloat16)(x, weight, torch.ones(4, -(-k // 128)), scales)
        assert given[-1].shape == (blocks, 2)
        assert given[-1].stride() == (1, blocks)
        assert torch.equal(given[-1][: scales.shape[1]], scales.t())


def test_block_scales_of_a_torch_without_the_newer_operator(monkeypatch):
    """Where torch would read the wrong scales, the route is refused and native is another."""
    monkeypatch.delattr(torch, "_scaled_mm_v2", raising=False)
    shape = attrs.evolve(next(s for s in shapes_of("a8w8_blockscale") if s.m), m=32, n=256, k=640, layout="row")
    native = hooks.FAMILIES["a8w8_blockscale"].native
    answer = bound(Solution(BUILTIN, "scaled_mm"), shape, H200)
    assert re.search(r"needs K divisible by 512 with this version of torch \(K=640\)", str(answer))
    assert native(shape, H200) != "scaled_mm"
    assert native(attrs.evolve(shape, k=1024), H200) == "scaled_mm"


def test_scales_are_multiplied_in_float32_and_rounded_once():
    """Results match float64 with at most two float32 roundings and one of the output.

    Gradients reach the scales.
    """
    dtypes, biases, sources = (
        (torch.bfloat16, torch.float16, torch.float32), (None, torch.float32, torch.bfloat16), (torch.int32, torch.float32),
    )  # fmt: skip
    for dtype, bias, source in itertools.product(dtypes, biases, sources):
        generator = torch.Generator().manual_seed(5)
        product = torch.randint(-(1 << 20), 1 << 20, (9, 17), generator=generator)
        by_row, by_column = (torch.rand(*size, generator=generator) + 0.5 for size in ((9, 1), (1, 17)))
        added = None if bias is None else torch.randn(17, generator=generator).to(bias)
        exact = product.double() * by_row.double() * by_column.double() + (0 if added is None else added.double())
        out = rescale(product.to(source), by_row, by_column, added, dtype)
        assert out.dtype == dtype
        finite, rtol = exact.abs() < torch.finfo(dtype).max, torch.finfo(dtype).eps * 0.51 + 3e-7
        assert torch.allclose(out.double()[finite], exact[finite], rtol=rtol, atol=0), (dtype, bias, source)
        rescale(product.to(source), by_row.requires_grad_(), by_column, added, dtype).sum().backward()
        assert by_row.grad is not None


def test_scales_that_begin_elsewhere_are_copied():
    """A vector of scales begins at 16 bytes for cuBLASLt; a single value may lie anywhere."""
    scales = torch.rand(64)
    assert aligned(scales) is scales
    moved = aligned(scales[1:])
    assert moved.data_ptr() % 16 == 0
    assert torch.equal(moved, scales[1:])
    one = scales[1]
    assert aligned(one) is one


#: op, fields of the shape, route and the reason of its refusal
REFUSALS = (
    ("a8w8", {"dtype": "int8"}, "scaled_mm", "multiplies fp8, not int8"),
    ("a8w8", {"dtype": "fp8_e4m3fn"}, "int_mm", "multiplies int8, not fp8_e4m3fn"),
    ("a8w8", {"dtype": "int8", "m": 4}, "int_mm", r"needs more than 16 rows \(M=4\)"),
    ("a8w8", {"dtype": "int8", "k": 1 << 17}, "int_mm", r"needs K below 131072"),
    ("a8w8", {"dtype": "int8", "n": 12}, "int_mm", r"needs N and K divisible by 8 \(N=12"),
    ("a8w8", {"dtype": "fp8_e4m3fn", "outdtype": "fp32"}, "scaled_mm_fast", "fp32"),
    ("a8w8_blockscale", {"n": 200}, "scaled_mm", r"needs N and K divisible by 16 \(N=200"),
    ("batched_a8w8", {"dtype": "fp8_e4m3fn", "outdtype": "fp16"}, "scaled_grouped_mm", "gives bf16, not fp16"),
    ("a8w8_blockscale", {"k": 130}, "blocks_bmm", r"needs K divisible by 128 \(K=130\)"),
    ("a8w8_blockscale", {"outdtype": "fp32"}, "float32", "too coarse for fp32"),
    ("a8w8_blockscale", {"outdtype": "fp16"}, "bf16", "too coarse for fp16"),
    ("a16w4_blockscale", {"dtype": "fp16"}, "bf16", "fewer bits than activations in fp16"),
    ("a16w4_blockscale", {}, "halves", "splits fp16, not bf16"),
    ("fmoe", {"dtype": "fp16"}, "grouped_mm", "is a loop over the experts for fp16"),
)


def test_refusals_of_an_h200():
    """A route is refused with its requirement."""
    faults = []
    for op, fields, name, reason in REFUSALS:
        base = attrs.evolve(next(s for s in shapes_of(op) if s.m), m=32, n=256, k=512, epilogue="none", layout="row")
        answer = bound(Solution(BUILTIN, name), attrs.evolve(base, **fields), H200)
        faults += [] if not isinstance(answer, Launcher) and re.search(reason, str(answer)) else [f"{op} {fields} {name}: {answer}"]
    assert not faults

"""a16wn: weights in formats that are records, their shapes, columns, reference and function."""

import itertools
import math
import re

import attrs
import pytest
import torch
from tunedgemm.backends.registry import Registry
from tunedgemm.device import device_of
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops import op_named
from tunedgemm.ops.a16wn import check_values
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.formats.weight_only import Weight, decode, quantise
from tunedgemm.ops.weight_formats import FORMATS, WeightFormat
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import infer_op, read_rows
from tunedgemm.table.untuned import read_untuned
from tunedgemm.testing.listed import listed
from tunedgemm.tuner import Options, tune

OP = op_named("a16wn")
CPU = torch.device("cpu")
X = torch.ones(2, 64).bfloat16()
#: NF4 of bitsandbytes: the first of two neighbours in the high bits, one float32 scale for 64.
NF4 = WeightFormat(
    "nf4", 4, ("uint8",),
    (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    groups=(64,), scale=("fp32",), order=(1, 0),
)  # fmt: skip


def shape(m, n, k, w_format, group=0, **fields):
    extra = {"w_format": w_format, "w_group": group}
    return Shape("a16wn", m, n, k, **{"outdtype": fields.get("dtype", "bf16"), "scale": "block", "extra": extra, **fields})


def ints(*sizes):
    return torch.zeros(*sizes, dtype=torch.int32)


def ones(*sizes, dtype=torch.bfloat16):
    return torch.ones(*sizes).to(dtype)


class TestShapeOf:
    """From the operands of a call to its shape."""

    @listed(
        ("w_format", "operands", "group"),
        [
            ("gptq_int4", (ints(8, 9), ones(2, 9)), 32),
            ("gptq_int4", (ints(8, 9), ones(1, 9)), 0),  # 64 of 64 are the whole row
            ("gptq_int4_zp", (ints(8, 9), ones(2, 9), ints(2, 2)), 32),
            ("gptq_int4_order", (ints(8, 9), ones(2, 9), None, ints(64)), 32),
            ("ct_int4_zp", (ints(9, 8), ones(9, 2), ints(2, 2)), 32),
            ("fp8_tensor", (ones(9, 64, dtype=torch.float8_e4m3fn), torch.ones(1)), 0),
            ("mxfp8", (ones(9, 64, dtype=torch.float8_e4m3fn), torch.zeros(9, 2, dtype=torch.uint8)), 32),
            ("nvfp4", (torch.zeros(9, 32, dtype=torch.uint8), ones(9, 4, dtype=torch.float8_e4m3fn), None, None, torch.tensor(1.0)), 16),
        ],
    )
    def test_the_group_follows_from_the_scales(self, w_format, operands, group):
        """N is that of the scales or the weight, K that of x; leading dimensions of x are rows."""
        found = OP.shape_of(X.view(2, 1, 64), *operands, w_format=w_format)
        assert found == shape(2, 9, 64, w_format, group)
        biased = OP.shape_of(X, *operands, *[None] * (5 - len(operands)), ones(9), otype=torch.float32, w_format=w_format)
        assert biased == shape(2, 9, 64, w_format, group, outdtype="fp32", epilogue="bias")

    @listed(
        ("w_format", "operands", "message"),
        [
            ("int5", (ints(8, 9), ones(2, 9)), "unknown w_format (got 'int5'); use one of gptq_int4, "),
            (["gptq_int4"], (ints(8, 9), ones(2, 9)), "unknown w_format (got ['gptq_int4']); use one of gptq_int4, "),
            ("gptq_int4", (ints(9, 8), ones(2, 9)), "the weight of gptq_int4 must be [K/8, N] for x [..., K] on its device (got x (2, 64)"),
            ("awq_int4", (ints(8, 9), ones(2, 9)), "the weight of awq_int4 must be [K, N/8] for x"),
            ("ct_int4", (ints(8, 9), ones(2, 9)), "the weight of ct_int4 must be [N, K/8] for x"),
            ("ct_int4", (ints(9, 8).to(torch.uint8), ones(9, 2)), "weight must be torch.int32 (got torch.uint8)"),
            ("ct_int4", (ints(9, 8), ones(9, 4)), "w_scale of ct_int4 must be [9, 2] for group 32 or [9, 1] for group 64 or"),
            ("ct_int4", (ints(9, 8), ones(9, 2).half()), "w_scale must be torch.bfloat16 (got torch.float16), the dtype of x; pass"),
            ("fp8_block", (ones(9, 64, dtype=torch.float8_e4m3fn), torch.ones(1, 1)), "a group of 128, which must divide K=64 (got"),
            ("gptq_int4", (ints(8, 9), ones(2, 9), ints(2, 2)), "w_zeros: gptq_int4 has none (got (2, 2) torch.int32 on cpu); the"),
            ("gptq_int4_zp", (ints(8, 9), ones(2, 9)), "w_zeros: gptq_int4_zp needs it (got None); pass the checkpoint's qzeros"),
            ("gptq_int4_zp", (ints(8, 9), ones(2, 9), ints(2, 9)), "w_zeros must be [2, 2], torch.int32 on cpu (got (2, 9)"),
            ("gptq_int4_zp", (ints(8, 9), ones(2, 9), ints(2, 2).t()), "must be contiguous (got strides (1, 2)); pass w_zeros.cont"),
            ("gptq_int4_zp", (ints(8, 9), ones(2, 9), ints(9, 1)), "w_zeros must be [2, 2]"),
            ("gptq_int4", (ints(8, 9), ones(2, 9), None, ints(64)), "w_index: gptq_int4 has none (got (64,) torch.int32 on cpu); formats"),
            ("gptq_int4_order", (ints(8, 9), ones(2, 9)), "w_index: gptq_int4_order needs it (got None); pass the checkpoint's g_idx"),
            ("gptq_int4_order", (ints(8, 9), ones(3, 9), None, ints(64)), "of a sharded weight with act-order, keep the scales of all"),
        ],
    )  # fmt: skip
    def test_operands_that_do_not_fit(self, w_format, operands, message):
        """Each error names the op, the operand, the given value and the valid one."""
        with pytest.raises(OperandError, match=f"^a16wn: .*{re.escape(message)}"):
            OP.shape_of(X, *operands, w_format=w_format)
        absent = [None] * (6 - len(operands))
        with pytest.raises(OperandError, match=f"^a16wn: .*{re.escape(message)}"):  # also without a hash
            TunedGemm().gemm_a16wn(X, *operands, *absent, w_format=w_format)

    @listed(("w_format", "group", "keyed"), [("gptq_int4_order", 128, 64), ("gptq_int4", 256, 0)])
    def test_a_shard_of_k(self, w_format, group, keyed):
        """A shard has the group that its scales show, and the values of its columns, in any order."""
        index = torch.randperm(256, dtype=torch.int32) // 128 if "order" in w_format else None
        whole = quantise(w_format, torch.randn(9, 256), group % 256, index=index)
        for part in (slice(0, 128), slice(128, 256)):
            own = attrs.evolve(whole, weight=whole.weight[part.start // 8 : part.stop // 8], w_index=None if index is None else index[part])
            found = OP.shape_of(X.repeat(1, 2), own.weight, own.w_scale, own.w_zeros, own.w_index, w_format=w_format)
            assert found == shape(2, 9, 128, w_format, keyed)
            assert torch.equal(decode(FORMATS[w_format], own), decode(FORMATS[w_format], whole)[:, part])

    def test_one_element_along_k_is_refused(self):
        """Its weight has the sizes of its scales, which would hide N."""
        with pytest.raises(OperandError, match=r"a16wn: K must be more than 8 \(got K=8\)"):
            OP.shape_of(X[:, :8], ints(1, 9), ones(1, 9), w_format="gptq_int4")

    def test_values_are_checked_once_not_in_calls(self):
        """A scale that divides, or an index of no group, is refused by `check_values`, never by a call."""
        codes, scale, divides = torch.zeros(9, 32, dtype=torch.uint8), ones(9, 4, dtype=torch.float8_e4m3fn), torch.tensor(2688 / 3.0)
        with pytest.raises(OperandError, match="w_global_scale: nvfp4 needs it"):
            OP.shape_of(X, codes, scale, w_format="nvfp4")
        OP.shape_of(X, codes, scale, None, None, divides, w_format="nvfp4")
        OP.shape_of(X, ints(8, 9), ones(2, 9), None, ints(64) + 2, w_format="gptq_int4_order")
        with pytest.raises(OperandError, match=r"w_global_scale: it multiplies, .* at most 1 \(got 896\); pass the reciprocal"):
            check_values(None, divides, 1)
        for value in (0.0, -1.0, math.nan, math.inf):
            with pytest.raises(OperandError, match=r"w_global_scale must be finite and above 0"):
                check_values(None, torch.tensor(value), 1)
        with pytest.raises(OperandError, match=r"w_index: groups must be from 0 to 1 \(got 2 to 2\); of a sharded"):
            check_values(ints(64) + 2, None, 2)
        check_values(None, torch.nn.Parameter(torch.tensor(1.0)), 1)  # read without torch's warning of a gradient
        check_values(ints(64) + 1, torch.tensor(3 / 2688), 2)


class TestColumns:
    """From a row of a table to a shape, and back."""

    def test_the_key_names_the_format(self, tmp_path):
        """The key tells a table of this op from others; one group of K is the whole row."""
        row = {"M": "1", "N": "512", "K": "128", "x_dtype": "torch.float16", "w_format": "gptq_int4", "w_group": "128"}
        found = OP.columns.parse({**row, "outdtype": "torch.float16"})
        assert found == shape(1, 512, 128, "gptq_int4", 0, dtype="fp16")
        cells = {name: text for name, text in OP.columns.format(found).items() if text}
        assert cells == {**row, "w_group": "0", "outdtype": "torch.float16"}
        path = tmp_path / "mine.csv"
        path.write_text(",".join(("gfx", "cu_num", *OP.columns.key, *OP.columns.values)) + "\n")
        assert infer_op([path]) is OP

    @listed(
        ("cells", "message"),
        [
            ({"w_format": "int5"}, "column 'w_format' must be one of gptq_int4, "),
            ({"w_format": "gptq_int4", "w_group": "48"}, "w_group must be 32 or 64 or 128 or 0 (got 48)"),
            ({"w_format": "gptq_int4", "w_group": "128"}, "K must be a multiple of 128, which share a scale (got K=96)"),
            ({"w_format": "awq_int4", "w_group": "32"}, "N must be a multiple of 8, which share an element (got N=9)"),
            ({"w_format": "gptq_int4", "w_group": "0", "K": "12"}, "K must be a multiple of 8, which share an element (got K=12)"),
            ({"w_format": "gptq_int4", "w_group": "0", "K": "8"}, "K must be more than 8 (got K=8)"),
            ({"w_format": "int8_channel", "w_group": "32"}, "w_group must be 0 (got 32)"),
        ],
    )
    def test_rows_that_no_call_asks_for(self, cells, message):
        """The message has the field, its value and what would fit."""
        with pytest.raises(ShapeError, match=re.escape(message)):
            OP.columns.parse({"M": "1", "N": "9", "K": "96", "w_group": "0", **cells})


class TestReference:
    """The exact result that everything is compared with."""

    def test_a_global_scale_and_a_bias(self):
        """The global scale multiplies the product, and not the bias."""
        which = shape(3, 5, 64, "nvfp4", 16, outdtype="fp32", epilogue="bias", bias_dtype="fp32")
        operands = OP.make_inputs(which, CPU, 0)
        x, weight, w_scale, _, _, factor, bias = operands
        values = decode(FORMATS["nvfp4"], Weight(weight, w_scale), torch.float64)
        torch.testing.assert_close(OP.reference(which, operands), x.double() @ values.t() * float(factor) + bias.double())
        assert 0 < float(factor) < 1

    def test_bytes_moved(self):
        """Packed weights, scales, zero points and indices count what they hold; padding nothing."""
        rest = 2 * 64 * 2 + 2 * 9 * 2
        assert OP.bytes_moved(shape(2, 9, 64, "gptq_int4", 32)) == rest + 9 * 32 + 2 * 9 * 2
        assert OP.bytes_moved(shape(2, 9, 64, "gptq_int4_zp_order", 32)) == rest + 9 * 32 + 2 * 9 * 2 + 9 + 4 * 64
        assert OP.bytes_moved(shape(2, 9, 64, "nvfp4", 16)) == rest + 9 * 32 + 9 * 4 + 4
        assert OP.bytes_moved(shape(2, 9, 64, "fp8_tensor")) == rest + 9 * 64 + 4
        assert OP.weight_dtype(shape(2, 9, 64, "mxfp4", 32)) == "fp4x2"


@listed(("w_format", "dtype"), [(name, dtype) for name in FORMATS for dtype in ("bf16", "fp16")])
def test_the_function(w_format, dtype):
    """gemm_a16wn serves every format; in float32 its error is that of the sum's order alone."""
    group = FORMATS[w_format].groups[-1]
    which = shape(6, 24, 256, w_format, group, dtype=dtype, outdtype="fp32", epilogue="bias", bias_dtype="fp32")
    x, weight, w_scale, *rest = OP.make_inputs(which, CPU, 0)
    out = TunedGemm().gemm_a16wn(x.view(2, 3, 256), weight, w_scale, *rest, torch.float32, w_format=w_format)
    assert (out.shape, out.dtype) == ((2, 3, 24), torch.float32)
    assert worst_row_error(out, OP.reference(which, (x, weight, w_scale, *rest))) < 1e-6


@listed("w_format", [name for name, form in FORMATS.items() if form.dtypes == ("int32",)])
def test_an_empty_output_has_n_for_any_sizes(w_format):
    """N is found without the format, also where the sizes of packed weights and scales coincide."""
    for n in (1, 2, 4, 8, 16, 32, 64, 256):
        for k, group in ((16, 0), (32, 32), (64, 32), (256, 32), (256, 0)):
            if n % 8 and w_format == "awq_int4":
                continue
            index = torch.arange(k).to(torch.int32) // (group or k) if FORMATS[w_format].has_index else None
            stored = quantise(w_format, torch.ones(n, k), group, index=index)
            for x in (torch.ones(3, k), torch.ones(2, 3, k)):
                assert OP.fake(x, stored.weight, stored.w_scale, stored.w_zeros).shape == (*x.shape[:-1], n)


@listed(("w_format", "weight", "w_scale"), [("gptq_int4", (0, 16), (0, 16)), ("awq_int4", (0, 2), (0, 16)), ("ct_int4", (16, 0), (16, 0))])
def test_no_k_gives_zeros(w_format, weight, w_scale):
    """Without K the weight and its scales have equally many rows, and the output still has N."""
    zeros = ints(0, 2) if w_format == "awq_int4" else None
    out = TunedGemm().gemm_a16wn(X[:, :0], ints(*weight), ones(*w_scale), zeros, w_format=w_format)
    assert torch.equal(out, torch.zeros(2, 16).bfloat16())


def test_gradients_reach_the_activations():
    """The weight has none; that of x is the weight times the output's."""
    x, weight, w_scale, _, _, factor = OP.make_inputs(shape(3, 16, 64, "nvfp4", 16), CPU, 1)
    x.requires_grad_()
    TunedGemm().gemm_a16wn(x, weight, w_scale, w_global_scale=factor, w_format="nvfp4").sum().backward()
    wanted = decode(FORMATS["nvfp4"], Weight(weight, w_scale), torch.float64).sum(0) * float(factor)
    torch.testing.assert_close(x.grad.double(), wanted.expand(3, 64), rtol=2**-7, atol=1e-3)


def test_a_list_of_every_format_is_captured_tuned_and_served(tmp_path, monkeypatch):
    """Calls write a list, whose rows in the table serve the same calls."""
    monkeypatch.setattr("tunedgemm.dispatch.dispatcher.current_device", lambda: device_of(-1))
    shapes = [shape(3, 16, 64, name, 32 if 32 in form.groups else form.groups[0]) for name, form in FORMATS.items() if name != "fp8_block"]
    shapes.append(shape(3, 16, 128, "fp8_block", 128))
    served_twice(shapes, tmp_path, monkeypatch)


def test_the_next_format_is_one_record(tmp_path, monkeypatch):
    """NF4 is quantised, served, captured and tuned by its record alone."""
    monkeypatch.setitem(FORMATS, "nf4", NF4)
    monkeypatch.setattr("tunedgemm.dispatch.dispatcher.current_device", lambda: device_of(-1))
    weight = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    stored = quantise("nf4", weight)
    codes = torch.stack((stored.weight >> 4, stored.weight & 15), -1).view(9, 2, 64)
    wanted = torch.tensor(NF4.values)[codes.long()] * weight.view(9, 2, 64).abs().amax(-1, keepdim=True)
    torch.testing.assert_close(decode(NF4, stored), wanted.view(9, 128))
    assert float((wanted.view(9, 128) - weight).norm() / weight.norm()) < 0.1
    served_twice([shape(3, 9, 128, "nf4", 64), shape(2, 16, 64, "nf4", 64, dtype="fp16")], tmp_path, monkeypatch)


def served_twice(shapes, tmp_path, monkeypatch):
    """Capture calls, tune the list over torch, and check calls that the rows serve."""
    workload = TunedGemm(settings=Settings(capture=True))
    for which in shapes:
        called(workload, which)
    workload.of("a16wn")._capture.flush()
    captured = tmp_path / "home" / OP.columns.untuned_file
    assert {listed_shape.shape for listed_shape in read_untuned(captured, OP)} == set(shapes)
    table = tmp_path / "table.csv"
    options = Options(libtype="torch", iters=3, warmup=1, seconds=0.1, cache="hot", device="cpu")
    report = tune("a16wn", [each.shape for each in read_untuned(captured, OP)], table, options, registry=Registry())
    assert not report.failed and {row.shape for row in read_rows(table, OP)[0]} == set(shapes)
    monkeypatch.setenv(OP.columns.variable, str(table))
    production = TunedGemm()
    for which in shapes:
        assert production.of("a16wn").explain(which).tuned
        out, wanted = called(production, which)
        assert worst_row_error(out, wanted) <= OP.tolerance(which).row_error


def on_a_grid(form, n, k, group, dtype, generator):
    """Draw a weight of any codes whose scales are powers of two, so that sums of its products are exact."""

    def draw(low, high, *sizes):
        return torch.randint(low, high, sizes, generator=generator)

    def scales(sizes, dtype):
        return (2.0 ** draw(-2, 3, *sizes)).to(dtype)

    n_stored, k_stored = (n, k // form.per) if form.along == "k" else (n // form.per, k)
    sizes, zeros = form.turned(n_stored, k_stored), form.zero_sizes(n, k, group)
    if form.dtypes[0].startswith("fp8"):
        weight = draw(-8, 9, *sizes).to(torch.float8_e4m3fn)
    else:
        ends = {"int32": (-(1 << 31), 1 << 31, torch.int32), "int8": (-128, 128, torch.int8)}
        low, high, stored = ends.get(form.dtypes[0], (0, 256, torch.uint8))
        weight = draw(low, high, *sizes).to(stored)
    return Weight(
        weight,
        scales(form.scale_sizes(n, k, group), torch_dtype(form.scale[0]) if form.scale else dtype),
        None if form.zeros is None else draw(-(1 << 31), 1 << 31, *zeros).to(torch.int32),
        draw(0, k // (group or k), k).to(torch.int32) if form.has_index else None,
        scales((), torch.float32) if form.has_global else None,
    )


def test_products_on_a_grid_are_exact():
    """Sums of any codes times small integers are exact in float32; a NaN scale spoils its rows."""
    gemm, generator = TunedGemm(), torch.Generator().manual_seed(0)
    for dtype, form in itertools.product((torch.bfloat16, torch.float16), FORMATS.values()):
        group = form.groups[int(torch.randint(len(form.groups), (), generator=generator))]
        m, n, blocks = (int(torch.randint(1, end, (), generator=generator)) for end in (34, 40, 4))
        n, k = n * (form.per if form.along == "n" else 1), blocks * max(group, 2 * form.per)
        stored, x = on_a_grid(form, n, k, group, dtype, generator), torch.randint(-4, 5, (m, k), generator=generator).to(dtype)
        factor = 1.0 if stored.w_global_scale is None else float(stored.w_global_scale)
        for spoiled in (None, math.nan) if "e8m0" in form.scale else (None, 0.0, math.nan):  # e8m0 has no zero
            if spoiled is not None:
                stored.w_scale.view(-1)[torch.randint(stored.w_scale.numel(), (), generator=generator)] = spoiled
            wanted = x.double() @ decode(form, stored, torch.float64).t() * factor
            out = gemm.gemm_a16wn(x, *attrs.astuple(stored, recurse=False), None, torch.float32, w_format=form.name)
            torch.testing.assert_close(out.double(), wanted, rtol=0, atol=0, equal_nan=True)
            assert form.has_index or bool(out.isnan().any()) is (spoiled is not None and math.isnan(spoiled))


def called(gemm, which):
    operands = OP.make_inputs(which, CPU, 0)
    return gemm.call("a16wn", *operands, otype=torch_dtype(which.outdtype), **OP.fields(which)), OP.reference(which, operands)


def test_scales_of_other_rows_and_groups_change_the_result():
    """With rolled scales, zero points or indices the result is out of bounds."""
    for name, form in FORMATS.items():
        which = shape(4, 256, 256, name, form.groups[0])
        operands = OP.make_inputs(which, CPU, 0)
        wanted, bound = OP.reference(which, operands), OP.tolerance(which).row_error
        for place, operand in enumerate(operands):
            for dimension in range(operand.dim() if place in (2, 3, 4) and operand is not None else 0):
                if operand.shape[dimension] > 1:
                    rolled = operand.view(torch.uint8) if operand.element_size() == 1 else operand
                    rolled = rolled.roll(1, dimension).view(operand.dtype)
                    wrong = OP.reference(which, (*operands[:place], rolled, *operands[place + 1 :]))
                    assert worst_row_error(wrong, wanted) > bound, (name, OP.operands[place], dimension)

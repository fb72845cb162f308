"""batched_bf16: operands, columns, reference and functions of the batched product in 16 bits."""

from pathlib import Path

import attrs
import pytest
import torch
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.errors import DtypeError, OperandError, ShapeError
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed

OP = op_named("batched_bf16")
BF16, FP16, CPU = torch.bfloat16, torch.float16, torch.device("cpu")
CONFIGS = Path(__file__).parents[3] / "shared" / "aiter" / "configs"


def ones(*sizes, dtype=BF16, device=None):
    return torch.ones(*sizes, dtype=dtype, device=device)


def plain(m=4, n=5, k=8, b=3, **fields):
    return Shape("batched_bf16", m, n, k, extra={"B": b}, **fields)


class TestShapeOf:
    """From the operands of a call to its shape."""

    def test_batches_rows_and_columns(self):
        """B is the first dimension of both, M that of x, N that of the weight."""
        assert OP.shape_of(ones(3, 4, 8), ones(3, 5, 8)) == plain()
        assert OP.shape_of(ones(3, 0, 8), ones(3, 5, 8)).m == 0

    def test_dtypes_and_bias(self):
        """The output has x's dtype by default;
        a bias of either form and any float dtype is a field."""
        assert OP.shape_of(ones(3, 4, 8, dtype=FP16), ones(3, 5, 8, dtype=FP16)) == plain(dtype="fp16", outdtype="fp16")
        for sizes in ((3, 5), (3, 1, 5)):
            biased = OP.shape_of(ones(3, 4, 8), ones(3, 5, 8), ones(*sizes, dtype=torch.float32), otype=torch.float32)
            assert biased == plain(outdtype="fp32", epilogue="bias", bias_dtype="fp32")

    @listed(
        ("operands", "otype", "message"),
        [
            ((ones(4, 8), ones(3, 5, 8)), None, r"x must be 3-D \[B, M, K\] and the weight 3-D \[B, N, K\] \(x \(4, 8\)"),
            ((ones(3, 4, 8), ones(2, 5, 8)), None, r"the same B .*weight \(2, 5, 8\)"),
            ((ones(3, 4, 8), ones(3, 5, 9)), None, "last dimension of x must equal that"),
            ((ones(3, 4, 8), ones(3, 8, 5)), None, r"must be passed as weight.transpose\(1, 2\)"),
            ((ones(3, 4, 8), ones(3, 5, 8, dtype=FP16)), None, "must both be one of torch.bfloat16, torch.float16"),
            ((ones(3, 4, 8, dtype=torch.int8), ones(3, 5, 8, dtype=torch.int8)), None, "must both be one of"),
            ((ones(3, 4, 8), ones(3, 5, 8, device="meta")), None, "on one device .* on cpu, .* on meta"),
            ((ones(3, 4, 8), ones(3, 5, 8), ones(5)), None, r"bias must be \[3, 5\] or \[3, 1, 5\] on cpu.*got \(5,\)"),
            ((ones(3, 4, 8), ones(3, 5, 8), ones(3, 5, dtype=torch.int8)), None, "bias must be .*got .*torch.int8"),
            ((ones(3, 4, 8), ones(3, 5, 8), 1.0), None, "bias must be .*got float"),
            ((ones(3, 4, 8), None), None, r"x and weight must be tensors \(x \(3, 4, 8\) torch.bfloat16 on cpu, weight NoneType\)"),
            ((ones(3, 4, 8), ones(3, 5, 8)), torch.int8, r"the output must be one of .*got torch.int8"),
            ((ones(2, 4, 32), shuffle_weight(ones(2, 16, 32))), None, r"must be plain \(got layout aiter16x16\); pass unshuffle_weight"),
        ],
    )
    def test_operands_that_do_not_fit(self, operands, otype, message):
        """Each error names the given value."""
        with pytest.raises(OperandError, match=rf"batched_bf16: .*{message}"):
            OP.shape_of(*operands, otype=otype)


class TestColumns:
    """From a row of AITER's table to a shape, and back."""

    def test_aiters_key_has_defaults(self):
        """B, M, N and K are a bf16 product without bias, and are written as AITER writes them."""
        row = {"B": "3", "M": "4", "N": "5", "K": "8"}
        assert OP.columns.parse(row) == plain()
        assert OP.columns.format(plain()) == {**row, "dtype": "", "outdtype": "", "bias": ""}

    def test_fields_outside_the_key_are_in_our_columns(self):
        """Dtypes and bias come back; 0, AITER's filler, says nothing."""
        shape = plain(dtype="fp16", outdtype="fp32", epilogue="bias")
        assert OP.columns.format(shape)["outdtype"] == "torch.float32"
        assert OP.columns.parse(OP.columns.format(shape)) == shape
        assert OP.columns.parse({"B": "3", "M": "4", "N": "5", "K": "8", "dtype": "0", "outdtype": "0", "bias": "0"}) == plain()

    @listed(
        ("cells", "error", "message"),
        [
            ({"B": "0"}, ShapeError, "B must be at least 1"),
            ({"B": ""}, ShapeError, "'B' must be a whole number"),
            ({"M": "nan"}, ShapeError, "'M' must be a whole number"),
            ({"dtype": "int8"}, ShapeError, "'dtype' must be one of bf16, fp16"),
            ({"outdtype": "torch.int8"}, ShapeError, "'outdtype' must be one of bf16, fp16, fp32"),
            ({"dtype": "float12"}, DtypeError, "unknown dtype 'float12'"),
            ({"bias": "perhaps"}, ShapeError, "'bias' must be True or False"),
        ],
    )
    def test_bad_cells_are_named(self, cells, error, message):
        """A cell that is wrong is named by its column."""
        with pytest.raises(error, match=message):
            OP.columns.parse({"B": "3", "M": "4", "N": "5", "K": "8", **cells})


def test_equivalent_shapes_end_with_aiters_row():
    """A call of another dtype or with bias tries its own row, then AITER's;
    the ladder is the exact M."""
    assert OP.equivalent_shapes(plain()) == (plain(),)
    other = plain(dtype="fp16", outdtype="fp32", epilogue="bias", bias_dtype="bf16")
    assert OP.equivalent_shapes(other) == (other, plain())
    assert dict(OP.padded_m(17, 64)) == {17: "exact"}


def test_reference():
    """Each batch has its own weight and bias, and sums are exact."""
    x = torch.tensor([[[256.0, 1.0]], [[1.0, 2.0]]], dtype=BF16)
    weight = torch.tensor([[[1.0, 1.0]], [[10.0, 100.0]]], dtype=BF16)
    out = OP.reference(plain(1, 1, 2, 2), (x, weight, torch.tensor([[0.5], [0.25]])))
    assert out.flatten().tolist() == [257.5, 210.25]


def test_work():
    """Operations and bytes of all batches."""
    shape = plain(2, 4, 8, 3, epilogue="bias", bias_dtype="fp32", outdtype="fp32")
    assert OP.flops(shape) == 3 * 2 * 2 * 4 * 8
    assert OP.bytes_moved(shape) == 3 * (2 * (2 * 8 + 4 * 8) + 4 * 4 + 4 * 2 * 4)


class TestFunctions:
    """AITER's functions over a dispatcher."""

    def test_both_names(self):
        """The op names its public functions, and both names are one function."""
        functions = OP.entry(Dispatcher(OP))
        assert set(functions) == set(OP.functions)
        assert functions["batched_gemm_bf16"] is functions["batched_gemm_bf16_CK"]

    @listed("bias", [False, True])
    def test_the_result(self, bias):
        """The product in AITER's default dtype, in x's or in the requested one; the launcher is cached."""
        dispatcher = Dispatcher(OP)
        call = OP.entry(dispatcher)["batched_gemm_bf16"]
        shape = plain(4, 16, 32, dtype="fp16", epilogue="bias" if bias else "none")
        operands = OP.make_inputs(shape, CPU, 0)
        wanted = OP.reference(shape, operands)
        for dtype, out in ((torch.float32, torch.float32), (None, FP16)):
            found = call(*operands, dtype=dtype, splitK=3)
            assert found.dtype == out
            assert torch.allclose(found.double(), wanted, rtol=1e-2, atol=1e-2)
        assert call(*operands).dtype == BF16
        assert len(dispatcher.launchers) == 3
        assert torch.equal(call(*operands), call(*[operand.clone() for operand in operands]))
        assert len(dispatcher.launchers) == 3

    def test_different_calls_have_different_launchers(self):
        """Sizes, density, gradients and the bias are part of the key."""
        dispatcher = Dispatcher(OP)
        call = OP.entry(dispatcher)["batched_gemm_bf16"]
        x, weight = OP.make_inputs(plain(4, 16, 32), CPU, 0)
        calls = [(x, weight), (x[:, :2].contiguous(), weight), (x[:, :2], weight), (x, weight, ones(3, 16)), (x, weight, ones(3, 1, 16))]
        for count, operands in enumerate(calls, start=1):
            call(*operands)
            assert len(dispatcher.launchers) == count
        out = call(x, weight.clone().requires_grad_())
        out.float().sum().backward()
        assert len(dispatcher.launchers) == len(calls) + 1

    def test_operands_that_are_not_tensors(self):
        """The error names the operands, and nothing is cached."""
        dispatcher = Dispatcher(OP)
        with pytest.raises(OperandError, match="x and weight must be tensors"):
            OP.entry(dispatcher)["batched_gemm_bf16"](ones(3, 4, 8), [1.0])
        assert not dispatcher.launchers


def test_large_shapes_have_rows():
    """Shapes meant for a GPU are of this op, and AITER's columns tell them."""
    assert OP.large
    for shape in OP.large:
        assert OP.columns.parse({c: t for c, t in OP.columns.format(shape).items() if t}) == shape
        assert attrs.evolve(shape, m=1) not in OP.large

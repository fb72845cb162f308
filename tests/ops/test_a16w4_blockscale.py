"""a16w4_blockscale: 16-bit activations, an mxfp4 weight, columns, reference and AITER's function
name."""

import re

import attrs
import pytest
import torch
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import error_ratio, worst_row_error
from tunedgemm.ops.formats.mxfp4 import per_1x32_f4_quant
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import infer_op
from tunedgemm.testing.listed import listed

OP = op_named("a16w4_blockscale")
CPU = torch.device("cpu")
FP4, E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu


def fp4(*sizes, dtype=FP4):
    """Pairs of 0.5 (code 1) and 1.0 (code 2), the even element first."""
    return torch.full(sizes, 0x21, dtype=torch.uint8).view(dtype)


def ones(*sizes, dtype=E8M0, device=None):
    """Scales of 1, whose byte is 127."""
    return torch.full(sizes, 127, dtype=torch.uint8, device=device).view(dtype)


X = torch.ones(2, 96).bfloat16()
SHUFFLED = shuffle_weight(fp4(16, 64))


def shape(m, n, k, layout="row", **fields):
    return Shape("a16w4_blockscale", m, n, k, **{"outdtype": "bf16", "scale": "block", "layout": layout, **fields})


class TestShapeOf:
    """From the operands of a call to its shape."""

    @listed("pair", [FP4, torch.uint8])
    @listed("byte", [E8M0, torch.uint8])
    @listed("dtype", ["bf16", "fp16"])
    def test_the_dtype_is_that_of_x(self, pair, byte, dtype):
        """Weight and scales may have their own dtype or be bytes;
        the output has x's dtype by default."""
        found = OP.shape_of(X.to(torch_dtype(dtype)), fp4(5, 48, dtype=pair), ones(5, 3, dtype=byte))
        assert found == shape(2, 5, 96, dtype=dtype, outdtype=dtype)

    def test_a_shuffled_weight_goes_with_shuffled_scales(self):
        """Shuffled scales have padded rows and columns; leading dimensions of x are rows."""
        x = torch.ones(2, 3, 320).half()
        found = OP.shape_of(x, shuffle_weight(fp4(272, 160)), ones(512, 16), torch.ones(272), otype=torch.float32)
        assert found == shape(6, 272, 320, "aiter16x16", dtype="fp16", outdtype="fp32", epilogue="bias", bias_dtype="fp32")

    @listed(
        ("operands", "message"),
        [
            ((X.float(), fp4(5, 48), ones(5, 3)), "x must be torch.bfloat16, torch.float16 (got torch.float32)"),
            ((fp4(2, 48), fp4(5, 48), ones(5, 3)), "x must be torch.bfloat16, torch.float16 (got torch.float4_e2m1fn_x2)"),
            ((X, fp4(5, 48).view(torch.int8), ones(5, 3)), "weight must be torch.float4_e2m1fn_x2, torch.uint8 (got"),
            ((X, fp4(5, 96), ones(5, 6)), "the last dimension of x must be 2 times that of the [N, K/2] weight (x (2, 96)"),
            ((X, fp4(5, 64), ones(5, 4)), "for a weight padded in K, pad x with zeros to K=128, too"),
            ((X, fp4(48), ones(5, 3)), "the weight must be 2-D [N, K/2]"),
            ((torch.ones(2, 80).half(), fp4(5, 40), ones(5, 3)), "K must be a multiple of 32, which share a scale (got K=80)"),
            ((X, fp4(5, 48), ones(9, 3)), "; shuffled scales (shuffle_scale(s)) are [256, 8]"),
            ((torch.ones(2, 128).half(), SHUFFLED, ones(9, 4)), "w_scale must be [256, 8]"),
            ((torch.ones(2, 128).half(), SHUFFLED, ones(8, 256).t()), "scales must be contiguous (got w_scale with strides (1, 256))"),
            ((X, fp4(5, 48), torch.ones(5, 3)), "w_scale must be torch.float8_e8m0fnu, torch.uint8 (got"),
            ((X, fp4(5, 48), ones(5, 3, device="meta")), "on cpu (got (5, 3) torch.float8_e8m0fnu on meta)"),
            ((X, fp4(5, 48), ones(5, 3), torch.ones(4)), "bias must be [5] or [1, 5]"),
        ],
    )
    def test_operands_that_do_not_fit(self, operands, message):
        """Each error names the op, the operand, the given value and the valid one."""
        with pytest.raises(OperandError, match=f"^a16w4_blockscale: .*{re.escape(message)}"):
            OP.shape_of(*operands)


class TestColumns:
    """From a row of a table to a shape, and back."""

    def test_the_key_alone(self):
        """M, N, K and x's dtype, by default bf16, mean a plain weight without bias."""
        row = {"M": "1", "N": "512", "K": "4096", "x_dtype": "torch.float16"}
        found = OP.columns.parse(row)
        assert found == shape(1, 512, 4096, dtype="fp16")
        assert {name: text for name, text in OP.columns.format(found).items() if text} == row
        assert OP.columns.parse({"M": "1", "N": "512", "K": "4096"}).dtype == "bf16"

    def test_columns_identify_the_table(self, tmp_path):
        """The dtype in the key tells a table of this op from those of block scales in fp8, whatever its name."""
        path = tmp_path / "mine.csv"
        path.write_text(",".join(("gfx", "cu_num", *OP.columns.key, *OP.columns.values)) + "\n")
        assert infer_op([path]) is OP


class TestReference:
    """The exact result that everything is compared with."""

    def test_values_and_scales(self):
        """Each 32 elements of a weight row are 0.5 and 1 in turn, times a power of two; x is not
        rounded, and the bias is added."""
        x = torch.tensor([[1.0] * 32 + [2.0] * 32, [0.25] * 64]).bfloat16()
        w_scale = torch.tensor([[127, 127], [127, 129], [120, 127]], dtype=torch.uint8)
        out = OP.reference(shape(2, 3, 64, epilogue="bias", bias_dtype="fp32"), (x, fp4(3, 32), w_scale, torch.tensor([0.0, 1.0, 2.0])))
        group = 16 * (0.5 + 1.0)
        wanted = [[1 + 2, 1 + 2 * 4, 2**-7 + 2], [0.25 + 0.25, 0.25 + 0.25 * 4, 0.25 * 2**-7 + 0.25]]
        assert out.tolist() == [[group * value + bias for value, bias in zip(row, (0.0, 1.0, 2.0), strict=True)] for row in wanted]


@listed("outdtype", ["bf16", "fp16", "fp32"])
def test_activations_rounded_to_mxfp4_are_outside_the_tolerance(outdtype):
    """A kernel that rounds x to the weight's format computes another op."""
    which = shape(32, 48, 2048, outdtype=outdtype)
    x, weight, w_scale = OP.make_inputs(which, CPU, 3)
    rounded, x_scale = per_1x32_f4_quant(x)
    other = Shape("a4w4_blockscale", 32, 48, 2048, "fp4x2", outdtype, scale="block")
    coarse = op_named("a4w4_blockscale").reference(other, (rounded, weight, x_scale, w_scale))
    reference, tolerance = OP.reference(which, (x, weight, w_scale)), OP.tolerance(which)
    assert worst_row_error(coarse.to(torch_dtype(outdtype)), reference) > 2 * tolerance.row_error
    assert worst_row_error(reference.to(torch_dtype(outdtype)), reference) < tolerance.row_error / 2


def test_bytes_moved():
    """x counts two bytes an element, the weight half a byte, each 32 one byte; padding nothing."""
    which = shape(2, 4, 64, epilogue="bias", bias_dtype="fp32")
    assert OP.bytes_moved(which) == 2 * 64 * 2 + 4 * 32 + 4 * 2 + 4 * 4 + 2 * 4 * 2
    assert OP.bytes_moved(attrs.evolve(which, layout="aiter16x16")) == OP.bytes_moved(which)
    assert OP.weight_dtype(which) == "fp4x2"


class TestFunction:
    """gemm_a16wfp4, with AITER's arguments followed by two of ours."""

    @listed("layout", ["aiter16x16", "row"])
    @listed("dtype", ["bf16", "fp16"])
    def test_aiters_arguments(self, layout, dtype):
        """gemm_a16wfp4 takes AITER's arguments in order, then bias and bpreshuffle."""
        which = shape(6, 32, 64, layout, dtype=dtype, outdtype="fp32", epilogue="bias", bias_dtype="fp32")
        x, weight, w_scale, bias = OP.make_inputs(which, CPU, 0)
        out = TunedGemm().gemm_a16wfp4(
            x.view(2, 3, 64), weight, w_scale, True, torch.float32, None, {"NUM_KSPLIT": 2}, bias, layout != "row"
        )
        reference, tolerance = OP.reference(which, (x, weight, w_scale, bias)), OP.tolerance(which)
        assert (out.shape, out.dtype) == ((2, 3, 32), torch.float32)
        assert worst_row_error(out, reference) <= tolerance.row_error
        assert error_ratio(out.view(6, 32), reference, tolerance) == 0.0

    def test_the_output_is_bf16_by_default(self):
        """As AITER's is, for activations in fp16, too; None gives the dtype of x."""
        operands = OP.make_inputs(shape(2, 32, 64, dtype="fp16"), CPU, 0)
        assert TunedGemm().gemm_a16wfp4(*operands).dtype == torch.bfloat16
        assert TunedGemm().gemm_a16wfp4(*operands, dtype=None).dtype == torch.float16

    @listed(
        ("layout", "fields", "message"),
        [
            ("row", {"y": torch.empty(2, 32)}, "y is not taken, the output is a new tensor; call y.copy_(…) with it"),
            ("row", {"bpreshuffle": True}, "bpreshuffle=True, but the weight has layout row; pass shuffle_weight(w), as_shuffled(w) if"),
            ("aiter16x16", {}, "bpreshuffle=False, but the weight has layout aiter16x16"),
        ],
    )
    def test_arguments_that_change_the_result_are_refused(self, layout, fields, message):
        """Each is named, and so is a weight whose type contradicts bpreshuffle."""
        operands = OP.make_inputs(shape(2, 32, 64, layout), CPU, 0)
        with pytest.raises(OperandError, match=re.escape(f"a16w4_blockscale: {message}")):
            TunedGemm().gemm_a16wfp4(*operands, **fields)

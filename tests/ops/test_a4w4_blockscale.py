"""a4w4_blockscale: mxfp4 operands, both orders of scales, columns, reference and AITER's function."""

import re

import attrs
import pytest
import torch
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.formats.scales import shuffle_scale
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.ops.scale_order import scale_order
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed

OP = op_named("a4w4_blockscale")
CPU = torch.device("cpu")
FP4, E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu


def fp4(*sizes, dtype=FP4):
    """Pairs of 0.5 (code 1) and 1.0 (code 2), the even element first."""
    return torch.full(sizes, 0x21, dtype=torch.uint8).view(dtype)


SHUFFLED = shuffle_weight(fp4(16, 64))


def ones(*sizes, dtype=E8M0, device=None):
    """Scales of 1, whose byte is 127."""
    return torch.full(sizes, 127, dtype=torch.uint8, device=device).view(dtype)


def shape(m, n, k, layout="row", **fields):
    return Shape("a4w4_blockscale", m, n, k, "fp4x2", **{"outdtype": "bf16", "scale": "block", "layout": layout, **fields})


class TestShapeOf:
    """From the operands of a call to its shape."""

    @listed("pair", [FP4, torch.uint8])
    @listed("byte", [E8M0, torch.uint8])
    def test_k_counts_elements(self, pair, byte):
        """K counts two elements in each byte of x and of the weight, typed or not."""
        found = OP.shape_of(fp4(6, 48, dtype=pair), fp4(5, 48, dtype=pair), ones(6, 3, dtype=byte), ones(5, 3, dtype=byte))
        assert found == shape(6, 5, 96)

    def test_a_shuffled_weight_goes_with_shuffled_scales(self):
        """Shuffled scales have rows padded to 256 and columns padded to 8."""
        found = OP.shape_of(
            fp4(2, 3, 160), shuffle_weight(fp4(272, 160)), ones(256, 16), ones(512, 16), torch.ones(272), otype=torch.float16
        )
        assert found == shape(6, 272, 320, "aiter16x16", outdtype="fp16", epilogue="bias", bias_dtype="fp32")

    @listed(
        ("operands", "message"),
        [
            ((torch.ones(2, 48), fp4(5, 48), ones(2, 3), ones(5, 3)), "x must be torch.float4_e2m1fn_x2, torch.uint8 (got torch.float32)"),
            ((fp4(2, 48), fp4(5, 48).view(torch.int8), ones(2, 3), ones(5, 3)), "weight must be torch.float4_e2m1fn_x2, torch.uint8 (got"),
            ((fp4(2, 48), fp4(5, 64), ones(2, 3), ones(5, 4)), "the last dimension of x must equal that of the [N, K] weight"),
            ((fp4(2, 40), fp4(5, 40), ones(2, 3), ones(5, 3)), "K must be a multiple of 32, which share a scale (got K=80)"),
            ((fp4(2, 48), fp4(5, 48), ones(3, 3), ones(5, 3)), "x_scale must be [2, 3], torch.float8_e8m0fnu, torch.uint8 on cpu"),
            ((fp4(2, 48), fp4(5, 48), ones(2, 3), ones(9, 8)), "; shuffled scales (shuffle_scale(s)) are [256, 8]"),
            ((fp4(2, 64), SHUFFLED, ones(2, 8), ones(256, 8)), "x_scale must be [256, 8]"),
            ((fp4(2, 64), SHUFFLED, ones(256, 8), ones(9, 4)), "w_scale must be [256, 8]"),
            ((fp4(2, 64), SHUFFLED, ones(2, 4), ones(256, 8)), "one order (got x_scale row, w_scale aiter32x8); pass shuffle_scale(s)"),
            ((fp4(2, 64), SHUFFLED, ones(8, 256).t(), ones(256, 8)), "scales must be contiguous (got x_scale with strides (1, 256))"),
            ((fp4(2, 48), fp4(5, 48), torch.ones(2, 3), ones(5, 3)), "x_scale must be torch.float8_e8m0fnu, torch.uint8 (got"),
            ((fp4(2, 48), fp4(5, 48), ones(2, 3), ones(5, 3, device="meta")), "on cpu (got (5, 3) torch.float8_e8m0fnu on meta)"),
            ((fp4(2, 48), fp4(5, 48), ones(2, 3), ones(5, 3), torch.ones(4)), "bias must be [5] or [1, 5]"),
        ],
    )  # fmt: skip
    def test_operands_that_do_not_fit(self, operands, message):
        """Each error names the op, the operand, the given value and the valid one."""
        with pytest.raises(OperandError, match=f"^a4w4_blockscale: .*{re.escape(message)}"):
            OP.shape_of(*operands)


class TestColumns:
    """From a row of AITER's tables to a shape, and back."""

    def test_a_row_of_aiter(self):
        """M, N and K, which counts elements, mean a shuffled weight, bf16 out and no bias."""
        row = {"M": "1", "N": "512", "K": "4096"}
        found = OP.columns.parse(row)
        assert found == shape(1, 512, 4096, "aiter16x16")
        assert {name: text for name, text in OP.columns.format(found).items() if text} == row

    @listed(("layout", "order"), [("row", "aiter32x8"), ("aiter16x16", "row")])
    def test_the_order_of_scales(self, layout, order):
        """A column where it is not the usual one; AITER's rows serve such calls, too."""
        row = {"M": "1", "N": "512", "K": "4096", "scale_order": order} | ({"layout": layout} if layout == "row" else {})
        found = OP.columns.parse(row)
        assert dict(found.extra) == {"scale_order": order}
        assert {name: text for name, text in OP.columns.format(found).items() if text} == row
        assert OP.equivalent_shapes(found) == (found, shape(1, 512, 4096, "aiter16x16"))
        assert OP.columns.parse({**row, "scale_order": "aiter32x8" if layout != "row" else "row"}) == shape(1, 512, 4096, layout)
        with pytest.raises(ShapeError, match="'scale_order' must be one of row, aiter32x8"):
            OP.columns.parse({**row, "scale_order": "m_major"})


class TestReference:
    """The exact result that everything is compared with."""

    def test_values_and_scales(self):
        """Each 32 elements of a row are 0.5 and 1 in turn, times a power of two; the bias is added."""
        x_scale = torch.tensor([[127, 128], [126, 130]], dtype=torch.uint8)
        w_scale = torch.tensor([[127, 127], [127, 129], [120, 127]], dtype=torch.uint8)
        group = 16 * (0.25 + 1.0)
        out = OP.reference(
            shape(2, 3, 64, epilogue="bias", bias_dtype="fp32"), (fp4(2, 32), fp4(3, 32), x_scale, w_scale, torch.tensor([0.0, 1.0, 2.0]))
        )
        wanted = [[1 + 2, 1 + 2 * 4, 2**-7 + 2], [0.5 + 8, 0.5 + 8 * 4, 2**-8 + 8]]
        assert out.tolist() == [[group * value + bias for value, bias in zip(row, (0.0, 1.0, 2.0), strict=True)] for row in wanted]

    def test_the_even_element_is_the_low_nibble(self):
        """A weight that is 1 at the even places and 0 at the odd ones sums the low nibbles."""
        weight = torch.full((1, 16), 0x02, dtype=torch.uint8)
        assert OP.reference(shape(1, 1, 32), (fp4(1, 16), weight, ones(1, 1), ones(1, 1))).item() == 16 * 0.5


def test_bytes_moved():
    """An element counts half a byte, and each 32 one byte; padding counts nothing."""
    which = shape(2, 4, 64, epilogue="bias", bias_dtype="fp32")
    assert OP.bytes_moved(which) == (2 + 4) * 32 + (2 + 4) * 2 + 4 * 4 + 2 * 4 * 2
    assert OP.bytes_moved(attrs.evolve(which, layout="aiter16x16")) == OP.bytes_moved(which)


class TestFunction:
    """AITER's gemm_a4w4."""

    @listed("layout", ["aiter16x16", "row"])
    @listed("shuffled", [False, True])
    @listed("m", [1, 256])
    def test_scales_of_either_order_go_with_either_weight(self, layout, shuffled, m):
        """The product is right to the last bit of bf16, although no padding tells the order at M = 256."""
        x, weight, x_scale, w_scale = OP.make_inputs(shape(m, 256, 512), CPU, 0)
        wanted = OP.reference(shape(m, 256, 512), (x, weight, x_scale, w_scale)).double()
        if shuffled:
            x_scale, w_scale = shuffle_scale(x_scale), shuffle_scale(w_scale)
        order = None if shuffled or layout == "row" else "row"
        weight = weight if layout == "row" else shuffle_weight(weight, layout)
        found = OP.shape_of(x, weight, x_scale, w_scale, scale_order=order)
        assert (found.layout, scale_order(found)) == (layout, "aiter32x8" if shuffled else "row")
        out = TunedGemm().gemm_a4w4(x, weight, x_scale, w_scale, bpreshuffle=layout != "row", scale_order=order)
        assert float((out.double() - wanted).norm() / wanted.norm()) < 2.0**-8

    def test_launchers_are_not_shared_between_orders(self):
        """Calls of equal sizes and other orders, by type or by word, each get their own result."""
        x, weight, x_scale, w_scale = OP.make_inputs(shape(256, 256, 512), CPU, 0)
        gemm = TunedGemm()
        row = gemm.gemm_a4w4(x, weight, x_scale, w_scale, bpreshuffle=False)
        marked = gemm.gemm_a4w4(x, weight, shuffle_scale(x_scale), shuffle_scale(w_scale), bpreshuffle=False)
        raw = [shuffle_scale(scale).plain for scale in (x_scale, w_scale)]
        stated = gemm.gemm_a4w4(x, weight, *raw, bpreshuffle=False, scale_order="aiter32x8")
        assert torch.equal(row, marked)
        assert torch.equal(row, stated)

    def test_scales_assigned_to_a_parameter_count_at_once(self):
        """A hit multiplies by the scales that a parameter holds now, after a move and an assignment."""
        x, weight, x_scale, w_scale = OP.make_inputs(shape(32, 256, 512), CPU, 0)
        gemm, layer = TunedGemm().gemm_a4w4, torch.nn.Module()
        layer.scale = torch.nn.Parameter(shuffle_scale(w_scale), requires_grad=False)
        first = gemm(x, weight, shuffle_scale(x_scale), layer.scale, bpreshuffle=False)
        layer._apply(torch.clone)
        assert torch.equal(gemm(x, weight, shuffle_scale(x_scale), layer.scale, bpreshuffle=False), first)
        layer.scale.data = shuffle_scale((w_scale.view(torch.uint8) + 1).view(w_scale.dtype))  # an exponent: twice the scale
        assert torch.equal(gemm(x, weight, shuffle_scale(x_scale), layer.scale, bpreshuffle=False), 2 * first)

    @listed("layout", ["aiter16x16", "row"])
    def test_aiters_arguments(self, layout):
        """gemm_a4w4 takes AITER's arguments in AITER's order."""
        which = shape(6, 32, 64, layout, outdtype="fp16", epilogue="bias", bias_dtype="fp32")
        x, *rest = OP.make_inputs(which, CPU, 0)
        out = TunedGemm().gemm_a4w4(x.view(2, 3, 32), *rest, torch.float16, 1.0, 0.0, layout != "row")
        assert (out.shape, out.dtype) == ((2, 3, 32), torch.float16)
        assert worst_row_error(out, OP.reference(which, (x, *rest))) <= OP.tolerance(which).row_error

    @listed(
        ("layout", "fields", "message"),
        [
            ("aiter16x16", {"alpha": 2.0}, "alpha and beta are only taken as 1 and 0 (got alpha=2.0, beta=0.0)"),
            ("aiter16x16", {"beta": 1.0}, "alpha and beta are only taken as 1 and 0 (got alpha=1.0, beta=1.0)"),
            ("aiter16x16", {"apreshuffle": True}, "apreshuffle is not taken"),
            ("aiter16x16", {"global_A_scale": torch.ones(1)}, "global_A_scale is not taken"),
            ("aiter16x16", {"global_B_scale": torch.ones(1)}, "global_B_scale is not taken"),
            ("aiter16x16", {"bpreshuffle": False}, "bpreshuffle=False, but the weight has layout aiter16x16"),
            ("row", {}, "bpreshuffle=True, but the weight has layout row; pass shuffle_weight(B), as_shuffled(B) if"),
        ],
    )
    def test_arguments_that_change_the_result_are_refused(self, layout, fields, message):
        """Each is named, and so is a weight whose type contradicts bpreshuffle."""
        operands = OP.make_inputs(shape(2, 32, 64, layout), CPU, 0)
        with pytest.raises(OperandError, match=re.escape(message)):
            TunedGemm().gemm_a4w4(*operands, **fields)

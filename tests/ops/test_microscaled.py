"""a8w8_mxfp8 and a4w4_nvfp4: shapes, columns, reference, and products that are exact by construction."""

import math
import re

import pytest
import torch
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.formats.scales import E8M0, shuffle_scale, swizzle_scale
from tunedgemm.ops.microscaled import check_values
from tunedgemm.ops.scale_order import MX_ORDERS
from tunedgemm.shape import Shape
from tunedgemm.table.csvfile import infer_op
from tunedgemm.testing.listed import listed

CPU = torch.device("cpu")
MXFP8, NVFP4 = op_named("a8w8_mxfp8"), op_named("a4w4_nvfp4")
FP8, BYTE, ONE = torch.float8_e4m3fn, torch.uint8, torch.ones(())
NAMES = ("a8w8_mxfp8", "a4w4_nvfp4")


def shape(op, m, n, k, **fields):
    dtype = "fp8_e4m3fn" if op == "a8w8_mxfp8" else "fp4x2"
    return Shape(op, m, n, k, dtype, **{"outdtype": "bf16", "scale": "block", **fields})


def zeros(*sizes, dtype=BYTE):
    return torch.zeros(*sizes, dtype=BYTE).view(dtype)


def operands_of(op, x, weight, x_scale, w_scale, order="row"):
    """Operands of values that both formats hold, with scales that both hold, in an order."""
    scale_dtype = E8M0 if op == "a8w8_mxfp8" else FP8
    scales = [scale.to(scale_dtype) for scale in (x_scale, w_scale)]
    if order != "row":
        scales = [swizzle_scale(scales[0], order), swizzle_scale(scales[1])]
    if op == "a8w8_mxfp8":
        return x.to(FP8), weight.to(FP8), *scales
    return codes(x), codes(weight), *scales, ONE, ONE


def codes(values):
    """Pack values of e2m1 by their table, the even element in the low nibble."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    found = (values.abs()[..., None] == table).to(BYTE).argmax(-1).to(BYTE) | (values.signbit().to(BYTE) << 3)
    return found[..., ::2] | (found[..., 1::2] << 4)


def product(op, *operands, **keywords):
    return getattr(TunedGemm(), f"gemm_{op}")(*operands, **keywords)


class TestShapeOf:
    """From the operands of a call to its shape."""

    @listed(
        ("order", "x_scale", "w_scale"),
        [
            (None, (6, 2), (9, 2)), (None, (2, 3, 2), (9, 2)), ("row", (6, 2), (9, 2)), ("128x4", (128, 4), (128, 4)),
            ("128x4", (512,), (512,)), ("8x4", (8, 4), (128, 4)), ("8x4", (32,), (128, 4)),
        ],
    )  # fmt: skip
    def test_scales_in_each_order(self, order, x_scale, w_scale):
        """The order is as stated, row-major without; tiles may be flat, as FlashInfer's are."""
        extra = {} if order in (None, "row") else {"scale_order": order}
        x, weight = zeros(2, 3, 64, dtype=FP8), zeros(9, 64, dtype=FP8)
        found = MXFP8.shape_of(x, weight, zeros(*x_scale), zeros(*w_scale), torch.ones(9), otype=torch.float32, scale_order=order)
        assert found == shape("a8w8_mxfp8", 6, 9, 64, outdtype="fp32", epilogue="bias", bias_dtype="fp32", extra=extra)
        x, weight, factors = zeros(2, 3, 16), zeros(9, 16), (torch.ones(1), ONE)
        found = NVFP4.shape_of(x, weight, zeros(*x_scale, dtype=FP8), zeros(*w_scale, dtype=FP8), *factors, scale_order=order)
        assert found == shape("a4w4_nvfp4", 6, 9, 32, extra=extra)

    @listed(
        ("changed", "message"),
        [
            ({"x": zeros(2, 64)}, "x must be torch.float8_e4m3fn (got torch.uint8)"),
            ({"weight": zeros(9, 64, dtype=FP8).float()}, "weight must be torch.float8_e4m3fn (got torch.float32)"),
            ({"weight": zeros(9, 32, dtype=FP8)}, "the last dimension of x must equal that of the [N, K] weight"),
            ({"x": zeros(2, 48, dtype=FP8), "weight": zeros(9, 48, dtype=FP8)}, "K must be a multiple of 32, which share a scale (got K"),
            ({"x_scale": zeros(2, 4)}, "x_scale must be [2, 2], torch.float8_e8m0fnu, torch.uint8 on cpu (got (2, 4)"),
            ({"x_scale": zeros(128, 4)}, "torch.uint8 on cpu) for scale_order='row'; pass scale_order='128x4' for scales in tiles"),
            ({"w_scale": torch.ones(9, 2)}, "w_scale must be torch.float8_e8m0fnu, torch.uint8 (got torch.float32)"),
            ({"scale_order": "128x4"}, "x_scale must be [128, 4] or [512]"),
            ({"scale_order": "128x4", "x_scale": zeros(128, 4)}, "w_scale must be [128, 4] or [512]"),
            ({"scale_order": "8x4"}, "for scale_order='8x4'; pass swizzle_scale(s) of row-major scales"),
            ({"scale_order": "128x4", "x_scale": zeros(4, 128).t()}, "x_scale in tiles must be contiguous (got strides (1, 128)); pass"),
            ({"scale_order": "aiter32x8"}, "scale_order must be row or 128x4 or 8x4 (got 'aiter32x8')"),
            ({"scale_order": ""}, "scale_order must be row or 128x4 or 8x4 (got '')"),
            ({"bias": torch.ones(8)}, "bias must be [9] or [1, 9]"),
            ({"otype": torch.float64}, "the output must be one of"),
        ],
    )  # fmt: skip
    def test_operands_that_do_not_fit(self, changed, message):
        """Each error names the op, the operand, the given value and the valid one."""
        given = {"x": zeros(2, 64, dtype=FP8), "weight": zeros(9, 64, dtype=FP8), "x_scale": zeros(2, 2), "w_scale": zeros(9, 2)} | changed
        operands = [given.pop(name) for name in ("x", "weight", "x_scale", "w_scale", "bias") if name in given]
        with pytest.raises(OperandError, match=f"^a8w8_mxfp8: .*{re.escape(message)}"):
            MXFP8.shape_of(*operands, **given)

    @listed(
        ("place", "value", "message"),
        [
            (4, None, "x_global_scale must be one float32 value (got None); pass amax / 2688, or 1 for one level"),
            (4, torch.ones(2), "x_global_scale must be [] or [1], torch.float32"),
            (5, torch.ones(()).double(), "w_global_scale must be torch.float32 (got torch.float64)"),
            (2, zeros(2, 2), "x_scale must be torch.float8_e4m3fn (got torch.uint8)"),
            (0, zeros(2, 12), "the last dimension of x"),
        ],
    )
    def test_operands_of_nvfp4_that_do_not_fit(self, place, value, message):
        """Each error names the op, the operand, the given value and the valid one."""
        operands = [zeros(2, 16), zeros(9, 16), zeros(2, 2, dtype=FP8), zeros(9, 2, dtype=FP8), ONE, ONE]
        operands[place] = value
        with pytest.raises(OperandError, match=f"^a4w4_nvfp4: .*{re.escape(message)}"):
            NVFP4.shape_of(*operands)

    def test_calls_read_no_global_scales(self):
        """Operands without values have a shape, and a call serves any value, cached or not."""
        operands = (zeros(2, 16), zeros(9, 16), zeros(2, 2, dtype=FP8), zeros(9, 2, dtype=FP8), ONE, ONE)
        assert NVFP4.shape_of(*(operand.to("meta") for operand in operands)) == shape("a4w4_nvfp4", 2, 9, 32)
        gemm = TunedGemm()
        for value in (896.0, 1.0, 896.0):
            assert not gemm.gemm_a4w4_nvfp4(*operands[:4], torch.tensor(value), ONE).any()

    @listed(
        ("value", "message"),
        [
            (2688 / 100, "it multiplies, amax / 2688, and must be at most 24.37 (got 26.88); pass the reciprocal"),
            (0.0, "must be finite and above 0 (got 0); pass amax / 2688, or 1 for zeros"),
            (-1.0, "must be finite and above 0 (got -1)"), (math.inf, "must be finite and above 0 (got inf)"),
            (math.nan, "must be finite and above 0 (got nan)"),
        ],
    )  # fmt: skip
    def test_values_of_global_scales(self, value, message):
        """`check_values` refuses either global scale where it cannot be one that multiplies."""
        fine = torch.nn.Parameter(torch.tensor([65504 / 2688]))  # read without torch's warning of a gradient
        check_values(fine, fine)
        check_values(None, None)
        with pytest.raises(OperandError, match=f"^a4w4_nvfp4: x_global_scale:? {re.escape(message)}"):
            check_values(torch.tensor(value), None)
        with pytest.raises(OperandError, match=f"^a4w4_nvfp4: w_global_scale:? {re.escape(message)}"):
            check_values(fine, torch.tensor(value))

    @listed(("place", "name"), [(2, "x_scale"), (3, "w_scale")])
    @listed("order", list(MX_ORDERS))
    def test_scales_in_the_order_of_aiter(self, place, name, order):
        """Shuffled scales are refused where their sizes fit, by their type or by their memory."""
        operands = [zeros(256, 256, dtype=FP8), zeros(256, 256, dtype=FP8), zeros(256, 8), zeros(256, 8)]
        assert MXFP8.shape_of(*operands, scale_order=order).m == 256
        typed, untyped = shuffle_scale(operands[place]), torch.nn.Parameter(zeros(256, 8), requires_grad=False)
        untyped.data = shuffle_scale(operands[place])
        assert type(untyped) is torch.nn.Parameter
        message = f"^a8w8_mxfp8: {name} must be row-major or .* \\(got aiter32x8\\); pass unshuffle_scale\\({name}, 256, 8\\)"
        for scale in (typed, untyped):
            with pytest.raises(OperandError, match=message):
                MXFP8.shape_of(*operands[:place], scale, *operands[place + 1 :], scale_order=order)


class TestColumns:
    """From a row of a table to a shape, and back."""

    @listed("op", [MXFP8, NVFP4])
    def test_rows(self, op, tmp_path):
        """A row holds the order of scales unless it is row-major; the file's name tells the op."""
        row = {"M": "1", "N": "512", "K": "128", "bias": "True", "scale_order": "8x4"}
        found = op.columns.parse(row)
        assert found == shape(op.name, 1, 512, 128, epilogue="bias", bias_dtype="bf16", extra={"scale_order": "8x4"})
        assert {name: text for name, text in op.columns.format(found).items() if text} == row
        assert op.columns.format(op.columns.parse({**row, "scale_order": "row"}))["scale_order"] == ""
        path = tmp_path / op.columns.tuned_file
        path.write_text(",".join(("gfx", "cu_num", *op.columns.key, *op.columns.values)) + "\n")
        assert infer_op([path]) is op

    @listed(
        ("cells", "message"),
        [
            ({"K": "72"}, "K must be a multiple of 32, which share a scale (got K=72)"),
            ({"scale_order": "m_major"}, "column 'scale_order' must be one of row, 128x4, 8x4"),
        ],
    )
    def test_rows_that_no_call_asks_for(self, cells, message):
        """The message has the field, its value and what would fit."""
        with pytest.raises(ShapeError, match=re.escape(message)):
            MXFP8.columns.parse({"M": "1", "N": "9", "K": "96", **cells})

    def test_bytes_moved(self):
        """Operands, scales and global scales count once; padding of tiles does not."""
        for order in MX_ORDERS:
            extra = {} if order == "row" else {"scale_order": order}
            assert MXFP8.bytes_moved(shape("a8w8_mxfp8", 2, 9, 64, extra=extra)) == 11 * 64 + 11 * 2 + 2 * 18
            assert NVFP4.bytes_moved(shape("a4w4_nvfp4", 2, 9, 64, extra=extra)) == 11 * 32 + 11 * 4 + 8 + 2 * 18


@listed("op", list(NAMES))
@listed("order", list(MX_ORDERS))
def test_products_on_a_grid_are_exact(op, order):
    """Sums of values of e2m1 with scales that are powers of two are exact in float32, for any sizes."""
    generator, group = torch.Generator().manual_seed(1), 32 if op == "a8w8_mxfp8" else 16
    table = torch.tensor([-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for _ in range(6):
        m, n, blocks = (int(torch.randint(1, end, (), generator=generator)) for end in (140, 140, 12))
        values = [table[torch.randint(15, (rows, blocks * group), generator=generator)] for rows in (m, n)]
        scales = [2.0 ** torch.randint(-3, 4, (rows, blocks), generator=generator) for rows in (m, n)]
        wide = [value.double() * scale.double().repeat_interleave(group, -1) for value, scale in zip(values, scales, strict=True)]
        out = product(op, *operands_of(op, *values, *scales, order), dtype=torch.float32, scale_order=order)
        assert torch.equal(out.double(), wide[0] @ wide[1].t()), (m, n, blocks)


@listed("op", [MXFP8, NVFP4])
def test_scales_of_other_rows_and_groups_change_the_result(op):
    """With rolled scales the result is out of bounds; global scales and the bias act as stated."""
    which = shape(op.name, 5, 48, 256, outdtype="fp32", epilogue="bias", bias_dtype="fp32")
    operands = op.make_inputs(which, CPU, 0)
    wanted, bound = op.reference(which, operands), op.tolerance(which).row_error
    for place in (2, 3):
        for dimension in (0, 1):
            rolled = operands[place].view(BYTE).roll(1, dimension).view(operands[place].dtype)
            wrong = op.reference(which, (*operands[:place], rolled, *operands[place + 1 :]))
            assert worst_row_error(wrong, wanted) > bound
    if op is NVFP4:
        doubled = (*operands[:4], operands[4] * 2, operands[5] * 4, operands[6])
        torch.testing.assert_close(op.reference(which, doubled), (wanted - operands[6]) * 8 + operands[6])


@listed("op", [MXFP8, NVFP4])
@listed("order", list(MX_ORDERS))
def test_the_order_of_scales_changes_no_bits(op, order):
    """Leading dimensions and any order of scales give the bits of the row-major call."""
    group = 32 if op is MXFP8 else 16
    x, weight, x_scale, w_scale, *rest = op.make_inputs(shape(op.name, 6, 24, 7 * group, epilogue="bias"), CPU, 0)
    wanted = product(op.name, x, weight, x_scale, w_scale, *rest)
    scales = (x_scale, w_scale) if order == "row" else (swizzle_scale(x_scale, order), swizzle_scale(w_scale))
    out = product(op.name, x.view(BYTE).view(2, 3, -1).view(x.dtype), weight, *scales, *rest, scale_order=order)
    assert out.shape == (2, 3, 24) and torch.equal(out.view(6, 24), wanted)


def test_zero_and_nan_scales():
    """A zero scale of nvfp4 gives exact zeros; a NaN scale spoils its row or column alone."""
    x, weight, x_scale, w_scale, *rest = NVFP4.make_inputs(shape("a4w4_nvfp4", 4, 32, 64), CPU, 0)
    assert not product("a4w4_nvfp4", x, weight, torch.zeros_like(x_scale.view(BYTE)).view(FP8), w_scale, *rest).any()
    for op, nan in ((MXFP8, 255), (NVFP4, 127)):
        x, weight, x_scale, w_scale, *rest = op.make_inputs(shape(op.name, 4, 32, 64), CPU, 0)
        clean = product(op.name, x, weight, x_scale, w_scale, *rest)
        for place, scale in enumerate((x_scale, w_scale)):
            spoiled = scale.view(BYTE).clone()
            spoiled[2, 1] = nan
            scales = (spoiled.view(scale.dtype), w_scale) if place == 0 else (x_scale, spoiled.view(scale.dtype))
            out = product(op.name, x, weight, *scales, *rest)
            hit = torch.zeros_like(clean, dtype=torch.bool)
            hit.select(place, 2).fill_(True)
            assert out[hit].isnan().all() and torch.equal(out[~hit], clean[~hit])


def test_extreme_scales_of_mxfp8():
    """The reference is exact from 2^-127 to 2^127: a large scale and a small one cancel."""
    x, weight, _, _ = MXFP8.make_inputs(shape("a8w8_mxfp8", 4, 32, 32), CPU, 0)
    which = shape("a8w8_mxfp8", 4, 32, 32, outdtype="fp32")
    plain = MXFP8.reference(which, (x, weight, torch.full((4, 1), 127, dtype=BYTE), torch.full((32, 1), 127, dtype=BYTE)))
    for power in (0, 3, 246, 254):
        scales = torch.full((4, 1), power, dtype=BYTE), torch.full((32, 1), 254 - power, dtype=BYTE)
        assert torch.equal(MXFP8.reference(which, (x, weight, *scales)), plain)
    scales = torch.full((4, 1), 8, dtype=BYTE), torch.full((32, 1), 246, dtype=BYTE)
    torch.testing.assert_close(product("a8w8_mxfp8", x, weight, *scales, dtype=torch.float32).double(), plain)


def test_a_global_scale_has_a_gradient():
    """The operands have none; the product's derivative by a global scale is the product over it."""
    x, weight, x_scale, w_scale, x_global, w_global = NVFP4.make_inputs(shape("a4w4_nvfp4", 3, 16, 64), CPU, 0)
    x_global.requires_grad_()
    out = product("a4w4_nvfp4", x, weight, x_scale, w_scale, x_global, w_global, dtype=torch.float32)
    out.sum().backward()
    torch.testing.assert_close(x_global.grad, (out.sum() / x_global).detach())

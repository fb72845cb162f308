"""AITER's Triton products, with AITER's arguments, against products in float64."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable

import pytest
import torch
import tunedgemm
from tunedgemm.errors import OperandError, UserError

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
M, N, K = 64, 256, 512


def drawn(*sizes: int, seed: int = 0) -> torch.Tensor:
    """Return normal bf16 values."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(BF16)


X, W, BIAS = drawn(M, K), drawn(N, K, seed=1), drawn(N, seed=2)
XB, WB = drawn(3, M, K, seed=3), drawn(3, N, K, seed=4)


def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return x @ w.mT in float64."""
    return x.double() @ w.double().mT


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of a product."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def as_rows_of_16(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight's shuffled bytes in the shape of the Triton functions, [N/16, 16 k]."""
    return tunedgemm.shuffle_weight(weight).plain.reshape(weight.shape[0] // 16, -1)


def of_32_rows(scale: torch.Tensor) -> torch.Tensor:
    """Return shuffled scales in the shape of the Triton functions, [rows/32, K]."""
    return tunedgemm.shuffle_scale(scale)[: scale.shape[0]].reshape(scale.shape[0] // 32, -1)


def powers(values: torch.Tensor, high: int, wide: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to fp8 with e8m0 scales of blocks."""
    _, scale = tunedgemm.per_block_quant(values, FP8, (high, wide))
    power = scale.log2().ceil()
    spread = (2.0**power).repeat_interleave(high, 0).repeat_interleave(wide, 1)
    return (values.float() / spread).to(FP8), (power + 127).to(torch.uint8)


XR, XR_SCALE = tunedgemm.pertoken_quant(X, quant_dtype=FP8)
WR, WR_SCALE = tunedgemm.pertoken_quant(W, quant_dtype=FP8)
XG, XG_SCALE = tunedgemm.per_1x128_quant(X, FP8)
WG, WG_SCALE = tunedgemm.per_block_quant(W, FP8)
X4, X4_SCALE = tunedgemm.per_1x32_f4_quant(X)
W4, W4_SCALE = tunedgemm.per_1x32_f4_quant(W)
X4B, X4B_SCALE = (torch.stack(parts) for parts in zip(*map(tunedgemm.per_1x32_f4_quant, XB), strict=True))
W4B, W4B_SCALE = (torch.stack(parts) for parts in zip(*map(tunedgemm.per_1x32_f4_quant, WB), strict=True))
XP, XP_SCALE = powers(X, 1, 32)
WP, WP_SCALE = powers(W, 128, 128)
X4_VALUES, W4_VALUES = tunedgemm.dequant_fp4(X4, X4_SCALE), tunedgemm.dequant_fp4(W4, W4_SCALE)
WG_VALUES = tunedgemm.dequant_blocks(WG, WG_SCALE, block=(128, 128))
PRODUCT, OF_FOURS = exact(X, W), exact(X4_VALUES, W4_VALUES)
OF_BLOCKS = exact(tunedgemm.dequant_blocks(XG, XG_SCALE), WG_VALUES)
OF_ROWS = exact(XR, WR) * XR_SCALE * WR_SCALE.t()
OF_BATCH = exact(XB, WB)
SHUFFLED_4 = (as_rows_of_16(W4), of_32_rows(X4_SCALE), of_32_rows(W4_SCALE))

Case = tuple[str, tuple[object, ...], torch.Tensor]
#: module -> (function, operands, product); all but `gemm_a8wfp4` also take the output
BASIC: dict[str, list[Case]] = {
    "gemm_a16w16": [("gemm_a16w16", (X, W), PRODUCT)],
    "gemm_a16w16_atomic": [("gemm_a16w16_atomic", (X, W), PRODUCT)],
    "gemm_a8w8": [("gemm_a8w8", (XR, WR, XR_SCALE, WR_SCALE.t()), OF_ROWS)],
    "gemm_a8w8_per_token_scale": [("gemm_a8w8_per_token_scale", (XR, WR, XR_SCALE, WR_SCALE), OF_ROWS)],
    "gemm_a8w8_blockscale": [
        ("gemm_a8w8_blockscale", (XG, WG, XG_SCALE, WG_SCALE), OF_BLOCKS),
        ("gemm_a8w8_blockscale_preshuffle", (XG, as_rows_of_16(WG), tunedgemm.transposed_scale(XG_SCALE), WG_SCALE), OF_BLOCKS),
    ],
    "gemm_a16w8_blockscale": [
        ("gemm_a16w8_blockscale", (X, WG, WG_SCALE), exact(X, WG_VALUES)),
        ("gemm_a16w8_blockscale_preshuffle", (X, as_rows_of_16(WG), WG_SCALE), exact(X, WG_VALUES)),
    ],
    "gemm_a16wfp4": [
        ("gemm_a16wfp4", (X, W4, W4_SCALE), exact(X, W4_VALUES)),
        ("gemm_a16wfp4_preshuffle", (X, SHUFFLED_4[0], SHUFFLED_4[2]), exact(X, W4_VALUES)),
    ],
    "gemm_afp4wfp4": [
        ("gemm_afp4wfp4", (X4, W4, X4_SCALE, W4_SCALE), OF_FOURS),
        ("gemm_afp4wfp4_preshuffle", (X4, *SHUFFLED_4), OF_FOURS),
        ("gemm_afp4wfp4_preshuffled_weight_scales", (X4, *SHUFFLED_4), OF_FOURS),
        ("gemm_afp4wfp4_preshuffled_scales", (X4, W4, *SHUFFLED_4[1:]), OF_FOURS),
    ],
    "gemm_afp4wfp4_pre_quant_atomic": [("gemm_afp4wfp4_pre_quant", (X, W4, W4_SCALE), exact(X, W4_VALUES))],
    "gemm_afp8wfp8": [
        ("gemm_afp8wfp8", (XP, WP, XP_SCALE, WP_SCALE), PRODUCT),
        ("gemm_afp8wfp8_preshuffle", (XP, tunedgemm.shuffle_weight(WP).plain, XP_SCALE, WP_SCALE), PRODUCT),
    ],
}
BATCHED: dict[str, list[Case]] = {
    "batched_gemm_bf16": [("batched_gemm_bf16", (XB, WB), OF_BATCH)],
    "batched_gemm_a16wfp4": [("batched_gemm_a16wfp4", (XB, W4B, W4B_SCALE), exact(XB, tunedgemm.dequant_fp4(W4B, W4B_SCALE)))],
    "batched_gemm_afp4wfp4": [
        (
            "batched_gemm_afp4wfp4",
            (X4B, W4B, X4B_SCALE, W4B_SCALE),
            exact(tunedgemm.dequant_fp4(X4B, X4B_SCALE), tunedgemm.dequant_fp4(W4B, W4B_SCALE)),
        )
    ],
    "batched_gemm_afp4wfp4_pre_quant": [
        ("batched_gemm_afp4wfp4_pre_quant", (XB, W4B, W4B_SCALE), exact(XB, tunedgemm.dequant_fp4(W4B, W4B_SCALE)))
    ],
}
CASES = [
    pytest.param(folder, module, *case, id=case[0])
    for folder, modules in (("basic", BASIC), ("batched", BATCHED))
    for module, cases in modules.items()
    for case in cases
]


def module(name: str) -> types.ModuleType:
    """Return a module of AITER's Triton products."""
    return importlib.import_module(f"aiter.ops.triton.{name}")


@pytest.mark.parametrize(("folder", "home", "name", "operands", "expected"), CASES)
def test_products(aiter, folder, home, name, operands, expected):
    """Each product is right to its rounding, in a new tensor and in a given one, by both paths."""
    function: Callable[..., torch.Tensor] = getattr(module(f"gemm.{folder}.{home}"), name)
    output = {"YQ" if name == "batched_gemm_bf16" else "y": torch.empty(expected.shape, dtype=torch.float32)}
    tolerance = 0.05 if expected is PRODUCT and "fp8" in name else 0.005  # the quantisation of the operands

    assert getattr(module(home), name) is function
    assert function(*operands).dtype == BF16
    assert error(function(*operands), expected) < tolerance
    assert function(*operands, **output) is next(iter(output.values()))
    assert error(next(iter(output.values())), expected) < tolerance


def test_fp8_and_mxfp4(aiter):
    """gemm_a8wfp4 writes to its third argument."""
    y = torch.empty(M, N, dtype=BF16)

    assert module("gemm_a8wfp4").gemm_a8wfp4(XR, W4, y, XR_SCALE, W4_SCALE) is y
    assert error(y, exact(XR.double() * XR_SCALE, W4_VALUES)) < 0.005


def test_formats_of_8_bits_without_an_op(aiter):
    """gemm_a8w8 also multiplies e5m2, and cuts an output of integers off."""
    function = module("gemm_a8w8").gemm_a8w8
    x, w = X.to(torch.float8_e5m2), W.to(torch.float8_e5m2)
    expected = exact(x, w) * XR_SCALE * WR_SCALE.t() + BIAS.double()
    whole, wide = (function(XR, WR, XR_SCALE, WR_SCALE, dtype=dtype) for dtype in (torch.int32, torch.float32))

    assert error(function(x, w, XR_SCALE, WR_SCALE.t(), BIAS), expected) < 0.005
    assert torch.equal(whole, wide.int())
    of_shuffled = module("gluon.gemm_a8w8").gemm_a8w8_preshuffle(XR, as_rows_of_16(WR), XR_SCALE, WR_SCALE, dtype=torch.int32)
    assert of_shuffled.dtype == torch.int32 and error(of_shuffled, wide) < 0.05


def test_products_below_a_compilers_name(aiter):
    """The modules of gluon have the same products, and one of a shuffled weight with scales of rows."""
    home = module("gluon.gemm_a8w8")

    assert module("gluon.gemm_afp4wfp4").gemm_afp4wfp4 is module("gemm_afp4wfp4").gemm_afp4wfp4
    assert error(home.gemm_a8w8_preshuffle(XR, as_rows_of_16(WR), XR_SCALE, WR_SCALE.t()), OF_ROWS) < 0.005


def test_square_weights_in_columns(aiter):
    """A square weight [N, K] with the strides of columns is one, as in AITER, and not taken for a mistake."""
    square, x = drawn(K, K, seed=10), X
    eights, scales = tunedgemm.pertoken_quant(square, quant_dtype=FP8)
    fours, powers = tunedgemm.per_1x32_f4_quant(drawn(K // 2, K, seed=11))
    columns, eights_columns, fours_columns = (one.t().contiguous().t() for one in (square, eights, fours.view(torch.uint8)))

    assert error(module("gemm_a16w16").gemm_a16w16(x, columns), exact(x, square)) < 0.005
    assert error(module("gemm_a8w8").gemm_a8w8(XR, eights_columns, XR_SCALE, scales), exact(XR, eights) * XR_SCALE * scales.t()) < 0.005
    assert error(module("gemm_a16wfp4").gemm_a16wfp4(x, fours_columns, powers), exact(x, tunedgemm.dequant_fp4(fours, powers))) < 0.005


def test_few_rows_have_plain_scales(aiter):
    """Below 32 rows gemm_afp4wfp4_preshuffle takes the scales of x in plain order."""
    out = module("gemm_afp4wfp4").gemm_afp4wfp4_preshuffle(X4[:5], SHUFFLED_4[0], X4_SCALE[:5], SHUFFLED_4[2])

    assert error(out, OF_FOURS[:5]) < 0.005


@pytest.mark.parametrize("name", [None, "gelu", "gelu_tanh", "relu", "silu", "silu_exp2"])
def test_activations(aiter, name):
    """An activation is applied before the output is rounded; the gate is the first half."""
    apply = {None: lambda x: x, "gelu": torch.nn.functional.gelu, "relu": torch.relu, "silu": torch.nn.functional.silu}
    apply |= {"silu_exp2": apply["silu"], "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}
    gate, up = PRODUCT.chunk(2, dim=-1)

    assert error(module("gemm_a16w16").gemm_a16w16(X, W, BIAS, activation=name), apply[name](PRODUCT + BIAS.double())) < 0.005
    assert error(module("gemm_a16w16_gated").gemm_a16w16_gated(X, W, activation=name), apply[name](gate) * up) < 0.005
    with pytest.raises(UserError, match="activation: unknown name"):
        module("gemm_a16w16").gemm_a16w16(X, W, activation="tanhshrink")


@pytest.mark.parametrize("kind", ["ff_a16w16_{}", "ff_a16w16_fused_{}"])
def test_feed_forward(aiter, kind):
    """Both forms of both layers compute up, activation, gate and down."""
    up_plain, up_gated, down = W, drawn(2 * N, K, seed=5), drawn(N, K, seed=6)
    home = module(f"gemm.feed_forward.{kind.format('gated')}" if "fused" in kind else "gemm.feed_forward.ff_a16w16")
    plain = module("gemm.feed_forward.ff_a16w16_fused_ungated").ff_a16w16_fused_ungated if "fused" in kind else home.ff_a16w16_nogate
    gate, up = exact(X, up_gated).chunk(2, dim=-1)

    assert error(plain(X, up_plain, down, activation="relu"), torch.relu(PRODUCT) @ down.double()) < 0.01
    gated = getattr(home, kind.format("gated"))(X, up_gated, down, activation="silu")
    assert error(gated, (torch.nn.functional.silu(gate) * up) @ down.double()) < 0.01


def test_two_products_at_once(aiter):
    """The fused pairs compute both products, each with its bias."""
    eights = module("gemm.fused.fused_gemm_a8w8_blockscale_a16w16").fused_gemm_a8w8_blockscale_a16w16
    fours = module("gemm.fused.fused_gemm_afp4wfp4_a16w16").fused_gemm_afp4wfp4_a16w16
    bias = BIAS.double()

    for first, second, expected in (
        (*eights(XG, WG, XG_SCALE, WG_SCALE, X, W, BIAS, BIAS), OF_BLOCKS),
        (*fours(X4, W4, X4_SCALE, W4_SCALE, X, W, False, BIAS, BIAS), OF_FOURS),
        (*fours(X4, SHUFFLED_4[0], SHUFFLED_4[1], SHUFFLED_4[2], X, W, True, BIAS, BIAS), OF_FOURS),
    ):
        assert error(first, expected + bias) < 0.005
        assert error(second, PRODUCT + bias) < 0.005


def test_products_with_a_factor_and_a_summand(aiter):
    """fuse_type 0 is a * product + b, 1 is a * b + product."""
    home = module("fused_gemm_afp4wfp4_mul_add")
    a, b = drawn(M, N, seed=7), drawn(M, N, seed=8)

    for function, operands, product in (
        (module("fused_gemm_a8w8_blockscale_mul_add").fused_gemm_a8w8_blockscale_mul_add, (XG, WG, XG_SCALE, WG_SCALE), OF_BLOCKS),
        (home.fused_gemm_afp4wfp4_mul_add, (X4, W4, X4_SCALE, W4_SCALE), OF_FOURS),
        (home.fused_gemm_afp4wfp4_preshuffle_add_mul, (X4, *SHUFFLED_4), OF_FOURS),
    ):
        assert error(function(*operands, a, b), a.double() * product + b.double()) < 0.005
        assert error(function(*operands, a, 3.0, fuse_type=1), 3 * a.double() + product) < 0.005
        assert error(function(*operands, a, b, torch.float32, fuse_type=1), a.double() * b.double() + product) < 1e-5


def test_split_and_concatenated(aiter):
    """The columns of each head are split, and y is appended to the first part."""
    heads, first, second, third = 4, 40, 24, 8
    y = drawn(M, heads, third, seed=9)
    eights, fours = (module(f"gemm.fused.fused_gemm_{name}_split_cat") for name in ("a8w8_blockscale", "afp4wfp4"))

    for function, operands, product in (
        (eights.fused_gemm_a8w8_blockscale_split_cat, (XG, WG, y, XG_SCALE, WG_SCALE), OF_BLOCKS),
        (
            eights.fused_gemm_a8w8_blockscale_preshuffle_split_cat,
            (XG, as_rows_of_16(WG), y, tunedgemm.transposed_scale(XG_SCALE), WG_SCALE),
            OF_BLOCKS,
        ),
        (fours.fused_gemm_afp4wfp4_split_cat, (X4, W4, y, X4_SCALE, W4_SCALE), OF_FOURS),
        (fours.fused_gemm_afp4wfp4_preshuffle_split_cat, (X4, SHUFFLED_4[0], y, *SHUFFLED_4[1:]), OF_FOURS),
    ):
        head, tail = function(*operands, first, second)
        expected = product.view(M, heads, first + second)
        assert error(head[..., :first], expected[..., :first]) < 0.005 and torch.equal(head[..., first:], y)
        assert error(tail, expected[..., first:]) < 0.005


def test_batched_8_bits(aiter):
    """Batched products with scales of rows, and with one scale of the weight."""
    (xq, xs), (wq, ws) = (
        (torch.stack(parts) for parts in zip(*(tunedgemm.pertoken_quant(one, quant_dtype=torch.int8) for one in both), strict=True))
        for both in (XB, WB)
    )
    tensor, scale = tunedgemm.per_tensor_quant(WB, quant_dtype=FP8)
    name = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
    grouped = getattr(module(f"gemm.batched.{name}"), name)
    expected = exact(XB, tensor.double() * scale)

    out = module("gemm.batched.batched_gemm_a8w8").batched_gemm_a8w8(xq, wq, xs, ws.mT.contiguous())
    assert error(out, exact(xq, wq) * xs.double() * ws.double().mT) < 0.005
    assert error(grouped(XB, tensor, scale), expected) < 0.005
    turned = grouped(XB.transpose(0, 1).contiguous(), tensor, scale, transpose_bm=True, transpose_bm_in=True)
    assert error(turned, expected.transpose(0, 1)) < 0.005
    with pytest.raises(OperandError, match="y_scale is not supported"):
        module("batched_gemm_a16wfp4").batched_gemm_a16wfp4(XB, W4B, W4B_SCALE, y_scale=scale)

"""AITER's products with AITER's argument names, and with the output as an argument."""

from __future__ import annotations

import importlib

import pytest
import torch
import tunedgemm
from tunedgemm.device import current_device
from tunedgemm.errors import OperandError

FP8 = torch.float8_e4m3fn
M, N, K = 5, 256, 512
X, WEIGHT, BIAS = (
    torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed, sizes in enumerate(((M, K), (N, K), (N,)))
)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of a product."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def rows() -> dict[str, torch.Tensor]:
    """Return operands with one scale a row."""
    (xq, x_scale), (wq, w_scale) = (tunedgemm.pertoken_quant(one, quant_dtype=FP8) for one in (X, WEIGHT))
    return {"XQ": xq, "WQ": wq, "x_scale": x_scale, "w_scale": w_scale}


def blocks() -> dict[str, torch.Tensor]:
    """Return operands with scales of blocks."""
    (xq, x_scale), (wq, w_scale) = tunedgemm.per_1x128_quant(X, FP8), tunedgemm.per_block_quant(WEIGHT, FP8)
    return {"XQ": xq, "WQ": wq, "x_scale": x_scale, "w_scale": w_scale}


def fours() -> dict[str, torch.Tensor]:
    """Return operands of mxfp4, shuffled."""
    (xq, x_scale), (wq, w_scale) = (tunedgemm.per_1x32_f4_quant(one, shuffle=True) for one in (X, WEIGHT))
    return {"A": xq, "B": shuffled(wq), "A_scale": x_scale, "B_scale": w_scale}


def shuffled(weight: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of shuffled bytes, as a loader of checkpoints has it."""
    return tunedgemm.shuffle_weight(weight).plain


def transposed(operands: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return block operands as the functions for shuffled weights take them."""
    return operands | {"WQ": shuffled(operands["WQ"]), "x_scale": tunedgemm.transposed_scale(operands["x_scale"])}


def spelled(operands: dict[str, torch.Tensor], **names: str) -> dict[str, torch.Tensor]:
    """Return operands under other names."""
    return {names.get(name, name): value for name, value in operands.items()}


WITH_SHUFFLED = lambda: (found := rows()) | {"WQ": shuffled(found["WQ"])}  # noqa: E731
IN_AITERS_WORDS = {"XQ": "A", "WQ": "B", "x_scale": "A_scale", "w_scale": "B_scale"}
IN_CKS_WORDS = {there: here for here, there in IN_AITERS_WORDS.items()}
#: function -> operands, name of the output, further arguments
WRITERS = {
    "gemm_a16w16_asm": (lambda: {"A": X, "B": WEIGHT}, "out", {"bias": BIAS}),
    "gemm_a8w8_ck": (rows, "Out", {"bias": BIAS, "splitK": 2}),
    "gemm_a8w8_asm": (WITH_SHUFFLED, "Out", {"kernelName": "any", "bias": BIAS.float()}),
    "gemm_a8w8_bpreshuffle_ck": (WITH_SHUFFLED, "Out", {}),
    "gemm_a8w8_bpreshuffle_cktile": (WITH_SHUFFLED, "out", {}),
    "gemm_a8w8_bpreshuffle_flydsl": (WITH_SHUFFLED, "Out", {"config": {}}),
    "gemm_a8w8_blockscale_ck": (blocks, "Out", {}),
    "gemm_a8w8_blockscale_cktile": (blocks, "Out", {}),
    "gemm_a8w8_blockscale_bpreshuffle_ck": (lambda: transposed(blocks()), "Out", {}),
    "gemm_a8w8_blockscale_bpreshuffle_cktile": (lambda: transposed(blocks()), "Out", {}),
    "gemm_a8w8_blockscale_bpreshuffle_asm": (lambda: spelled(transposed(blocks()), **IN_AITERS_WORDS), "out", {"bias": BIAS.float()}),
    "gemm_a4w4_asm": (fours, "out", {"bias": BIAS.float()}),
    "gemm_a4w4_blockscale": (lambda: spelled(fours(), **IN_CKS_WORDS), "Out", {}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_outputs_are_written(aiter, name):
    """A function named after a backend writes its product to the output, and returns that."""
    make, argument, further = WRITERS[name]
    out = torch.full((M, N), torch.nan, dtype=torch.bfloat16)
    expected = X.double() @ WEIGHT.double().t() + (BIAS.double() if "bias" in further else 0)

    returned = getattr(aiter, name)(**make(), **{argument: out}, **further)

    assert returned is out
    assert error(out, expected) < (0.25 if "a4w4" in name else 0.05)


def test_skinny_products_are_written(aiter):
    """The functions for few rows take the weight first, and the output as an argument."""
    (xq, x_scale), (wq, w_scale) = (tunedgemm.per_tensor_quant(one, quant_dtype=FP8) for one in (X, WEIGHT))
    expected = X.double() @ WEIGHT.double().t()

    for call in (
        lambda out: aiter.wvSpltK(WEIGHT, X, out, M, 304),
        lambda out: aiter.LLMM1(WEIGHT, X, out, 4),
        lambda out: aiter.wvSplitKQ(wq, xq, out, w_scale, x_scale, 304),
    ):
        out = torch.zeros(M, N, dtype=torch.bfloat16)
        assert call(out) is None
        assert error(out, expected) < 0.05


def test_outputs_of_another_shape_are_refused(aiter):
    """An output that the product would be broadcast to is an error."""
    with pytest.raises(OperandError, match=r"output must be \[5, 256\] \(got \[2, 5, 256\]\)"):
        aiter.gemm_a8w8_ck(**rows(), Out=torch.empty(2, M, N))


def test_names_of_arguments_are_those_of_aiter(aiter):
    """Calls by AITER's keywords give the product; the function of two names is one frame."""
    expected = tunedgemm.gemm_a16w16(X, WEIGHT, BIAS)

    assert torch.equal(aiter.gemm_a16w16(A=X, B=WEIGHT, bias=BIAS), expected)
    assert torch.equal(aiter.tgemm.mm(inp=X, weights=WEIGHT, bias=BIAS), expected)
    assert torch.equal(importlib.import_module("aiter.tuned_gemm").TunedGemm().mm(inp=X, weights=WEIGHT, bias=BIAS), expected)
    assert aiter.gemm_a16w16.__code__.co_filename.startswith("<tunedgemm hot function")


@pytest.mark.parametrize("backend", ["asm", "flydsl", "hipb", "opus", "skinny", "torch", "triton"])
def test_backends_of_the_module_are_the_tables(aiter, backend):
    """A function of one backend gives the product of the tables, of plain or shuffled bytes."""
    function = getattr(importlib.import_module("aiter.tuned_gemm"), f"{backend}_gemm")
    expected = tunedgemm.gemm_a16w16(X, WEIGHT, BIAS)

    assert torch.equal(function(X, WEIGHT, 0, bias=BIAS), expected)
    assert error(function(inp=X, weights=shuffled(WEIGHT), solidx=3, bias=BIAS, bpreshuffle=True), expected) < 0.01


def test_spelled_functions_are_traced_as_one(aiter):
    """A compiled graph has one op for a call by AITER's keywords."""
    compiled = torch.compile(
        lambda x: aiter.gemm_a16w16(A=x, B=WEIGHT) + aiter.tgemm.mm(inp=x, weights=WEIGHT), backend="eager", fullgraph=True
    )

    assert torch.equal(compiled(X), 2 * tunedgemm.gemm_a16w16(X, WEIGHT))


def test_block_scales_with_a_shuffled_weight(aiter):
    """isBpreshuffled declares shuffled bytes, with the scales of x in rows; out is written."""
    operands, out = blocks(), torch.empty(M, N, dtype=torch.bfloat16)
    plain = aiter.gemm_a8w8_blockscale(**operands)

    assert error(aiter.gemm_a8w8_blockscale(**(operands | {"WQ": shuffled(operands["WQ"])}), isBpreshuffled=True), plain) < 0.01
    assert aiter.gemm_a8w8_blockscale_bpreshuffle(**transposed(operands), out=out) is out
    assert error(out, plain) < 0.01


def test_plain_bytes_of_mxfp4_are_shuffled_bytes(aiter):
    """gemm_a4w4 reads a plain weight as shuffled, as AITER does; with bpreshuffle=False as plain."""
    expected = X.double() @ WEIGHT.double().t()
    (xq, x_scale), (wq, w_scale) = (tunedgemm.per_1x32_f4_quant(one) for one in (X, WEIGHT))

    assert error(aiter.gemm_a4w4(**fours()), expected) < 0.25
    assert error(aiter.ops.triton.gemm.basic.gemm_afp4wfp4.gemm_afp4wfp4(xq, wq, x_scale, w_scale), expected) < 0.25


@pytest.mark.parametrize("rows", [256, 288])
@pytest.mark.parametrize("bpreshuffle", [True, False])
def test_scales_of_mxfp4_are_shuffled_whatever_the_weight_is(aiter, rows, bpreshuffle):
    """Plain tensors hold shuffled scales, as in AITER, padded to 256 rows or to 32 as older engines do."""
    x, weight = (torch.randn(size, 256, generator=torch.Generator().manual_seed(size)) for size in (rows, rows))
    (xq, x_scale), (wq, w_scale) = (tunedgemm.per_1x32_f4_quant(one) for one in (x, weight))
    expected = tunedgemm.dequant_fp4(xq, x_scale, torch.float64) @ tunedgemm.dequant_fp4(wq, w_scale, torch.float64).t()
    raw = [tunedgemm.shuffle_scale(scale).plain[:rows].clone() for scale in (x_scale, w_scale)]

    out = aiter.gemm_a4w4(xq, shuffled(wq) if bpreshuffle else wq, *raw, bpreshuffle=bpreshuffle)
    assert error(out, expected) < 2.0**-8
    with pytest.raises(OperandError, match=r"multiple of 32 rows of 8 \(got \(33, 8\)\); shuffle_scale"):
        aiter.gemm_a4w4(xq, wq, raw[0][:33], raw[1], bpreshuffle=False)


def test_the_device_is_described(aiter):
    """get_gfx, get_cu_num and the others describe the present device; the logger is the project's."""
    chip, common = (importlib.import_module(f"aiter.{name}") for name in ("jit.utils.chip_info", "ops.gemm_op_common"))
    device = current_device()

    assert (aiter.get_gfx(), chip.get_gfx_runtime(), chip.get_gfx_list()) == (device.gfx, device.gfx, [device.gfx])
    assert (chip.get_cu_num(), chip.get_device_name()) == (device.cu_num, device.name)
    assert aiter.logger.name == "tunedgemm"
    assert common.get_padded_m(1000, 4096, 512, 0) == 1024


def test_paths_of_tables(aiter, monkeypatch, tmp_path):
    """AITER_CONFIGS has the table that tuning writes to, for each variable."""
    configs = importlib.import_module("aiter.jit.core").AITER_CONFIGS
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(tmp_path / "own.csv"))

    assert str(tmp_path / "own.csv") == configs.AITER_CONFIG_GEMM_BF16_FILE
    with pytest.raises(AttributeError, match="AITER_CONFIG_GDN_K5_OPT_FILE: unknown"):
        _ = configs.AITER_CONFIG_GDN_K5_OPT_FILE


def test_names_of_plugins(aiter, monkeypatch):
    """gradlib's functions are those of the installed plugin that has them; without it the name is missing."""
    assert aiter.hipb_mm.__module__.startswith("tunedgemm_hipblaslt")
    del aiter.hipb_mm
    monkeypatch.setattr("tunedgemm_aiter_names.metadata.entry_points", lambda group: ())

    with pytest.raises(AttributeError, match="hipb_mm: no installed plugin serves it"):
        _ = aiter.hipb_mm


@pytest.mark.parametrize("dtype", [FP8, torch.int8], ids=str)
def test_a_weight_padded_in_k(aiter, dtype):
    """`gemm_a8w8_bpreshuffle` pads x as AITER does; the result is that of the weight without padding."""
    gemm = importlib.import_module("aiter.ops.gemm_op_a8w8").gemm_a8w8_bpreshuffle
    (xq, x_scale), (wq, w_scale) = (tunedgemm.pertoken_quant(one[:, :448].contiguous(), quant_dtype=dtype) for one in (X, WEIGHT))
    weight = importlib.import_module("aiter.ops.shuffle").shuffle_weight(wq, pad_k_to=128)
    assert weight.aiter_padded_k == 512
    padded, plain = (gemm(xq, one, x_scale, w_scale, dtype=torch.float32) for one in (weight, tunedgemm.shuffle_weight(wq)))
    assert error(padded, plain) < 1e-6

"""Quantisation against scalar definitions written independently, its inverse, zeros, NaN,
infinities and tails."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats import quant
from tunedgemm.ops.formats.mxfp4 import as_fp4, dequant_fp4, per_1x32_f4_quant
from tunedgemm.ops.formats.quant import dequant_blocks, dequant_rows, per_1x128_quant, per_block_quant, per_tensor_quant, pertoken_quant
from tunedgemm.ops.formats.scales import shuffle_scale, transposed_scale, unshuffle_scale, untransposed_scale
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.testing.listed import listed

DTYPES = {"int8": torch.int8, "fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e4m3fnuz": torch.float8_e4m3fnuz}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
#: half a step at the largest value, relative to it: int8 has steps of 1, e4m3 3 bits of fraction
STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4, torch.float8_e4m3fnuz: 2**-4}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
every_dtype = listed("dtype", DTYPES.values())


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Normal values, each row of another magnitude."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (made * torch.logspace(-3, 3, shape[-2] if len(shape) > 1 else 1)[:, None]).to(dtype).view(shape)


def plain(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


@pytest.fixture(params=[None, 96], ids=["one slice", "slices of 96"])
def sliced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in slices as small as large tensors are to the real ones."""
    if request.param:
        monkeypatch.setattr(quant, "_SLICE", request.param)


@every_dtype
@pytest.mark.usefixtures("sliced")
def test_each_row_has_its_scale_and_reads_back_within_a_step(dtype: torch.dtype):
    """pertoken_quant: scale = amax / largest, values within half a step of x / scale;
    x is unchanged."""
    for source in (torch.bfloat16, torch.float32):
        x = normal(3, 5, 200, dtype=source)
        before = x.clone()
        q, scale = pertoken_quant(x, quant_dtype=dtype)
        assert torch.equal(x, before)
        assert (q.shape, q.dtype, scale.shape, scale.dtype) == (x.shape, dtype, (3, 5, 1), torch.float32)
        torch.testing.assert_close(scale, x.float().abs().amax(-1, keepdim=True) / LARGEST[dtype])
        assert q.float().abs().amax(-1).eq(LARGEST[dtype]).all()
        error = (dequant_rows(q, scale) - x.float()).abs().amax(-1, keepdim=True)
        assert (error <= STEP[dtype] * 1.001 * x.float().abs().amax(-1, keepdim=True)).all()


@every_dtype
@pytest.mark.usefixtures("sliced")
def test_a_tensor_has_one_scale(dtype: torch.dtype):
    """per_tensor_quant: one scale [1] from the largest value of all."""
    x = normal(2, 7, 64)
    q, scale = per_tensor_quant(x, quant_dtype=dtype)
    assert (q.shape, q.dtype, scale.shape) == (x.shape, dtype, (1,))
    torch.testing.assert_close(scale, (x.float().abs().amax() / LARGEST[dtype]).view(1))
    assert (dequant_rows(q, scale) - x.float()).abs().amax() <= STEP[dtype] * 1.001 * x.float().abs().amax()


@every_dtype
def test_a_given_scale_is_used_and_larger_values_saturate(dtype: torch.dtype):
    """Static scales: values beyond the largest and infinities saturate; NaN is NaN in fp8 and 0 in int8."""
    top = LARGEST[dtype]
    x = torch.tensor([[1.0, -2.0, 3 * top, -math.inf, math.inf, math.nan, 0.0, 0.5]])
    for q, scale in (
        per_tensor_quant(x, torch.tensor(0.5), quant_dtype=dtype),
        pertoken_quant(x, torch.tensor([0.5]), quant_dtype=dtype),
        pertoken_quant(x, torch.tensor([[0.5]]), quant_dtype=dtype),
    ):
        assert scale.flatten().tolist() == [0.5]
        expected = [2.0, -4.0, top, -top, top, 0.0 if dtype is torch.int8 else math.nan, 0.0, 1.0]
        assert q.float()[0].tolist() == pytest.approx(expected, nan_ok=True)


def test_int8_is_rounded_to_nearest_with_ties_to_even():
    """Where AITER's torch route truncates, values go to the nearest integer."""
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 0.6, -0.6, 127.0]])
    assert pertoken_quant(x, torch.ones(1))[0].tolist() == [[0, 2, 2, 0, -2, 1, -1, 127]]


@every_dtype
@listed("shape", [(3, 128), (2, 3, 200), (1, 1), (5, 129), (0, 256), (256,)], ids=str)
@pytest.mark.usefixtures("sliced")
def test_blocks_of_a_row_have_scales_tails_included(shape: tuple[int, ...], dtype: torch.dtype):
    """per_1x128_quant equals pertoken_quant of each piece of 128 or less of a row."""
    x = normal(*shape) if shape[0] else torch.zeros(shape, dtype=torch.bfloat16)
    q, scale = per_1x128_quant(x, dtype)
    assert (q.shape, scale.shape) == (x.shape, (*shape[:-1], -(-shape[-1] // 128)))
    for place, start in enumerate(range(0, shape[-1], 128)):
        part, own = pertoken_quant(x[..., start : start + 128], quant_dtype=dtype)
        assert torch.equal(plain(q[..., start : start + 128].contiguous()), plain(part))
        assert torch.equal(scale[..., place : place + 1], own)
    assert torch.equal(dequant_blocks(q, scale), q.float() * scale.repeat_interleave(128, -1)[..., : shape[-1]])


@every_dtype
@listed("shape", [(128, 128), (256, 384), (130, 100), (3, 129, 200), (2, 1, 1), (2, 0, 128), (1, 128)], ids=str)
@pytest.mark.usefixtures("sliced")
def test_square_blocks_have_scales_tails_included(shape: tuple[int, ...], dtype: torch.dtype):
    """per_block_quant equals per_tensor_quant of each block of 128x128 or less."""
    x = normal(*shape, dtype=torch.float32) if shape[-2] else torch.zeros(shape)
    before = x.clone()
    q, scale = per_block_quant(x, dtype)
    assert torch.equal(x, before)
    n, k = shape[-2:]
    assert (q.shape, scale.shape) == (x.shape, (*shape[:-2], -(-n // 128), -(-k // 128)))
    for source, values, scales in zip(*(list(t.flatten(0, -3)) if t.dim() > 2 else [t] for t in (x, q, scale)), strict=True):
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                part, own = per_tensor_quant(source[block], quant_dtype=dtype)
                assert torch.equal(plain(values[block].contiguous()), plain(part)) and scales[i, j] == own
    wide = scale.repeat_interleave(128, -1)[..., :k].repeat_interleave(128, -2)[..., :n, :]
    assert torch.equal(dequant_blocks(q, scale, block=(128, 128)), q.float() * wide)


def e8m0_of(top: float) -> int:
    """Byte of the smallest power of two that is not below top / 6, in exact arithmetic, of a normal range."""
    return max(1, math.ceil(math.log2(top / 6)) + 127) if math.frexp(top)[0] != 0.75 else math.frexp(top)[1] - 3 + 127


def e2m1_of(value: float) -> float:
    """Nearest value of e2m1, a tie going to the even code."""
    return min(range(8), key=lambda code: (abs(E2M1[code] - abs(value)), code % 2))


def test_fp4_is_rounded_to_the_nearest_with_ties_to_even():
    """Ties and a grid between them match a scalar search;
    each group's largest is 6, so the scale is 1."""
    grid = torch.arange(0, 6 * 32 + 1).float() / 32
    grid = torch.cat([grid, torch.nextafter(grid, torch.tensor(7.0)).clamp(max=6), torch.nextafter(grid, torch.tensor(-1.0)).clamp(min=0)])
    groups = [torch.cat([part, torch.full((32 - len(part),), 6.0)]) for part in grid.split(31)]
    x = torch.stack(groups)
    for sign in (1, -1):
        q, scale = per_1x32_f4_quant(sign * x)
        assert plain(scale).eq(127).all()
        codes = torch.stack((plain(q) & 15, plain(q) >> 4), -1).view(x.shape)  # the even element in the low nibble
        assert codes.tolist() == [[e2m1_of(v) | (8 if sign < 0 else 0) for v in row] for row in x.tolist()]


def test_the_scale_of_fp4_is_amax_over_6_rounded_up_to_a_power_of_two():
    """Over all magnitudes of float32, at six times a power of two and one bit away;
    nothing saturates."""
    chance = random.Random(4)
    tops = [6.0 * 2.0**e for e in range(-120, 125)] + [chance.uniform(1, 2) * 2.0 ** chance.randint(-120, 126) for _ in range(500)]
    top = torch.tensor(tops)
    top = torch.cat([top, torch.nextafter(top, torch.tensor(0.0)), torch.nextafter(top, torch.tensor(math.inf))])
    x = torch.zeros(len(top), 32)
    x[:, 5] = top
    q, scale = per_1x32_f4_quant(x)
    assert plain(scale)[:, 0].tolist() == [e8m0_of(value) for value in top.tolist()]
    assert (dequant_fp4(q, scale, torch.float64)[:, 5] * 0.75 <= top.double()).all()


def test_fp4_at_the_ends_of_float32():
    """The largest float has scale byte 253; subnormals have 1, values that vanish when divided by 6
    have 0, zeros give zeros."""
    tops = [torch.finfo(torch.float32).max, 2.0**-140, 2.0**-147, 3 * 2.0**-149, 0.0]
    x = torch.zeros(len(tops), 32)
    x[:, 0] = torch.tensor(tops)
    q, scale = per_1x32_f4_quant(x)
    assert plain(scale)[:, 0].tolist() == [253, 1, 1, 0, 0]
    assert dequant_fp4(q, scale)[1:].eq(0).all()
    assert dequant_fp4(q, scale, torch.float64)[0, 0] == 2.0**128  # to the nearest of e2m1: beyond float32 again


def test_every_byte_of_fp4_and_e8m0_has_its_value():
    """dequant_fp4 of all 256 pairs and 256 scales follows the formats' definitions; 255 is NaN."""
    pairs = torch.arange(256, dtype=torch.uint8).view(16, 16)
    found = dequant_fp4(pairs, torch.full((16, 1), 127, dtype=torch.uint8))
    signed = [*E2M1, *(-value for value in E2M1)]
    expected = [[signed[nibble] for byte in row for nibble in (byte & 15, byte >> 4)] for row in pairs.tolist()]
    assert found.tolist() == expected and torch.equal(found.signbit(), torch.tensor(expected).signbit())
    ones = as_fp4(torch.full((256, 16), 0x22, dtype=torch.uint8))
    values = dequant_fp4(ones, torch.arange(256, dtype=torch.uint8)[:, None], torch.float64)
    assert values[:255, 0].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255].isnan().all()


@pytest.mark.parametrize(
    "quantise",
    [
        pytest.param(lambda x, dtype: pertoken_quant(x, quant_dtype=dtype), id="row"),
        pytest.param(lambda x, dtype: per_tensor_quant(x, quant_dtype=dtype), id="tensor"),
        pytest.param(per_1x128_quant, id="1x128"),
        pytest.param(per_block_quant, id="128x128"),
    ],
)
@every_dtype
def test_zeros_have_scale_one_and_non_finite_values_read_back_as_nan(quantise: Callable[..., Any], dtype: torch.dtype):
    """A group of zeros, or one that vanishes when divided, has scale 1; one with NaN or inf has
    values 0 and no finite scale."""
    for value in (0.0, 1e-45):
        q, scale = quantise(torch.full((2, 64), value), dtype)
        assert q.float().eq(0).all() and scale.eq(1).all()
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(2, 64)
        x[1, 3] = bad
        q, scale = quantise(x, dtype)
        assert q[1].float().eq(0).all() and not scale.flatten()[-1].isfinite()
        assert (dequant_rows(q[1:], scale.flatten()[-1:])).isnan().all()
        if scale.numel() == 2:  # the other group is as if nothing were
            assert dequant_rows(q[:1], scale.flatten()[:1]).allclose(torch.ones(1, 64))


def test_fp4_scales_are_shuffled_over_all_rows():
    """per_1x32_f4_quant(shuffle=True) gives shuffled scales
    [rows, K/32] of a tensor with leading dimensions."""
    x = normal(3, 50, 64)
    (q, scale), (same_q, shuffled) = per_1x32_f4_quant(x), per_1x32_f4_quant(x, shuffle=True)
    assert torch.equal(plain(q), plain(same_q)) and shuffled.shape == (256, 8)
    assert torch.equal(plain(unshuffle_scale(shuffled, 150, 2)), plain(scale).view(150, 2))


def test_a_transposed_scale_keeps_its_shape_and_transposes_its_memory():
    """transposed_scale puts element (m, g) at g * M + m and untransposed_scale inverts it; leading
    dimensions are rows."""
    for shape in ((5, 3), (2, 5, 3), (1, 4), (4, 1)):
        scale = torch.randn(shape)
        turned = transposed_scale(scale)
        assert turned.shape == scale.shape and turned.is_contiguous()
        assert torch.equal(turned.flatten(), scale.view(-1, shape[-1]).t().flatten())
        assert torch.equal(untransposed_scale(turned), scale)
    with pytest.raises(OperandError, match=r"is contiguous \(got \(3, 5\) with strides \(1, 3\)\)"):
        untransposed_scale(torch.randn(5, 3).t())


@every_dtype
def test_scales_of_rows_come_in_any_shape(dtype: torch.dtype):
    """dequant_rows takes [M], [M, 1], [1, M] or one value;
    float64 multiplies in float64, bf16 rounds once."""
    x = normal(6, 32)
    q, scale = pertoken_quant(x, quant_dtype=dtype)
    for form in (scale, scale.flatten(), scale.t()):
        assert torch.equal(dequant_rows(q, form), q.float() * scale)
    assert torch.equal(dequant_rows(q, scale, torch.float64), q.double() * scale.double())
    assert torch.equal(dequant_rows(q, scale, torch.bfloat16), (q.float() * scale).bfloat16())
    for one in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]])):
        assert torch.equal(dequant_rows(q, one), q.float() * 0.5)


def test_strided_and_empty_inputs_are_taken():
    """Transposed and sliced tensors quantise like contiguous ones,
    no rows give none, and gradients are dropped."""
    x = normal(64, 96, dtype=torch.float32)
    strided: list[Callable[[torch.Tensor], Any]] = [pertoken_quant, per_tensor_quant, per_1x128_quant, per_block_quant, per_1x32_f4_quant]
    for quantise in strided:
        for view in (x.t(), x[:, :64], x[::2], x.view(8, 8, 96).transpose(0, 1)):
            got, expected = quantise(view), quantise(view.contiguous())
            assert all(torch.equal(plain(a), plain(b)) for a, b in zip(got, expected, strict=True))
        q, scale = quantise(torch.zeros(0, 64))
        assert q.shape[0] == 0 and (scale.numel() == 0 or scale.tolist() == [1.0])
        assert not any(t.requires_grad for t in quantise(x.clone().requires_grad_()))


def test_the_arguments_are_aiters():
    """Smooth scales multiply first, scales have the requested dtype,
    and AITER's positions and keywords hold."""
    x, smooth = normal(6, 64), torch.rand(64) + 0.5
    for got in (pertoken_quant(x, x_scale=smooth), pertoken_quant(x, None, smooth, torch.float32, torch.int8)):
        for one, other in zip(got, pertoken_quant(x.float() * smooth), strict=True):
            assert torch.equal(one, other)
    assert pertoken_quant(x, scale_dtype=torch.bfloat16)[1].dtype == torch.bfloat16
    assert per_tensor_quant(x, None, torch.float16, torch.int8)[1].dtype == torch.float16
    plain_scales, shuffled = per_1x32_f4_quant(x)[1], per_1x32_f4_quant(x, None, torch.float4_e2m1fn_x2, True)[1]
    assert torch.equal(plain(unshuffle_scale(shuffled, 6, 2)), plain(plain_scales))


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "dtype of x": (lambda: pertoken_quant(torch.ones(2, 2, dtype=torch.int32)), r"takes bf16, fp16, fp32 or fp64 \(got torch.int32\)"),
    "quant_dtype": (lambda: pertoken_quant(torch.ones(2, 2), quant_dtype=torch.uint8), r"are int8 and float8_e4m3fn.*got torch.uint8"),
    "scalar": (lambda: pertoken_quant(torch.tensor(1.0)), r"1 or more dimensions .*got \(\)"),
    "no columns": (lambda: per_1x128_quant(torch.ones(2, 0)), r"not empty \(got \(2, 0\)\)"),
    "one dimension": (lambda: per_block_quant(torch.ones(128)), r"2 or more dimensions .*got \(128,\)"),
    "scale of rows": (lambda: pertoken_quant(torch.ones(4, 2), torch.ones(3)), r"row of \(4, 2\) has 4 values \(got shape \(3,\)\)"),
    "scale of a tensor": (lambda: per_tensor_quant(torch.ones(4, 2), torch.ones(4)), r"one value \(got shape \(4,\)\); pertoken_quant"),
    "smooth scale": (lambda: pertoken_quant(torch.ones(4, 2), x_scale=torch.ones(4)), r"2 values, one a column \(got shape \(4,\)\)"),
    "scale of fp4": (lambda: per_1x32_f4_quant(torch.ones(2, 32), torch.ones(2, 1)), "takes its scales from the values"),
    "dtype of fp4": (lambda: per_1x32_f4_quant(torch.ones(2, 32), quant_dtype=torch.int8), "quant_dtype torch.int8"),
    "K of fp4": (lambda: per_1x32_f4_quant(torch.ones(2, 48)), r"K must be a multiple of 32 \(got K=48\)"),
    "dequant rows": (lambda: dequant_rows(torch.ones(4, 2, dtype=torch.int8), torch.ones(3)), "has 4 values"),
    "dequant dtype": (lambda: dequant_rows(torch.ones(4, 2), torch.ones(4)), "got torch.float32"),
    "dequant 1x128": (
        lambda: dequant_blocks(torch.ones(4, 200, dtype=torch.int8), torch.ones(4, 1)),
        r"1x128 blocks of \(4, 200\) are \[4, 2\] \(got \(4, 1\)\)",
    ),
    "dequant 128x128": (
        lambda: dequant_blocks(torch.ones(2, 129, 200, dtype=torch.int8), torch.ones(2, 2), block=(128, 128)),
        r"128x128 blocks of \(2, 129, 200\) are \[2, 2, 2\] \(got \(2, 2\)\)",
    ),
    "dequant 128x128 of a vector": (
        lambda: dequant_blocks(torch.ones(8, dtype=torch.int8), torch.ones(1), block=(128, 128)),
        "of a tensor",
    ),
    "fp4 scale": (
        lambda: dequant_fp4(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(256, 8, dtype=torch.uint8)),
        r"\[4, 2\] \(got \(256, 8\)\); unshuffle_scale",
    ),
    "fp4 K": (lambda: dequant_fp4(torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8)), "K=16 is no multiple of 32"),
    "fp4 dtype": (lambda: as_fp4(torch.zeros(4, 8, dtype=torch.int8)), r"are torch.float4_e2m1fn_x2 or torch.uint8 \(got torch.int8\)"),
    "e8m0 dtype": (lambda: shuffle_scale(torch.ones(2, 2)), r"are torch.float8_e8m0fnu or torch.uint8 \(got torch.float32\)"),
    "e8m0 dimensions": (lambda: shuffle_scale(torch.zeros(2, dtype=torch.uint8)), r"\[..., K/32\] \(got shape \(2,\)\)"),
    "unshuffle": (
        lambda: unshuffle_scale(torch.zeros(256, 8, dtype=torch.uint8), 257, 8),
        r"scale of \[257, 8\] is \[512, 8\] \(got \(256, 8\)\)",
    ),
    "transposed scalar": (lambda: transposed_scale(torch.tensor(1.0)), "one or more dimensions"),
    "shuffled": (
        lambda: dequant_rows(shuffle_weight(torch.ones(32, 32, dtype=torch.int8)), torch.ones(1)),
        r"layout aiter16x16.*unshuffle_weight\(w\) first",
    ),
}


@listed(("use", "match"), WRONG.values(), ids=WRONG.keys())
def test_invalid_arguments_are_refused_and_named(use: Callable[[], object], match: str):
    """Wrong dtypes, sizes, scales and shuffled weights are
    OperandErrors that name the given and valid ones."""
    with pytest.raises(OperandError, match=match):
        use()


@pytest.mark.gpu
def test_the_gpu_matches_the_cpu():
    """Every function on the GPU, captured or not,
    matches the CPU within a rounding step, and fp4 exactly."""
    x = normal(64, 224, dtype=torch.float32)
    x[3] = 0
    x[5, 7] = math.nan
    for quantise in (per_1x32_f4_quant, lambda t: per_1x32_f4_quant(t, shuffle=True)):
        assert all(torch.equal(plain(a), plain(b.cpu())) for a, b in zip(quantise(x), quantise(x.cuda()), strict=True))
    q, e8m0 = per_1x32_f4_quant(x)
    torch.testing.assert_close(dequant_fp4(q.cuda(), e8m0.cuda()).cpu(), dequant_fp4(q, e8m0), rtol=0, atol=0, equal_nan=True)
    for dtype in DTYPES.values():
        for block in ((1, 128), (128, 128)):
            on_gpu = dequant_blocks(*per_block_quant(x.cuda(), dtype, block), block=block).cpu()
            on_cpu = dequant_blocks(*per_block_quant(x, dtype, block), block=block)
            assert torch.equal(on_gpu.isnan(), on_cpu.isnan())
            largest = x.nan_to_num().abs().amax()
            assert ((on_gpu - on_cpu).nan_to_num().abs() <= 2 * STEP[dtype] * largest).all()
    held = torch.randn(32, 256, device="cuda")
    calls: list[Callable[[], Any]] = [
        lambda: pertoken_quant(held), lambda: per_tensor_quant(held), lambda: per_1x128_quant(held), lambda: per_1x32_f4_quant(held),
        lambda: (dequant_fp4(*per_1x32_f4_quant(held)), dequant_blocks(*per_1x128_quant(held))),
    ]  # fmt: skip
    for call in calls:
        expected = call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(plain(a), plain(b)) for a, b in zip(got, expected, strict=True))


@listed("order", ["m_major", "m_major_padded"])
@listed("shape", [(61, 300), (64, 256), (3, 128), (1, 392), (2, 3, 200), (0, 256), (256,)], ids=str)
@pytest.mark.usefixtures("sliced")
def test_scales_are_written_in_their_order(shape: tuple[int, ...], order: str):
    """per_1x128_quant gives the same values with scales in any order."""
    x = normal(*shape) if shape[0] else torch.zeros(shape, dtype=torch.bfloat16)
    q, scale = per_1x128_quant(x, scale_order=order)
    plain_q, row_major = per_1x128_quant(x)
    m, blocks = (shape[:-1] and math.prod(shape[:-1])) or 1, -(-shape[-1] // 128)
    assert torch.equal(plain(q), plain(plain_q)) and torch.equal(scale, row_major)
    if scale.numel():
        assert scale.reshape(-1, blocks).stride()[1] in (m if order == "m_major" else -(-m // 4) * 4, 1)
        assert scale.untyped_storage().nbytes() == 4 * blocks * (m if order == "m_major" else -(-m // 4) * 4)


def test_an_unknown_order_of_scales():
    """The error names the allowed words."""
    with pytest.raises(OperandError, match="scale_order must be row, m_major, m_major_padded \\(got 'column'\\)"):
        per_1x128_quant(torch.ones(2, 128), scale_order="column")


def test_m_major_scales_need_no_transposing_copy():
    """Scales of AITER's transposed form are a view of M-major ones."""
    x = normal(6, 300)
    scale = per_1x128_quant(x, scale_order="m_major")[1]
    assert transposed_scale(scale).data_ptr() == scale.data_ptr()
    assert torch.equal(transposed_scale(scale), transposed_scale(per_1x128_quant(x)[1]))


@listed("function", [pertoken_quant, per_tensor_quant])
def test_a_smaller_largest_value(function):
    """With dtypeMax the largest magnitude becomes that value; one that the dtype lacks is refused."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    q, scale = function(x, quant_dtype=torch.int8, dtypeMax=7)
    assert int(q.abs().max()) == 7
    assert float((q * scale - x).abs().max()) <= float(scale.max()) / 2 + 1e-6
    for wrong in (0, 128):
        with pytest.raises(OperandError, match=f"dtypeMax must be above 0 and at most the 127 of torch.int8 .got {wrong}"):
            function(x, quant_dtype=torch.int8, dtypeMax=wrong)

"""Formats of weights alone: stored layouts, decoded values, exactness, and nearest codes."""

import math
import re

import attrs
import pytest
import torch
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.weight_only import Weight, decode, pack, quantise, unpack
from tunedgemm.ops.weight_formats import FORMATS
from tunedgemm.testing.listed import listed

PACKED = [name for name, form in FORMATS.items() if form.dtypes == ("int32",)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
#: AWQ's places of eight neighbours along N in an element, lowest bits first.
AWQ = [0, 4, 1, 5, 2, 6, 3, 7]
N, K = 16, 64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def words(*sizes):
    """Any int32 elements, negative ones among them."""
    return torch.randint(-(1 << 31), 1 << 31, sizes, generator=generator()).to(torch.int32)


def nibble(word, place):
    return (int(word) >> 4 * place) & 15


def byte(word, place):
    return (int(word) >> 8 * place) & 255


def drawn_packed(name, group, n=N, k=K):
    """A weight of random bits in checkpoint layout, with a zero and a NaN scale."""
    groups, across, per = k // (group or k), -(-n // 8), 4 if "int8" in name else 8
    is_ct, has_zeros = name.startswith("ct"), "_zp" in name or name.startswith("awq")
    scale = torch.rand(groups, n, generator=generator()) + 0.5
    scale[0, 1], scale[-1, 2] = 0.0, math.nan
    weight = words(n, k // per) if is_ct else words(k, n // 8) if name.startswith("awq") else words(k // per, n)
    zeros = words(across, groups) if is_ct else words(groups, across)
    index = torch.randint(0, groups, (k,), generator=generator()).to(torch.int32) if name.endswith("_order") else None
    return Weight(weight, scale.t().contiguous() if is_ct else scale, zeros if has_zeros else None, index)


def value_of(name, stored, group, n, k):
    """Decode one element from the description of its checkpoint."""
    g = k // (group or K) if stored.w_index is None else int(stored.w_index[k])
    if "int8" in name:
        at, of_group = ((n, k // 4), (n, g)) if name == "ct_int8" else ((k // 4, n), (g, n))
        word, scale = stored.weight[at], stored.w_scale[of_group]
        return (byte(word, k % 4) - 128) * float(scale)
    if name.startswith("ct"):
        code, scale = nibble(stored.weight[n, k // 8], k % 8), float(stored.w_scale[n, g])
        zero = 8 if stored.w_zeros is None else nibble(stored.w_zeros[n // 8, g], n % 8)
    elif name.startswith("awq"):
        code, scale = nibble(stored.weight[k, n // 8], AWQ[n % 8]), float(stored.w_scale[g, n])
        zero = nibble(stored.w_zeros[g, n // 8], AWQ[n % 8])
    else:
        code, scale = nibble(stored.weight[k // 8, n], k % 8), float(stored.w_scale[g, n])
        less = "_v2" not in name  # the first checkpoint format stores zero points minus 1
        zero = 8 if stored.w_zeros is None else (nibble(stored.w_zeros[g, n // 8], n % 8) + less) % 16
    return (code - zero) * scale


@listed(("name", "group"), [(name, group) for name in PACKED for group in (32, 64, 0)])
def test_packed_integers_against_the_checkpoints_layout(name, group):
    """Each element is found at its bits, with the scale and zero point of its group."""
    for n in (N, 8 if name.startswith("awq") else 11):  # odd N leaves places of the last zero points free
        stored = drawn_packed(name, group, n)
        wanted = [[value_of(name, stored, group, row, k) for k in range(K)] for row in range(n)]
        torch.testing.assert_close(
            decode(FORMATS[name], stored, torch.float64), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=0, equal_nan=True
        )


@listed("name", ["mxfp4", "nvfp4"])
def test_fp4_against_the_definition(name):
    """The low nibble is the even element; a byte 255 of e8m0 and a NaN of e4m3 give NaN, zero gives zero."""
    group, n = FORMATS[name].groups[0], 7
    weight = torch.randint(0, 256, (n, K // 2), generator=generator(), dtype=torch.uint8)
    scale = torch.rand(n, K // group, generator=generator()).mul_(4).to(torch.float8_e4m3fn)
    scale[0, 0], scale[1, 1] = 0.0, math.nan
    if name == "mxfp4":
        scale = torch.randint(100, 150, (n, K // group), generator=generator(), dtype=torch.uint8)
        scale[1, 1] = 255
    factors = (scale.view(torch.float8_e8m0fnu) if name == "mxfp4" else scale).double().repeat_interleave(group, 1)
    codes = [[int(weight[row, k // 2]) >> 4 * (k % 2) & 15 for k in range(K)] for row in range(n)]
    wanted = torch.tensor([[E2M1[code & 7] * (-1 if code & 8 else 1) for code in row] for row in codes]).double() * factors
    found = decode(FORMATS[name], Weight(weight, scale), torch.float64)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert found[1, group : 2 * group].isnan().all()
    assert bool(found[0, :group].any()) is (name == "mxfp4")
    as_pairs = decode(FORMATS[name], Weight(weight.view(torch_dtype("fp4x2")), scale), torch.float64)
    torch.testing.assert_close(as_pairs, found, rtol=0, atol=0, equal_nan=True)


def test_bytes_against_the_definition():
    """int8 and fp8 have their values; scales are by row, tensor, block of 128 x 128, or 32 of K."""
    n, k = 131, 256
    values = torch.randn(n, k, generator=generator()) * 30
    rows, cols = torch.arange(n)[:, None], torch.arange(k)
    for name, sizes, of in (
        ("int8_channel", (n, 1), lambda scale: scale),
        ("fp8_channel", (n, 1), lambda scale: scale),
        ("fp8_tensor", (), lambda scale: scale),
        ("fp8_block", (2, 2), lambda scale: scale[rows // 128, cols // 128]),
        ("mxfp8", (n, 8), lambda scale: scale[rows, cols // 32]),
    ):
        weight, scale = values.to(torch_dtype(FORMATS[name].dtypes[0])), torch.rand(sizes, generator=generator()) + 0.5
        scale = scale.log2().round().exp2().to(torch.float8_e8m0fnu) if name == "mxfp8" else scale
        assert torch.equal(decode(FORMATS[name], Weight(weight, scale), torch.float64), weight.double() * of(scale.double())), name
        if scale.numel() == 1:
            assert torch.equal(decode(FORMATS[name], Weight(weight, scale.view(1))), decode(FORMATS[name], Weight(weight, scale)))


@listed("name", FORMATS)
def test_codes_come_back(name):
    """Every code in every place of an element, along either dimension, is packed and unpacked."""
    form = FORMATS[name]
    if form.per == 1:
        return
    codes = torch.arange(1 << form.bits, dtype=torch.uint8).repeat(form.per + 1, form.per)[:, torch.randperm((1 << form.bits) * form.per)]
    for along, size in (("k", codes), ("n", codes.t())):
        stored = pack(size, form, along)
        assert stored.dtype is torch_dtype(form.dtypes[-1]) and stored.is_contiguous()
        rest = unpack(stored, form, along)
        assert torch.equal(rest[: size.shape[0], : size.shape[1]], size) and not rest[size.shape[0] :].any()


@listed(("name", "dtype"), [(name, dtype) for name, form in FORMATS.items() for dtype in form.exact])
def test_every_value_times_every_scale_is_exact(name, dtype):
    """All codes with all scales, except where e8m0 leaves the dtype's range of exponents."""
    form = FORMATS[name]
    scale = torch.arange(256, dtype=torch.uint8).view(torch_dtype(form.scale[0]))
    if form.bits == 8:
        weight = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(torch.float8_e4m3fn)
    else:
        weight = pack(torch.arange(16).repeat(256, 2), form, "k")
    stored = Weight(weight, scale[:, None].view(torch.uint8).expand(256, -(-weight.shape[1] * form.per // form.groups[0])).contiguous())
    stored = attrs.evolve(stored, w_scale=stored.w_scale.view(scale.dtype))
    rounded, wanted = decode(form, stored, torch_dtype(dtype)).double(), decode(form, stored, torch.float64)
    inside = (wanted == 0) | wanted.isnan() | ((wanted.abs() >= 2.0**-126) & (wanted.abs() < 2.0**128))
    assert inside.double().mean() > (0.99 if name == "nvfp4" else 0.9)
    assert inside.all() or name != "nvfp4"
    torch.testing.assert_close(rounded[inside], wanted[inside], rtol=0, atol=0, equal_nan=True)


def levels(form, stored, weight):
    """All values that an element of each group could have, [N, groups, 1, values]."""
    factor = 1.0 if stored.w_global_scale is None else float(stored.w_global_scale)
    if form.values:
        values = torch.tensor(form.values)
    else:
        every = torch.arange(256, dtype=torch.uint8).view(torch_dtype(form.dtypes[0])).float()
        values = every[every.isfinite()]
    (n, k), values = weight.shape, values.double()
    scale = stored.w_scale.double().t() if form.is_kn else stored.w_scale.double()
    scale = scale.reshape(1, 1).expand(n, 1) if form.rows == 0 else scale.repeat_interleave(form.rows, 0)[:n]
    zeros = 0.0
    if stored.w_zeros is not None:
        zeros = ((unpack(stored.w_zeros, form, "n")[:n].long() + form.zeros) % (1 << form.bits))[..., None]
    every = (values - zeros) * scale[..., None] * factor
    by_k = torch.arange(k) // (k // scale.shape[1]) if stored.w_index is None else stored.w_index.long()
    return every[:, by_k]


@listed(("name", "group"), [(name, group) for name, form in FORMATS.items() for group in form.groups])
def test_values_get_their_nearest_code(name, group):
    """No other code of its group is nearer to a value; a zero row stays zero."""
    form, n, k = FORMATS[name], 24, 256
    weight = torch.randn(n, k, generator=generator()) * (torch.rand(n, 1, generator=generator()) + 0.1)
    weight[3] = 0.0
    index = None
    if form.has_index:
        index = (torch.arange(k) // (group or k))[torch.randperm(k, generator=generator())].to(torch.int32)
    stored = quantise(name, weight, group, dtype=torch.float16, index=index)
    factor = 1.0 if stored.w_global_scale is None else stored.w_global_scale.double()
    found = decode(form, stored, torch.float64) * factor
    best = (levels(form, stored, weight) - weight.double()[..., None]).abs().amin(-1)
    assert ((found - weight).abs() <= best * (1 + 1e-5) + 1e-6).all()
    assert not found[3].any()
    assert float((found - weight).norm() / weight.norm()) < (
        0.02 if form.bits == 8 and "int8" in name else 0.04 if form.bits == 8 else 0.16
    )


def test_a_zero_point_of_0_is_stored_as_15():
    """A borrow of GPTQModel's whole elements is undone in whole elements, in the format without minus 1."""
    zeros = torch.tensor([0, 5, 0, 0, 15, 1, 7, 0])
    first, second = FORMATS["gptq_int4_zp"], FORMATS["gptq_int4_zp_v2"]

    def decoded(form, words):
        weight = torch.zeros(4, 8, dtype=torch.int32)  # codes of 0, whose values are minus the zero point
        return -decode(form, Weight(weight, torch.ones(1, 8), words))[:, 0]

    stored = pack(((zeros - 1) % 16)[:, None], first, "n")
    assert torch.equal(unpack(stored, first, "n")[:, 0], torch.tensor([15, 4, 15, 15, 14, 0, 6, 15], dtype=torch.uint8))
    assert torch.equal(decoded(first, stored), zeros.float())
    borrowed = pack(zeros[:, None], second, "n") - 0x11111111
    assert torch.equal(decoded(second, borrowed + 0x11111111), zeros.float())
    assert torch.equal(decoded(first, borrowed), ((zeros - torch.tensor([0, 1, 0, 1, 1, 0, 0, 0])) % 16).float())


def test_an_index_beyond_the_groups_gives_nan():
    """Columns of other groups keep their values."""
    stored = drawn_packed("gptq_int4_zp_order", 32)
    form, index = FORMATS["gptq_int4_zp_order"], stored.w_index.clone()
    index[5], index[7] = 2, -1
    found, wanted = (decode(form, attrs.evolve(stored, w_index=each)) for each in (index, stored.w_index))
    assert found[:, [5, 7]].isnan().all()
    kept = [k for k in range(K) if k not in (5, 7)]
    torch.testing.assert_close(found[:, kept], wanted[:, kept], rtol=0, atol=0, equal_nan=True)


def test_large_weights_are_decoded_in_slices():
    """A weight of more elements than a slice has the values of its parts."""
    weight = torch.randint(-128, 128, (3, 1 << 22), dtype=torch.int8)
    scale = torch.tensor([[1.0], [2.0], [0.5]])
    found = decode(FORMATS["int8_channel"], Weight(weight, scale), torch.bfloat16)
    assert torch.equal(found, (weight.float() * scale).bfloat16())


@listed(
    ("arguments", "message"),
    [
        (("int5", torch.ones(8, 32)), "a16wn: unknown w_format (got 'int5'); use one of gptq_int4,"),
        (("gptq_int4", torch.ones(8, 32), 48), "gptq_int4 has no index and groups of 32 or 64 or 128 or 0 (got group=48, index=False)"),
        (("gptq_int4_order", torch.ones(8, 32), 32), "gptq_int4_order has an index and groups of"),
        (("gptq_int4", torch.ones(8, 40), 32), "K must be a multiple of 32 and K of 8 (got N=8, K=40); pad the weight with zeros"),
        (("awq_int4", torch.ones(9, 32), 32), "K must be a multiple of 32 and N of 8 (got N=9, K=32)"),
    ],
)
def test_weights_that_no_format_has(arguments, message):
    """Each error has the given value and the valid ones."""
    with pytest.raises(OperandError, match=re.escape(message)):
        quantise(*arguments)

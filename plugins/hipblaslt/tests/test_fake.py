"""The fake libraries compute like torch and refuse what headers and manuals exclude."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

BF16, FP16, FP32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
pytestmark = pytest.mark.nightly  # tests of a test double
BOTH = ("cublaslt", "hipblaslt")
BIAS = 4
SCALAR, OUTER, VEC128, BLK128 = 0, 3, 4, 5
#: One rounding of the result, and the error of float sums before it.
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-22}
MAX_WORKSPACE = 32 << 20


both = pytest.mark.parametrize("library", BOTH, indirect=True)
nvidia = pytest.mark.parametrize("library", ["cublaslt"], indirect=True)
amd = pytest.mark.parametrize("library", ["hipblaslt"], indirect=True)


def expect(fake: Any, library: Any, product: Any, expected: torch.Tensor) -> None:
    """Run the library's own choice and compare with float64."""
    out = product.tensors["d"]
    out.fill_(-77)
    workspace = fake.aligned(MAX_WORKSPACE)
    library.check(product.run(workspace=workspace))
    bound = ROUNDING.get(out.dtype, 0)
    torch.testing.assert_close(out.double(), expected.expand(out.shape), rtol=bound, atol=bound * expected.abs().max().item() / 16)


def reference(product: Any) -> torch.Tensor:
    """Return the product in float64."""
    return product.tensors["b"].double() @ product.tensors["a"].double().mT


FLOATS = [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32)]


@both
def test_floats(fake: Any, library: Any) -> None:
    """Float products are right for each pair of operations, with padded rows and odd sizes."""
    m, n, k = 7, 33, 71
    for (dtype, out), ops in itertools.product(FLOATS, ("tn", "nn", "nt", "tt")):
        a = fake.draw(*((n, k) if ops[0] == "t" else (k, n)), dtype=dtype)
        b = fake.draw(*((m, k) if ops[1] == "n" else (k, m)), dtype=dtype)
        padded = [torch.empty(x.shape[0], x.shape[1] + 3, dtype=x.dtype)[:, : x.shape[1]].copy_(x) for x in (a, b)]
        d = torch.full((m, n + 5), -77, dtype=out)
        product = fake.Product(library, *padded, d[:, :n], ops=ops)
        expect(fake, library, product, (b if ops[1] == "n" else b.T).double() @ (a.T if ops[0] == "t" else a).double())
        assert (d[:, n:] == -77).all(), "the padding of D is not written"


@both
def test_batches(fake: Any, library: Any) -> None:
    """The matrices of a batch are packed, share a weight, or are interleaved by rows."""
    for kind in ("packed", "shared", "interleaved"):
        x, w = fake.draw(3, 4, 32, dtype=BF16), fake.draw(3, 16, 32, dtype=BF16)
        d = torch.empty(3, 4, 16, dtype=BF16)
        if kind == "shared":
            w = w[:1].expand(3, -1, -1)
        if kind == "interleaved":
            x, d = (y.transpose(0, 1).contiguous().transpose(0, 1) for y in (x, d))
        expect(fake, library, fake.Product(library, w, x, d), x.double() @ w.double().mT)


#: dtype, output, bias.
BIASES = {
    "cublaslt": [(BF16, BF16, BF16), (BF16, FP32, FP32), (FP16, FP16, FP16), (FN, BF16, BF16), (FN, FP32, BF16)],
    "hipblaslt": [(BF16, BF16, BF16), (BF16, BF16, FP32), (FP16, FP16, FP16), (FNUZ, FP16, FP32)],
}


@both
def test_bias(fake: Any, library: Any) -> None:
    """A bias of each supported dtype is added to each row of the row-major result."""
    for dtype, out, bias_type in BIASES[library.libtype]:
        bias = fake.draw(48, dtype=bias_type)
        product = fake.linear(library, dtype, out, epilogue=BIAS, bias=bias.data_ptr(), bias_type=fake.TYPES[bias_type])
        expect(fake, library, product, reference(product) + bias.double())


@both
def test_alpha_beta_and_c(fake: Any, library: Any) -> None:
    """D = alpha A B + beta C, where C is D or has another leading dimension."""
    product = fake.linear(library, FP32)
    c = fake.draw(5, 56, dtype=FP32)
    product.alpha, product.beta = ctypes.c_float(-0.5), ctypes.c_float(2)
    product.pointers["c"], product.layouts["c"][3] = c.data_ptr(), 56
    expected = -0.5 * reference(product) + 2 * c[:, :48].double()
    expect(fake, library, product, expected)
    inplace = product.tensors["d"].copy_(c[:, :48])
    product.pointers["c"], product.layouts["c"][3] = inplace.data_ptr(), 48
    library.check(product.run(workspace=fake.aligned(MAX_WORKSPACE)))
    torch.testing.assert_close(inplace.double(), expected, rtol=1e-5, atol=1e-5)


@both
def test_a_bias_for_each_matrix_of_a_batch(fake: Any, library: Any) -> None:
    """Biases of a batch are a stride apart; without a stride all matrices share one."""
    x, w, bias = fake.draw(3, 4, 32, dtype=BF16), fake.draw(3, 16, 32, dtype=BF16), fake.draw(3, 20, dtype=BF16)
    for stride, expected in ((20, bias[:, None, :16]), (0, bias[0, :16])):
        product = fake.Product(library, w, x, torch.empty(3, 4, 16, dtype=BF16), epilogue=BIAS, bias=bias.data_ptr(), bias_stride=stride)
        expect(fake, library, product, x.double() @ w.double().mT + expected.double())
    product.desc["bias_stride"] = 15
    assert library.named(product.run()) == "INVALID_VALUE"
    assert "biases 15 apart" in library.reason()


@both
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_rounding(fake: Any, library: Any, dtype: torch.dtype) -> None:
    """Results are rounded to nearest even as in torch, including subnormals and overflow."""
    powers = torch.exp2(torch.arange(-24.0, 16.0)).to(dtype)
    w, x = torch.zeros(40, 8, dtype=dtype), torch.zeros(1, 8, dtype=dtype)
    w[:, 0], x[0, 0] = powers, 1
    product = fake.Product(library, w, x, torch.empty(1, 40, dtype=dtype))
    numbers = [
        0.0,
        -1.5,
        2.0,
        0.4999,
        1 + 2.0**-11,
        1 + 3 * 2.0**-11,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
        1.9999,
        1e38,
        float("nan"),
        float("inf"),
    ]
    for number in [*numbers, *torch.randn(50).tolist()]:
        product.alpha = ctypes.c_float(number)
        library.check(product.run())
        expected = (powers.float() * number).to(dtype)
        assert torch.equal(product.tensors["d"][0].nan_to_num(nan=-3), expected.nan_to_num(nan=-3)), number


@both
def test_int8_is_exact(fake: Any, library: Any) -> None:
    """int8 products are exact."""
    product = fake.linear(library, INT8, m=9, n=20, k=4096)
    expect(fake, library, product, reference(product))
    product.beta = ctypes.c_int32(-1)
    library.check(product.run(workspace=fake.aligned(MAX_WORKSPACE)))
    assert not product.tensors["d"].any(), "the product minus itself"


FP8 = [("cublaslt", FN), ("hipblaslt", FN), ("hipblaslt", FNUZ)]
fp8 = pytest.mark.parametrize(("library", "dtype"), FP8, indirect=["library"], ids=str)


@fp8
def test_every_fp8_value(fake: Any, library: Any, dtype: torch.dtype) -> None:
    """Each fp8 bit pattern has torch's value, including NaN."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype)
    # fp8 rows have 16 elements: a value in the first column, then zeros
    w, x = torch.zeros(256, 16, dtype=torch.uint8).view(dtype), torch.zeros(1, 16).to(dtype)
    w.view(torch.uint8)[:, 0] = values.view(torch.uint8)
    x[0, 0] = 1
    out = torch.empty(1, 256, dtype=FP32)
    library.check(fake.Product(library, w, x, out).run(workspace=fake.aligned(MAX_WORKSPACE)))
    assert torch.equal(out[0].nan_to_num(nan=1e9), values.float().nan_to_num(nan=1e9))


@fp8
def test_scales(fake: Any, library: Any, dtype: torch.dtype) -> None:
    """fp8 takes tensor scales, or row scales of activations and weight."""
    for out, mode in itertools.product((BF16, FP16, FP32), (SCALAR, OUTER)):
        x_scale, w_scale = torch.rand(5 if mode else 1) + 0.5, torch.rand(48 if mode else 1) + 0.5
        product = fake.linear(library, dtype, out, mode_a=mode, mode_b=mode, scale_a=w_scale.data_ptr(), scale_b=x_scale.data_ptr())
        expect(fake, library, product, reference(product) * x_scale.double()[:, None] * w_scale.double())


@pytest.mark.parametrize(("library", "dtype"), [("cublaslt", FN), ("hipblaslt", FNUZ)], indirect=["library"], ids=str)
def test_block_scales(fake: Any, library: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """1x128 scales have rows innermost; 128x128 scales have K innermost, padded to fours."""
    monkeypatch.setenv("FAKE_LT_BLOCKSCALES", "1")
    m, n, k, blocks = 132, 272, 5 * 128 + 64, 6
    for modes in ((BLK128, VEC128), (VEC128, VEC128), (VEC128, BLK128)):
        factors, memory = [], []
        for mode, rows in zip(modes, (n, m), strict=True):
            if mode == VEC128:
                memory.append(torch.rand(blocks, rows) + 0.5)
                factors.append(memory[-1].T)
            else:
                memory.append(torch.rand(-(-rows // 128), 8) + 0.5)
                factors.append(memory[-1][:, :blocks].repeat_interleave(128, 0)[:rows])
        addresses = {"scale_a": memory[0].data_ptr(), "scale_b": memory[1].data_ptr()}
        product = fake.linear(library, dtype, FP32, m, n, k, mode_a=modes[0], mode_b=modes[1], **addresses)
        weight, x = (
            product.tensors[name].double() * f.double().repeat_interleave(128, 1)[:, :k] for name, f in zip("ab", factors, strict=True)
        )
        expect(fake, library, product, x @ weight.T)


@amd
def test_shuffled_weights(fake: Any, library: Any) -> None:
    """A weight in AITER's layout (16, 16) is read in the tiled order of its element size."""
    for dtype, order, pack in ((BF16, 101, 8), (FP16, 101, 8), (FN, 100, 16), (FNUZ, 100, 16), (INT8, 100, 16)):
        product = fake.linear(library, dtype, n=48, k=128)
        expected = reference(product)
        tiles = product.tensors["a"].view(torch.uint8).view(3, 16, 128 // pack, 16).transpose(1, 2).contiguous()
        product.pointers["a"] = tiles.data_ptr()
        product.of_layout["a"]["order"] = order
        expect(fake, library, product, expected)


def _layout(operand: str, place: int, value: int) -> Callable[[Any], None]:
    return lambda product: product.layouts[operand].__setitem__(place, value)


def _of_layout(operand: str, **values: int) -> Callable[[Any], None]:
    return lambda product: product.of_layout[operand].update(values)


def _desc(**values: int) -> Callable[[Any], None]:
    return lambda product: product.desc.update(values)


def _pointer(operand: str, address: int | None) -> Callable[[Any], None]:
    return lambda product: product.pointers.update({operand: address})


def _argument(**values: Any) -> Callable[[Any], None]:
    return lambda product: product.arguments.update(values)


def _compute(compute: int, scale_type: int) -> Callable[[Any], None]:
    def change(product: Any) -> None:
        product.compute, product.scale_type = compute, scale_type

    return change


#: Libtypes, dtype of the product [5, 48, 64], change, status, part of the reason.
REFUSALS: list[tuple[tuple[str, ...], torch.dtype, Callable[[Any], None], str, str]] = [
    (BOTH, BF16, _argument(handle=None), "NOT_INITIALIZED", "no live handle"),
    (BOTH, BF16, _argument(handle=64), "NOT_INITIALIZED", "no live handle"),
    (BOTH, BF16, _argument(desc=None), "INVALID_VALUE", "no live matmul descriptor"),
    (BOTH, BF16, _argument(d_layout=None), "INVALID_VALUE", "D has no live matrix layout"),
    (BOTH, BF16, _argument(alpha=None), "INVALID_VALUE", "is null"),
    (BOTH, BF16, _pointer("a", None), "INVALID_VALUE", "is null"),
    (BOTH, BF16, _pointer("c", None), "INVALID_VALUE", "is null"),
    (BOTH, BF16, _pointer("d", None), "INVALID_VALUE", "is null"),
    (BOTH, BF16, _layout("a", 0, 29), "NOT_SUPPORTED", "type 29"),
    (BOTH, BF16, _layout("a", 0, 2), "NOT_SUPPORTED", "A is of type 2, B of type 14"),
    (BOTH, BF16, _layout("c", 0, 0), "NOT_SUPPORTED", "C is of type 0"),
    (BOTH, BF16, lambda product: [_layout(x, 0, 2)(product) for x in "cd"], "NOT_SUPPORTED", "stored as type 2"),
    (BOTH, BF16, _layout("a", 1, 63), "INVALID_VALUE", "has 64 rows"),
    (BOTH, BF16, _layout("a", 1, 0), "INVALID_VALUE", "A is 0 x 48"),
    (BOTH, BF16, _layout("a", 3, 63), "INVALID_VALUE", "leading dimension 63 of A"),
    (BOTH, BF16, _layout("d", 2, 6), "INVALID_VALUE", "must be 48 x 5"),
    (BOTH, BF16, _layout("d", 3, 40), "INVALID_VALUE", "leading dimension 40 of D"),
    (BOTH, BF16, _layout("c", 3, 56), "INVALID_VALUE", "one matrix with two layouts"),
    (BOTH, BF16, _of_layout("b", order=1), "NOT_SUPPORTED", "column-major"),
    (BOTH, BF16, _of_layout("a", order=1), "NOT_SUPPORTED", "reads A in order 1"),
    (BOTH, BF16, _of_layout("a", batch=2), "INVALID_VALUE", "A has 2 matrices, D 1"),
    (BOTH, BF16, lambda product: [_of_layout(x, batch=2)(product) for x in "abcd"], "INVALID_VALUE", "in D"),
    (BOTH, BF16, lambda product: [_of_layout(x, batch=2, stride=24)(product) for x in "abcd"], "INVALID_VALUE", "in A"),
    (BOTH, BF16, _of_layout("d", batch_mode=1), "NOT_SUPPORTED", "of the D matrix layout"),
    (BOTH, BF16, _desc(op_a=7), "INVALID_VALUE", "operation 7 of A"),
    (BOTH, BF16, _desc(epilogue=2), "NOT_SUPPORTED", "epilogue 2"),
    (BOTH, BF16, _desc(epilogue=BIAS), "INVALID_VALUE", "there is none"),
    (BOTH, BF16, _desc(epilogue=BIAS, bias=4097), "INVALID_VALUE", "not aligned to its elements"),
    (BOTH, BF16, _desc(epilogue=BIAS, bias_type=2), "NOT_SUPPORTED", "bias"),
    (BOTH, BF16, _desc(pointer_mode=2), "NOT_SUPPORTED", "pointer mode 2"),
    (BOTH, BF16, _desc(scale_d=64), "NOT_SUPPORTED", "nothing here computes with it"),
    (BOTH, BF16, _desc(scale_a=64), "INVALID_VALUE", "scale pointers are for fp8"),
    (BOTH, BF16, _desc(mode_a=OUTER, mode_b=OUTER), "NOT_SUPPORTED", "scale modes"),
    (BOTH, BF16, _compute(1, 0), "NOT_SUPPORTED", "computation 1"),
    (BOTH, BF16, _compute(2, 14), "NOT_SUPPORTED", "scale type 14"),
    (BOTH, INT8, _compute(68, 0), "NOT_SUPPORTED", "int8 computes in int32"),
    (BOTH, INT8, _desc(epilogue=BIAS, bias=4096), "NOT_SUPPORTED", "no bias"),
    (BOTH, FN, _desc(mode_a=OUTER, mode_b=OUTER, scale_b=64), "INVALID_VALUE", "one is null"),
    (BOTH, FN, _desc(mode_a=OUTER, scale_a=64, scale_b=64), "NOT_SUPPORTED", "scale modes 3 of A and 0"),
    (BOTH, FN, _desc(mode_a=BLK128, mode_b=BLK128, scale_a=64, scale_b=64), "NOT_SUPPORTED", "scale modes 5 of A and 5"),
    (BOTH, FN, _desc(scale_a=66), "INVALID_VALUE", "not aligned to floats"),
    (("hipblaslt",), FN, _desc(mode_a=BLK128, mode_b=VEC128, scale_a=64, scale_b=64), "NOT_SUPPORTED", "not supported yet"),
    (("hipblaslt",), BF16, _of_layout("a", order=100), "NOT_SUPPORTED", "elements of 1 bytes"),
    (("hipblaslt",), BF16, lambda product: [_of_layout("a", order=101)(product), _desc(op_a=111)(product)], "INVALID_VALUE", "has 64 rows"),
    (("hipblaslt",), BF16, lambda product: [_of_layout("a", order=101)(product), _layout("a", 3, 72)(product)], "NOT_SUPPORTED", "tiled A"),
    (("cublaslt",), FNUZ, lambda product: None, "NOT_SUPPORTED", "type 1000"),
    (("cublaslt",), FN, _desc(epilogue=BIAS, bias=4096, bias_type=0), "NOT_SUPPORTED", "wanted 14"),
    (("cublaslt",), FN, _layout("b", 3, 72), "NOT_SUPPORTED", "leading dimensions of 16 bytes"),
    (("cublaslt",), FN, _desc(mode_a=BLK128, mode_b=VEC128, scale_a=64, scale_b=64), "NOT_SUPPORTED", "come in fours"),
    (("cublaslt",), INT8, _layout("b", 3, 66), "NOT_SUPPORTED", "divisible by 4"),
]


@both
def test_refusals(fake: Any, library: Any) -> None:
    """Each faulty argument is refused with the library's status and a reason that names it."""
    faults = []
    for libtypes, dtype, change, status, reason in REFUSALS:
        if library.libtype in libtypes:
            product = fake.linear(library, dtype)
            change(product)
            got = library.named(product.run(workspace=fake.aligned(MAX_WORKSPACE))), library.reason()
            refused = got[0] == status and reason in got[1] and got[1].startswith(f"{library.prefix}Matmul: ")
            faults += [] if refused else [(status, reason, got)]
    assert not faults


@fp8
def test_scales_of_batches(fake: Any, library: Any, dtype: torch.dtype) -> None:
    """A batch shares its tensor scales; row scales are refused."""
    x, w, scale = fake.draw(2, 4, 32, dtype=dtype), fake.draw(2, 16, 32, dtype=dtype), torch.rand(64) + 0.5
    product = fake.Product(library, w, x, torch.empty(2, 4, 16, dtype=BF16), scale_a=scale.data_ptr())
    expect(fake, library, product, x.double() @ w.double().mT * scale[0].double())
    product.desc |= {"mode_a": OUTER, "mode_b": OUTER, "scale_b": scale.data_ptr()}
    assert library.named(product.run()) == "NOT_SUPPORTED"
    assert "goes with batches" in library.reason()


@amd
def test_8_bit_operands_are_aligned(fake: Any, library: Any) -> None:
    """8-bit operands must be at multiples of 16 bytes."""
    product = fake.linear(library, FNUZ)
    product.pointers["b"] += 8
    assert library.named(product.run()) == "NOT_SUPPORTED"
    assert "wants B at a multiple of 16" in library.reason()


@nvidia
def test_fp8_needs_the_tensor_cores_form(fake: Any, library: Any) -> None:
    """fp8 needs A transposed, B not, and K, rows of D and pointers in multiples of 16 bytes."""
    x = fake.draw(16, 16, dtype=FN)
    for ops in ("nn", "nt", "tt"):
        product = fake.Product(library, x, x, torch.empty(16, 16, dtype=BF16), ops=ops)
        assert library.named(product.run()) == "NOT_SUPPORTED"
        assert "A transposed and B not" in library.reason()
    for n, k in ((20, 64), (48, 72)):
        assert library.named(fake.linear(library, FN, n=n, k=k).run()) == "NOT_SUPPORTED"
        assert "of 16 bytes" in library.reason()
    product = fake.linear(library, FN)
    product.pointers["a"] += 8
    assert library.named(product.run()) == "NOT_SUPPORTED"
    assert "at a multiple of 16 bytes" in library.reason()

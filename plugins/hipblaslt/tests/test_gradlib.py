"""gradlib's functions over the fake hipBLASLt: names, arguments, meaning and errors."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import tunedgemm_hipblaslt
from tunedgemm.plugin import LaunchError, UserError
from tunedgemm.tools.tables import shuffle_weight
from tunedgemm_hipblaslt import gradlib

FNUZ, BF16, FP16, FP32, INT8 = torch.float8_e4m3fnuz, torch.bfloat16, torch.float16, torch.float32, torch.int8
M, N, K = 5, 48, 128
#: The fake's indices: correct, wrong numbers, failing launch, with a workspace.
RIGHT, WRONG, FAILS, WITH_WORKSPACE = 1003, 1012, 1017, 1004


@pytest.fixture(autouse=True)
def hipblaslt(backends: dict[str, Any], harness: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Use the fake library."""
    monkeypatch.setattr(gradlib, "backend", backends["hipblaslt"])
    gradlib.hipb_destroy_extension()
    yield backends["hipblaslt"]
    gradlib.hipb_destroy_extension()


def draw(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Draw normal numbers, or small integers for int8."""
    return torch.randint(-8, 8, sizes).to(dtype) if dtype is INT8 else torch.randn(*sizes).to(dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Check an output to within two roundings of its dtype."""
    bound = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 2.0**-18}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound * float(expected.abs().max()) / 4)


def test_the_package_exports_gradlib() -> None:
    """The package exports gradlib's functions, and no other name."""
    for name in ("hipb_create_extension", "hipb_destroy_extension", "hipb_findallsols", "hipb_mm"):
        assert getattr(tunedgemm_hipblaslt, name) is getattr(gradlib, name)
    with pytest.raises(AttributeError, match="hipb_nothing"):
        getattr(tunedgemm_hipblaslt, "hipb_nothing")  # noqa: B009 - by the module's own look-up


def test_the_arguments_are_gradlibs() -> None:
    """Arguments have gradlib's names and order (aiter/ops/gradlib.py)."""
    assert list(inspect.signature(gradlib.hipb_mm).parameters) == [
        "mat1", "mat2", "solution_index", "bias", "out_dtype", "scaleA", "scaleB", "scaleOut", "bpreshuffle", "use_gelu",
    ]  # fmt: skip
    assert list(inspect.signature(gradlib.hipb_findallsols).parameters) == [
        "mat1", "mat2", "bias", "out_dtype", "scaleA", "scaleB", "scaleC", "bpreshuffle", "use_gelu",
    ]  # fmt: skip


def test_create_and_destroy() -> None:
    """Both may be called at any time and repeatedly."""
    for _ in range(2):
        gradlib.hipb_create_extension()
        gradlib.hipb_destroy_extension()
    x, w = draw(M, K), draw(N, K)
    assert_close(gradlib.hipb_mm(x, w.t(), -1), x.double() @ w.double().T)


def test_floats() -> None:
    """The first answer and each index multiply in each float dtype, with and without a bias."""
    for index, dtype, biased in itertools.product((-1, RIGHT, WITH_WORKSPACE), (BF16, FP16, FP32), (False, True)):
        x, w = draw(M, K, dtype=dtype), draw(N, K, dtype=dtype)
        bias = draw(N, dtype=dtype) if biased else None
        out = gradlib.hipb_mm(x, w.t(), index, bias)
        assert (out.shape, out.dtype) == ((M, N), dtype)
        assert_close(out, x.double() @ w.double().T + (0 if bias is None else bias.double()))


def test_output_dtype_and_scale() -> None:
    """out_dtype sets the output's dtype, and scaleOut is applied last."""
    x, w, bias = draw(M, K), draw(N, K), draw(N, dtype=FP32)
    expected = x.double() @ w.double().T + bias.double()
    assert_close(gradlib.hipb_mm(x, w.t(), -1, bias, out_dtype=FP32), expected)
    assert_close(gradlib.hipb_mm(x, w.t(), -1, bias, FP32, scaleOut=torch.tensor([0.5])), expected * 0.5)


def test_fp8() -> None:
    """fp8 takes tensor or row scales, plain or shuffled weights, and a bias."""
    for out, by_row, shuffled, index in itertools.product((BF16, FP16, FP32), (False, True), (False, True), (-1, RIGHT)):
        x, w, bias = draw(M, K, dtype=FNUZ), draw(N, K, dtype=FNUZ), draw(N, dtype=out)
        a = torch.rand(M, 1) + 0.5 if by_row else torch.tensor([[1.5]])
        b = torch.rand(1, N) + 0.5 if by_row else torch.tensor([[0.75]])
        weight = shuffle_weight(w, "aiter16x16").plain if shuffled else w
        expected = (x.double() @ w.double().T) * a.double() * b.double() + bias.double()
        assert_close(gradlib.hipb_mm(x, weight.t(), index, bias, out, a, b, bpreshuffle=shuffled), expected)


def test_fp8_without_scales() -> None:
    """fp8 without scales is a plain product."""
    x, w = draw(M, K, dtype=FNUZ), draw(N, K, dtype=FNUZ)
    assert_close(gradlib.hipb_mm(x, w.t(), -1, out_dtype=BF16), x.double() @ w.double().T)


def test_int8_with_scales() -> None:
    """int8 is scaled in float32 after an exact product."""
    x, w, a, b = draw(M, K, dtype=INT8), draw(N, K, dtype=INT8), torch.rand(M, 1), torch.rand(1, N)
    assert_close(gradlib.hipb_mm(x, w.t(), -1, None, BF16, a, b), (x.double() @ w.double().T) * a.double() * b.double())


def test_shuffled_floats() -> None:
    """A shuffled 16-bit weight is read in its order."""
    for dtype in (BF16, FP16):
        x, w = draw(M, K, dtype=dtype), draw(N, K, dtype=dtype)
        out = gradlib.hipb_mm(x, shuffle_weight(w, "aiter16x16").plain.t(), -1, bpreshuffle=True)
        assert_close(out, x.double() @ w.double().T)


def test_views() -> None:
    """Views at odd addresses or with gaps are read as torch reads them."""
    x, w, bias = draw(M, 2 * K)[:, ::2], draw(N + 1, K), draw(2 * N)[::2]
    assert_close(gradlib.hipb_mm(x, w[1:].t(), -1, bias), x.double() @ w[1:].double().T + bias.double())
    row_major = draw(K, N)
    assert_close(gradlib.hipb_mm(x, row_major, -1), x.double() @ row_major.double())
    memory = draw(M * K + 1, dtype=FNUZ)
    odd, weight = memory[1:].view(M, K), draw(N, K, dtype=FNUZ)
    a, b = (torch.rand(M, 2) + 0.5)[:, :1], (torch.rand(N, 2) + 0.5).t()[:1]
    out = gradlib.hipb_mm(odd, weight.t(), -1, None, BF16, a, b)
    assert_close(out, (odd.double() @ weight.double().T) * a.double() * b.double())


def test_findallsols() -> None:
    """All indices for exactly these operands are listed, best first, and each launches."""
    x, w, bias = draw(M, K), draw(N, K), draw(N)
    indices = gradlib.hipb_findallsols(x, w.t(), bias)
    assert indices[:8] == list(range(1000, 1008))
    assert len(indices) == 36
    expected = x.double() @ w.double().T + bias.double()
    for index in indices:
        if index == FAILS:
            with pytest.raises(LaunchError, match="EXECUTION_FAILED"):
                gradlib.hipb_mm(x, w.t(), index, bias)
        elif index != WRONG:
            assert_close(gradlib.hipb_mm(x, w.t(), index, bias), expected)
    shuffled = gradlib.hipb_findallsols(x, shuffle_weight(w, "aiter16x16").plain.t(), bpreshuffle=True)
    assert 8 < len(shuffled) < len(indices)
    scaled = draw(M, K, dtype=FNUZ), draw(N, K, dtype=FNUZ).t()
    assert gradlib.hipb_findallsols(*scaled, None, BF16, torch.ones(1), torch.ones(1))
    assert gradlib.hipb_findallsols(x[:, :72], w[:, :72].t()) != indices


def test_unlisted_indices() -> None:
    """An index that the library does not list for the product is refused."""
    x, w = draw(M, K), draw(N, K)
    for index in (9999, 1008, 0):
        with pytest.raises(UserError, match=rf"hipb_mm: a16w16 M=5 N=48 K=128 .*does not list algorithm {index}"):
            gradlib.hipb_mm(x, w.t(), index)


OPERAND_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"mat2": draw(K + 1, N)}, r"one dtype \(got \(5, 128\) torch.bfloat16, \(129, 48\)"),
    ({"mat2": draw(K, N, dtype=FP16)}, "of one dtype"),
    ({"mat1": draw(1, M, K)}, r"mat1 \[M, K\]"),
    ({"mat2": draw(K)}, r"mat2 \[K, N\]"),
    ({"use_gelu": True, "bias": draw(N)}, "use_gelu: not supported .*; apply torch.nn.functional.gelu"),
    ({"scaleA": torch.ones(1)}, "give both or neither"),
    ({"scaleB": torch.ones(1)}, "give both or neither"),
    ({"scaleA": torch.ones(1), "scaleB": torch.ones(1)}, "must have 8 bits .got bf16"),
    ({"bias": draw(N - 1)}, r"bias: must be \[48\] \(got \(47,\)\)"),
    ({"bias": draw(1)}, r"bias: must be \[48\]"),
    ({"out_dtype": FP16}, "give bf16 or fp32 .got fp16"),
    ({"out_dtype": INT8}, "outdtype: must be"),
    ({"mat1": draw(0, K)}, "empty batch"),
    ({"mat1": draw(M, K).double(), "mat2": draw(K, N).double()}, "operands must be bf16, fp16, fp32"),
    ({"mat2": draw(N, K).to("meta").t()}, "mat2: must be on mat1's device cpu .got meta"),
    ({"bias": draw(N).to("meta")}, "bias: must be on mat1's device"),
]
SCALE_FAULTS: list[tuple[dict[str, Any], str]] = [
    (
        {"scaleA": torch.ones(M, 1), "scaleB": torch.ones(1)},
        r"or \[5, 1\] and \[1, 48\] \(got \(5, 1\) torch.float32, \(1,\)",
    ),
    ({"scaleA": torch.ones(1), "scaleB": torch.ones(1, N)}, "one value each"),
    ({"scaleA": torch.ones(M - 1, 1), "scaleB": torch.ones(1, N)}, r"\(got \(4, 1\)"),
    ({"scaleA": torch.ones(M, 1), "scaleB": torch.ones(1, N + 1)}, "one value each"),
    ({"scaleA": torch.ones(1).bfloat16(), "scaleB": torch.ones(1)}, "must be float32"),
    ({"scaleA": torch.ones(M, 1).double(), "scaleB": torch.ones(1, N).double()}, "must be float32"),
    ({"scaleA": torch.ones(M, 1), "scaleB": torch.ones(1, N), "out_dtype": None}, "outdtype: must be"),
]


def test_faulty_operands() -> None:
    """Both functions refuse operands that form no product, with what would be accepted."""
    for change, reason in OPERAND_FAULTS:
        operands = {"mat1": draw(M, K), "mat2": draw(N, K).t()} | change
        for call in (lambda **more: gradlib.hipb_mm(solution_index=-1, **more), gradlib.hipb_findallsols):
            with pytest.raises(UserError, match=reason):
                call(**operands)


def test_faulty_scales() -> None:
    """Scales of other sizes or dtypes are refused before any is read."""
    for change, reason in SCALE_FAULTS:
        operands = {"mat1": draw(M, K, dtype=FNUZ), "mat2": draw(N, K, dtype=FNUZ).t(), "out_dtype": BF16} | change
        with pytest.raises(UserError, match=reason):
            gradlib.hipb_mm(solution_index=-1, **operands)


def test_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """OCP fp8 on an MI300, and any product on a CPU without the fake, are refused."""
    x, w = draw(M, K, dtype=torch.float8_e4m3fn), draw(N, K, dtype=torch.float8_e4m3fn)
    with pytest.raises(UserError, match=r"gfx942 multiplies fp8_e4m3fnuz \(got fp8_e4m3fn\)"):
        gradlib.hipb_mm(x, w.t(), -1, out_dtype=BF16)
    monkeypatch.setattr(gradlib, "backend", tunedgemm_hipblaslt.hipblaslt)
    with pytest.raises(UserError, match=r"needs an AMD device \(got cpu"):
        gradlib.hipb_mm(draw(M, K), draw(N, K).t(), -1)

"""gradlib's functions over the fake hipBLASLt: its names, arguments and meaning, and which mistakes are told."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import tunedgemm_hipblaslt
from tunedgemm.plugin import UserError, shuffle_weight
from tunedgemm_hipblaslt import gradlib

FNUZ, BF16, FP16, FP32, INT8 = torch.float8_e4m3fnuz, torch.bfloat16, torch.float16, torch.float32, torch.int8
M, N, K = 5, 48, 128
#: The fake's numbers: one that is right, the one that is wrong, the one that fails, one with scratch.
RIGHT, WRONG, FAILS, SCRATCH = 1003, 1012, 1017, 1004


@pytest.fixture(autouse=True)
def hipblaslt(backends: dict[str, Any], over: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake in place of the vendor's library."""
    monkeypatch.setattr(gradlib, "backend", backends["hipblaslt"])
    gradlib.hipb_destroy_extension()
    yield backends["hipblaslt"]
    gradlib.hipb_destroy_extension()


def drawn(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randint(-8, 8, sizes).to(dtype) if dtype is INT8 else torch.randn(*sizes).to(dtype)


def close(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Two roundings of the output's dtype."""
    bound = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 2.0**-18}[out.dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=bound, atol=bound * float(wanted.abs().max()) / 4)


@pytest.mark.parametrize("name", ["hipb_create_extension", "hipb_destroy_extension", "hipb_findallsols", "hipb_mm"])
def test_the_names_are_the_packages(name: str) -> None:
    """The package gives gradlib's functions under their names; another name is none of its attributes."""
    assert getattr(tunedgemm_hipblaslt, name) is getattr(gradlib, name)
    with pytest.raises(AttributeError, match="hipb_nothing"):
        getattr(tunedgemm_hipblaslt, "hipb_nothing")  # noqa: B009 - by the module's own look-up


def test_the_arguments_are_gradlibs() -> None:
    """Arguments have gradlib's names, order and defaults (aiter/ops/gradlib.py)."""
    assert list(inspect.signature(gradlib.hipb_mm).parameters) == [
        "mat1", "mat2", "solution_index", "bias", "out_dtype", "scaleA", "scaleB", "scaleOut", "bpreshuffle", "use_gelu",
    ]  # fmt: skip
    assert list(inspect.signature(gradlib.hipb_findallsols).parameters) == [
        "mat1", "mat2", "bias", "out_dtype", "scaleA", "scaleB", "scaleC", "bpreshuffle", "use_gelu",
    ]  # fmt: skip


def test_create_and_destroy() -> None:
    """Both may be called at any time, and again."""
    for _ in range(2):
        gradlib.hipb_create_extension()
        gradlib.hipb_destroy_extension()
    x, w = drawn(M, K), drawn(N, K)
    close(gradlib.hipb_mm(x, w.t(), -1), x.double() @ w.double().T)


@pytest.mark.parametrize("number", [-1, RIGHT, SCRATCH])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_floats(number: int, dtype: torch.dtype, bias: bool) -> None:
    """The library's first answer and a number multiply and add a bias, as `mat1 @ mat2`."""
    x, w = drawn(M, K, dtype=dtype), drawn(N, K, dtype=dtype)
    added = drawn(N, dtype=dtype) if bias else None
    out = gradlib.hipb_mm(x, w.t(), number, added)
    assert (out.shape, out.dtype) == ((M, N), dtype)
    close(out, x.double() @ w.double().T + (added.double() if added is not None else 0))


def test_the_output_is_of_the_dtype_that_is_asked_for() -> None:
    """out_dtype is that of the output; a factor of the output comes last."""
    x, w, bias = drawn(M, K), drawn(N, K), drawn(N, dtype=FP32)
    wanted = x.double() @ w.double().T + bias.double()
    close(gradlib.hipb_mm(x, w.t(), -1, bias, out_dtype=FP32), wanted)
    close(gradlib.hipb_mm(x, w.t(), -1, bias, FP32, scaleOut=torch.tensor([0.5])), wanted * 0.5)


@pytest.mark.parametrize("out", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("number", [-1, RIGHT])
def test_fp8(out: torch.dtype, by_row: bool, shuffled: bool, number: int) -> None:
    """Scales are one value each or one a row, the weight is plain or shuffled, with a bias in the output's dtype."""
    x, w, bias = drawn(M, K, dtype=FNUZ), drawn(N, K, dtype=FNUZ), drawn(N, dtype=out)
    a = torch.rand(M, 1) + 0.5 if by_row else torch.tensor([[1.5]])
    b = torch.rand(1, N) + 0.5 if by_row else torch.tensor([[0.75]])
    weight = shuffle_weight(w, "aiter16x16").plain if shuffled else w
    wanted = (x.double() @ w.double().T) * a.double() * b.double() + bias.double()
    close(gradlib.hipb_mm(x, weight.t(), number, bias, out, a, b, bpreshuffle=shuffled), wanted)


def test_fp8_without_scales() -> None:
    """Without scales the values are multiplied as they are."""
    x, w = drawn(M, K, dtype=FNUZ), drawn(N, K, dtype=FNUZ)
    close(gradlib.hipb_mm(x, w.t(), -1, out_dtype=BF16), x.double() @ w.double().T)


def test_int8_with_scales() -> None:
    """int8 is scaled, too, in float32 after a product that does not round."""
    x, w, a, b = drawn(M, K, dtype=INT8), drawn(N, K, dtype=INT8), torch.rand(M, 1), torch.rand(1, N)
    close(gradlib.hipb_mm(x, w.t(), -1, None, BF16, a, b), (x.double() @ w.double().T) * a.double() * b.double())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_shuffled_floats(dtype: torch.dtype) -> None:
    """A shuffled weight of 16 bits is read in its order."""
    x, w = drawn(M, K, dtype=dtype), drawn(N, K, dtype=dtype)
    out = gradlib.hipb_mm(x, shuffle_weight(w, "aiter16x16").plain.t(), -1, bpreshuffle=True)
    close(out, x.double() @ w.double().T)


def test_views() -> None:
    """Operands that are views, at odd addresses or with gaps, are read as torch reads them."""
    x, w, bias = drawn(M, 2 * K)[:, ::2], drawn(N + 1, K), drawn(2 * N)[::2]
    close(gradlib.hipb_mm(x, w[1:].t(), -1, bias), x.double() @ w[1:].double().T + bias.double())
    row_major = drawn(K, N)
    close(gradlib.hipb_mm(x, row_major, -1), x.double() @ row_major.double())
    memory = drawn(M * K + 1, dtype=FNUZ)
    odd, weight = memory[1:].view(M, K), drawn(N, K, dtype=FNUZ)
    a, b = (torch.rand(M, 2) + 0.5)[:, :1], (torch.rand(N, 2) + 0.5).t()[:1]
    out = gradlib.hipb_mm(odd, weight.t(), -1, None, BF16, a, b)
    close(out, (odd.double() @ weight.double().T) * a.double() * b.double())


def test_findallsols(over: Any) -> None:
    """All numbers that the library lists for exactly these operands, best guesses first; each is launched."""
    x, w, bias = drawn(M, K), drawn(N, K), drawn(N)
    found = gradlib.hipb_findallsols(x, w.t(), bias)
    assert found[:8] == list(range(1000, 1008))
    assert len(found) == 36
    wanted = x.double() @ w.double().T + bias.double()
    for number in found:
        if number == FAILS:
            with pytest.raises(Exception, match="EXECUTION_FAILED"):
                gradlib.hipb_mm(x, w.t(), number, bias)
        elif number != WRONG:
            close(gradlib.hipb_mm(x, w.t(), number, bias), wanted)
    shuffled = gradlib.hipb_findallsols(x, shuffle_weight(w, "aiter16x16").plain.t(), bpreshuffle=True)
    assert 8 < len(shuffled) < len(found)
    scaled = drawn(M, K, dtype=FNUZ), drawn(N, K, dtype=FNUZ).t()
    assert gradlib.hipb_findallsols(*scaled, None, BF16, torch.ones(1), torch.ones(1))
    assert gradlib.hipb_findallsols(x[:, :72], w[:, :72].t()) != found


@pytest.mark.parametrize("number", [9999, 1008, 0])
def test_numbers_that_are_not_listed(number: int) -> None:
    """A number that the library does not list for the product is refused, not launched."""
    x, w = drawn(M, K), drawn(N, K)
    with pytest.raises(UserError, match=rf"hipb_mm: a16w16 M=5 N=48 K=128 .*does not list algorithm {number}"):
        gradlib.hipb_mm(x, w.t(), number)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"mat2": drawn(K + 1, N)}, r"one dtype \(got \(5, 128\) torch.bfloat16, \(129, 48\)"),
    ({"mat2": drawn(K, N, dtype=FP16)}, "of one dtype"),
    ({"mat1": drawn(1, M, K)}, r"mat1 \[M, K\]"),
    ({"mat2": drawn(K)}, r"mat2 \[K, N\]"),
    ({"use_gelu": True, "bias": drawn(N)}, "use_gelu: not supported .*; apply torch.nn.functional.gelu"),
    ({"scaleA": torch.ones(1)}, "give both or neither"),
    ({"scaleB": torch.ones(1)}, "give both or neither"),
    ({"scaleA": torch.ones(1), "scaleB": torch.ones(1)}, "must have 8 bits .got bf16"),
    ({"bias": drawn(N - 1)}, r"bias: must be \[48\] \(got \(47,\)\)"),
    ({"bias": drawn(1)}, r"bias: must be \[48\]"),
    ({"out_dtype": FP16}, "give bf16 or fp32 .got fp16"),
    ({"out_dtype": INT8}, "outdtype: must be"),
    ({"mat1": drawn(0, K)}, "empty batch"),
    ({"mat1": drawn(M, K).double(), "mat2": drawn(K, N).double()}, "operands must be bf16, fp16, fp32"),
    ({"mat2": drawn(N, K).to("meta").t()}, "mat2: must be on mat1's device cpu .got meta"),
    ({"bias": drawn(N).to("meta")}, "bias: must be on mat1's device"),
]
SCALED: list[tuple[dict[str, Any], str]] = [
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


@pytest.mark.parametrize(("change", "reason"), MISTAKES, ids=[reason for _, reason in MISTAKES])
def test_mistakes(change: dict[str, Any], reason: str) -> None:
    """Operands that form no product are named by both functions, with what would do."""
    given = {"mat1": drawn(M, K), "mat2": drawn(N, K).t()} | change
    for call in (lambda **more: gradlib.hipb_mm(solution_index=-1, **more), gradlib.hipb_findallsols):
        with pytest.raises(UserError, match=reason):
            call(**given)


@pytest.mark.parametrize(("change", "reason"), SCALED, ids=[reason for _, reason in SCALED])
def test_mistakes_of_scales(change: dict[str, Any], reason: str) -> None:
    """Scales that are too few, too many or of another dtype are refused before anything is read."""
    given = {"mat1": drawn(M, K, dtype=FNUZ), "mat2": drawn(N, K, dtype=FNUZ).t(), "out_dtype": BF16} | change
    with pytest.raises(UserError, match=reason):
        gradlib.hipb_mm(solution_index=-1, **given)


def test_the_fp8_of_another_chip() -> None:
    """An MI300 multiplies its own fp8 alone."""
    with pytest.raises(UserError, match="gfx942 multiplies fp8_e4m3fnuz .got fp8_e4m3fn"):
        gradlib.hipb_mm(drawn(M, K, dtype=torch.float8_e4m3fn), drawn(N, K, dtype=torch.float8_e4m3fn).t(), -1, out_dtype=BF16)


def test_no_library_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fake a CPU has no hipBLASLt, and that is said."""
    monkeypatch.setattr(gradlib, "backend", tunedgemm_hipblaslt.hipblaslt)
    with pytest.raises(UserError, match="needs an AMD device .got cpu"):
        gradlib.hipb_mm(drawn(M, K), drawn(N, K).t(), -1)

"""Calls whose row keeps a dequantised weight: the tuned product of a16w16, or the next kernel."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
import tunedgemm
from tunedgemm.backends import kept_weights
from tunedgemm.backends.kept_weights import LIMIT, used
from tunedgemm.device import device_of
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.weight_only import Weight, decode, quantise
from tunedgemm.ops.weight_formats import FORMATS
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.folders import user_table
from tunedgemm.table.row import Row

CPU, N, K, M = device_of(-1), 64, 128, 16
SHAPE = Shape("a16wn", M, N, K, scale="block", extra={"w_format": "gptq_int4", "w_group": 0})
PRODUCT = Shape("a16w16", M, N, K)
X = torch.randn(M, K, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def drawn(seed: int) -> Weight:
    values = torch.randn(N, K, generator=torch.Generator().manual_seed(seed))
    return quantise("gptq_int4", values)


def called(weight: Weight, x: torch.Tensor = X) -> torch.Tensor:
    return tunedgemm.gemm_a16wn(x, weight.weight, weight.w_scale, w_format="gptq_int4")


def is_right(out: torch.Tensor, weight: Weight) -> bool:
    exact = X.double() @ decode(FORMATS["gptq_int4"], weight).double().t()
    return bool((out.double() - exact).norm() < 2.0**-7 * exact.norm())


def text() -> str:
    return str(tgemm.of("a16wn").explain(SHAPE, CPU))


@pytest.fixture(autouse=True)
def rows() -> None:
    """Write rows for the product, and for the same product of a16w16."""
    for shape, name in ((SHAPE, "dequantised"), (PRODUCT, "native")):
        path = user_table(op_named(shape.op))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, op_named(shape.op), [Row(shape, CPU.gfx, CPU.cu_num, "", Solution("torch", name), 5.0)])


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that limits the kept weights to a number of them."""

    def limit(weights: int) -> None:
        gc.collect()
        monkeypatch.setenv(LIMIT, str(used() + weights * N * K * 2))
        tunedgemm.reload()

    return limit


def test_the_row_of_a16w16_serves(limited: Callable[[int], None]) -> None:
    """The weight is kept, and the product is bound by the other op's table."""
    limited(1)
    weight, before = drawn(1), used()
    assert is_right(called(weight), weight) and is_right(called(weight), weight)
    assert used() - before == N * K * 2
    assert tgemm.of("a16wn").bound(SHAPE, CPU).offer.solution.kernel_name == "dequantised"
    product = tgemm.of("a16w16")
    assert product.is_bound(PRODUCT, CPU) and product.bound(PRODUCT, CPU).tuned


def test_a_process_without_a_limit_says_what_to_set(limited: Callable[[int], None]) -> None:
    """The row is a miss with the variable's name, and torch's call serves."""
    limited(0)
    weight = drawn(1)
    assert is_right(called(weight), weight) and not used()
    assert f"not torch:dequantised: torch refuses: dequantised keeps 16,384 bytes for each weight; set {LIMIT}, such as to 8GiB" in text()


def test_weights_beyond_the_limit_take_the_next_kernel(limited: Callable[[int], None]) -> None:
    """The first weight stays kept, the second is served in each call, and nothing is vetoed."""
    limited(1)
    weights = [drawn(seed) for seed in (1, 2)]
    for _ in range(2):
        assert all(is_right(called(weight), weight) for weight in weights)
        assert used() == N * K * 2
    assert tgemm.of("a16wn").bound(SHAPE, CPU).offer.solution.kernel_name == "dequantised"
    del weights[0]
    gc.collect()
    assert is_right(called(weights[0]), weights[0]) and used() == N * K * 2, "the freed room is used"


def test_a_weight_that_cannot_be_decoded_vetoes_no_other(limited: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls take the next kernel; others keep the solution."""
    limited(1)
    weights, real = [drawn(seed) for seed in (1, 2)], kept_weights._computed

    def computed(make: kept_weights.Make, operands: tuple[torch.Tensor, ...]) -> object:
        failing = operands[0] is weights[0].weight
        return real((lambda *_: 1 / 0) if failing else make, operands)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(kept_weights, "_computed", computed)
    for _ in range(2):
        assert all(is_right(called(weight), weight) for weight in weights)
    assert used() == N * K * 2
    assert tgemm.of("a16wn").bound(SHAPE, CPU).offer.solution.kernel_name == "dequantised"


def test_rows_of_several_m_are_asked_once(limited: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused weight does not try the row of a larger M with the same solution."""
    op = op_named("a16wn")
    rows = [Row(SHAPE.with_m(m), CPU.gfx, CPU.cu_num, "", Solution("torch", "dequantised"), 5.0) for m in (9, M)]
    write_rows(user_table(op), op, rows)
    limited(1)
    weights, made = [drawn(seed) for seed in (1, 2)], []
    real = kept_weights._made
    monkeypatch.setattr(kept_weights, "_made", lambda *arguments: made.append(0) or real(*arguments))
    assert all(called(weight, X[:9]).isfinite().all() for weight in weights)
    assert len(made) == 2


def test_gradients_and_writes_are_followed(limited: Callable[[int], None]) -> None:
    """torch serves a call that needs a gradient; a weight that is changed in place is decoded anew."""
    limited(1)
    weight, other = drawn(1), drawn(2)
    x = X.clone().requires_grad_()
    called(weight, x).sum().backward()
    assert x.grad is not None and not used()
    called(weight)
    weight.weight.copy_(other.weight)
    weight.w_scale.copy_(other.w_scale)
    assert is_right(called(weight), other) and used() == N * K * 2
    weight.weight.data.copy_(drawn(3).weight)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.weight, requires_grad=False)
    tunedgemm.refresh(layer)
    assert is_right(called(weight), weight)


def test_traced_calls_keep_nothing(limited: Callable[[int], None]) -> None:
    """A call of tensors without memory has the output's sizes and makes no copy."""
    limited(1)
    weight = drawn(1)
    out = tunedgemm.gemm_a16wn(X.to("meta"), weight.weight.to("meta"), weight.w_scale.to("meta"), w_format="gptq_int4")
    assert (out.shape, out.dtype, used()) == ((M, N), torch.bfloat16, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_serves(limited: Callable[[int], None], in_child: Callable[..., str]) -> None:
    """It reads the copy of its parent, also while another thread of the parent held the lock."""
    limited(1)
    weight, inside, over = drawn(1), threading.Event(), threading.Event()

    def hold() -> None:
        with kept_weights._lock:
            inside.set()
            over.wait(10)

    copy = kept_weights.kept((weight.weight, weight.w_scale, None, None), "f", N * K * 2, lambda *_: torch.zeros(N, K, dtype=X.dtype))
    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    child = in_child(lambda: kept_weights.kept((weight.weight, weight.w_scale, None, None), "f", 0, None) is copy and renewed(weight))
    over.set()
    thread.join()
    assert child == "served"


def renewed(weight: Weight) -> bool:
    """Renew a copy, which takes the lock."""
    kept_weights.renew([weight.weight])
    return True


def test_one_layer_has_two_formats_by_m(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of larger M quantises x where the process allows it; else its reason names the variable."""
    shape = Shape("a16wn", M, N, K, scale="block", extra={"w_format": "mxfp8", "w_group": 32})
    op, solutions = op_named("a16wn"), (Solution("torch", "decoded"), Solution("torch", "as_a8w8_mxfp8"))
    given = [Row(shape.with_m(m), CPU.gfx, CPU.cu_num, "", each, 5.0) for m, each in zip((1, M), solutions, strict=True)]
    write_rows(user_table(op), op, given)
    weight = quantise("mxfp8", torch.randn(N, K, generator=torch.Generator().manual_seed(1)))
    exact = X.double() @ decode(FORMATS["mxfp8"], weight).double().t()
    errors = []
    for word in ("given", "quantised"):
        monkeypatch.setenv("TUNEDGEMM_TORCH_ACTIVATIONS", word)
        tunedgemm.reload()
        out = tunedgemm.gemm_a16wn(X, weight.weight, weight.w_scale, w_format="mxfp8")
        errors.append(float((out.double() - exact).norm() / exact.norm()))
        served = [tgemm.of("a16wn").bound(shape.with_m(m), CPU) for m in (1, M)]
        assert served[0].offer.solution == solutions[0]
        assert (served[1].offer.solution == solutions[1]) == (word == "quantised")
        assert ("set TUNEDGEMM_TORCH_ACTIVATIONS=quantised" in str(served[1])) == (word == "given")
    assert errors[0] < 0.005 and 0.01 < errors[1] < 0.05

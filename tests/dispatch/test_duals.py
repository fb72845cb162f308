"""Forward-mode derivatives: a tangent is kept or the call refused, whichever backend is chosen."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd import forward_ad
from tunedgemm.dispatch.gradients import open_dual_levels
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.testing.fakes import fake_backend, fake_registry


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def gemm(calls: list[str]) -> TunedGemm:
    """An instance whose backend computes without torch's derivatives, for every shape."""

    def call(solution, shape, *operands):
        calls.append(shape.op)
        return op_named(shape.op).reference(shape, tuple(operand.detach().clone() for operand in operands)).to(torch.float32)

    backend = fake_backend("turbo", ops=("a16w16", "a8w8", "batched_bf16"), heuristic="fake", call=call)
    return TunedGemm(fake_registry(backend), settings=Settings(untuned=("turbo",)))


X, W, BIAS = torch.randn(4, 64), torch.randn(32, 64), torch.randn(32)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_tangent_is_kept(gemm: TunedGemm, calls: list[str], place: int, grad: bool) -> None:
    """Tangents of x, weight and bias are kept even where another backend served the same call
    before, and it does again afterwards."""
    operands = [X, W, BIAS]
    gemm.gemm_a16w16(*operands)
    assert calls == ["a16w16"]
    tangent = torch.randn_like(operands[place])
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        operands[place] = forward_ad.make_dual(operands[place], tangent)
        wanted = forward_ad.unpack_dual(torch.nn.functional.linear(*operands)).tangent
        for call in (gemm.gemm_a16w16, gemm.dispatcher.call):
            found = forward_ad.unpack_dual(call(*operands)).tangent
            torch.testing.assert_close(found, wanted)
    assert calls == ["a16w16"]
    gemm.gemm_a16w16(X, W, BIAS)
    gemm.gemm_a16w16(X, W, BIAS)
    assert calls == ["a16w16"] * 3


def test_calls_without_a_tangent_keep_their_backend_within_a_level(gemm: TunedGemm, calls: list[str]) -> None:
    """An open level does not change the backend of other calls."""
    with forward_ad.dual_level():
        for _ in range(2):
            gemm.gemm_a16w16(X, W)
        gemm.gemm_a16w16(forward_ad.make_dual(X, X), W)
        gemm.gemm_a16w16(X, W)
    assert calls == ["a16w16"] * 3
    assert not open_dual_levels()


def test_a_call_met_first_within_a_level_is_cached_after_it_alone(gemm: TunedGemm) -> None:
    """A launcher cached while a level is open could serve the key of a dual tensor."""
    with forward_ad.dual_level():
        gemm.gemm_a16w16(X, W)
        assert not gemm.dispatcher.launchers
    gemm.gemm_a16w16(X, W)
    assert len(gemm.dispatcher.launchers) == 1


def test_a_tangent_of_scales_is_kept_or_refused(gemm: TunedGemm, calls: list[str]) -> None:
    """Other ops keep a tangent by torch's call or refuse it with an error that names the op."""
    op, shape = op_named("a8w8"), Shape("a8w8", 4, 32, 64, "fp8_e4m3fn", "fp32", scale="row")
    x, weight, x_scale, w_scale = op.make_inputs(shape, torch.device("cpu"), 0)
    gemm.gemm_a8w8(x, weight, x_scale, w_scale, None, torch.float32)
    assert calls == ["a8w8"]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x_scale, torch.ones_like(x_scale))
        try:
            out = gemm.gemm_a8w8(x, weight, dual, w_scale, None, torch.float32)
        except OperandError as error:
            assert "a8w8: an operand has a tangent" in str(error)
        else:
            assert forward_ad.unpack_dual(out).tangent.any()
    assert calls == ["a8w8"]


def test_other_threads_are_unaffected(gemm: TunedGemm) -> None:
    """Calls of another thread while levels open and close have the right results."""
    stop, wrong = threading.Event(), []
    wanted = gemm.gemm_a16w16(X, W)

    def work():
        while not stop.is_set():
            if not torch.allclose(gemm.gemm_a16w16(X, W), wanted):
                wrong.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(50):
        with forward_ad.dual_level():
            out = gemm.gemm_a16w16(forward_ad.make_dual(X, X), W)
            assert forward_ad.unpack_dual(out).tangent is not None
    stop.set()
    thread.join()
    assert not wrong

"""Verify: wrong in any way is caught, right passes."""

from __future__ import annotations

import pytest
import torch
from tunedgemm.device import device_of
from tunedgemm.launcher import Launcher
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import fake_backend
from tunedgemm.tuner.trial import Candidate
from tunedgemm.tuner.verify import Verifier, bind

OP, SHAPE = op_named("a16w16"), Shape("a16w16", 24, 48, 64, "fp32")
linear = torch.nn.functional.linear
_state: list[torch.Tensor] = []


def unwritten(x, weight):
    out = torch.empty(x.shape[0], weight.shape[0])
    out[:-1] = linear(x[:-1], weight)
    return out


def last_tile_wrong(x, weight):
    out = linear(x, weight)
    out[-8:, -8:] = 0
    return out


def one_row_wrong(x, weight):
    out = linear(x, weight)
    out[7] *= 1.01
    return out


def out_of_bounds(x, weight):
    out = torch.empty(x.shape[0], weight.shape[0])
    out.as_strided((1,), (1,), out.storage_offset() + out.numel())[0] = 1.0
    return out.copy_(linear(x, weight))


def writes_operand(x, weight):
    out = linear(x, weight)
    x[0, 0] += 1
    return out


def memoised(x, weight):
    _state.append(linear(x, weight))
    return _state[0].clone()


def baked_weight(x, weight):
    _state.append(weight)
    return linear(x, _state[0])


def narrow(x, weight):
    return linear(x.bfloat16(), weight.bfloat16()).float()


def wrong_shape(x, weight):
    return linear(x, weight).t()


def wrong_dtype(x, weight):
    return linear(x, weight).double()


def elsewhere(x, weight):
    return linear(x, weight).to("meta")


def raises(x, weight):
    raise RuntimeError("boom")


def nan(x, weight):
    return linear(x, weight) * float("nan")


def checked(call, shape: Shape = SHAPE):
    _state.clear()
    sets = [OP.make_inputs(shape, torch.device("cpu"), seed) for seed in (0, 1, 2)]
    sets = [(sets[0][0], *operands[1:]) for operands in sets]
    before = [operand.clone() for operand in sets[0]]
    timing = Verifier(OP, shape, sets, 0.05).check(Solution("fake", call.__name__), Launcher(call))
    assert all(torch.equal(now, was) for now, was in zip(sets[0], before, strict=True)), "operands must be as before for the next solution"
    return timing


@pytest.mark.parametrize(
    ("call", "status", "detail"),
    [
        (linear, "ok", ""),
        (unwritten, "wrong", "worst row"),
        (last_tile_wrong, "wrong", "worst row"),
        (one_row_wrong, "wrong", "worst row"),
        (out_of_bounds, "wrong", "outside its output"),
        (writes_operand, "wrong", "changed its operands"),
        (memoised, "wrong", "worst row"),
        (baked_weight, "wrong", "worst row"),
        (narrow, "wrong", "worst row"),
        (wrong_shape, "wrong", "instead of"),
        (wrong_dtype, "wrong", "instead of"),
        (elsewhere, "wrong", "on meta instead of"),
        (raises, "failed", "RuntimeError: boom"),
        (nan, "wrong", "100.00%"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_fault_has_its_status_and_reason(call, status: str, detail: str) -> None:
    """A fault that a whole-tensor average would hide is found all the same."""
    timing = checked(call)

    assert timing.status == status
    assert detail in timing.detail


def test_a_refusal_to_bind_is_a_timing_with_the_reason() -> None:
    """What the backend says reaches the trial log; resources have their own status."""
    backend = fake_backend("turbo", solutions=("there",))
    refused = bind(Candidate(Solution("turbo", "gone"), backend), SHAPE, device_of(-1))

    assert refused.status == "unsupported"
    assert "no kernel 'gone'" in refused.detail

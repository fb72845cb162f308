"""Verify: every kind of wrong output is caught, and right ones pass."""

from __future__ import annotations

import functools

import pytest
import torch
from tunedgemm.backends.backend import with_plain_weights
from tunedgemm.backends.launcher import Launcher
from tunedgemm.ops import op_named, ops
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import exact
from tunedgemm.testing.shapes import shapes_of
from tunedgemm.tuner.verify import Verifier

OP, SHAPE = op_named("a16w16"), Shape("a16w16", 24, 48, 64, "fp32")
linear = torch.nn.functional.linear
_state: list[torch.Tensor] = []
_memory: dict = {}


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


def transposed(x, weight):
    return linear(weight, x).t()


def shared_buffer(x, weight):
    _memory.setdefault("out", linear(x, weight)).copy_(linear(x, weight))
    return _memory["out"]


def wrong_dtype(x, weight):
    return linear(x, weight).double()


def elsewhere(x, weight):
    return linear(x, weight).to("meta")


def raises(x, weight):
    raise RuntimeError("boom")


def not_numbers(x, weight):
    return linear(x, weight) * float("nan")


def unsteady(x, weight):
    _state.append(x)
    return linear(x, weight) * (1.0 + 2.0**-22 * (len(_state) % 2))


def replaces_a_buffer(x, weight):
    _state[:] = [x.new_zeros(1 << 16)]
    return linear(x, weight)


def leaks(x, weight):
    _state.append(linear(x, weight))
    return _state[-1].clone()


def keeps_a_workspace(x, weight):
    if not _state:
        _state.append(torch.empty(4096))
    _state[0].zero_()
    return linear(x, weight)


def right_for_a_while(x, weight):
    _state.append(x)
    return linear(x, weight) * (2.0 if len(_state) > 20 else 1.0)


def memoised_by_address(x, weight):
    key = (x.data_ptr(), weight.data_ptr())
    _memory.setdefault(key, linear(x, weight))
    return _memory[key].clone()


def operands(shape: Shape = SHAPE) -> list:
    sets = [OP.make_inputs(shape, torch.device("cpu"), seed) for seed in (0, 1, 2)]
    return [(sets[0][0], *operands[1:]) for operands in sets]


def checked(call, shape: Shape = SHAPE):
    _state.clear()
    _memory.clear()
    sets = operands(shape)
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
        (memoised_by_address, "wrong", "worst row"),
        (baked_weight, "wrong", "worst row"),
        (narrow, "wrong", "worst row"),
        (wrong_shape, "wrong", "instead of"),
        (transposed, "wrong", "instead of contiguous rows"),
        (shared_buffer, "wrong", "did not allocate in the call"),
        (wrong_dtype, "wrong", "instead of"),
        (elsewhere, "wrong", "on meta instead of"),
        (raises, "failed", "RuntimeError: boom"),
        (not_numbers, "wrong", "100.00%"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_fault_has_its_status_and_reason(call, status: str, detail: str) -> None:
    """A fault that a whole-tensor average would hide is found all the same."""
    timing = checked(call)

    assert timing.status == status
    assert detail in timing.detail


def test_a_verified_kernel_is_known_to_repeat_itself() -> None:
    """The same bits in repeated calls are found, and so are others that are right, too."""
    assert checked(linear).deterministic is True
    timing = checked(unsteady)
    assert (timing.status, timing.deterministic) == ("ok", False)


def test_a_cache_that_fills_up_is_not_a_leak() -> None:
    """A workspace that the first call keeps, or that each call puts in the place of the last, is
    none; one more at every call is.
    """
    assert checked(keeps_a_workspace).status == "ok"
    assert checked(replaces_a_buffer).status == "ok"
    assert checked(leaks).status == "leaks"
    assert "every call keeps" in checked(leaks).detail


def test_a_kernel_that_is_right_only_once_is_wrong() -> None:
    """After the timing everything is checked again."""
    _state.clear()
    verifier, launcher = Verifier(OP, SHAPE, operands(), 0.05), Launcher(right_for_a_while)

    assert verifier.check(Solution("fake", "a"), launcher).status == "ok"
    for _ in range(30):
        launcher.call(*operands()[0])
    again = verifier.check_again(Solution("fake", "a"), launcher, graphed=False)

    assert again.status == "wrong"
    assert "right at first, wrong later" in again.detail


def shape_with_rows(name: str) -> Shape:
    """An example of an op with several rows, whose rows do not share a scale that is computed from
    all of them.
    """
    shapes = [shape for shape in shapes_of(name) if shape.m > 2 and "per_Tensor" not in dict(shape.extra).values()]
    return min(shapes, key=lambda shape: (op_named(name).flops(shape), str(shape)))


def verifier_of(shape: Shape) -> Verifier:
    op = op_named(shape.op)
    verifier = Verifier(op, shape, [op.make_inputs(shape, torch.device("cpu"), seed) for seed in (0, 1)], 0.05)
    verifier.prepare()
    return verifier


@pytest.mark.parametrize("name", sorted(ops()))
def test_right_and_wrong_outputs_differ_for_every_op(name: str) -> None:
    """The reference itself passes.

    Last row of the last batch lost, an operand written to, and an output of another form do not.
    """
    shape = shape_with_rows(name)
    verifier, solution = verifier_of(shape), Solution("fake", "k")
    right = functools.partial(exact, solution, shape)

    def last_row_lost(*operands):
        out = right(*operands)
        out[..., -1, :] = 0
        return out

    def writes(*operands):
        out = right(*operands)
        raw = operands[0].view(torch.uint8)
        raw.bitwise_xor_(1)
        return out

    def unwritten(*operands):
        out = torch.empty_like(right(*operands))
        out[..., :-1, :] = right(*operands)[..., :-1, :]
        return out

    def check(call):
        timing = verifier.check(solution, with_plain_weights(Launcher(call), shape))
        return timing.status, timing.detail

    assert check(right) == ("ok", "")
    for wrong in (last_row_lost, unwritten):
        assert check(wrong)[0] == "wrong"
    assert check(writes) == ("wrong", "it changed its operands")
    assert check(lambda *operands: right(*operands).flatten())[0] == "wrong"
    assert check(right) == ("ok", "")  # what was written to has been put back

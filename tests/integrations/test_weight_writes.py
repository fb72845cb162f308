"""Copies of weights follow any sequence of writes, and the steps of every optimiser."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis
import pytest
import torch
import tunedgemm
from hypothesis import strategies as st
from tunedgemm.dispatch.preshuffle import PRESHUFFLE_M_THRESHOLD
from tunedgemm.errors import OperandError
from tunedgemm.integrations.conversion import convert
from tunedgemm.ops.formats.shuffle import shuffle_weight

BF16, SIDE = torch.bfloat16, 64
MANY = PRESHUFFLE_M_THRESHOLD


def drawn(seed: int, rows: int = SIDE) -> torch.Tensor:
    return torch.randn(rows, SIDE, generator=torch.Generator().manual_seed(seed)).to(BF16)


MODES = {
    "eager": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(st.data())
def test_any_sequence_of_writes_is_followed(met, writes: Any, data: Any) -> None:
    """After each of generated writes a converted layer equals a plain one, in any mode, compiled or not."""
    layer = torch.nn.Linear(SIDE, SIDE, bias=False, dtype=BF16).requires_grad_(False)
    assert convert(layer, shuffle=True, keep_plain=True).shuffled == ("",)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager")
    quick = [name for name in sorted(writes.WRITES) if "compiled" not in name]
    for name in data.draw(st.lists(st.sampled_from(quick), min_size=1, max_size=6)):
        present = layer.weight.detach()
        kept = writes.WRITES[name](layer, drawn(data.draw(st.integers(2, 9))).to(present.dtype))
        del present
        if data.draw(st.booleans()):
            del kept
        if writes.is_unseen(name):
            tunedgemm.refresh(layer)
        x, mode = drawn(1, data.draw(st.sampled_from((1, MANY)))).to(layer.weight.dtype), data.draw(st.sampled_from(sorted(MODES)))
        call = compiled if data.draw(st.integers(0, 9)) == 0 else layer
        with MODES[mode]():
            found, wanted = call(x), torch._C._nn.linear(x, layer.weight)
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()), equal_nan=True)


def test_a_step_counts_for_weights_with_copies_alone() -> None:
    """Fused optimisers raise the version of a shuffled weight, and of no weight without a copy."""
    watched, other = torch.nn.Parameter(drawn(1)), torch.nn.Parameter(drawn(1))
    shuffle_weight(watched)
    for weight in (watched, other):
        weight.grad = drawn(2)
    before = watched._version, other._version
    torch.optim.Adam([watched, other], fused=True).step()
    assert (watched._version > before[0], other._version) == (True, before[1])


def test_a_step_outdates_the_copy_of_a_caller(met) -> None:
    """`gemm_a16w16` refuses a copy from before a fused step, also as a parameter or a view of it."""
    weight, x = torch.nn.Parameter(drawn(1)), drawn(3, MANY)
    shuffled = shuffle_weight(weight)
    weight.grad = drawn(2)
    torch.optim.SGD([weight], lr=1.0, fused=True).step()
    for copied in (shuffled, torch.nn.Parameter(shuffled, requires_grad=False), shuffled.detach(), shuffled.clone()):
        with torch.no_grad(), pytest.raises(OperandError, match="has changed since shuffle_weight"):
            tunedgemm.gemm_a16w16(x, weight, shuffled_weight=copied)


@pytest.mark.parametrize("alias", ["data", "parameter"])
def test_a_copy_of_an_alias_follows_the_weight(met, alias: str) -> None:
    """A copy of `weight.data`, which counts writes apart, serves the weight until it changes."""
    weight, x = torch.nn.Linear(SIDE, SIDE, bias=False, dtype=BF16).requires_grad_(False).weight, drawn(3, MANY)
    source = weight.data if alias == "data" else torch.nn.Parameter(weight.data, requires_grad=False)
    shuffled = shuffle_weight(source)
    found = tunedgemm.gemm_a16w16(x, weight, shuffled_weight=shuffled)
    torch.testing.assert_close(found, torch._C._nn.linear(x, weight), rtol=0.02, atol=0.02)
    for _ in range(2):
        weight.add_(1)
        with pytest.raises(OperandError, match="has changed since shuffle_weight"):
            tunedgemm.gemm_a16w16(x, weight, shuffled_weight=shuffled)


def test_a_copy_of_a_freed_tensor_serves_one_at_its_address(met) -> None:
    """A weight at the address of the freed tensor that was shuffled counts as that weight, not as changed."""
    x, freed = drawn(3, MANY), drawn(1)
    shuffled = shuffle_weight(freed)
    weight = torch.empty(0, dtype=BF16).set_(freed.untyped_storage(), 0, freed.shape)  # as an allocator does
    weight.mul_(1)
    assert (weight.data_ptr(), weight._version != freed._version) == (freed.data_ptr(), True)
    del freed
    tunedgemm.gemm_a16w16(x, weight, shuffled_weight=shuffled)


def test_the_hook_leaves_other_optimisers_alone(met) -> None:
    """A step over lazy parameters does what it did before the hook."""
    shuffle_weight(drawn(1))
    lazy, learnt = torch.nn.LazyLinear(4), torch.nn.Parameter(drawn(1))
    learnt.grad = drawn(2)
    optimiser = torch.optim.SGD([*lazy.parameters(), learnt], lr=1.0)
    optimiser.step()
    torch.testing.assert_close(learnt.detach(), drawn(1) - drawn(2))

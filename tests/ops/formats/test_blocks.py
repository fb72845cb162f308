"""Operations on shuffled weights: those that keep whole blocks of rows, and the refusal of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tunedgemm.errors import OperandError
from tunedgemm.ops.formats.shuffle import ShuffledWeight, as_shuffled, shuffle_weight, unshuffle_weight
from tunedgemm.testing.listed import listed


@pytest.fixture
def weight() -> ShuffledWeight:
    return shuffle_weight(torch.randn(64, 64, dtype=torch.bfloat16))


@pytest.fixture
def experts() -> ShuffledWeight:
    return shuffle_weight(torch.randn(4, 32, 64, dtype=torch.bfloat16))


USES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "linear": F.linear,
    "matmul": lambda x, w: x @ w,
    "matmul, left": lambda x, w: w @ x,
    "mm": torch.mm,
    "mm, out": lambda x, w: torch.mm(x, x, out=w),
    "bmm": lambda x, w: torch.bmm(x[None], shuffle_weight(x[None])),
    "addmm": lambda x, w: torch.addmm(x[0], x, w),
    "einsum": lambda x, w: torch.einsum("mk,nk->mn", x, w),
    "+": lambda x, w: x + w,
    "+=": lambda x, w: w.add_(x),
    "t": lambda x, w: w.t(),
    "view": lambda x, w: w.view(32, 128),
    "view of another dtype": lambda x, w: w.view(torch.uint8).view(64, 2, 64),
    "reshape": lambda x, w: w.reshape(-1),
    "unsqueeze": lambda x, w: w.unsqueeze(1),
    "stack": lambda x, w: torch.stack([w, w], 1),
    "stack with a plain one": lambda x, w: torch.stack([w, x]),
    "cat": lambda x, w: torch.cat([x, w]),
    "cat along K": lambda x, w: torch.cat([w, w], 1),
    "rows": lambda x, w: w[:8],
    "rows from within a block": lambda x, w: w[8:24],
    "row": lambda x, w: w[0],
    "columns": lambda x, w: w[:, :16],
    "index": lambda x, w: w[torch.tensor([0])],
    "allclose": torch.allclose,
    "set_": lambda x, w: w.set_(x),
}


@listed("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@listed("use", USES.values(), ids=USES.keys())
def test_plain_use_is_refused(use: Callable[..., object], mode: Callable[[], Any], weight: ShuffledWeight):
    """Reading a shuffled weight as plain is an error in every mode, with layout and remedy."""
    before = weight.plain.clone()
    with mode(), pytest.raises(OperandError, match=r"layout aiter16x16.*unshuffle_weight\(w\) first"):
        use(torch.randn(64, 64, dtype=torch.bfloat16), weight)
    assert torch.equal(weight.plain, before)


def test_experts_can_be_taken_from_a_stack(experts: ShuffledWeight):
    """Indexing before [N, K] gives typed views of the same memory, each the shuffled weight of its expert."""
    plain = unshuffle_weight(experts)
    for taken in (experts[1], experts.select(-3, 1), list(experts)[1], experts.unbind()[1]):
        assert type(taken) is type(experts) and taken.data_ptr() == experts[1].data_ptr()
        assert torch.equal(unshuffle_weight(taken), plain[1])
    assert torch.equal(unshuffle_weight(experts[1:3]), plain[1:3])
    assert torch.equal(unshuffle_weight(experts[:]), plain)
    with pytest.raises(OperandError, match="not contiguous"):
        experts[::2]
    with pytest.raises(OperandError, match="not contiguous"):
        experts[:, :16]
    with pytest.raises(OperandError, match=r"before \[N, K\], or along N in whole blocks \(got \(4, 32, 64\), dimension 1\)"):
        experts[:, :8]


def test_a_row_for_each_block_is_plain(experts: ShuffledWeight):
    """A view of one row a block, as AITER's Triton products take it, is the bytes as a plain tensor."""
    for weight in (experts[1], experts, shuffle_weight(torch.zeros(64, 64, dtype=torch.int8), (32, 16))):
        rows = 32 if "32x16" in weight.layout_name else 16
        seen = weight.reshape(*weight.shape[:-2], weight.shape[-2] // rows, weight.shape[-1] * rows)
        assert type(seen) is torch.Tensor and seen.data_ptr() == weight.data_ptr()
        assert torch.equal(as_shuffled(seen.reshape(weight.shape), weight.layout_name), weight)
    with pytest.raises(OperandError, match="view would read"):
        experts.view(4, -1)


REARRANGED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view of a stack as one matrix": lambda w: w.view(-1, w.shape[-1]),
    "reshape": lambda w: w.reshape(2, 2, 32, 64),
    "flatten": lambda w: w.flatten(0, 1),
    "unflatten": lambda w: w.unflatten(0, (2, 2)),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "squeeze": lambda w: w[:1].squeeze(0),
    "stack": lambda w: torch.stack([w[0], w[3]]),
    "stack before it": lambda w: torch.stack([w, w], 1),
    "cat of stacks": lambda w: torch.cat([w[1:], w[:1]]),
    "cat of rows": lambda w: torch.cat([w[0], w[1]]),
    "rows of one": lambda w: w[1][16:],
    "split rows": lambda w: w[1].split(16)[1],
    "chunk": lambda w: w.chunk(2)[1],
    "index_select": lambda w: w.index_select(0, torch.tensor([3, 1])),
    "dtype": lambda w: w.view(torch.int16),
    "copy_": lambda w: torch.empty_like(w).copy_(w),
    "copy_ of one": lambda w: w[1].clone().copy_(w[2]),
}


@listed("change", REARRANGED.values(), ids=REARRANGED.keys())
def test_what_keeps_whole_blocks_keeps_the_layout(change: Callable[[torch.Tensor], torch.Tensor], experts: ShuffledWeight):
    """Views, joins and parts of whole blocks are typed, and are the shuffled weight of the plain result."""
    changed = change(experts)
    assert isinstance(changed, ShuffledWeight) and changed.layout_name == "aiter16x16" and changed.is_shuffled
    assert torch.equal(unshuffle_weight(changed), change(unshuffle_weight(experts)))


def test_one_block_of_all_rows_is_not_cut():
    """Only dimensions before [N, K] change where the order depends on N."""
    weight = shuffle_weight(torch.zeros(4, 64, 64), "columns128")
    assert type(weight.view(2, 2, 64, 64)) is type(torch.stack([weight[0], weight[1]])) is type(weight)
    for change in (lambda w: w.view(-1, 64), lambda w: torch.cat([w[0], w[1]]), lambda w: w[0][:32]):
        with pytest.raises(OperandError, match=r"unshuffle_weight\(w\) first"):
            change(weight)

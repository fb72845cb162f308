"""operands: products of nothing, whose sizes no shape has."""

from __future__ import annotations

import itertools

import pytest
import torch
import tunedgemm
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named


@pytest.mark.parametrize(
    ("name", "empty"), [*itertools.product(("a16w16", "batched_bf16"), ("n", "k", "nk")), ("batched_bf16", "b"), ("batched_bf16", "bk")]
)
def test_empty_sizes_give_what_torch_gives(name: str, empty: str) -> None:
    """Where N, K or B is 0, products give zeros, the bias or an empty output of the right sizes and dtype."""
    op, wide = op_named(name), {"n": 256, "k": 256} | {letter: 0 for letter in empty if letter != "b"}
    batch = () if name == "a16w16" else (0,) if "b" in empty else (2,)
    x, weight = torch.randn(*batch, 3, wide["k"]).bfloat16(), torch.randn(*batch, wide["n"], wide["k"]).bfloat16()
    bias = torch.randn(*batch, wide["n"]).bfloat16()
    expected = x @ weight.transpose(-1, -2)
    out = tunedgemm.call(op.name, x, weight)
    assert torch.equal(out, expected) and out.dtype == expected.dtype
    assert torch.equal(tunedgemm.call(op.name, x, weight, bias), expected + bias.unsqueeze(-2))
    with pytest.raises(OperandError):
        tunedgemm.call(op.name, x, weight[..., :-1] if wide["k"] else torch.randn(*batch, wide["n"], 8).bfloat16())


@pytest.mark.parametrize("n", [0, 16])
@pytest.mark.parametrize("k", [0, 32])
def test_empty_sizes_keep_gradients(n: int, k: int) -> None:
    """Operands of an empty product get gradients of their sizes, as from torch."""
    operands = [torch.randn(3, k, requires_grad=True), torch.randn(n, k, requires_grad=True), torch.randn(n, requires_grad=True)]
    tunedgemm.gemm_a16w16(*operands).sum().backward()
    ours = [operand.grad for operand in operands]
    for operand in operands:
        operand.grad = None
    torch.nn.functional.linear(*operands).sum().backward()
    for operand, gradient in zip(operands, ours, strict=True):
        torch.testing.assert_close(gradient, operand.grad)


@pytest.mark.parametrize("leading", [(), (0,), (1,), (2,), (2, 3), (0, 2)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_empty_sizes_take_leading_dimensions(leading: tuple[int, ...], device: str) -> None:
    """The bias is added to each row of an empty product with leading dimensions, also without memory."""
    for k, n in ((0, 1), (0, 16), (32, 0)):
        x, weight, bias = (torch.randn(*sizes, device=device) for sizes in ((*leading, 3, k), (n, k), (n,)))
        expected = torch.nn.functional.linear(x, weight, bias)
        out = tunedgemm.gemm_a16w16(x, weight, bias)
        assert (out.shape, out.dtype, out.device) == (expected.shape, expected.dtype, expected.device)
        assert device == "meta" or torch.equal(out, expected)

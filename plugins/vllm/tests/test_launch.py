"""launch: every form of the operands reaches vLLM's operator as it takes them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution, Unsupported, device_of
from tunedgemm.tools.tables import op_named
from tunedgemm_vllm import launch, library

CPU = device_of(-1)
SOLUTION = Solution("fakevllm", library.PRODUCT)
FP8 = Shape("a8w8", 6, 144, 272, dtype="fp8_e4m3fn", outdtype="bf16", scale="row")
BLOCK = attrs.evolve(FP8, op="a8w8_blockscale", k=384, scale="block")


@pytest.fixture
def operators(importable: None) -> Any:
    """Return the module behind the stand-in's operators, its records empty."""
    import fake_vllm
    import vllm_stand_in_operators

    library.operators(fake_vllm.vllm.hooks.vendor)
    vllm_stand_in_operators.calls.clear()
    vllm_stand_in_operators.asked.clear()
    return vllm_stand_in_operators


def bound(shape: Shape) -> Launcher:
    """Bind the one solution over the stand-in."""
    import fake_vllm

    launcher = fake_vllm.vllm.bind(SOLUTION, shape, CPU)
    assert isinstance(launcher, Launcher), launcher
    return launcher


def is_close(shape: Shape, out: torch.Tensor, operands: tuple[Any, ...]) -> bool:
    """Tell whether an output [..., N] is the product of its operands."""
    exact = op_named(shape.op).reference(shape, operands)
    return bool((out.reshape(shape.m, shape.n).double() - exact.double()).norm() < 2**-7 * exact.norm())


@pytest.mark.parametrize("leading", [(6,), (2, 3), (1, 6), (2, 1, 3)])
@pytest.mark.parametrize("shape", [FP8, attrs.evolve(FP8, scale="tensor"), BLOCK], ids=lambda shape: shape.scale)
def test_leading_dimensions(operators: Any, shape: Shape, leading: tuple[int, ...]) -> None:
    """x and its scales may have any leading dimensions; the output has the same."""
    x, weight, x_scale, w_scale = op_named(shape.op).make_inputs(shape, torch.device("cpu"), 0)
    scales = x_scale if shape.scale == "tensor" else x_scale.view(*leading, -1)
    out = bound(shape).call(x.view(*leading, shape.k), weight, scales, w_scale)
    assert out.shape == (*leading, shape.n) and out.dtype is torch.bfloat16
    assert is_close(shape, out, (x, weight, x_scale, w_scale))
    assert operators.calls == [(6, 144, shape.k, shape.scale == "block")]


@pytest.mark.parametrize(("x_shape", "w_shape"), [((6,), (144,)), ((6, 1), (144, 1)), ((6, 1), (1, 144))])
def test_forms_of_row_scales(operators: Any, x_shape: tuple[int, ...], w_shape: tuple[int, ...]) -> None:
    """Vectors, columns and rows of scales are all taken."""
    x, weight, x_scale, w_scale = op_named("a8w8").make_inputs(FP8, torch.device("cpu"), 0)
    out = bound(FP8).call(x, weight, x_scale.view(x_shape), w_scale.view(w_shape))
    assert is_close(FP8, out, (x, weight, x_scale, w_scale))


@pytest.mark.parametrize(
    ("m", "k", "order", "copied"),
    [
        (8, 384, "row", 8 * 3 * 4),
        (8, 384, "m_major", 0),
        (8, 384, "m_major_padded", 0),  # a multiple of four rows has no padding
        (6, 384, "m_major", 0),
        (6, 384, "m_major_padded", 6 * 3 * 4),
        (1, 384, "row", 0),
        (1, 384, "m_major", 0),
        (1, 384, "m_major_padded", 3 * 4),
        (6, 128, "row", 0),  # one block of K
        (6, 128, "m_major_padded", 0),
    ],
)
def test_orders_of_scales(operators: Any, m: int, k: int, order: str, copied: int) -> None:
    """Scales are copied only where their memory differs from M-major without padding."""
    shape = attrs.evolve(BLOCK, m=m, k=k, extra={} if order == "row" else {"scale_order": order})
    operands = op_named(shape.op).make_inputs(shape, torch.device("cpu"), 0)
    launcher = bound(shape)
    assert launcher.workspace_bytes == copied
    assert is_close(shape, launcher.call(*operands), operands)


@pytest.mark.parametrize(("shape", "asked"), [(FP8, 90), (BLOCK, 90), (attrs.evolve(FP8, dtype="int8"), None)], ids=str)
def test_the_library_is_asked_for_its_cuda(operators: Any, shape: Shape, asked: int | None) -> None:
    """fp8 products depend on the CUDA that the library was built with, those of int8 do not."""
    bound(shape)
    assert operators.asked == ([] if asked is None else [asked])


def test_a_library_of_an_old_cuda(operators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is a refusal with the architecture."""
    import fake_vllm

    older = attrs.evolve(fake_vllm.vllm, host=Device("sm_89", 128))
    assert isinstance(older.bind(SOLUTION, FP8, CPU), Launcher)
    asked = type("Operators", (), {"cutlass_scaled_mm_supports_block_fp8": staticmethod(lambda capability: capability >= 100)})
    assert launch.refusal(asked, BLOCK, Device("sm_100", 148)) == ""
    assert launch.refusal(asked, BLOCK, Device("sm_90", 132)) == (
        "vllm: its library was built without block products for sm_90; install a wheel of a newer CUDA"
    )


@pytest.mark.parametrize(("name", "split"), [("cutlass_scaled_mm_v2", 0), ("cutlass_scaled_mm", 4)])
def test_other_solutions_are_refused(importable: None, name: str, split: int) -> None:
    """A row of another kernel is a miss that names both."""
    import fake_vllm

    answer = fake_vllm.vllm.bind(Solution("fakevllm", name, split), FP8, CPU)
    assert isinstance(answer, Unsupported)
    assert f"kernel must be cutlass_scaled_mm without splitK (got {name!r}, {split})" in answer.reason

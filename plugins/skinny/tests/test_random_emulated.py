"""On the fake GPUs: random small shapes, solutions and operands through the backend, as `test_random_gpu` has them on a real one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm_skinny import Skinny
from tunedgemm_skinny.limits import OPS

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

both = pytest.mark.parametrize("skinny", ["nvidia", "amd"], indirect=True)
#: N and K at most, elements of the weight at most, rows of x at most: what the emulator multiplies in half a second.
ROOM = (300, 4000, 12_000, 32)
#: One op for each way to scale; batches have the numbers of these.
SCALINGS = ("a16w16", "a8w8", "a8w8_blockscale")


def examples(count: int) -> Any:
    """The same examples each time; none is shrunk, for each has a compile of its own."""
    return hypothesis.settings(
        max_examples=count, derandomize=True, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip


def served(data: Any, shape: Any, made: Any, skinny: Skinny, over: ModuleType, drawing: ModuleType) -> tuple[Any, Any, torch.Tensor]:
    """Operands of a shape, drawn from what *made* gives, a solution that is drawn, too, and its output."""
    solution = data.draw(drawing.solutions(skinny, shape, over.CPU))
    case = data.draw(made(shape, over.CPU))
    return case, solution, drawing.launched(drawing.bound(skinny, solution, shape, over.CPU), case)


@both
@pytest.mark.parametrize("kind", ["small", "odd", "wide", "deep"])
@examples(10)
@hypothesis.given(data=st.data())
def test_any_solution_of_any_shape_is_right(data: Any, kind: str, skinny: Skinny, over: ModuleType, drawing: ModuleType) -> None:
    """What is listed, or near what is, matches the reference; NaNs around operands and in the output before it do not get in."""
    shape = data.draw(drawing.shapes(kind, drawing.Room(*ROOM)))
    case, solution, out = served(data, shape, drawing.normal, skinny, over, drawing)
    assert not drawing.fault(case, out), f"{shape}: {solution}"


@both
@pytest.mark.parametrize("op", [op for op in OPS if op != "a16w16"])
@examples(8)
@hypothesis.given(data=st.data())
def test_any_solution_of_any_op_is_right(data: Any, op: str, skinny: Skinny, over: ModuleType, drawing: ModuleType) -> None:
    """The same in every dtype of the operands, with every kind of scales, and in batches."""
    kind, dtypes = data.draw(st.sampled_from(drawing.KINDS)), drawing.dtypes_of(op, skinny.host.gfx)
    shape = data.draw(drawing.shapes(kind, drawing.Room(*ROOM), op, dtypes))
    case, solution, out = served(data, shape, drawing.normal, skinny, over, drawing)
    assert not drawing.fault(case, out), f"{shape}: {solution}"


@both
@pytest.mark.parametrize("op", SCALINGS)
@examples(10)
@hypothesis.given(data=st.data())
def test_infinities_and_nans_are_where_torch_has_them(data: Any, op: str, skinny: Skinny, over: ModuleType, drawing: ModuleType) -> None:
    """Each reaches exactly the outputs that it takes part in; the others stay right, with subnormal numbers among the operands."""
    kind, dtypes = data.draw(st.sampled_from(drawing.KINDS)), drawing.dtypes_of(op, skinny.host.gfx, floating=True)
    shape = data.draw(drawing.shapes(kind, drawing.Room(*ROOM), op, dtypes))
    case, solution, out = served(data, shape, drawing.sprinkled, skinny, over, drawing)
    assert not drawing.misplaced(case, out), f"{shape}: {solution}"


@both
@pytest.mark.parametrize("op", SCALINGS)
@examples(5)
@hypothesis.given(data=st.data())
def test_subnormal_numbers_count(data: Any, op: str, skinny: Skinny, over: ModuleType, drawing: ModuleType) -> None:
    """An x of subnormal numbers alone gives the product that it should."""
    dtypes = drawing.dtypes_of(op, skinny.host.gfx, floating=True)
    case = data.draw(drawing.subnormal(data.draw(drawing.shapes("odd", drawing.Room(*ROOM), op, dtypes)), over.CPU))
    solution = data.draw(drawing.solutions(skinny, case.shape, over.CPU))
    out = drawing.launched(drawing.bound(skinny, solution, case.shape, over.CPU), case)
    assert not drawing.fault(case, out), f"{case.shape}: {solution}"


@both
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@examples(8)
@hypothesis.given(data=st.data())
def test_any_order_of_blocks_and_threads_gives_the_same_bits(
    data: Any, split: bool, skinny: Skinny, over: ModuleType, drawing: ModuleType
) -> None:
    """With a split and without, whatever the op."""
    op = data.draw(st.sampled_from(list(OPS)))
    drawn = drawing.shapes("deep", drawing.Room(40, 4000, 8000, 16), op, drawing.dtypes_of(op, skinny.host.gfx))
    shape = attrs.evolve(data.draw(drawn), outdtype="fp32")
    solution = data.draw(drawing.solutions(skinny, shape, over.CPU, split))
    hypothesis.assume(solution is not None)
    case, native = data.draw(drawing.normal(shape, over.CPU)), over.native(skinny)
    launcher = drawing.bound(skinny, solution, shape, over.CPU)
    first = launcher.call(*case.operands)
    for seed in range(10):
        native.fake_seed(seed)
        assert torch.equal(drawing.bits(launcher.call(*case.operands)), drawing.bits(first)), f"{shape}: {solution}, order {seed}"
    native.fake_seed(1)

"""Random small shapes, solutions and operands on the fake GPUs.

`test_random_gpu` runs them on a real one.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm_skinny import Skinny
from tunedgemm_skinny.limits import OPS

pytestmark = pytest.mark.nightly

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

both = pytest.mark.parametrize("skinny", ["nvidia", "amd"], indirect=True)
#: Most N, K, weight elements and rows of x: half a second in the emulator.
ROOM = (300, 4000, 12_000, 32)
#: One op for each kind of scales; batched ops have the same numbers.
SCALINGS = ("a16w16", "a8w8", "a8w8_blockscale")


def examples(count: int) -> Any:
    """Return settings with the same examples each time, none shrunk: each compiles a kernel."""
    return hypothesis.settings(
        max_examples=count, derandomize=True, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip


def served(data: Any, shape: Any, operands: Any, skinny: Skinny, over: ModuleType, drawing: ModuleType) -> tuple[Any, Any, torch.Tensor]:
    """Draw operands by *operands* and a solution of a shape; return both and the output."""
    solution = data.draw(drawing.solutions(skinny, shape, over.CPU))
    case = data.draw(operands(shape, over.CPU))
    return case, solution, drawing.launched(drawing.bound(skinny, solution, shape, over.CPU), case)


@both
@pytest.mark.cases("kind", ["small", "odd", "wide", "deep"])
@examples(10)
@hypothesis.given(data=st.data())
def test_any_solution_of_any_shape_is_right(data: Any, kind: str, skinny: Skinny, over: ModuleType, drawing: ModuleType) -> None:
    """Listed solutions and their neighbours match the reference.

    NaNs around the operands do not leak in.
    """
    shape = data.draw(drawing.shapes(kind, drawing.Room(*ROOM)))
    case, solution, out = served(data, shape, drawing.normal, skinny, over, drawing)
    assert not drawing.fault(case, out), f"{shape}: {solution}"


@both
@pytest.mark.cases("op", [op for op in OPS if op != "a16w16"])
@examples(8)
@hypothesis.given(data=st.data())
def test_any_solution_of_any_op_is_right(data: Any, op: str, skinny: Skinny, over: ModuleType, drawing: ModuleType) -> None:
    """Solutions of every op match the reference, in every dtype and kind of scales."""
    kind, dtypes = data.draw(st.sampled_from(drawing.KINDS)), drawing.dtypes_of(op, skinny.host.gfx)
    shape = data.draw(drawing.shapes(kind, drawing.Room(*ROOM), op, dtypes))
    case, solution, out = served(data, shape, drawing.normal, skinny, over, drawing)
    assert not drawing.fault(case, out), f"{shape}: {solution}"


@both
@pytest.mark.cases("op", SCALINGS)
@examples(10)
@hypothesis.given(data=st.data())
def test_infinities_and_nans_are_where_torch_has_them(data: Any, op: str, skinny: Skinny, over: ModuleType, drawing: ModuleType) -> None:
    """Infinities and NaNs reach only their own outputs, and all other outputs are right."""
    kind, dtypes = data.draw(st.sampled_from(drawing.KINDS)), drawing.dtypes_of(op, skinny.host.gfx, floating=True)
    shape = data.draw(drawing.shapes(kind, drawing.Room(*ROOM), op, dtypes))
    case, solution, out = served(data, shape, drawing.sprinkled, skinny, over, drawing)
    assert not drawing.misplaced(case, out), f"{shape}: {solution}"


@both
@pytest.mark.cases("op", SCALINGS)
@examples(5)
@hypothesis.given(data=st.data())
def test_subnormal_numbers_count(data: Any, op: str, skinny: Skinny, over: ModuleType, drawing: ModuleType) -> None:
    """An x of subnormal numbers gives the right product."""
    dtypes = drawing.dtypes_of(op, skinny.host.gfx, floating=True)
    case = data.draw(drawing.subnormal(data.draw(drawing.shapes("odd", drawing.Room(*ROOM), op, dtypes)), over.CPU))
    solution = data.draw(drawing.solutions(skinny, case.shape, over.CPU))
    out = drawing.launched(drawing.bound(skinny, solution, case.shape, over.CPU), case)
    assert not drawing.fault(case, out), f"{case.shape}: {solution}"


@both
@pytest.mark.cases("split", [False, True])
@examples(8)
@hypothesis.given(data=st.data())
def test_any_order_of_blocks_and_threads_gives_the_same_bits(
    data: Any, split: bool, skinny: Skinny, over: ModuleType, drawing: ModuleType
) -> None:
    """Any order of blocks and threads gives the same bits, split or not, for every op."""
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

"""Random shapes, solutions and operands on the fake GPUs and on a real one.

``SKINNY_EXAMPLES`` is the number of products.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Solution, device_of
from tunedgemm.tools.launching import torch_dtype
from tunedgemm_skinny import skinny
from tunedgemm_skinny.limits import OPS

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

EXAMPLES = int(os.environ.get("SKINNY_EXAMPLES", "40"))
CALLS = 100
#: Most N, K, weight elements and rows of x on a fake GPU: half a second in the emulator.
ROOM = (300, 4000, 12_000, 32)
#: Most N, K and weight elements of a product on a GPU, and of one with a float64 reference.
LARGEST, EXACT = (70_000, 30_000, 200_000_000), (20_000, 20_000, 1 << 24)
#: One op for each kind of scales; batched ops have the same numbers.
SCALINGS = ("a16w16", "a8w8", "a8w8_blockscale")
GPU = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
FAKE = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("nvidia", "amd")]
on_fakes = pytest.mark.parametrize("place", FAKE, indirect=True)
on_gpu = pytest.mark.parametrize("device", [pytest.param("gpu", marks=GPU)], indirect=True)
everywhere = pytest.mark.parametrize("place", [*FAKE, pytest.param("gpu", marks=GPU)], indirect=True)


@attrs.frozen
class Place:
    """A backend, the device that it runs on, the architecture, and the most sizes of products."""

    backend: Any
    device: Device
    gfx: str
    largest: tuple[int, ...]
    exact: tuple[int, ...]


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, backends: dict[str, Any], over: ModuleType) -> Place:
    """Return the fake GPU of a kind, or the first GPU."""
    if request.param == "gpu":
        device = device_of(0)
        return Place(skinny, device, device.gfx, LARGEST, EXACT)
    backend = backends[request.param]
    return Place(backend, over.CPU, backend.host.gfx, ROOM, ROOM)


def examples(share: int) -> Any:
    """Return settings of a share of the examples, the same each time, none shrunk: each compiles."""
    return hypothesis.settings(
        max_examples=max(EXAMPLES // share, 1), derandomize=True, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip


def dtypes_of(op: str, place: Place, drawing: ModuleType, *, floating: bool = False) -> tuple[str, ...]:
    """Return the device's dtypes of an op; skip without any."""
    dtypes: tuple[str, ...] = drawing.dtypes_of(op, place.gfx, floating=floating)
    return dtypes or pytest.skip(f"{place.gfx} has no dtype of {op}")


def launched(data: Any, case: Any, place: Place, drawing: ModuleType) -> tuple[Solution, torch.Tensor]:
    """Draw a solution of a case's shape; return it and its output."""
    solution = data.draw(drawing.solutions(place.backend, case.shape, place.device))
    out = drawing.launched(drawing.bound(place.backend, solution, case.shape, place.device), case)
    assert out.dtype == torch_dtype(case.shape.outdtype)
    return solution, out


@everywhere
@pytest.mark.cases("kind", ["small", "odd", "wide", "deep"])
@examples(4)
@hypothesis.given(data=st.data())
def test_any_solution_of_any_shape_is_right(data: Any, kind: str, place: Place, drawing: ModuleType) -> None:
    """Listed solutions and their neighbours match the reference.

    NaNs around the operands do not leak in.
    """
    case = data.draw(drawing.normal(data.draw(drawing.shapes(kind, drawing.Room(*place.largest))), place.device))
    solution, out = launched(data, case, place, drawing)
    assert not drawing.fault(case, out), f"{case.shape}: {solution}"


@everywhere
@pytest.mark.cases("op", [op for op in OPS if op != "a16w16"])
@examples(4)
@hypothesis.given(data=st.data())
def test_any_solution_of_any_op_is_right(data: Any, op: str, place: Place, drawing: ModuleType) -> None:
    """Solutions of every op match the reference, in every dtype and kind of scales."""
    kind, dtypes = data.draw(st.sampled_from(drawing.KINDS)), dtypes_of(op, place, drawing)
    case = data.draw(drawing.normal(data.draw(drawing.shapes(kind, drawing.Room(*place.largest), op, dtypes)), place.device))
    solution, out = launched(data, case, place, drawing)
    assert not drawing.fault(case, out), f"{case.shape}: {solution}"


@everywhere
@pytest.mark.cases("op", SCALINGS)
@examples(4)
@hypothesis.given(data=st.data())
def test_infinities_and_nans_are_where_torch_has_them(data: Any, op: str, place: Place, drawing: ModuleType) -> None:
    """Infinities and NaNs reach only their own outputs, and all other outputs are right."""
    kind, dtypes = data.draw(st.sampled_from(drawing.KINDS)), dtypes_of(op, place, drawing, floating=True)
    case = data.draw(drawing.sprinkled(data.draw(drawing.shapes(kind, drawing.Room(*place.exact), op, dtypes)), place.device))
    solution, out = launched(data, case, place, drawing)
    assert not drawing.misplaced(case, out), f"{case.shape}: {solution}"


@everywhere
@pytest.mark.cases("op", SCALINGS)
@examples(8)
@hypothesis.given(data=st.data())
def test_subnormal_numbers_count(data: Any, op: str, place: Place, drawing: ModuleType) -> None:
    """An x of subnormal numbers gives the right product."""
    dtypes = dtypes_of(op, place, drawing, floating=True)
    case = data.draw(drawing.subnormal(data.draw(drawing.shapes("odd", drawing.Room(*place.exact), op, dtypes)), place.device))
    solution, out = launched(data, case, place, drawing)
    assert not drawing.fault(case, out), f"{case.shape}: {solution}"


@on_fakes
@pytest.mark.cases("split", [False, True])
@examples(5)
@hypothesis.given(data=st.data())
def test_any_order_of_blocks_and_threads_gives_the_same_bits(
    data: Any, split: bool, place: Place, over: ModuleType, drawing: ModuleType
) -> None:
    """Any order of blocks and threads gives the same bits, split or not, for every op."""
    op = data.draw(st.sampled_from(list(OPS)))
    drawn = drawing.shapes("deep", drawing.Room(40, 4000, 8000, 16), op, drawing.dtypes_of(op, place.gfx))
    shape = attrs.evolve(data.draw(drawn), outdtype="fp32")
    solution = data.draw(drawing.solutions(place.backend, shape, over.CPU, split))
    hypothesis.assume(solution is not None)
    case, native = data.draw(drawing.normal(shape, over.CPU)), over.native(place.backend)
    launcher = drawing.bound(place.backend, solution, shape, over.CPU)
    first = launcher.call(*case.operands)
    for seed in range(10):
        native.fake_seed(seed)
        assert torch.equal(drawing.bits(launcher.call(*case.operands)), drawing.bits(first)), f"{shape}: {solution}, order {seed}"
    native.fake_seed(1)


def changed(launcher: Any, operands: tuple[torch.Tensor, ...], first: torch.Tensor, drawing: ModuleType) -> int:
    """Count the calls whose bits differ from the first."""
    count = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(CALLS):
        count += (drawing.bits(launcher.call(*operands)) != drawing.bits(first)).any()
    return int(count)


@on_gpu
@pytest.mark.cases("split", [False, True])
@examples(5)
@hypothesis.given(data=st.data())
def test_a_hundred_calls_give_the_same_bits(data: Any, split: bool, device: Device, drawing: ModuleType) -> None:
    """A hundred calls give the same bits, also with another stream busy."""
    kind = "deep" if split else data.draw(st.sampled_from(drawing.KINDS))
    op = data.draw(st.sampled_from([op for op in OPS if drawing.dtypes_of(op, device.gfx)]))
    drawn = drawing.shapes(kind, drawing.Room(2000 if split else 20_000, 20_000, 1 << 24), op, drawing.dtypes_of(op, device.gfx))
    shape = attrs.evolve(data.draw(drawn), outdtype="fp32")
    solution = data.draw(drawing.solutions(skinny, shape, device, split))
    hypothesis.assume(solution is not None)
    case = data.draw(drawing.normal(shape, device))
    launcher, square, other = drawing.bound(skinny, solution, shape, device), torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    first = launcher.call(*case.operands)
    assert not drawing.fault(case, first), f"{shape}: {solution}"
    assert changed(launcher, case.operands, first, drawing) == 0, f"{shape}: {solution}, alone"
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(20):  # 3 ms each in float32 on an H100
            square @ square
    assert changed(launcher, case.operands, first, drawing) == 0, f"{shape}: {solution}, with another stream"
    torch.cuda.synchronize()

"""The plan of the bring-up kit: every backend, op and format that the device serves, hardest first."""

from __future__ import annotations

from typing import Any

import pytest
from tunedgemm.backends.platforms import Platform
from tunedgemm.device import Device
from tunedgemm.ops import ops
from tunedgemm.shape import Shape
from tunedgemm.solution import Unsupported
from tunedgemm.testing.bring_up.checks import CHECKS
from tunedgemm.testing.bring_up.plan import plan, served_shapes, tuned_shapes
from tunedgemm.testing.fakes import fake_backend, fake_registry

MI300X = Device("gfx942", 304, "amd-instinct-mi300x")


def items(device: Device, *backends: Any, libtypes: str = "all") -> list[dict[str, Any]]:
    return plan(fake_registry(*backends), device, libtypes, lambda *_: None)["items"]


def test_each_item_once_in_turns(cpu: Device) -> None:
    """All checks of the device come first; kernels that never ran come before known ones in each turn."""
    ran = fake_backend("ran", platforms=(Platform(("cpu",), ran=("CPU",)),))
    new = fake_backend("new", platforms=(Platform(("cpu",)),))
    names = [item["id"] for item in items(cpu, ran, new, libtypes="ran,new")]
    assert len(names) == len(set(names)) and names[:3] == ["formats", "shuffles", "dispatch"]
    assert [name.split()[:2] for name in names[3:5]] == [["outputs", "new"], ["outputs", "ran"]]
    assert {name.split()[0] for name in names} == {check.name for check in CHECKS} - {"graphs", "clocks"}


def test_a_gpu_has_every_check() -> None:
    """Graphs and clocks need a GPU."""
    assert {item["check"] for item in items(MI300X)} == {check.name for check in CHECKS}


def test_refused_shapes_are_not_asked(cpu: Device) -> None:
    """Only shapes that the backend supports are items, and none is empty."""
    narrow = fake_backend("narrow", supports=lambda shape, device: None if shape.k % 64 == 0 else Unsupported("K"))
    shapes = [Shape.from_dict(item["shape"]) for item in items(cpu, narrow, libtypes="narrow") if item["libtype"]]
    assert shapes and all(shape.k % 64 == 0 and shape.m for shape in shapes)


def test_formats_come_first_and_in_the_devices_fp8() -> None:
    """The first shapes have different formats, and every format of fp8 is asked for in fnuz on an MI300X."""
    backend = fake_backend("mine", ops=tuple(ops()))
    shapes = served_shapes(backend, "a8w8", MI300X)
    first = {(shape.dtype, shape.scale) for shape in shapes[:6]}
    assert {("fp8_e4m3fnuz", "row"), ("fp8_e4m3fnuz", "tensor"), ("int8", "row")} <= first
    assert any("q_dtype_w=fp8_e4m3fnuz" in str(shape) for shape in served_shapes(backend, "fmoe", MI300X))


@pytest.mark.parametrize(("device", "count"), [(MI300X, 20), (Device("sm_90", 132), 20), (Device("cpu-avx512", 4), 8)], ids=str)
def test_shapes_to_tune(device: Device, count: int) -> None:
    """Twenty different shapes of four ops, in the device's fp8."""
    shapes = tuned_shapes(device)
    assert len(set(shapes)) == count and len({shape.op for shape in shapes}) == 4
    assert {shape.dtype for shape in shapes} == {"bf16", "fp8_e4m3fnuz" if device.gfx == "gfx942" else "fp8_e4m3fn"}


def test_tuning_by_other_libtypes_is_another_item(cpu: Device) -> None:
    """A report goes on with other libtypes: checks of one backend are known, its tuning is not theirs."""
    backends = fake_backend("one"), fake_backend("two")
    one, both = ({item["id"]: item["check"] for item in items(cpu, *backends, libtypes=libtypes)} for libtypes in ("one", "one,two"))
    assert (
        {check for name, check in one.items() if name not in both} == {"tune"} == {both[name] for name in both if name.startswith("tune")}
    )

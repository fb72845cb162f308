"""Check that the backends keep the contract, on a GPU and everywhere with fake compilers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tunedgemm.plugin import Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance
from tunedgemm.tools.tables import op_named


def form_of(shape: Shape) -> tuple[str, ...]:
    """Return op, kind of scales and layout of the weight, which select a kernel's source."""
    return (shape.op, shape.scale, shape.layout, str(shape["q_type"]) if shape.op == "fmoe" else "")


@pytest.mark.usefixtures("compiling")
class OnGpu(BackendConformance):
    """Compile instances on demand: the suite binds without preparing."""

    #: A compilation takes up to a minute.
    max_solutions: ClassVar[int] = 3

    @classmethod
    def every_shape(cls) -> tuple[Shape, ...]:
        """Return all shapes on a GPU, elsewhere the first of each op; the tests of spaces cover
        others.
        """
        shapes = super().every_shape()
        return shapes if cls._device().kind != "cpu" else tuple({shape.op: shape for shape in reversed(shapes)}.values())


@pytest.mark.slow
class TestCutlass(OnGpu):
    """CUTLASS with nvcc."""

    libtype = "cutlass"


class TestCk(OnGpu):
    """Composable Kernel with hipcc."""

    libtype = "ck"


class TestCkTile(OnGpu):
    """CK Tile with hipcc."""

    libtype = "cktile"


class OverFakes(StandInConformance):
    """Objects of the fake compilers; the CPU emulates the GPU that they are compiled for."""

    folder = Path(__file__).with_name("installed")
    work = 1 << 22
    max_solutions = 2

    # The CPU captures no graphs.
    test_graphs_capture_what_claims_to_be_graph_safe = None

    @classmethod
    def every_shape(cls) -> tuple[Shape, ...]:
        """Return the smallest served shape of each form; the tests of the limits cover others."""
        backend, device = cls.backend(), cls._device()
        served = [shape for shape in super().every_shape() if backend.refusal(shape, device) is None]
        served.sort(key=lambda shape: op_named(shape.op).flops(shape), reverse=True)
        return tuple({form_of(shape): shape for shape in served}.values())

    @classmethod
    def served_shapes(cls) -> Sequence[Shape]:
        """Return the same shapes: whether the limits allow a shape does not depend on the fakes."""
        return cls.every_shape()

    @pytest.fixture(autouse=True)
    def compilers(self, fakes: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set up the fake toolchains, and a cache for the session."""
        monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path_factory.getbasetemp() / "ck-artifacts"))
        monkeypatch.setenv("TUNEDGEMM_CK_COMPILE", "1")


class TestFakeCutlass(OverFakes):
    """CUTLASS's instances by the fake nvcc."""

    libtype = "fakecutlass"


def moe_shapes() -> Iterator[Shape]:
    """Yield shapes of fmoe.

    A case is (tokens, model_dim, inter_dim, expert, topk), activation, kind of the scales, dtype,
    doweight_stage1.
    """
    cases = (
        ((9, 128, 128, 4, 2), "Silu", "per_Tensor", "float8_e4m3fnuz", "1"),
        ((5, 256, 128, 8, 3), "Silu", "per_Token", "int8", "1"),
        ((7, 256, 256, 4, 2), "Gelu", "per_1x128", "float8_e4m3fnuz", "0"),
    )
    names = ("token", "model_dim", "inter_dim", "expert", "topk", "act_type", "q_type", "q_dtype_a", "q_dtype_w", "doweight_stage1")
    for sizes, act, kind, dtype, weighted in cases:
        cells = dict(zip(names, (*map(str, sizes), act, kind, dtype, dtype, weighted), strict=True))
        yield op_named("fmoe").columns.parse(cells | {"use_g1u1": "1", "layout": "aiter16x16"})


class TestFakeCk(OverFakes):
    """Composable Kernel's instances by the fake clang.

    The op's examples lack fmoe in gfx942's fp8, so this class adds shapes.
    """

    libtype = "fakeck"

    more = tuple(moe_shapes())


class TestFakeCkTile(OverFakes):
    """CK Tile's instances by the fake clang."""

    libtype = "fakecktile"

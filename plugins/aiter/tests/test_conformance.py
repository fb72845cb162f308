"""Check that the backends keep the contract, over the installed AITER and over a stand-in for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance
from tunedgemm.tools.launching import scale_order
from tunedgemm.tools.tables import op_named
from tunedgemm_aiter import limits

MI355X = Device("gfx950", 256)
#: Orders of scales that AITER's functions read.
ORDERS = ("row", "aiter32x8")


class OnGpu(BackendConformance):
    """AITER's kernels on an AMD GPU; elsewhere one shape of each op."""

    max_solutions = 3

    @classmethod
    def every_shape(cls) -> tuple[Shape, ...]:
        """List the shapes to ask about."""
        shapes = super().every_shape()
        return shapes if cls._device().kind == "amd" else tuple({shape.op: shape for shape in reversed(shapes)}.values())


class TestFlydsl(OnGpu):
    """FlyDSL's kernels."""

    libtype = "flydsl"


class TestOpus(OnGpu):
    """opus's kernels."""

    libtype = "opus"


class TestGluon(OnGpu):
    """Gluon's kernels."""

    libtype = "gluon"


class TestAiter(OnGpu):
    """AITER's fused MoE."""

    libtype = "aiter"


class OverStandIn(StandInConformance):
    """The stand-in; the CPU emulates an MI355X."""

    folder = Path(__file__).with_name("installed")
    max_solutions = 3

    # The CPU captures no graphs.
    test_graphs_capture_what_claims_to_be_graph_safe = None

    @classmethod
    def every_shape(cls) -> tuple[Shape, ...]:
        """Return two served shapes of each op and dtype, one and several rows, and those of `more`."""
        family = cls.libtype.removeprefix("fake")
        served = [
            shape for shape in super().every_shape() if not limits.unsupported(family, shape, MI355X) and scale_order(shape) in ORDERS
        ]
        served.sort(key=lambda shape: op_named(shape.op).flops(shape), reverse=True)
        small = {(shape.op, shape.dtype, shape.bias, shape.m > 1): shape for shape in served}
        return tuple(dict.fromkeys((*small.values(), *cls.more)))

    @classmethod
    def served_shapes(cls) -> Sequence[Shape]:
        """Return the same shapes: the limits do not depend on AITER."""
        return cls.every_shape()

    @pytest.fixture(autouse=True)
    def aiter(self, stand_in: Path) -> Path:
        """Install the stand-in for AITER."""
        return stand_in


class TestFakeFlydsl(OverStandIn):
    """FlyDSL's rows."""

    libtype = "fakeflydsl"
    more = (
        Shape("a16w16", 5, 64, 128),
        Shape("a16w16", 1, 128, 256, dtype="fp16", outdtype="fp16", epilogue="bias"),
        *(
            Shape("a8w8_bpreshuffle", m, 64, 128, dtype=dtype, outdtype="bf16", scale="row", layout="aiter16x16")
            for m in (1, 5)
            for dtype in ("fp8_e4m3fn", "int8")
        ),
    )


class TestFakeOpus(OverStandIn):
    """opus's rows."""

    libtype = "fakeopus"
    more = (Shape("a16w16", 64, 128, 256, outdtype="fp32"), Shape("a16w16", 3, 64, 192))


class TestFakeGluon(OverStandIn):
    """Gluon's products."""

    libtype = "fakegluon"


class TestFakeAiter(OverStandIn):
    """AITER's fused MoE by its own tables."""

    libtype = "fakeaiter"

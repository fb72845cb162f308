"""Conformance of the backend: with Humming on a GPU, and over a fake on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunedgemm.plugin import Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance


def weights(m: int, w_format: str, group: int, layout: str = "humming", dtype: str = "bf16", n: int = 128, k: int = 128) -> Shape:
    """Return a shape of a weight in a layout."""
    extra: Any = {"w_format": w_format, "w_group": group}
    return Shape("a16wn", m, n, k, dtype, dtype, scale="block", layout=layout, extra=extra)


MORE = (
    weights(3, "gptq_int4", 32, "marlin", n=256),
    weights(65, "gptq_int4_order", 64, "marlin", "fp16"),
    weights(2, "int8_channel", 0, "marlin", "fp16"),
    weights(17, "fp8_block", 128, k=256),
    weights(9, "awq_int4", 0, dtype="fp16"),
    weights(5, "mxfp4", 32),
)


class TestHumming(BackendConformance):
    """Conformance of Humming's kernels."""

    libtype = "humming"
    max_solutions = 2

    @classmethod
    def every_shape(cls) -> tuple[Shape, ...]:
        """Return the shapes of the suite, and others of its layouts."""
        return tuple(dict.fromkeys((*super().every_shape(), *MORE)))


class TestOverFake(StandInConformance):
    """Conformance over a Humming that computes on the host and checks every argument."""

    libtype = "fakehumming"
    folder = Path(__file__).with_name("installed")
    max_solutions = 3
    more = MORE

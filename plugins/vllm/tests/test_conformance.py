"""Conformance of the backend: over an installed vLLM on a GPU, and over a stand-in on every machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tunedgemm.plugin import Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance

ORDERS = ("row", "m_major", "m_major_padded")


def blocks(m: int, n: int, k: int, order: str, outdtype: str = "bf16") -> Shape:
    """Return a shape with block scales in an order."""
    extra = {} if order == "row" else {"scale_order": order}
    return Shape("a8w8_blockscale", m, n, k, dtype="fp8_e4m3fn", outdtype=outdtype, scale="block", extra=extra)


def rows(m: int, n: int, k: int, dtype: str, scale: str, outdtype: str = "bf16", bias: bool = False) -> Shape:
    """Return a shape with scales by row or tensor."""
    epilogue = {"epilogue": "bias", "bias_dtype": outdtype} if bias else {}
    return Shape("a8w8", m, n, k, dtype=dtype, outdtype=outdtype, scale=scale, **epilogue)


#: Tails of blocks in N and K, few rows, M that is not a multiple of four.
MORE = (
    *(blocks(m, n, k, order) for m, n, k in ((1, 144, 400), (60, 192, 272), (3, 272, 512)) for order in ORDERS),
    *(rows(5, 144, 272, dtype, scale, bias=True) for dtype in ("int8", "fp8_e4m3fn") for scale in ("row", "tensor")),
    rows(1, 256, 512, "fp8_e4m3fn", "row", "fp16"),
)


class TestVllm(BackendConformance):
    """Conformance over an installed vLLM."""

    libtype = "vllm"

    @classmethod
    def every_shape(cls) -> tuple[Shape, ...]:
        """Return the shapes of the suite, and those with tails."""
        return tuple(dict.fromkeys((*super().every_shape(), *MORE)))


class TestStandIn(StandInConformance):
    """Conformance over the stand-in, whose operators check each argument."""

    libtype = "fakevllm"
    folder = Path(__file__).with_name("installed")
    more = MORE

    @pytest.fixture(autouse=True)
    def on_path(self, importable: None) -> None:
        """Put the stand-in where child processes find it."""

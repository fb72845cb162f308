"""Conformance of the backend: over an installed vLLM on a GPU, and over a stand-in on every machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tunedgemm.plugin import Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance
from tunedgemm.tools.tables import op_named

ORDERS = ("row", "m_major", "m_major_padded")


def blocks(m: int, n: int, k: int, order: str, outdtype: str = "bf16") -> Shape:
    """Return a shape with block scales in an order."""
    extra = {} if order == "row" else {"scale_order": order}
    return Shape("a8w8_blockscale", m, n, k, dtype="fp8_e4m3fn", outdtype=outdtype, scale="block", extra=extra)


def rows(m: int, n: int, k: int, dtype: str, scale: str, outdtype: str = "bf16", bias: bool = False) -> Shape:
    """Return a shape with scales by row or tensor."""
    epilogue = {"epilogue": "bias", "bias_dtype": outdtype} if bias else {}
    return Shape("a8w8", m, n, k, dtype=dtype, outdtype=outdtype, scale=scale, **epilogue)


def experts(tokens: int, model_dim: int, inter_dim: int, count: int, topk: int, **cells: str) -> Shape:
    """Return a shape of gated experts in fp8 with a scale a row."""
    sizes = {"token": tokens, "model_dim": model_dim, "inter_dim": inter_dim, "expert": count, "topk": topk}
    words = {"act_type": "Silu", "q_type": "per_Token", "q_dtype_a": "fp8_e4m3fn", "q_dtype_w": "fp8_e4m3fn", "use_g1u1": "1"}
    return op_named("fmoe").columns.parse({**{name: str(size) for name, size in sizes.items()}, **words, "layout": "row", **cells})


#: Tails of N, of K where they may be, few rows, M that is not a multiple of four.
MORE = (
    *(blocks(m, n, k, order) for m, n, k in ((1, 144, 384), (60, 192, 256), (3, 272, 512), (5, 112, 128)) for order in ORDERS),
    *(rows(5, 144, 272, dtype, scale, bias=True) for dtype in ("int8", "fp8_e4m3fn") for scale in ("row", "tensor")),
    rows(1, 256, 512, "fp8_e4m3fn", "row", "fp16"),
    experts(1, 128, 64, 4, 1),
    experts(9, 144, 96, 8, 2),  # the grouped product swaps its operands up to 64 pairs
    experts(40, 128, 80, 6, 3, dtype="fp16"),
    experts(33, 128, 64, 16, 5, expert_parallel="True"),
    experts(7, 128, 64, 4, 2, outdtype="fp16"),
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

"""Conformance of the backend, over the vendors' libraries and over fake ones."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from tunedgemm.plugin import Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance

SPLIT = Shape("a16w16", 3, 33, 520, epilogue="bias", bias_dtype="fp32")
BATCH = Shape("batched_a8w8", 2, 17, 136, dtype="int8", outdtype="bf16", scale="row", extra={"B": 3})


FORMATS = tuple(
    Shape("a16wn", m, n, k, dtype=dtype, outdtype=dtype, scale="block", extra={"w_format": name, "w_group": group}, **epilogue)
    for name, group, dtype, m, n, k, epilogue in (
        ("gptq_int4_zp", 32, "fp16", 3, 40, 352, {"epilogue": "bias", "bias_dtype": "fp16"}),
        ("awq_int4", 0, "fp16", 1, 136, 256, {}),
        ("ct_int4", 64, "bf16", 1, 37, 320, {}),
        ("ct_int4_zp", 128, "bf16", 16, 19, 384, {}),
        ("nvfp4", 16, "bf16", 5, 33, 640, {"epilogue": "bias", "bias_dtype": "fp32"}),
        ("mxfp4", 32, "bf16", 1, 50, 512, {}),
    )
)


class TestSkinny(BackendConformance):
    """Conformance over the vendors' libraries.

    Every shape of the suite on a GPU, elsewhere one of each op.
    """

    libtype = "skinny"

    @classmethod
    def every_shape(cls) -> tuple[Shape, ...]:
        """List the shapes to ask about."""
        shapes = super().every_shape()
        return shapes if torch.cuda.is_available() else tuple({shape.op: shape for shape in reversed(shapes)}.values())


class OverFakes(StandInConformance):
    """Conformance on the CPU, which emulates the GPU of the fake libraries.

    The shapes have one launcher each: plain operands with a bias and splits, scaled ones, bf16
    times mxfp4, and each order and kind of codes of 4 bits.
    """

    folder = Path(__file__).with_name("installed")
    max_solutions = 2

    @pytest.fixture(autouse=True)
    def fakes(self, fake: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Build the fake libraries where child processes find them.

        Compiled programs stay for the session.
        """
        for name in ("nvrtc", "hiprtc", "cuda", "hip"):
            monkeypatch.setenv("FAKE_SKINNY_FOLDER", str(fake.build(name).parent))


class TestCuda(OverFakes):
    """Conformance over the fake NVRTC and CUDA driver."""

    libtype = "skinnycuda"
    shapes = (SPLIT, BATCH, Shape("a16w4_blockscale", 2, 32, 256, outdtype="bf16", scale="block", layout="aiter16x16"), *FORMATS)


class TestHip(OverFakes):
    """Conformance over the fake hipRTC and HIP driver."""

    libtype = "skinnyhip"
    shapes = (SPLIT, BATCH)

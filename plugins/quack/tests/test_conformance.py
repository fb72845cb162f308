"""Conformance of the backend: with QuACK on a GPU, and over a fake on every machine."""

from __future__ import annotations

from pathlib import Path

from tunedgemm.plugin import Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance


class TestQuack(BackendConformance):
    """Conformance of QuACK's kernels; each compiles in two seconds."""

    libtype = "quack"
    max_solutions = 2


class TestOverFake(StandInConformance):
    """Conformance over a QuACK that computes on the host and checks every argument."""

    libtype = "fakequack"
    folder = Path(__file__).with_name("installed")
    max_solutions = 6
    more = (
        Shape("a16w16", 1, 1280, 8192),
        Shape("a16w16", 3, 40, 512, outdtype="fp32", epilogue="bias", bias_dtype="fp16"),
        Shape("a16w16", 257, 264, 72, dtype="fp16", epilogue="bias"),
    )

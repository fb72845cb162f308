"""Conformance of the backend: with QuACK on a GPU, and over a fake on every machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from tunedgemm.plugin import Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance


@pytest.fixture(scope="module")
def compiled(compile_on_all_cores: Callable[..., None]) -> None:
    """Compile each launched solution for each kind of operands: one after another they take minutes."""
    shapes, device = TestQuack.served_shapes(), TestQuack._device()
    listed = [TestQuack.backend().solutions(shape, device) for shape in shapes]
    ends = dict.fromkeys(solution for solutions in listed for solution in (solutions[0], solutions[-1]))
    split = [attrs.evolve(solution, split_k=3) for solution in list(ends)[:2]]
    deepest = {attrs.evolve(shape, m=1, n=1, k=1): shape for shape in sorted(shapes, key=lambda shape: shape.k)}
    compile_on_all_cores([(*pair, device) for pair in itertools.product([*ends, *split], deepest.values())])


@pytest.mark.usefixtures("compiled")
class TestQuack(BackendConformance):
    """Conformance of QuACK's kernels."""

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

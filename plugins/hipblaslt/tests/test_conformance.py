"""Conformance of both backends: on a GPU, and over the fakes on every machine."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import attrs
import pytest
from tunedgemm.plugin import Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance


class TestCublaslt(BackendConformance):
    """Conformance of cuBLASLt."""

    libtype = "cublaslt"


class TestHipblaslt(BackendConformance):
    """Conformance of hipBLASLt."""

    libtype = "hipblaslt"


class EmulatedConformance(StandInConformance):
    """Conformance of a backend over its fake, on a CPU that emulates the GPU."""

    folder = Path(__file__).with_name("installed")
    max_solutions = 3

    @classmethod
    def every_shape(cls) -> tuple[Shape, ...]:
        """Return one supported shape of each kind; test_launch varies the sizes."""
        kinds: dict[Shape, Shape] = {}
        for shape in super().every_shape():
            if cls.backend().refusal(shape, cls._device()) is None:
                kinds.setdefault(attrs.evolve(shape, m=1, n=1, k=1), shape)
        return tuple(kinds.values())

    @pytest.fixture(autouse=True)
    def fakes(self, fake: ModuleType, harness: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compile the libraries; hipBLASLt's lists only algorithms with correct numbers."""
        for libtype in ("cublaslt", "hipblaslt"):
            monkeypatch.setenv("FAKE_LT_FOLDER", str(fake.build(libtype).parent.parent))
        monkeypatch.setenv("FAKE_LT_SOLUTIONS", "12")


class TestEmulatedCublaslt(EmulatedConformance):
    """Conformance over the fake cuBLASLt."""

    libtype = "fakecu"


class TestEmulatedHipblaslt(EmulatedConformance):
    """Conformance over the fake hipBLASLt."""

    libtype = "fakehip"

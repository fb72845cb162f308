"""Both backends keep the contract: over the vendors' libraries on a GPU, and over the fake ones on every machine."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance


class TestCublaslt(BackendConformance):
    """Everything that the core asks of a backend, of cuBLASLt."""

    libtype = "cublaslt"


class TestHipblaslt(BackendConformance):
    """Everything that the core asks of a backend, of hipBLASLt."""

    libtype = "hipblaslt"


class OverFakes(StandInConformance):
    """The same on the CPU, which stands for the GPU of the fake library."""

    folder = Path(__file__).with_name("installed")
    max_solutions = 3

    @pytest.fixture(autouse=True)
    def fakes(self, fake: ModuleType, over: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        """The libraries are there; hipBLASLt's has the answers that are right alone."""
        for libtype in ("cublaslt", "hipblaslt"):
            monkeypatch.setenv("FAKE_LT_FOLDER", str(fake.build(libtype).parent.parent))
        monkeypatch.setenv("FAKE_LT_SOLUTIONS", "12")


class TestCublasltOverItsFake(OverFakes):
    """Over the fake cuBLASLt."""

    libtype = "fakecu"


class TestHipblasltOverItsFake(OverFakes):
    """Over the fake hipBLASLt."""

    libtype = "fakehip"

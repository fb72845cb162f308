"""The backend keeps the contract: over the vendors' libraries on a GPU, and over the fake ones on every machine."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance


class TestSkinny(BackendConformance):
    """Everything that the core asks of a backend."""

    libtype = "skinny"


class OverFakes(StandInConformance):
    """The same on the CPU, which stands for the GPU of the fake libraries."""

    folder = Path(__file__).with_name("installed")
    work = 3 << 20
    max_solutions = 3

    @pytest.fixture(autouse=True)
    def fakes(self, fake: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The libraries are there, and processes that are started find them; what is compiled is kept for the session."""
        for name in ("nvrtc", "hiprtc", "cuda", "hip"):
            monkeypatch.setenv("FAKE_SKINNY_FOLDER", str(fake.build(name).parent))


class TestCuda(OverFakes):
    """Over the fake NVRTC and CUDA driver."""

    libtype = "skinnycuda"


class TestHip(OverFakes):
    """Over the fake hipRTC and HIP driver."""

    libtype = "skinnyhip"

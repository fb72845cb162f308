"""The backend keeps the contract: over the vendors' libraries on a GPU, and over the fake ones on every machine."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from tunedgemm.plugin import Shape, device_of
from tunedgemm.testing.conformance import BackendConformance

#: A distribution with the plugin's backend over the fakes, as `skinnycuda` and `skinnyhip`.
INSTALLED = Path(__file__).with_name("installed")
#: Multiplications of a shape at most: the fakes compute with one thread, in fibers.
WORK = 1 << 21


class TestSkinny(BackendConformance):
    """Everything that the core asks of a backend."""

    libtype = "skinny"


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """A block in which the distribution over the fakes is found, here and by processes that are started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(INSTALLED), *sys.path])
        yield


class OverFakes(BackendConformance):
    """The same on the CPU, which stands for the GPU of the fake libraries."""

    device = device_of(-1)
    max_solutions: ClassVar[int] = 3

    @pytest.fixture(autouse=True)
    def fakes(self, fake: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The libraries are there, and processes that are started find them; what is compiled is kept for the session."""
        for name in ("nvrtc", "hiprtc", "cuda", "hip"):
            monkeypatch.setenv("FAKE_SKINNY_FOLDER", str(fake.build(name).parent))

    @classmethod
    def plugin(cls) -> object:
        with installed():
            return super().plugin()

    @classmethod
    @functools.cache
    def backend(cls) -> Any:
        with installed():
            return BackendConformance.backend.__func__(cls)  # type: ignore[attr-defined]

    @classmethod
    @functools.cache
    def _elsewhere(cls, hidden: bool) -> dict[str, Any]:
        with installed():
            return BackendConformance._elsewhere.__func__(cls, hidden)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    @functools.cache
    def _shapes(cls) -> tuple[Shape, ...]:
        shapes = BackendConformance._shapes.__func__(cls)  # type: ignore[attr-defined]
        return tuple(shape for shape in shapes if math.prod((shape.m, shape.n, shape.k)) <= WORK)

    def test_loading_needs_no_device_and_no_other_plugin(self) -> None:
        """The plugin loads where no device is visible; that it imports no other is asked of the plugin itself."""
        assert not self._elsewhere(True)["cuda"]

    def test_prepare_needs_no_device(self, shape: Shape) -> None:
        """A process that finds the distribution compiles the first solution."""
        with installed():
            super().test_prepare_needs_no_device(shape)


class TestCuda(OverFakes):
    """Over the fake NVRTC and CUDA driver."""

    libtype = "skinnycuda"


class TestHip(OverFakes):
    """Over the fake hipRTC and HIP driver."""

    libtype = "skinnyhip"

"""Both backends keep the contract: over the vendors' libraries on a GPU, and over the fake ones on every machine."""

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

#: A distribution with the plugin's backends over the fakes, as `fakecu` and `fakehip`.
INSTALLED = Path(__file__).with_name("installed")
#: Multiplications of a shape at most: the fakes compute with one thread.
WORK = 1 << 21


class TestCublaslt(BackendConformance):
    """Everything that the core asks of a backend, of cuBLASLt."""

    libtype = "cublaslt"


class TestHipblaslt(BackendConformance):
    """Everything that the core asks of a backend, of hipBLASLt."""

    libtype = "hipblaslt"


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """A block in which the distribution over the fakes is found, here and by processes that are started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(INSTALLED), *sys.path])
        yield


class OverFakes(BackendConformance):
    """The same on the CPU, which stands for the GPU of the fake library."""

    device = device_of(-1)
    max_solutions: ClassVar[int] = 3

    @pytest.fixture(autouse=True)
    def fakes(self, fake: ModuleType, over: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        """The libraries are there; hipBLASLt's has the answers that are right alone."""
        for libtype in ("cublaslt", "hipblaslt"):
            monkeypatch.setenv("FAKE_LT_FOLDER", str(fake.build(libtype).parent.parent))
        monkeypatch.setenv("FAKE_LT_SOLUTIONS", "12")

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
        return tuple(shape for shape in shapes if math.prod((shape.m, shape.n, shape.k, int(dict(shape.extra).get("B", 1)))) <= WORK)

    def test_loading_needs_no_device_and_no_other_plugin(self) -> None:
        """The plugin loads where no device is visible; that it imports no other is asked of the plugin itself."""
        assert not self._elsewhere(True)["cuda"]


class TestCublasltOverItsFake(OverFakes):
    """Over the fake cuBLASLt."""

    libtype = "fakecu"


class TestHipblasltOverItsFake(OverFakes):
    """Over the fake hipBLASLt."""

    libtype = "fakehip"

"""The backends keep the contract: with the vendors' compilers on a GPU, and with fake ones on every machine."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tunedgemm.plugin import Shape, device_of
from tunedgemm.testing.conformance import BackendConformance

#: A distribution with the plugin's backends over the fake compilers, as ``fakecutlass``, ``fakeck`` and ``fakecktile``.
INSTALLED = Path(__file__).with_name("installed")
#: Multiplications of a shape at most: the fakes compute with one thread.
WORK = 1 << 22


class OnGpu(BackendConformance):
    """What the core asks of a backend, with instances compiled as they are needed: the suite binds without preparing."""

    #: A compilation takes up to a minute.
    max_solutions: ClassVar[int] = 3

    @pytest.fixture(autouse=True)
    def compiling(self, kept_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """What one test compiles serves the next, and compiling is allowed."""
        if kept_cache:
            monkeypatch.setenv("TUNEDGEMM_CACHE", kept_cache)
        else:
            monkeypatch.delenv("TUNEDGEMM_CACHE")
        monkeypatch.setenv("TUNEDGEMM_CK_COMPILE", "1")


class TestCutlass(OnGpu):
    """CUTLASS with nvcc."""

    libtype = "cutlass"


class TestCk(OnGpu):
    """Composable Kernel with hipcc."""

    libtype = "ck"


class TestCkTile(OnGpu):
    """CK Tile with hipcc."""

    libtype = "cktile"


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """A block in which the distribution over the fakes is found, here and by processes that are started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(INSTALLED), *sys.path])
        yield


class OverFakes(BackendConformance):
    """The same on the CPU, which stands for the GPU of the objects that the fake compilers make."""

    device = device_of(-1)
    max_solutions: ClassVar[int] = 2

    @pytest.fixture(autouse=True)
    def compilers(self, fakes: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        """The fake toolchains, and a cache for the session: what one test compiles serves the next."""
        monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path_factory.getbasetemp() / "ck-artifacts"))
        monkeypatch.setenv("TUNEDGEMM_CK_COMPILE", "1")

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


class TestFakeCutlass(OverFakes):
    """CUTLASS's instances by the fake nvcc."""

    libtype = "fakecutlass"


class TestFakeCk(OverFakes):
    """Composable Kernel's instances by the fake clang."""

    libtype = "fakeck"


class TestFakeCkTile(OverFakes):
    """CK Tile's instances by the fake clang."""

    libtype = "fakecktile"

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
from tunedgemm.plugin import Shape, device_of, op_named
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
    """Composable Kernel's instances by the fake clang; of fmoe also shapes in gfx942's fp8, which the examples of the op have none of."""

    libtype = "fakeck"

    @classmethod
    @functools.cache
    def _shapes(cls) -> tuple[Shape, ...]:
        return (*super()._shapes(), *map(op_named("fmoe").columns.parse, cls._routed()))

    @staticmethod
    def _routed() -> Iterator[dict[str, str]]:
        """Rows of fmoe: (tokens, model_dim, inter_dim, expert, topk), activation, kind of the scales, dtype, doweight_stage1."""
        cases = (
            ((9, 128, 128, 4, 2), "Silu", "per_Tensor", "float8_e4m3fnuz", "1"),
            ((20, 256, 64, 3, 2), "Gelu", "per_Token", "float8_e4m3fnuz", "0"),
            ((5, 256, 128, 8, 3), "Silu", "per_Token", "int8", "1"),
            ((7, 256, 256, 4, 2), "Gelu", "per_1x128", "float8_e4m3fnuz", "0"),
        )
        for sizes, act, kind, dtype, weighted in cases:
            names = ("token", "model_dim", "inter_dim", "expert", "topk", "act_type", "q_type", "q_dtype_a", "q_dtype_w", "doweight_stage1")
            cells = (*map(str, sizes), act, kind, dtype, dtype, weighted)
            yield dict(zip(names, cells, strict=True)) | {"use_g1u1": "1", "layout": "aiter16x16"}


class TestFakeCkTile(OverFakes):
    """CK Tile's instances by the fake clang."""

    libtype = "fakecktile"

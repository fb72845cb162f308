"""The backend keeps the contract: on an AMD GPU with packs, and over the fake HIP runtime on every machine."""

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

#: A distribution with the plugin's backend over the fake, as `fakeasm` and `fakeasm950`.
INSTALLED = Path(__file__).with_name("installed")
#: Multiplications of a shape at most: the fake computes with one thread.
WORK = 1 << 23


class TestAsm(BackendConformance):
    """Everything that the core asks of a backend."""

    libtype = "asm"


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """A block in which the distribution over the fake is found, here and by processes that are started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(INSTALLED), *sys.path])
        yield


class OverFake(BackendConformance):
    """The same on the CPU, which stands for the GPU of the fake runtime."""

    device = device_of(-1)
    max_solutions: ClassVar[int] = 4
    gfx: ClassVar[str] = ""
    fp8: ClassVar[str] = ""

    @pytest.fixture(autouse=True)
    def packs(self, no_other_packs: None, fake: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The library and the packs are there, and processes that are started find them."""
        monkeypatch.setenv("FAKE_ASM_LIBRARY", str(fake.build()))
        monkeypatch.setenv("TUNEDGEMM_ASM_PACKS", f"{tree}:{tree.with_name(f'{tree.name}-own')}")
        monkeypatch.setenv("FAKE_GFX", self.gfx)

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
        own = (
            Shape("a16w16", 33, 128, 256),
            Shape("a16w16", 5, 192, 320, outdtype="fp32", epilogue="bias", bias_dtype="fp32"),
            Shape("a16w16", 70, 64, 128, layout="aiter16x16", epilogue="bias"),
            Shape("a8w8_bpreshuffle", 33, 256, 256, dtype="int8", outdtype="bf16", scale="row", layout="aiter16x16"),
            Shape("a8w8_blockscale_bpreshuffle", 33, 256, 256, dtype=cls.fp8, outdtype="bf16", scale="block", layout="aiter16x16"),
            Shape("a4w4_blockscale", 33, 144, 512, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16"),
        )
        return (*own, *(shape for shape in shapes if math.prod((shape.m, shape.n, shape.k)) <= WORK))

    def test_prepare_needs_no_device(self, shape: Shape) -> None:
        """A process that finds the distribution prepares the first solution."""
        with installed():
            super().test_prepare_needs_no_device(shape)

    def test_loading_needs_no_device_and_no_other_plugin(self) -> None:
        """The plugin loads where no device is visible; that it imports no other is asked of the plugin itself."""
        assert not self._elsewhere(True)["cuda"]


class TestMi300x(OverFake):
    """As gfx942."""

    libtype, gfx, fp8 = "fakeasm", "gfx942", "fp8_e4m3fnuz"


class TestMi355x(OverFake):
    """As gfx950."""

    libtype, gfx, fp8 = "fakeasm950", "gfx950", "fp8_e4m3fn"

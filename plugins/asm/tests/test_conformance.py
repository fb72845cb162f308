"""Run the conformance suite on an AMD GPU with packs, and over the fake HIP runtime."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from tunedgemm.plugin import Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance


class TestAsm(BackendConformance):
    """Conformance of the backend on the present device."""

    libtype = "asm"


class OverFake(StandInConformance):
    """Conformance on a CPU that stands for the GPU of the fake runtime."""

    folder = Path(__file__).with_name("installed")
    max_solutions = 4
    gfx: ClassVar[str] = ""

    @pytest.fixture(autouse=True)
    def packs(self, no_other_packs: None, fake: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set the library and the packs for this process and its children."""
        monkeypatch.setenv("FAKE_ASM_LIBRARY", str(fake.build()))
        monkeypatch.setenv("TUNEDGEMM_ASM_PACKS", f"{tree}:{tree.with_name(f'{tree.name}-own')}")
        monkeypatch.setenv("FAKE_GFX", self.gfx)


def of_kernels(fp8: str) -> tuple[Shape, ...]:
    """Return shapes that the packs of the fake have kernels for, with this fp8, and four that they
    refuse.
    """
    return (
        Shape("a16w16", 33, 128, 256),
        Shape("a16w16", 5, 192, 320, outdtype="fp32", epilogue="bias", bias_dtype="fp32"),
        Shape("a16w16", 70, 64, 128, layout="aiter16x16", epilogue="bias"),
        Shape("a8w8_bpreshuffle", 33, 256, 256, dtype="int8", outdtype="bf16", scale="row", layout="aiter16x16"),
        Shape("a8w8_blockscale_bpreshuffle", 33, 256, 256, dtype=fp8, outdtype="bf16", scale="block", layout="aiter16x16"),
        Shape("a4w4_blockscale", 33, 144, 512, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16"),
        Shape("a16w16", 0, 128, 256),
        Shape("a16w16", 5, 96, 99),
        Shape("a8w8_bpreshuffle", 33, 144, 96, dtype=fp8, outdtype="bf16", scale="row", layout="aiter16x16"),
        Shape("a8w8_blockscale_bpreshuffle", 17, 64, 160, dtype=fp8, outdtype="bf16", scale="block", layout="aiter32x16"),
    )


class TestMi300x(OverFake):
    """Conformance as gfx942."""

    libtype, gfx, shapes = "fakeasm", "gfx942", of_kernels("fp8_e4m3fnuz")


class TestMi355x(OverFake):
    """Conformance as gfx950."""

    libtype, gfx, shapes = "fakeasm950", "gfx950", of_kernels("fp8_e4m3fn")

"""Load and launch AITER's code objects over the fake runtime; needs ``AITER_ASM_DIR``."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Shape
from tunedgemm_asm import packs

#: Read before a fixture hides it.
TREE = os.environ.get("AITER_ASM_DIR", "")
pytestmark = pytest.mark.skipif(not TREE or not Path(TREE, "gfx942").is_dir(), reason="needs AITER_ASM_DIR, a tree of AITER's code objects")
FP8 = {"gfx942": "fp8_e4m3fnuz", "gfx950": "fp8_e4m3fn"}


def product(loaded: packs.PackKernel, gfx: str) -> Shape:
    """Return a small product that the kernel supports."""
    kernel = loaded.kernel
    if kernel.abi == "aiter-bf16gemm":
        layout = "aiter16x16" if kernel.shuffled else "row"
        return Shape("a16w16", 40, kernel.tile_n, 256, layout=layout, epilogue="bias" if kernel.bias else "none")
    if kernel.abi == "aiter-i8gemm":
        return Shape("a8w8_bpreshuffle", 40, kernel.tile_n, 256, dtype="int8", outdtype="bf16", scale="row", layout="aiter16x16")
    if kernel.abi == "aiter-fp8gemm-blockscale":
        return Shape("a8w8_blockscale_bpreshuffle", 40, 128, 256, dtype=FP8[gfx], outdtype="bf16", scale="block", layout="aiter16x16")
    fp4 = Shape("a4w4_blockscale", 40, 144, 512, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16")
    return fp4 if kernel.shuffled else attrs.evolve(fp4, layout="row", extra={"scale_order": "aiter32x8"})


@pytest.mark.parametrize("gfx", ["gfx942", "gfx950"])
def test_every_code_object_loads_and_gets_the_arguments_that_it_declares(
    gfx: str, over: ModuleType, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every real code object passes the checks, loads, and computes its product from our arguments."""
    monkeypatch.setenv("FAKE_GFX", gfx)
    asm: Any = over.backend(fake, Path(TREE), gfx)
    found = asm.hooks.catalog(gfx)
    assert not found.refusals
    wrong, launched = {}, 0
    for name, loaded in found.kernels.items():
        assert loaded.checked().metadata.kernarg_bytes in loaded.abi.sizes
        launched += 1
        written = (1 if loaded.kernel.abi == "aiter-f4gemm" else 2) if loaded.kernel.splits else 0
        if text := over.fault(asm, fake, product(loaded, gfx), name, written):
            wrong[name] = text
    assert not wrong
    assert launched == {"gfx942": 37, "gfx950": 73}[gfx]
    assert over.native(asm, fake).fake_loads() == launched

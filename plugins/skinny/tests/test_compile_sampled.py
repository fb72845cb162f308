"""One kernel of each family compiles for every architecture, in every run; `test_compile` has more."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm_skinny.build import build_of, options, source
from tunedgemm_skinny.limits import TILED, UNTILED
from tunedgemm_skinny.space import enumerate_kernels

#: Architectures that the pinned compilers do not know: clang 19 and NVRTC 13.0.
NEWER = ("gfx950", "gfx1153", "gfx1154", "gfx1170", "gfx1171", "gfx1172", "sm_107")
SHAPES = (Shape("a16w16", 4, 4096, 4096), Shape("a8w8", 2, 4096, 4096, dtype="int8", outdtype="bf16", scale="row"))


@pytest.mark.parametrize("vendor", ["sm_", "gfx"])
def test_each_family_compiles(compilers: ModuleType, tmp_path: Any, vendor: str) -> None:
    """The first kernel of each family spills few registers, on architectures that never ran it, too."""
    compiler = compilers.nvrtc() if vendor == "sm_" else compilers.clang(tmp_path)
    if compiler is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc" if vendor == "sm_" else f"no {compilers.CLANG}")
    for gfx in (gfx for gfx in (*TILED, *UNTILED) if gfx.startswith(vendor) and gfx not in NEWER):
        for shape in SHAPES:
            first: dict[str, Any] = {}
            for kernel, splits in enumerate_kernels(shape, Device(gfx, 64)):
                first.setdefault(kernel.family, build_of(kernel, splits, shape, gfx))
            assert set(first) >= ({"rows", "tiles"} if gfx in TILED else {"rows"}), gfx
            for build in first.values():
                assert compiler.compile(source(build.kernel.family), options(build)).spilled <= 48, build

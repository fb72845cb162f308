"""The backends keep the contract: with the vendors' compilers on a GPU, and with fake ones on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tunedgemm.plugin import Shape
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance
from tunedgemm.tools import op_named


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


class OverFakes(StandInConformance):
    """The same on the CPU, which stands for the GPU of the objects that the fake compilers make."""

    folder = Path(__file__).with_name("installed")
    work = 1 << 22
    max_solutions = 2

    @pytest.fixture(autouse=True)
    def compilers(self, fakes: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        """The fake toolchains, and a cache for the session: what one test compiles serves the next."""
        monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path_factory.getbasetemp() / "ck-artifacts"))
        monkeypatch.setenv("TUNEDGEMM_CK_COMPILE", "1")


class TestFakeCutlass(OverFakes):
    """CUTLASS's instances by the fake nvcc."""

    libtype = "fakecutlass"


def routed() -> Iterator[Shape]:
    """Shapes of fmoe: (tokens, model_dim, inter_dim, expert, topk), activation, kind of the scales, dtype, doweight_stage1."""
    cases = (
        ((9, 128, 128, 4, 2), "Silu", "per_Tensor", "float8_e4m3fnuz", "1"),
        ((20, 256, 64, 3, 2), "Gelu", "per_Token", "float8_e4m3fnuz", "0"),
        ((5, 256, 128, 8, 3), "Silu", "per_Token", "int8", "1"),
        ((7, 256, 256, 4, 2), "Gelu", "per_1x128", "float8_e4m3fnuz", "0"),
    )
    names = ("token", "model_dim", "inter_dim", "expert", "topk", "act_type", "q_type", "q_dtype_a", "q_dtype_w", "doweight_stage1")
    for sizes, act, kind, dtype, weighted in cases:
        cells = dict(zip(names, (*map(str, sizes), act, kind, dtype, dtype, weighted), strict=True))
        yield op_named("fmoe").columns.parse(cells | {"use_g1u1": "1", "layout": "aiter16x16"})


class TestFakeCk(OverFakes):
    """Composable Kernel's instances by the fake clang; of fmoe also shapes in gfx942's fp8, which the examples of the op have none of."""

    libtype = "fakeck"

    more = tuple(routed())


class TestFakeCkTile(OverFakes):
    """CK Tile's instances by the fake clang."""

    libtype = "fakecktile"

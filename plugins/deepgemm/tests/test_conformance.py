"""Conformance of the backend, over the installed library and over its stand-in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
from tunedgemm.plugin import Shape, Solution
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.stand_in import StandInConformance
from tunedgemm.tools.tables import op_named


def scaled(m: int, n: int, k: int, order: str = "") -> Shape:
    """Return a shape of a8w8_blockscale."""
    return Shape("a8w8_blockscale", m, n, k, "fp8_e4m3fn", "bf16", scale="block", extra={"scale_order": order} if order else {})


def experts(tokens: int, model_dim: int, inter_dim: int, count: int, topk: int, **cells: str) -> Shape:
    """Return a shape of gated experts in fp8 with scales by block."""
    sizes = {"token": tokens, "model_dim": model_dim, "inter_dim": inter_dim, "expert": count, "topk": topk}
    words = {"act_type": "Silu", "q_type": "per_1x128", "q_dtype_a": "fp8_e4m3fn", "q_dtype_w": "fp8_e4m3fn", "use_g1u1": "1"}
    return op_named("fmoe").columns.parse({**{name: str(size) for name, size in sizes.items()}, **words, "layout": "row", **cells})


SHAPES = (
    Shape("a16w16", 1, 512, 1024),
    Shape("a16w16", 127, 512, 512),
    Shape("a16w16", 33, 136, 72),  # ragged in all three
    Shape("a16w16", 8, 256, 1024, outdtype="fp32"),
    Shape("a16w16", 0, 256, 512),
    scaled(1, 1280, 1024),
    scaled(16, 256, 384),
    scaled(33, 136, 80),  # one short block of K
    scaled(3, 576, 208),  # tails in N and K
    scaled(127, 136, 384, "m_major"),  # a prime M: columns that are not aligned
    scaled(64, 256, 512, "m_major"),
    scaled(59, 256, 512, "m_major_padded"),
    scaled(1, 256, 512, "m_major_padded"),
    scaled(0, 256, 512),
    experts(1, 256, 128, 4, 2),
    experts(16, 256, 128, 8, 2),
    experts(37, 208, 80, 6, 3, doweight_stage1="1"),  # tails of both K and of N, blocks of 128 across gate and up
    experts(33, 128, 64, 16, 5, expert_parallel="True", dtype="fp16"),
    experts(9, 144, 96, 8, 2, outdtype="fp16"),
    experts(0, 256, 128, 8, 2),
)


class TestDeepGemm(BackendConformance):
    """Conformance over the installed library.

    On a GPU kernels are compiled together first: one takes seconds.
    """

    libtype = "deepgemm"
    shapes = SHAPES
    max_solutions: ClassVar[int] = 2

    @pytest.fixture(autouse=True)
    def compiling(self, kept_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Allow compilation, into a cache that all tests share."""
        if kept_cache:
            monkeypatch.setenv("TUNEDGEMM_CACHE", kept_cache)
        else:
            monkeypatch.delenv("TUNEDGEMM_CACHE")
        monkeypatch.setenv("TUNEDGEMM_DEEPGEMM_COMPILE", "1")
        backend, device = self.backend(), self._device()
        if device.kind == "cpu":
            return
        names: dict[str, dict[Solution, None]] = {}
        shapes = [shape for shape in self.shapes if backend.refusal(shape, device) is None]
        for shape in shapes:  # a check binds what one shape lists for all shapes of the op
            listed = backend.solutions(shape, device)
            names.setdefault(shape.op, {}).update(dict.fromkeys((listed[0], listed[-1])))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda task: backend.prepare(*task, device), [(name, shape) for shape in shapes for name in names[shape.op]]))


class TestStandIn(StandInConformance):
    """Conformance over the stand-in, on the CPU, which emulates an H200."""

    libtype = "fakedeepgemm"
    folder = Path(__file__).with_name("installed")
    shapes = SHAPES
    max_solutions: ClassVar[int] = 3

    # The CPU captures no graphs.
    test_graphs_capture_what_claims_to_be_graph_safe = None

    @pytest.fixture(autouse=True)
    def compiling(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        """Allow compilation, into a cache for the session."""
        monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path_factory.getbasetemp() / "deepgemm-artifacts"))
        monkeypatch.setenv("TUNEDGEMM_DEEPGEMM_COMPILE", "1")

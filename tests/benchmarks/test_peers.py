"""benchmarks/peers.py: other projects' kernels are found, called with our operands, and checked."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tunedgemm.backends.launcher import Launcher
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape

ROOT = Path(__file__).parents[2] / "benchmarks"
BLOCKS = Shape("a8w8_blockscale", 5, 256, 384, "fp8_e4m3fn", "bf16", scale="block", extra={"scale_order": "m_major_padded"})


@pytest.fixture
def peers(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Load benchmarks/peers.py, which has looked for no library yet."""
    module = as_module(ROOT / "peers.py")
    for found in (module.deep_gemm, module.vllm_ops):
        found.cache_clear()
    return module


def library(error: float = 0.0) -> Any:
    """A stand-in for DeepGEMM, whose products have a relative error."""

    def fp8_gemm_nt(x: Any, weight: Any, out: torch.Tensor) -> None:
        shape = BLOCKS if x[1].stride(0) == 1 else Shape("a8w8_blockscale", 5, 256, 384, "fp8_e4m3fn", "bf16", scale="block")
        out.copy_(op_named(shape.op).reference(shape, (x[0], weight[0], x[1], weight[1])) * (1 + error))

    return SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt)


def test_a_right_product_is_a_launcher(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales arrive in the shape's order, and an op that a peer lacks is a reason, not an error."""
    monkeypatch.setitem(sys.modules, "deep_gemm", library())
    assert isinstance(peers.peer("deepgemm", BLOCKS), Launcher)
    assert peers.peer("deepgemm", Shape("a8w8", 5, 256, 384, "fp8_e4m3fn", "bf16", scale="row")) == "deepgemm has no a8w8"


def test_a_wrong_product_is_a_reason(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is called wrongly must not be timed."""
    monkeypatch.setitem(sys.modules, "deep_gemm", library(0.05))
    assert re.fullmatch(r"deepgemm: the product of .* is wrong \(relative difference 0\.05.*\)", peers.peer("deepgemm", BLOCKS))


def test_a_missing_library_is_an_error(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setattr(peers, "vllm_folder", lambda: None)
    with pytest.raises(UserError, match="install the wheel of vLLM"):
        peers.peer("vllm", BLOCKS)

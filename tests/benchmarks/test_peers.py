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
    assert peers.peer("deepgemm", Shape("a8w8", 5, 256, 384, "fp8_e4m3fn", "bf16", scale="row")) == "deepgemm has no a8w8: a8w8"


def test_a_wrong_product_is_a_reason(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is called wrongly must not be timed."""
    monkeypatch.setitem(sys.modules, "deep_gemm", library(0.05))
    assert re.fullmatch(r"deepgemm: the product of .* is wrong \(relative difference 0\.05.*\)", peers.peer("deepgemm", BLOCKS))


def test_a_missing_library_is_an_error(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setattr(peers, "vllm_folder", lambda: None)
    with pytest.raises(UserError, match="install the wheel of vLLM"):
        peers.peer("vllm", BLOCKS)


def test_the_floor_of_experts_is_two_products(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of experts are padded to 128, and each product reads the call's weights."""
    asked: list[Any] = []

    def grouped(x: Any, weight: Any, out: torch.Tensor, owners: torch.Tensor) -> None:
        asked.append((x[0].shape, x[1].stride(), weight, tuple(out.shape), owners))

    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=grouped))
    shape = next(example for example in op_named("fmoe").examples if example["q_type"] == "per_1x128" and example["g1u1"])
    operands = op_named("fmoe").make_inputs(shape, torch.device("cpu"), 0)
    launcher = peers.peer("deepgemm", shape)
    asked.clear()
    assert launcher.call(*operands).shape == (shape.m, shape.n)
    for (x, strides, weight, out, owners), sizes, index in zip(asked, ((2 * shape.k, shape.n), (shape.n, shape.k)), (1, 2), strict=True):
        assert (out[1], x[1], strides) == (*sizes, (1, len(owners))) and x[0] == out[0] == len(owners)
        assert weight[0] is operands[index] and weight[1] is operands[4 + index]
        hit = torch.bincount(operands[4].flatten())
        assert torch.bincount(owners).tolist() == [128 * -(-count // 128) for count in hit.tolist()]


def test_vllms_own_mode_multiplies_bf16(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode's module has moved between versions of vLLM; only bf16 is its product."""
    shape, mode = Shape("a16w16", 5, 48, 64), ModuleType("vllm.model_executor.layers.batch_invariant")
    mode.linear_batch_invariant = torch.nn.functional.linear  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, mode.__name__, mode)
    peers.batch_invariant_mode.cache_clear()
    assert isinstance(peers.peer("persistent", shape), Launcher)
    assert peers.peer("persistent", BLOCKS).startswith("persistent has no a8w8_blockscale")
    peers.batch_invariant_mode.cache_clear()


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the device a cache of 1 KiB, which copies of small weights exceed."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=1024))


def _decoded(name: str, group: int) -> Shape:
    return Shape("a16wn", 5, 48, 256, scale="block", extra={"w_format": name, "w_group": group})


@pytest.mark.usefixtures("small_cache")
def test_the_decoded_weight_is_a_peer_of_weight_only_products(peers: ModuleType) -> None:
    """It has the zero points and the global scale, and serves no other op."""
    for shape in (_decoded("gptq_int4_zp", 128), _decoded("nvfp4", 16)):
        assert isinstance(peers.peer("linear", shape), Launcher)
    assert peers.peer("linear", BLOCKS) == "linear has no a8w8_blockscale: a8w8_blockscale"


@pytest.mark.usefixtures("small_cache")
def test_marlin_repacks_once_what_vllm_repacks(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repacking gets what vLLM 0.33 takes, without a permutation; other formats are a reason."""
    shape, repacked = _decoded("gptq_int4", 128), list[Any]()

    def repack(codes: torch.Tensor, k: int, n: int, bits: int, is_a_8bit: bool) -> torch.Tensor:
        repacked.append((k, n, bits, is_a_8bit))
        return codes

    def product(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, *_: Any) -> torch.Tensor:
        return op_named("a16wn").reference(shape, (x, codes, scale))

    utils: Any = ModuleType("vllm.model_executor.layers.quantization.utils.marlin_utils")
    utils.marlin_make_workspace_new = utils.marlin_make_empty = lambda device: torch.empty(0, device=device)
    utils.marlin_permute_scales, utils.apply_gptq_marlin_linear = lambda scale, *_: scale, product
    types: Any = ModuleType("vllm.scalar_type")
    types.scalar_types = SimpleNamespace(uint4b8="uint4b8", uint4="uint4")
    for module in (utils, types):
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules["vllm.model_executor.layers.quantization.utils"], "marlin_utils", utils, raising=False)
    monkeypatch.setattr(peers, "vllm_ops", lambda: SimpleNamespace(gptq_marlin_repack=repack))
    assert isinstance(peers.peer("marlin", shape), Launcher)
    assert repacked == [(shape.k, shape.n, 4, False)]
    assert peers.peer("marlin", _decoded("int8_channel", 0)) == "marlin has no a16wn: int8_channel"

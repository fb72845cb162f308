"""benchmarks/peers.py: other projects' kernels are found, called with our operands, and checked."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import tunedgemm_humming
import tunedgemm_vllm
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape

ROOT = Path(__file__).parents[2] / "benchmarks"
STAND_INS = ROOT.parent / "plugins/vllm/tests/installed"
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


def _decoded(name: str, group: int, n: int = 48) -> Shape:
    return Shape("a16wn", 5, n, 256, scale="block", extra={"w_format": name, "w_group": group})


@pytest.mark.usefixtures("small_cache")
def test_the_decoded_weight_is_a_peer_of_weight_only_products(peers: ModuleType) -> None:
    """It has the zero points and the global scale, and serves no other op."""
    for shape in (_decoded("gptq_int4_zp", 128), _decoded("nvfp4", 16)):
        assert isinstance(peers.peer("linear", shape), Launcher)
    assert peers.peer("linear", BLOCKS) == "linear has no a8w8_blockscale: a8w8_blockscale"


@pytest.mark.usefixtures("small_cache")
def test_hummings_choice_is_compiled_first(peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is the first of the plugin's list, by a weight in Marlin's layout where that serves."""
    monkeypatch.syspath_prepend(ROOT.parent / "plugins/humming/tests/installed")
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    fake = importlib.import_module("fake_humming")
    monkeypatch.setattr(tunedgemm_humming, "humming", fake.fakehumming)
    for name, group in (("gptq_int4", 128), ("gptq_int4_zp", 32), ("fp8_channel", 0), ("mxfp8", 32), ("nvfp4", 16)):
        assert isinstance(peers.peer("humming", _decoded(name, group, 128)), Launcher)
    assert [kernel["block_shape"] for kernel in fake.built] == [(8, 128, 128)] * 5
    assert peers.peer("humming", BLOCKS) == "humming has no a8w8_blockscale: a8w8_blockscale"
    wanted = "humming has no a16wn: dtype: int8_channel must be with fp16, since its codes for bf16 are not Marlin's (got bf16)"
    assert peers.peer("humming", _decoded("int8_channel", 0, 128)) == wanted


@pytest.mark.usefixtures("small_cache")
def test_vllms_products_of_repacked_weights(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's launchers get the weight in their layout; what they do not serve is a reason."""
    monkeypatch.syspath_prepend(STAND_INS)
    importlib.import_module("vllm_stand_in_operators")
    hooks = tunedgemm_vllm.Vllm("vllm", tunedgemm_vllm.library.Vendor("vllm_stand_in", "vllm_stand_in_C"))
    monkeypatch.setattr(tunedgemm_vllm, "vllm", attrs.evolve(tunedgemm_vllm.vllm, hooks=hooks, host=Device("sm_90", 132)))
    for layout, name, group in (("marlin", "nvfp4", 16), ("marlin", "gptq_int4_zp", 32), ("machete", "awq_int4", 64)):
        assert isinstance(peers.peer(layout, _decoded(name, group, 128)), Launcher)
    wanted = "marlin has no a16wn: layout marlin needs N and K to be multiples of 64 and 128 or 128 and 64 (got 48 and 256)"
    assert peers.peer("marlin", _decoded("gptq_int4", 128)) == wanted
    wanted = "machete has no a16wn: output must be bf16, as x (got fp32)"
    assert peers.peer("machete", attrs.evolve(_decoded("ct_int4", 64, 128), outdtype="fp32")) == wanted

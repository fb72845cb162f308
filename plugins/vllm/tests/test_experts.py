"""experts: routing with unknown experts, limits, and libraries without the operators."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, Launcher, PluginError, Shape, Solution, device_of
from tunedgemm.tools.tables import op_named
from tunedgemm_vllm import experts, library, limits

CPU = device_of(-1)
SIZES = {"token": "6", "model_dim": "128", "inter_dim": "64", "expert": "4", "topk": "3"}
WORDS = {"act_type": "Silu", "q_type": "per_Token", "q_dtype_a": "fp8_e4m3fn", "q_dtype_w": "fp8_e4m3fn", "use_g1u1": "1", "layout": "row"}


def shape_of(**cells: str) -> Shape:
    """Return a shape of experts that are served, apart from *cells*."""
    return op_named("fmoe").columns.parse({**SIZES, **WORDS, **cells})


@pytest.mark.parametrize(
    "ids",
    [
        [[0, 1, 2]] * 6,
        [[3, 3, 3]] * 6,
        [[-1, 4, 2], [0, 1, 2], [-1, -1, -1], [4, 5, 2**31 - 1], [-(2**31), 3, 0], [1, 1, -7]],
        [[-1, -1, -1]] * 6,
    ],
    ids=["spread", "one", "unknown", "none"],
)
@pytest.mark.parametrize("tokens", [6, 24])
def test_routings(importable: None, ids: list[list[int]], tokens: int) -> None:
    """Unknown experts add nothing, whether the operands of the grouped product are swapped or not."""
    import fake_vllm

    shape = shape_of(token=str(tokens))
    operands = list(op_named("fmoe").make_inputs(shape, torch.device("cpu"), 0))
    operands[4] = torch.tensor(ids * (tokens // 6), dtype=torch.int32)
    launcher = fake_vllm.vllm.bind(Solution("fakevllm", library.GROUPED), shape, CPU)
    assert isinstance(launcher, Launcher), launcher
    out = launcher.call(*operands)
    exact = op_named("fmoe").reference(shape, tuple(operands)).float()
    assert out.shape == (tokens, 128) and out.dtype is torch.bfloat16
    assert (out.float() - exact).norm() <= 0.06 * exact.norm()
    known = (operands[4] >= 0) & (operands[4] < 4)
    assert not out[~known.any(1)].any()


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"q_type": "per_Tensor"}, "(got fp8_e4m3fn, per_Tensor, silu, gated)"),
        ({"q_dtype_w": "int8", "q_dtype_a": "int8"}, "(got int8, per_Token, silu, gated)"),
        ({"act_type": "Gelu"}, "(got fp8_e4m3fn, per_Token, gelu, gated)"),
        ({"use_g1u1": "0"}, "(got fp8_e4m3fn, per_Token, silu, not gated)"),
        ({"doweight_stage1": "1"}, "(got fp8_e4m3fn, per_Token, silu, gated, weighted in stage 1)"),
        ({"q_dtype_a": "bf16"}, "fmoe has no activations of bf16 and weights of fp8_e4m3fn"),
        ({"options": "bias1"}, "fmoe has no bias1"),
        ({"expert": "1024"}, "experts must be in 1..1023 (got 1024)"),
        ({"inter_dim": "72"}, "N and K must be multiples of 16 (got 128 and 72)"),
        ({"layout": "aiter16x16"}, "weight layout must be row (got 'aiter16x16')"),
        ({"token": "0"}, "M must be at least 1 (got 0)"),
    ],
)
def test_reasons(cells: dict[str, str], reason: str) -> None:
    """Each limit gives the value it found; the shape without the change is served."""
    device = Device("sm_90", 132)
    assert limits.unsupported(shape_of(), device, None) == ""
    assert limits.unsupported(shape_of(**cells), device, None).endswith(reason)
    assert limits.unsupported(shape_of(), attrs.evolve(device, gfx="sm_89"), None).startswith("fmoe needs one of sm_90, ")


def test_a_library_without_an_operator(monkeypatch: pytest.MonkeyPatch, importable: None) -> None:
    """An operator that the library lacks is named; vLLM 0.21 has its activation in another library."""
    import fake_vllm

    real = library.operator

    def lacking(vendor: Any, name: str) -> Any:
        if name == "silu_and_mul":
            raise PluginError(f"{vendor.package}: its library has no {name}")
        return real(vendor, name)

    monkeypatch.setattr(experts, "operator", lacking)
    answer = fake_vllm.vllm.bind(Solution("fakevllm", library.GROUPED), shape_of(), CPU)
    assert str(answer) == "vllm_stand_in: its library has no silu_and_mul"


@pytest.mark.gpu
@pytest.mark.skipif(library.folder_of("vllm") is None, reason="needs an installed vLLM")
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_unknown_experts_on_a_gpu(tokens: int) -> None:
    """vLLM's own operators skip them, too, also where a graph is replayed with other routings."""
    from tunedgemm_vllm import vllm

    shape, device = shape_of(token=str(tokens), model_dim="1024", inter_dim="512", expert="16", topk="4"), device_of(0)
    if answer := vllm.refusal(shape, device):
        pytest.skip(str(answer))
    launcher = vllm.bind(Solution("vllm", library.GROUPED), shape, device)
    assert isinstance(launcher, Launcher), launcher
    operands = list(op_named("fmoe").make_inputs(shape, torch.device("cuda"), 0))
    launcher.call(*operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launcher.call(*operands)
    for seed in (1, 2):
        torch.manual_seed(seed)
        operands[4].copy_(torch.randint(-2, 20, operands[4].shape))
        graph.replay()
        exact = op_named("fmoe").reference(shape, tuple(operands)).float()
        assert (out.float() - exact).norm() <= 0.08 * exact.norm()

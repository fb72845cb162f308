"""benchmarks/engine_bits.py and engine_worker.py: conditions, equal bits, digests."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Load benchmarks/engine_bits.py."""
    return as_module(BENCHMARKS / "engine_bits.py")


@pytest.fixture
def worker(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Load benchmarks/engine_worker.py."""
    return as_module(BENCHMARKS / "engine_worker.py")


class Engine:
    """A stand-in for an arm whose log probabilities depend on the batch from a size on."""

    model = "m"

    def __init__(self, name: str, wrong_from: int) -> None:
        self.name, self._wrong_from = name, wrong_from

    def ask(self, method: str, batches: Any, top: int) -> Any:
        assert (method, top) == ("exact", 5)
        return [[self._answer(request, len(batch)) for request in batch] for batch in batches]

    def _answer(self, request: tuple[int, int, int], size: int) -> list[str]:
        seed, _, tokens = request
        off = 1e-7 if size >= self._wrong_from else 0.0
        return [f"{seed} {seed}:{(-1.0 - off * place).hex()}" for place in range(tokens)]


def test_conditions_cover_all_prompts(script: ModuleType) -> None:
    """Each prompt is asked once under each condition, in full batches with requests of others."""
    mine = script.prompts(32, 16)
    assert len({seed for seed, *_ in mine}) == 32
    for name, (size, seed) in script.BATCHES.items():
        made = script.batches(mine, size, seed)
        asked = [request for batch in made for request in batch]
        assert all(len(batch) == size for batch in made), name
        assert sorted(request for request in asked if request in mine) == mine
    assert script.batches(mine, 64, 2) != script.batches(mine, 64, 3)


def test_answers_are_compared_bit_for_bit(script: ModuleType) -> None:
    """An arm is compared with the first arm of its mode alone, and one bit counts."""
    rows: list[dict[str, Any]] = []
    arguments = SimpleNamespace(prompts=4, tokens=3)
    arms = [Engine("vllm", 64), Engine("ours", 999), Engine("ours-eager", 1)]
    script.compare_bits(arms, arguments, rows.append, time.monotonic() + 60)
    differ = {(row["arm"], row["condition"]): row["differ"] for row in rows}
    assert differ["vllm", "alone"] == differ["vllm", "batch 7"] == 0 and differ["vllm", "batch 64"] == differ["vllm", "batch 200"] == 4
    assert {row["differ"] for row in rows if row["arm"] == "ours"} == {0}
    assert {(row["differ"], row["first token"]) for row in rows if row["arm"] == "ours-eager"} == {(4, 1)}
    assert next(row for row in rows if row["differ"])["largest difference"] == pytest.approx(2e-7)
    rows.append({"model": "m", "arm": "ours", "layers": 3, "differ at M=1": 0, "differ at M=7": 2, "first rows differ": 1})
    rows.append({"model": "m", "arm": "ours", "profile": "decode 8", "us": 50.4, "products, us": 40.0})
    rows.append({"model": "m", "figure": "decode 8, ms", "ours": 1.0, "ours over vllm": (1.5, 1.4, 1.6)})
    assert script.summary(rows)[1].startswith("m ours: of 4 prompts differ: 0 alone, 0 alone again, 0 batch 7")
    wanted = ("m ours: 3 layers, 3 differ from PyTorch or by M", "m ours: products: decode 8 40 of 50 us")
    assert script.summary(rows)[2:4] == list(wanted)
    assert script.summary(rows)[5] == "m, decode 8, ms: ours over vllm 1.500"


def test_layers_have_the_same_bits_in_the_engine_and_in_training(
    worker: ModuleType, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The other process multiplies by the engine's own weights, and sees other bits of an output."""
    wrong = torch.tensor([[2.0]], dtype=torch.bfloat16)  # a factor of all rows but the first
    apply = lambda layer, x, bias: torch.nn.functional.linear(x, layer.weight) * torch.where(torch.arange(len(x))[:, None] > 0, wrong, 1)  # noqa: E731
    layers = {name: torch.nn.Linear(256, n, bias=False, dtype=torch.bfloat16) for name, n in (("a", 64), ("b", 64), ("c", 32))}
    model = torch.nn.ModuleDict(layers)
    for name, layer in layers.items():
        exact = SimpleNamespace(apply=lambda layer, x, bias: torch.nn.functional.linear(x, layer.weight))
        layer.quant_method = SimpleNamespace(apply=apply) if name == "c" else exact
    engine = worker.Worker()
    engine.get_model = lambda: model
    found = engine.bits_of_layers([8, 16], str(tmp_path))
    files = [row for row in found if "file" in row]
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"layers": files, "sizes": [8, 16]})))
    worker.main()
    same, other = script.of_layers(found, json.loads(capsys.readouterr().out))
    assert (same["layers"], same["compared"], same["differ at M=8"], same["first rows differ"]) == (2, 1, 0, 0)
    assert (other["layers"], other["compared"], other["differ at M=8"], other["differ at M=16"], other["first rows differ"]) == (
        1,
        1,
        1,
        1,
        0,
    )


@pytest.mark.parametrize("scale", [("weight_scale", [64, 1]), ("weight_scale_inv", [1, 2])])
def test_layers_of_8_bits_are_multiplied(worker: ModuleType, scale: tuple[str, list[int]]) -> None:
    """A layer with scales by row or block is multiplied, and x needs no scale but one."""
    layer = SimpleNamespace(weight=torch.randn(64, 256).to(torch.float8_e4m3fn), **{scale[0]: torch.full(scale[1], 0.01)})
    x = worker.rows_of_x(5, 256, torch.device("cpu"))
    assert torch.equal(x.to(torch.float8_e4m3fn).to(x.dtype), x) and (x.view(5, 2, 128).abs().amax(2) == 448).all()
    out, factor = worker.multiply(layer, x), float(getattr(layer, scale[0]).flatten()[0])
    wanted = x.double() @ layer.weight.double().t() * factor
    assert (out.double() - wanted).norm() < 0.01 * wanted.norm()


def test_digests_tell_one_bit_and_the_order(worker: ModuleType) -> None:
    """Equal tensors have one digest; a flipped bit or two swapped elements have another."""
    data = torch.arange(1000, dtype=torch.float32)
    other, swapped = data.clone(), data.clone()
    other.view(torch.int32)[7] ^= 1
    swapped[[3, 5]] = data[[5, 3]]
    assert worker.digest(data) == worker.digest(data.clone())
    assert len({worker.digest(each) for each in (data, other, swapped, data[:999])}) == 4


def test_kernels_are_summed_by_kind(script: ModuleType) -> None:
    """A profile's row has the time of a step by kind."""
    kernels = {"flash_fwd_cutlass": (8, 80.0), "nvjet_tst_64x8": (16, 320.0), "triton_red_fused_rsqrt": (8, 40.0), "memcpy": (1, 8.0)}
    kernels |= {"tma block=[384, 1, 1]": (8, 16.0), "triton_red_fused_amax_cutlass_scaled_mm_div": (8, 24.0)}
    row = script.profile_row(kernels, 8)
    assert (row["us"], row["attention, us"], row["products, us"], row["norm, us"], row["other, us"]) == (61, 10, 42, 5, 1)
    assert row["fused, us"] == 3
    assert next(iter(row["kernels"])) == "nvjet_tst_64x8"


def test_kernels_of_one_name_are_told_apart(worker: ModuleType) -> None:
    """Kernels of one entry name count apart by their resources, whatever the grid is."""
    kernel = {"cat": "kernel", "name": "ptx", "dur": 2.0}
    sizes = [([132, 1, 1], 4096), ([8, 1, 1], 4096), ([132, 1, 1], 8192)]
    events = [{**kernel, "args": {"grid": grid, "block": [384, 1, 1], "shared memory": shared}} for grid, shared in sizes]
    events += [{"cat": "gpu_memset", "name": "Memset", "dur": 1.0, "args": {}}, {"cat": "cuda_runtime", "name": "launch"}, {"name": "end"}]
    name = "ptx block=[384, 1, 1] shared memory="
    assert worker.kernels_of({"traceEvents": events}) == {f"{name}4096": (2, 4.0), f"{name}8192": (1, 2.0), "Memset": (1, 1.0)}


def test_unknown_arms_are_refused(script: ModuleType) -> None:
    """An arm is a mode, or a mode and a variant."""
    assert script.parsed(["model", "--home", "h", "--arms", "ours-chunked", "plain"]).arms == ["ours-chunked", "plain"]
    for name in ("theirs", "ours-slow"):
        with pytest.raises(SystemExit):
            script.parsed(["model", "--home", "h", "--arms", name])

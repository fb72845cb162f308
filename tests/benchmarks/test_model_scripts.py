"""The scripts that run and time a whole model, at a tiny size on the CPU."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import tunedgemm
from tunedgemm.device import device_of
from tunedgemm.ops import op_named
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.row import Row
from tunedgemm.table.untuned import read_untuned

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
RUN, SPEED = ROOT / "examples" / "models" / "run_llama.py", ROOT / "benchmarks" / "model_speed.py"
SMALL = ("--model", "tiny", "--prompt", "6", "--steps", "2", "--batch", "2")


@pytest.fixture(scope="module")
def script(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Load examples/models/run_llama.py."""
    return as_module(RUN)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Capture the tiny model's shapes in a separate process, and give each a row of torch's own
    call.
    """
    home = tmp_path_factory.mktemp("home")
    environment = {**os.environ, "TUNEDGEMM_HOME": str(home), "AITER_TUNE_GEMM": "1"}
    subprocess.run([sys.executable, RUN, *SMALL, "--only-capture"], check=True, capture_output=True, timeout=300, env=environment)
    op, device = op_named("a16w16"), device_of(-1)
    shapes = [untuned.shape for untuned in read_untuned(home / "bf16_untuned_gemm.csv", op)]
    rows = [Row(shape, device.gfx, device.cu_num, device.name, Solution("torch", "native"), us=1.0) for shape in shapes]
    write_rows(home / "bf16_tuned_gemm.csv", op, rows)
    assert len(rows) == 9
    return home


@pytest.fixture
def home(captured: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve from that folder, and forget it afterwards."""
    monkeypatch.setenv("TUNEDGEMM_HOME", str(captured))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # no C++ compiler
    tunedgemm.reload()
    yield captured
    monkeypatch.undo()
    tunedgemm.reload()


@torch.inference_mode()
def test_decoding_with_the_cache_is_one_pass_over_all_tokens(script: ModuleType) -> None:
    """The logits of a prefill and its steps are those of the whole sequence at once, however often
    the cache was rewound.
    """
    asked = script.served("tiny", "cpu", batch=2, prompt=6, steps=3)
    whole = asked.model(input_ids=asked.tokens).logits[:, asked.prompt - 1 :]
    for _ in range(2):
        logits = torch.stack([asked.prefill(asked.step), *asked.decode(asked.step, keep=True)], dim=1)
        assert torch.allclose(logits, whole, atol=1e-5)


def test_a_model_by_the_name_of_a_shipped_one(script: ModuleType) -> None:
    """The sizes of Llama 3.1 8B are those that the package ships."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(script.named_model(script.DEFAULT["cuda"]))

    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (4096, 32, 128256)


def test_run_llama_agrees_in_every_mode(script: ModuleType, home: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The table answers every captured call exactly, and every mode's outputs agree."""
    monkeypatch.setattr(sys, "argv", [str(RUN), *SMALL, "--home", str(home), "--skip-tuning", "--rounds", "1"])
    monkeypatch.setattr(script, "console", script.Console())

    assert script.main() == 0
    out = capsys.readouterr().out
    assert "The table answers 100% of" in out
    assert "compiled: one decode step" in out

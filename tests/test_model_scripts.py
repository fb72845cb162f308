"""The scripts that run and time a whole model, at a tiny size on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
RUN, SPEED = ROOT / "examples" / "models" / "run_llama.py", ROOT / "benchmarks" / "model_speed.py"
SMALL = ("--model", "tiny", "--prompt", "6", "--steps", "2", "--batch", "2")


@pytest.fixture
def script(as_module: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/models/run_llama.py as a module."""
    monkeypatch.syspath_prepend(str(RUN.parent))
    return as_module(RUN)


@torch.inference_mode()
def test_decoding_with_the_cache_is_one_pass_over_all_tokens(script) -> None:
    """The logits of a prefill and its steps are those of the whole sequence at once, however often the cache was rewound."""
    asked = script.served("tiny", "cpu", batch=2, prompt=6, steps=3)
    whole = asked.model(input_ids=asked.tokens).logits[:, asked.prompt - 1 :]
    for _ in range(2):
        found = torch.stack([asked.prefill(asked.step), *asked.decode(asked.step, keep=True)], dim=1)
        assert torch.allclose(found, whole, atol=1e-5)


def test_a_model_by_the_name_of_a_shipped_one(script, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of Llama 3.1 8B are those that the package ships; here on the meta device."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(script.named_model(script.DEFAULT["cuda"]))

    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (4096, 32, 128256)


@pytest.mark.slow
def test_run_llama_captures_tunes_and_agrees(tmp_path) -> None:
    """Its three steps run; the table then answers every captured call exactly, and every mode's outputs agree."""
    command = [sys.executable, RUN, *SMALL, "--home", tmp_path, "--iters", "5", "--rounds", "1", "--libtype", "torch"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "The table answers 100% of" in answer.stdout
    assert answer.stdout.count("Outputs agree") == (3 if torch.cuda.is_available() else 2)
    assert "compiled: one decode step" in answer.stdout


@pytest.mark.slow
def test_model_speed_keeps_every_sample(tmp_path) -> None:
    """It tunes, measures every mode in three arms, and keeps as many samples as rounds; a second run takes no sample again."""
    kept = tmp_path / "speed.json"
    command = [
        sys.executable, SPEED, *SMALL, "--home", tmp_path / "home", "--stages", "capture,tune,eager", "--iters", "5", "--libtype", "torch",
        "--rounds", "3", "--prefill-rounds", "2", "--json", kept,
    ]  # fmt: skip
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    report = json.loads(kept.read_text())
    assert report["coverage"].startswith("The table answers 100%")
    assert report["unbound"] == {}
    assert [(cell["mode"], cell["phase"], cell["agree"]) for cell in report["cells"]] == [
        ("eager", "prefill", True),
        ("eager", "decode", True),
    ]
    for cell, rounds in zip(report["cells"], (2, 3), strict=True):
        assert {arm: len(values) for arm, values in cell["samples"].items()} == {"torch": rounds, "again": rounds, "tunedgemm": rounds}
        assert cell["gain"][1] <= cell["gain"][0] <= cell["gain"][2]
    again = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "eager: kept from" in again.stdout and json.loads(kept.read_text()) == report
    wrong = subprocess.run([*command[:2], *SMALL, "--home", tmp_path, "--stages", "flying"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and "no stage flying" in wrong.stderr

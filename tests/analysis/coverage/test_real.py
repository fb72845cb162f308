"""A small real model from capture to coverage, and AITER's own lists and tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tunedgemm.analysis.coverage import coverage
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.table.folders import home_folder
from tunedgemm.tuner import Options, tune

AITER = Path(__file__).parents[4] / "shared" / "aiter" / "configs"
MI300X = Device("gfx942", 304)


@pytest.mark.skipif(not AITER.is_dir(), reason="AITER's tables are not here")
class TestAiter:
    """AITER's own lists and tables, whose backends are not installed."""

    def test_rows_of_aiters_tables_for_its_model_lists(self):
        """AITER's bf16 tables have many rows of its llama70B
        list for gfx950 and none for an MI300X."""
        shapes, tables = AITER / "model_configs" / "llama70B_untuned_gemm.csv", AITER / "model_configs" / "llama70B_bf16_tuned_gemm.csv"
        far = coverage(shapes, device=Device("gfx950", 256), tables=[tables])
        near = coverage(shapes, device=MI300X, tables=[tables])

        assert far.rows("exact", by="calls") > 0.5 > far.share("exact", by="calls") > 0.1
        assert {one.libtype for one in far.unused()} >= {"asm", "flydsl"}
        assert far.share("exact", "fine", "coarse", "heuristic", "fallback", by="calls") == pytest.approx(1)
        assert {(entry.how in ("fallback", "heuristic"), entry.row) for entry in near.entries} == {(True, "")}

    def test_rows_of_the_mi300x_have_their_words_without_their_backend(self):
        """Its list of a8w8_bpreshuffle is exactly what its table holds for gfx942:304, all of it asm."""
        op = op_named("a8w8_bpreshuffle")
        found = coverage(AITER / op.columns.untuned_file, device=MI300X, tables=[AITER / op.columns.tuned_file])

        assert found.rows("exact") == 1.0
        [unused] = found.unused()
        assert (unused.libtype, unused.calls) == ("asm", found.calls)


WORKLOAD = """
import sys, torch, tunedgemm
from transformers import LlamaConfig, LlamaForCausalLM

sizes = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, vocab_size=128)
torch.manual_seed(0)
model = LlamaForCausalLM(sizes).eval()
with torch.inference_mode(), tunedgemm.patched():
    for length in map(int, sys.argv[1:]):
        model(input_ids=torch.arange(length)[None], logits_to_keep=1)
"""


@pytest.mark.nightly
def test_a_model_is_captured_tuned_and_covered(tmp_path, one_thread):
    """Coverage goes from 0 % to 100 % by tuning;
    other prompts show a padded share and its regret."""

    def run(*lengths: int) -> None:
        command = [sys.executable, "-c", WORKLOAD, *map(str, lengths)]
        subprocess.run(command, check=True, env={**os.environ, "AITER_TUNE_GEMM": "1"}, timeout=300)

    options = Options(libtype="torch", device="cpu", iters=15, seconds=0.1)
    run(16, 1)
    first = coverage()
    assert first.ops == ("a16w16",) and first.calls == 2 * (2 * 7 + 1)
    assert first.share("exact") == first.share("exact", by="calls") == 0.0

    assert not tune(options=options).failed
    second = coverage()
    assert second.share("exact") == second.share("exact", by="calls") == 1.0
    assert {entry.us_from for entry in second.entries} == {"row"}
    assert second.next() == []

    (home_folder() / "bf16_untuned_gemm.csv").unlink()
    run(13)
    third = coverage()
    padded = {entry.shape.m: entry for entry in third.entries if entry.how == "fine"}
    assert {entry.row_m for entry in padded.values()} == {16} and set(padded) == {13}
    assert third.share("fine", by="calls") == 14 / 15 and third.share("exact", by="calls") == 1 / 15
    assert third.regret() is None

    real = tmp_path / "real.csv"
    assert not tune("a16w16", None, real, options).failed
    fourth = coverage(against=[real])
    regret = fourth.regret()
    assert (regret.calls, regret.of) == (14, 14)
    assert 0.0 <= regret.weighted <= (regret.worst.regret or 0.0)
    assert fourth.share("fine", by="calls") == 14 / 15

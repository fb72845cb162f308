"""A small real model from capture to coverage, and AITER's own lists and tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from tunedgemm.analysis.coverage import coverage
from tunedgemm.device import Device
from tunedgemm.ops import op_named

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

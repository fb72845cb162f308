"""Row: lines of other makers' tables are rows like any other."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.csvfile import read_rows, upsert
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.table import Table

OP = op_named("a16w16")


def test_the_short_form_names_no_device_and_gives_a_rate(tmp_path):
    """M,N,K,lib,kernel_name,tflops,bandwidth_gb_s: rows for any device, their time from the rate; they survive a rewrite."""
    path = tmp_path / "t.csv"
    path.write_text(
        "M,N,K,lib,kernel_name,tflops,bandwidth_gb_s\n"
        "532,2048,2048,asm,bf16gemm_fp32bf16_tn_96x64_pf3_splitk,266.78,761.98\n"
        "532,2048,16384,hipblaslt,,540.44,1312.74\n"
    )
    rows, problems = read_rows(path, OP)

    assert problems == []
    assert [(row.gfx, row.cu_num, row.solution.libtype) for row in rows] == [("", 0, "asm"), ("", 0, "hipblaslt")]
    assert rows[0].solution.kernel_name == "bf16gemm_fp32bf16_tn_96x64_pf3_splitk"
    assert rows[0].us == pytest.approx(2 * 532 * 2048 * 2048 / 266.78 / 1e6)
    for device in (Device("gfx942", 304), Device("gfx950", 256)):
        [match] = Table.load(OP, above=[path]).candidates(rows[0].shape, device)
        assert match.row == rows[0]
    upsert(path, OP, [attrs.evolve(rows[0], gfx="gfx942", cu_num=304, us=9.0)])
    assert rows[0] in read_rows(path, OP)[0]

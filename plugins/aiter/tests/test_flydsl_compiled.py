"""FlyDSL's kernels as compiled: their code objects fit the device, and our refusals are AITER's."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from pathlib import Path

import pytest
from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.tables import op_of_file, read_rows
from tunedgemm_aiter.limits import fp8_of
from tunedgemm_aiter.names import parse, unfit

HERE = Path(__file__).parents[3]
CONFIGS = HERE.parent / "shared" / "aiter" / "configs"
RESULTS = HERE / "benchmarks" / "results" / "flydsl"
with (RESULTS / "kernels.csv").open(newline="") as _file:
    LINES = list(csv.DictReader(_file))


def kernel_of(line):
    """Return a line's kernel, as the plugin parses its name."""
    return parse("flydsl", "a16w16" if line["name"].startswith("flydsl_gemm") else "a8w8_bpreshuffle", line["name"])


def probes(line):
    """Yield the shapes of a line, and whether AITER takes each."""
    device = Device(line["gfx"], 256)
    for taken in ("takes", "refuses"):
        for text in line[taken].split():
            sizes, _, outdtype = text.partition(":")
            m, n, k = map(int, sizes.split("x"))
            if line["name"].startswith("flydsl_gemm"):
                shape = Shape("a16w16", m, n, k)
            else:
                scaled = {"dtype": fp8_of(device), "outdtype": outdtype or "bf16", "scale": "row", "layout": "aiter16x16"}
                shape = Shape("a8w8_bpreshuffle", m, n, k, **scaled)
            yield shape, device, taken == "takes"


@pytest.mark.parametrize("gfx", ["gfx942", "gfx950", "gfx1250"])
def test_each_kernel_compiles_for_its_device_and_fits_it(gfx):
    """LDS, threads and waves are within what the core states of the architecture."""
    architecture, lines = ARCHITECTURES[gfx], [line for line in LINES if line["gfx"] == gfx]
    assert lines
    for line in lines:
        assert line["result"] == "ok", line
        assert gfx in kernel_of(line).gfx
        assert int(line["lds"]) <= architecture.shared_bytes
        assert int(line["wave"]) == architecture.warp_size
        assert int(line["threads"]) <= 1024 and int(line["threads"]) % int(line["wave"]) == 0


def test_each_code_object_has_the_tile_of_the_parsed_name():
    """LDS holds the stages of the tile that the plugin reads in the name; warps are its threads."""
    for line in LINES:
        kernel = kernel_of(line)
        m, n, k = kernel.tile
        if kernel.family == "hgemm":
            warps = [int(found) for found in re.findall(r"block_[mnk]_warp(\d+)", line["name"])]
            stages = int(line["name"].removeprefix("flydsl_gemm").partition("_")[0])
            assert int(line["lds"]) == max(stages * (m + n) * k * 2, warps[2] * m * n * 2)
            assert int(line["threads"]) == 64 * math.prod(warps)
        elif kernel.family == "preshuffle":
            found = re.search(r"_\dx\dx\dx(\d)_", line["name"])
            assert int(line["lds"]) == min(int(found[1]) if found else 2, int(line["k"]) // k) * m * k
            assert int(line["threads"]) == 256
        else:
            assert kernel.family in ("8w", "wmma") and int(line["lds"]) >= kernel.steps * (m + n) * k // 2


def test_the_arguments_are_those_of_the_calls():
    """FlyDSL's launchers pass as many arguments as the code objects name."""
    found = {(kernel_of(line).family, line["arguments"]) for line in LINES}
    assert found == {("hgemm", "7"), ("preshuffle", "11"), ("8w", "12"), ("wmma", "11")}


def test_the_plugin_refuses_what_aiter_refuses():
    """Each shape near the limits of a kernel: AITER's functions and the plugin agree."""
    counts = Counter()
    for line in LINES:
        for shape, device, taken in probes(line):
            reason = unfit(kernel_of(line), kernel_of(line).split, shape, device)
            assert (not reason) == taken, (line["name"], shape, reason)
            counts[taken] += 1
    assert counts[True] > 1000 and counts[False] > 1000


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="AITER's tables are not here")
def test_every_kernel_of_aiters_rows_was_compiled():
    """Each kernel's name of a row with libtype flydsl, for the row's device."""
    files = [path for path in sorted(CONFIGS.rglob("*tuned_gemm*.csv")) if "untuned" not in path.name]
    rows = [row for path in files for row in read_rows(path, op_of_file(path))[0] if row.solution.libtype == "flydsl"]
    assert len(rows) == 68 + 353
    assert {(row.gfx, row.solution.kernel_name) for row in rows} <= {(line["gfx"], line["name"]) for line in LINES}

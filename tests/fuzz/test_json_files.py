"""Triton's JSON files and search spaces: parameters within the limits, or a fault with file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("tunedgemm_triton")

from tunedgemm.errors import UserError
from tunedgemm.plugin import Device, Shape
from tunedgemm_triton.jsonfiles import buckets, files, space
from tunedgemm_triton.jsonfiles.check import check as findings_of
from tunedgemm_triton.jsonfiles.dialect import OURS

ENTRY = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 3, "NUM_KSPLIT": 1}
OURS_TEXT = json.dumps({"M_LEQ_64": ENTRY, "M_GEQ_8192": {**ENTRY, "cache_modifier": ".cg", "SWAP": True}, "any": ENTRY}).encode()
OLD_TEXT = json.dumps({"small": ENTRY, "medium_M64": ENTRY, "xlarge": {**ENTRY, "waves_per_eu": 2}}).encode()
MOE = {**{f"{name}{part}": value for part in ("", "_2") for name, value in ENTRY.items() if name != "NUM_KSPLIT"}, "NUM_KSPLIT": 1}
FILES = {
    "gfx942-GEMM-A16W16.json": ("a16w16", OURS_TEXT),
    "sm_90-GEMM-A8W8_BLOCKSCALE-N=64-K=128.json": ("a8w8_blockscale", OLD_TEXT),
    "gfx950-GEMM-AFP4WFP4.json": ("a4w4_blockscale", OURS_TEXT),
    "sm_90-GEMM-FMOE_A16W16.json": ("fmoe", json.dumps({"any": MOE}).encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_json_files(fuzz: Any, mutations: ModuleType, corpus: Callable[..., list[bytes]], tmp_path: Path, name: str) -> None:
    """A changed file round-trips, or its name is in the fault that reading, checking or serving finds."""
    op, seed = FILES[name]
    path, copy = tmp_path / name, tmp_path / "copy.json"
    device = Device(name.split("-", maxsplit=1)[0], 132)

    def check(content: bytes) -> None:
        path.write_bytes(content)
        assert all(len(str(finding)) < 10_000 for finding in findings_of(path, [OURS]))
        try:
            entries = files.read(path)
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error), error
            return
        files.write(copy, entries)
        assert repr(files.read(copy)) == repr(entries)
        if op != "fmoe":
            for m in (1, 64, 9000):
                key = buckets.find(entries, m, buckets.bounds_of(path.stem))
                try:
                    _ = key and OURS.solution_of(entries[key], Shape(op, m, 64, 128), device)
                except UserError as error:
                    assert len(str(error)) < 10_000

    aiters = corpus("json", "triton/gfx942-GEMM-A16W16*.json") if op == "a16w16" else []
    whole = [content for content in aiters if content.rstrip().endswith(b"}") and content.count(b"{") == content.count(b"}")]
    fuzz([seed, *whole], mutations.of_json, check)


def test_search_spaces(fuzz: Any, mutations: ModuleType, tmp_path: Path) -> None:
    """A changed search space lists its configurations in bounded memory, or names the file."""
    path = tmp_path / "space.json"
    seed = json.dumps({"BLOCK_SIZE_M": [16, 64], "BLOCK_SIZE_N": [64], "BLOCK_SIZE_K": 64, "num_warps": [4, 8]}).encode()
    shape, device = Shape("a16w16", 64, 64, 128), Device("gfx942", 304)

    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            space.listed(space.space_of(str(path)), OURS, shape, device)
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error), error

    fuzz([seed, b"[" + seed + b"]"], mutations.of_json, check)

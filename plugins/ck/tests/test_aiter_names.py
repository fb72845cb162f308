"""Names of AITER's real tables: every one is read, and written again as it was; runs where a copy of AITER's tables lies beside."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_ck.tile import instance as tile
from tunedgemm_ck.xdl import instance as xdl
from tunedgemm_ck.xdl.moe import parse_moe

CONFIGS = Path(__file__).parents[4] / "shared" / "aiter" / "configs"

pytestmark = pytest.mark.skipif(not CONFIGS.is_dir(), reason="AITER's tables are not here")

#: How the name of a table ends to its op; the longest that fits.
TABLES = {
    "a8w8_tuned_gemm": "a8w8",
    "a8w8_bpreshuffle_tuned_gemm": "a8w8_bpreshuffle",
    "a8w8_blockscale_tuned_gemm": "a8w8_blockscale",
    "a8w8_blockscale_bpreshuffle_tuned_gemm": "a8w8_blockscale_bpreshuffle",
    "a4w4_blockscale_tuned_gemm": "a4w4_blockscale",
    "bf16_tuned_batched_gemm": "batched_bf16",
    "a8w8_tuned_batched_gemm": "batched_a8w8",
}


def rows_of(op: str) -> Iterator[tuple[str, str]]:
    """libtype and kernel's name of each row of an op that ck or cktile has."""
    for path in sorted(CONFIGS.rglob("*tuned*.csv")):
        fitting = [table for table in TABLES if table in path.name]
        if fitting and TABLES[max(fitting, key=len)] == op:
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    libtype = row.get("libtype") or ("asm" if row["kernelName"].startswith("_ZN") else "ck")
                    if libtype in ("ck", "cktile"):
                        yield libtype, row["kernelName"]


@pytest.mark.parametrize("op", sorted(TABLES.values()))
def test_every_name_of_an_op_is_read_and_written_again(op: str) -> None:
    """Each ck and cktile row's name is parsed to an instance whose name is the same text."""
    seen: Counter[str] = Counter()
    for libtype, name in rows_of(op):
        parse = xdl.parse if libtype == "ck" else tile.parse
        assert parse(name, op).name == name
        seen[libtype] += 1
    assert seen["ck"] > 20
    assert seen["cktile"] > 0 or op not in tile.PREFIXES


def test_every_stage_of_a_mixture_of_experts_is_read_and_written_again() -> None:
    """Each name of CK's two stages is parsed to a value whose name is the same text."""
    names = set()
    for path in CONFIGS.rglob("*tuned_fmoe*.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                names |= {row.get("kernelName1", ""), row.get("kernelName2", "")}
    stages = [name for name in names if name.startswith("moe_ck2stages")]
    assert len(stages) > 50
    assert [parse_moe(name).name for name in stages] == stages


@pytest.mark.parametrize("op", sorted(TABLES.values()))
def test_a_changed_number_of_a_real_name_is_no_other_instance(op: str) -> None:
    """A real name with one number changed either is refused or is written again as changed: no part is read loosely."""
    for libtype, name in dict.fromkeys(rows_of(op)):
        parse = xdl.parse if libtype == "ck" else tile.parse
        for place, sign in enumerate(name):
            if not sign.isdigit():
                continue
            changed = f"{name[:place]}{(int(sign) + 1) % 10}{name[place + 1 :]}"
            try:
                assert parse(changed, op).name == changed
            except PluginError as error:
                assert libtype in str(error)

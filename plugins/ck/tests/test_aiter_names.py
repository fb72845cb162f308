"""Check the names in AITER's tables, where a copy of them exists."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tunedgemm.plugin import Device, PluginError, Shape, Solution, Unsupported, device_of
from tunedgemm.tools.tables import op_named
from tunedgemm_ck import backend_of, toolchain
from tunedgemm_ck.problem import problem_of
from tunedgemm_ck.stages import split_stages
from tunedgemm_ck.tile import FAMILY as tile_family
from tunedgemm_ck.tile import names as tile
from tunedgemm_ck.tile.space import listed_instances as tile_instances
from tunedgemm_ck.xdl import FAMILY as xdl_family
from tunedgemm_ck.xdl import names as xdl
from tunedgemm_ck.xdl.limits import MOST_ELEMENTS
from tunedgemm_ck.xdl.moe.names import parse_moe
from tunedgemm_ck.xdl.space import listed_instances as xdl_instances

CPU = device_of(-1)
CONFIGS = Path(__file__).parents[4] / "shared" / "aiter" / "configs"

pytestmark = pytest.mark.skipif(not CONFIGS.is_dir(), reason="AITER's tables not found")

#: The end of a table's name to its op; the longest match applies.
TABLES = {
    "a8w8_tuned_gemm": "a8w8",
    "a8w8_bpreshuffle_tuned_gemm": "a8w8_bpreshuffle",
    "a8w8_blockscale_tuned_gemm": "a8w8_blockscale",
    "a8w8_blockscale_bpreshuffle_tuned_gemm": "a8w8_blockscale_bpreshuffle",
    "a4w4_blockscale_tuned_gemm": "a4w4_blockscale",
    "bf16_tuned_batched_gemm": "batched_bf16",
    "a8w8_tuned_batched_gemm": "batched_a8w8",
}


FAMILIES = {family.libtype: family for family in (xdl_family, tile_family)}


def rows_of(op: str) -> Iterator[tuple[str, str]]:
    """Yield libtype and kernel name of each row of an op that ck or cktile has."""
    return ((libtype, row["kernelName"]) for libtype, row in full_rows_of(op))


def full_rows_of(op: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield libtype and all cells of each row of an op that ck or cktile has."""
    for path in sorted(CONFIGS.rglob("*tuned*.csv")):
        fitting = [table for table in TABLES if table in path.name]
        if fitting and TABLES[max(fitting, key=len)] == op:
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    libtype = row.get("libtype") or ("asm" if row["kernelName"].startswith("_ZN") else "ck")
                    if libtype in ("ck", "cktile"):
                        yield libtype, row


def test_every_name_of_an_op_is_read_and_written_again() -> None:
    """Each ck and cktile row's name is parsed to an instance with the same name."""
    for op in sorted(TABLES.values()):
        seen: Counter[str] = Counter()
        for libtype, name in rows_of(op):
            parse = xdl.parse_name if libtype == "ck" else tile.parse_name
            assert parse(name, op).name == name
            seen[libtype] += 1
        assert seen["ck"] > 20
        assert seen["cktile"] > 0 or op not in tile.PREFIXES


def shape_of(op: str, row: dict[str, str]) -> Shape:
    """Return the shape of a row as tables read it: without a dtype, the fp8 of its gfx."""
    return op_named(op).columns.parse({"q_dtype_w": "fp8", **row})


def test_every_row_of_an_op_is_listed_fits_and_is_rendered() -> None:
    """Each row's instance is listed and fits the row, unless an operand exceeds 32 bits."""
    for op in sorted(TABLES.values()):
        listed = {"ck": set(xdl_instances(op)), "cktile": set(tile_instances(op)) if op in tile.PREFIXES else set()}
        rendered, beyond = {}, 0
        for libtype, row in full_rows_of(op):
            shape, device, family = shape_of(op, row), Device(row["gfx"], int(row["cu_num"])), FAMILIES[libtype]
            instance = family.parse(row["kernelName"], op)
            assert instance in listed[libtype]
            if max(shape.m * shape.n, shape.m * shape.k, shape.n * shape.k) >= MOST_ELEMENTS:
                beyond += 1
                continue
            assert family.unfit(instance, int(row["splitK"]), shape, device) is None
            rendered[libtype, instance] = family.render(instance, problem_of(shape, device.gfx))
        assert len(set(rendered.values())) == len(rendered) > 8
        assert beyond < 12


def test_every_stage_of_a_mixture_of_experts_is_read_and_written_again() -> None:
    """Each name of CK's two stages is parsed to a value with the same name."""
    names = set()
    for path in CONFIGS.rglob("*tuned_fmoe*.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                names |= {row.get("kernelName1", ""), row.get("kernelName2", "")}
    stages = [name for name in names if name.startswith("moe_ck2stages")]
    assert len(stages) > 50
    assert [parse_moe(name).name for name in stages] == stages


def test_rows_of_two_ck_stages_resolve_and_are_listed() -> None:
    """Each fmoe row of two CK stages fits and is rendered; the default space has nine of ten."""
    op, rows, offered, sources = op_named("fmoe"), 0, 0, {}
    for path in sorted(CONFIGS.rglob("*tuned_fmoe*.csv")):
        with path.open(newline="") as file:
            found = [row for row in csv.DictReader(file) if row.get("kernelName1", "").startswith("moe_ck2stages")]
        for row in found:
            if not row["kernelName2"].startswith("moe_ck2stages"):
                continue
            name, shape = f"{row['kernelName1']}+{row['kernelName2']}", op.columns.parse(row)
            device = Device("gfx950" if row["cu_num"] == "256" else "gfx942", int(row["cu_num"]))
            pair = xdl_family.parse(name, "fmoe")
            assert pair.name == name
            assert xdl_family.unfit(pair, int(row["ksplit"]), shape, device) is None
            assert (pair, 0) in xdl_family.enumerate_instances(shape, device, True)
            rows, offered = rows + 1, offered + ((pair, 0) in xdl_family.enumerate_instances(shape, device, False))
            sources |= {part: xdl_family.render(*part) for part in split_stages(pair, problem_of(shape, device.gfx))}
    assert rows > 700
    assert offered / rows > 0.9
    assert len(set(sources.values())) == len(sources) > 30


def test_a_changed_digit_changes_the_instance() -> None:
    """A name with one digit changed is refused or is written back as changed."""
    for op in sorted(TABLES.values()):
        for libtype, name in dict.fromkeys(rows_of(op)):
            parse = xdl.parse_name if libtype == "ck" else tile.parse_name
            for place, sign in enumerate(name):
                if not sign.isdigit():
                    continue
                changed = f"{name[:place]}{(int(sign) + 1) % 10}{name[place + 1 :]}"
                try:
                    assert parse(changed, op).name == changed
                except PluginError as error:
                    assert libtype in str(error)


def test_lacks_and_bind_agree_about_rows_that_are_not_built() -> None:
    """For a sample of each op's rows, `lacks` and `bind` refuse with one reason: here no object is stored."""
    count = 0
    for op in dict.fromkeys(TABLES.values()):
        for libtype, row in list(full_rows_of(op))[::97]:
            host = Device(row.get("gfx") or "gfx942", int(row["cu_num"]))
            backend = backend_of(FAMILIES[libtype], toolchain.hip, host)
            shape = op_named(op).columns.parse({column: row[column] for column in op_named(op).columns.key} | {"gfx": host.gfx})
            solution = Solution(libtype, row["kernelName"], split_k=int(row["splitK"]))
            if backend.refusal(shape, CPU) is None:
                answer = backend.bind(solution, shape, CPU)
                assert isinstance(answer, Unsupported), row
                assert backend.lacks(solution, shape, CPU) == answer.reason, row
                assert backend.lacks(solution, shape, host) in ("", answer.reason), row
                count += 1
    assert count > 100

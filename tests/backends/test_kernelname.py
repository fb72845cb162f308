"""KernelName: one declaration reads and writes names, and those in tables stay."""

import csv
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tunedgemm.backends.kernelname import KernelName
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

FORM = KernelName("mine_r{revision}_{tile:x2}_{kind:word}[_p{pack=1}q{depth}][_w{warps:x2}][_t?swap][_c?first.cold]", "revision")
#: Names that plugins listed before their forms were declared: libtype, device, shape, name, splitK.
GOLDEN = Path(__file__).with_name("kernel_names.csv")


@pytest.mark.parametrize(
    ("tile", "pack", "warps", "swap", "cold"),
    itertools.product([(8, 16), (256, 0)], [1, 2], [(0, 0), (2, 4)], [False, True], [False, True]),
)
def test_a_name_that_was_written_is_read_as_the_same_fields(tile, pack, warps, swap, cold):
    """Parts that say nothing are left out, and come back as absent fields."""
    fields = {"tile": tile, "kind": "a1", "pack": pack, "depth": 7, "warps": warps, "swap": swap}
    name = FORM.write(SimpleNamespace(**fields, first=SimpleNamespace(cold=cold)), revision=3)
    read = FORM.parse(name)
    assert name == f"mine_r3_{tile[0]}x{tile[1]}_a1{'_p2q7' * (pack > 1)}{'_w2x4' * any(warps)}{'_t' * swap}{'_c' * cold}"
    absent = {"pack": 1, "depth": 7, "warps": (0, 0)}
    assert {**absent, **read} == {**fields, "first.cold": cold, "revision": 3}


@pytest.mark.parametrize(
    "name",
    ["", "mine", "mine_r3_8x16_a1_", "mine_r03_8x16_a1", "mine_r3_8x16_a1_p1q7", "mine_r3_8x16_a1_w0x0", "mine_r3_8x16_a1_c_t",
     "mine_r3_8x16_a1_p2", "mine_r3_8x16x4_a1", "mine_r3_8x16_a-1", "mine_r3_8x16_a1\n", "mine_r٣_8x16_a1", f"mine_r3_8x{10**18}_a1"],
)  # fmt: skip
def test_any_other_text_is_refused(name):
    """Unknown and non-canonical texts: zeros in front, parts that say nothing, another order."""
    assert FORM.parse(name) is None


def golden():
    with GOLDEN.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("libtype", sorted({row["libtype"] for row in golden()}))
def test_names_in_tables_stay(libtype):
    """Every plugin knows the names that it listed; none knows them with another letter or a zero in front."""
    backend, faults = Registry().get(libtype), []
    if backend.__class__.__name__ != "Backend":
        pytest.skip(f"{libtype}: {backend}")
    for row in (row for row in golden() if row["libtype"] == libtype):
        shape, device, name = Shape.from_dict(json.loads(row["shape"])), Device(row["gfx"], int(row["cu_num"])), row["name"]
        others = [name + "_", "x" + name, name.upper()] + [f"{head}0{tail}" for head, digit, tail in _zeros(name)]
        asked = [(name, "")] + [(other, "refused") for other in others if other != name]
        for text, wanted in asked:
            lacks = backend.lacks(Solution(libtype, text, int(row["splitK"])), shape, device)
            faults += [] if bool(lacks) == bool(wanted) else [f"{text} for {shape} on {device}: {lacks or 'is known'}"]
    assert not faults


def _zeros(name):
    """Yield a name cut before its first number."""
    for index, letter in enumerate(name):
        if letter.isdigit():
            yield name[:index], letter, name[index:]
            return

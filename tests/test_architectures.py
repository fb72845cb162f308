"""The table of architectures: facts with sources, and limits of unknown members of a family."""

import importlib.util
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from tunedgemm.architectures import ARCHITECTURES, FP8, Architecture, Architectures
from tunedgemm.backends.platforms import Platform
from tunedgemm.device import Device
from tunedgemm.text.printable import warn_once

FAMILIES = sorted({each.family for each in ARCHITECTURES.values() if each.family})
#: Architectures of GPUs on sale or announced in November 2026.
OWNED = {
    "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_107", "sm_110", "sm_120", "sm_121",
    "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201", "gfx1250",
}  # fmt: skip


def test_each_line_is_an_architecture_with_its_source():
    """GPUs that people own are in the table; multiples of a warp's registers and real sizes are checked."""
    assert set(ARCHITECTURES) >= OWNED
    for gfx, facts in ARCHITECTURES.items():
        assert facts.gfx == gfx and len(facts.source) > 20, gfx
        assert facts.family in ("", f"{gfx[:-1]}x"), gfx
        assert facts.warp_size == (64 if facts.matrix == "mfma" else 32), gfx
        assert facts.file_ki << 10 >= facts.registers * facts.warp_size, gfx
        assert facts.shared_bytes >= 64 << 10 and facts.units in (1, 2), gfx
        assert facts.fp8 if facts.fp4 else facts.fp8 in FP8, gfx


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_member_has_the_least_of_its_family(family, caplog):
    """No fact of an unknown member exceeds a known member's, and a notice says so once."""
    members = [each for each in ARCHITECTURES.values() if each.family == family]
    unknown = next(f"{family[:-1]}{digit}" for digit in "9876543210" if f"{family[:-1]}{digit}" not in set(ARCHITECTURES))
    warn_once.cache_clear()
    table = Architectures(ARCHITECTURES.values())
    with caplog.at_level(logging.WARNING):
        found, again = table[unknown], table[unknown]
    assert found is again
    assert [record.message.partition(":")[0] for record in caplog.records] == [unknown]
    assert all(each.gfx in caplog.text for each in members)
    for field in attrs.fields(Architecture):
        least = getattr(found, field.name)
        if isinstance(least, int):
            assert least == min(getattr(each, field.name) for each in members)
        elif field.name in ("matrix", "fp8"):
            assert all(least in ("", getattr(each, field.name)) for each in members)
    platform = Platform((members[0].gfx,))
    assert platform.serves("a16w16", Device(unknown, 1)) and not platform.serves("a16w16", Device("gfx906", 1))


@pytest.mark.parametrize(
    "gfx", ["", "sm_", "sm_70", "sm_91", "sm_8x", "sm_10a", "sm_12_", "gfx906", "gfx908", "gfx90c", "gfx94-", "gfx115x", "cpu-avx2"]
)
def test_members_of_no_known_family_are_absent(gfx):
    """Neither older architectures nor neighbours that lack what is known are guessed."""
    assert gfx not in ARCHITECTURES and ARCHITECTURES.get(gfx) is None and ARCHITECTURES.stand_ins(gfx) == ()


def test_facts_select_architectures():
    """A set of required facts gives the names that have them all."""
    assert ARCHITECTURES.having(matrix="wgmma") == ("sm_90",)
    assert ARCHITECTURES.having(matrix=("mma", "tcgen05"), fp4=True) == ("sm_100", "sm_103", "sm_107", "sm_110", "sm_120", "sm_121")
    assert ARCHITECTURES.having(fp8="fp8_e4m3fnuz") == ("gfx942",)


def test_facts_of_wavefronts_of_32_lanes_are_those_of_llvm():
    """Each gfx11 and gfx12 that LLVM knows is in the table, with its lanes, LDS, registers and products.

    The LLVM is that of the installed Triton, which compiles the kernels.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton: pip install triton")
    lines = {gfx: facts for gfx, facts in ARCHITECTURES.items() if gfx.startswith("gfx1")}
    command = [sys.executable, str(Path(__file__).with_name("llvm_amd.py")), *lines]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    if not child.stdout:
        pytest.skip("Triton 3.9 is the first with a code generator to call")
    stated = json.loads(child.stdout)
    assert set(stated) == set(lines)
    limits = re.findall(r"local memory .* exceeds limit \((\d+)\)", child.stderr)
    for (gfx, found), limit in zip(stated.items(), limits, strict=True):
        facts = lines[gfx]
        assert (found["lanes"], int(limit)) == (facts.warp_size, facts.shared_bytes), gfx
        assert (found["bf16"], found["fp8"], found["fp4"]) == (facts.matrix == "wmma", facts.fp8 == "fp8_e4m3fn", facts.fp4), gfx
        registers = (facts.file_ki << 10) // facts.warp_size // (4 // facts.units)
        # LLVM allots 24 at a time of 1536.
        assert found["waves"] == registers // (264 if registers == 1536 else 256), gfx

"""Entries of JSON files: to kernels and back, AITER's files, and wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tunedgemm.plugin import Device, Shape, UserError
from tunedgemm.tools.tables import ops
from tunedgemm_triton.families import unsupported
from tunedgemm_triton.jsonfiles import entries, files
from tunedgemm_triton.jsonfiles.dialect import OURS
from tunedgemm_triton.names import Gemm, parse_name
from tunedgemm_triton.resources import ceil_div, has_idle_part

#: A loaded machine takes longer than the default deadline.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
AITER = Path(__file__).parents[4] / "shared" / "aiter" / "triton"
FILES = sorted(AITER.glob("*.json"))
MI300X, H200 = Device("gfx942", 304), Device("sm_90", 132)
PLAIN = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "num_warps": 4, "num_stages": 2}
PLAIN_SHAPES = [Shape("a16w16", m, n, k) for m in (1, 3, 40, 300, 4096) for n, k in ((1280, 8192), (333, 501))]
BLOCKS = Shape("a8w8_blockscale", 100, 2112, 7168, "fp8_e4m3fnuz", "bf16", scale="block")


@pytest.mark.parametrize("gfx", ["sm_90", "gfx942", "gfx1201"])
def test_every_solution_survives_its_entry(gfx: str) -> None:
    """Every listed solution of every op becomes an entry, survives JSON, and comes back without
    notes.
    """
    device, count = Device(gfx, 120), 0
    for op in OURS.ops:
        for shape in (*ops()[op].examples, *ops()[op].large, *(PLAIN_SHAPES if op == "a16w16" else ())):
            if not shape.m or unsupported(shape, device):
                continue
            for solution in OURS.listed(shape, device):
                entry = json.loads(json.dumps(OURS.entry_of(solution, shape, gfx)))
                assert OURS.solution_of(entry, shape, device) == (solution, ())
                count += 1
    assert count > 100


@pytest.mark.skipif(not FILES, reason="AITER's files not found next to the repository")
def test_files_of_aiter_survive_reading_and_writing(tmp_path: Path) -> None:
    """Names and lines stay the same, except for blanks at the end of lines."""
    for path in FILES:
        name = files.name_of(path)
        assert name is not None
        assert name.text == path.name
        files.write(tmp_path / name.text, files.read(path))
        lines = [[line.rstrip() for line in file.read_text().splitlines()] for file in (tmp_path / name.text, path)]
        assert lines[0] == lines[1]


@pytest.mark.skipif(not FILES, reason="AITER's files not found next to the repository")
def test_entries_of_aiter_become_kernels() -> None:
    """Each entry becomes a kernel, and that kernel the same entry, except for what the shape
    determines.
    """
    for path in FILES:
        _check_file_of_aiter(path)


def _check_file_of_aiter(path: Path) -> None:
    name = files.name_of(path)
    assert name is not None
    shape = Shape("a16w16", 100, 4096, 4096) if "A16W16" in name.tag else attrs.evolve(BLOCKS, **_sizes(name))
    for entry in files.read(path).values():
        solution, _ = OURS.solution_of(entry, shape, MI300X)
        assert solution is not None
        again = OURS.entry_of(solution, shape, "gfx942")
        expected = {"cache_modifier": None, **{key: value for key, value in entry.items() if key not in entries.DERIVED}}
        names = [key for key in expected if key != "NUM_KSPLIT"]
        assert {key: again[key] for key in names} == {key: expected[key] for key in names}
        assert again["NUM_KSPLIT"] <= entry.get("NUM_KSPLIT", 1)


def _sizes(name: files.Name) -> dict[str, int]:
    return {letter.lower(): size for letter, size in name.sizes}


def aiter_split(k: int, split: int, block_k: int) -> int:
    """Return the split of AITER's rule: halve while a part is shorter than a block, then take whole
    blocks.
    """
    part = ceil_div(k, split)
    while split > 1 and block_k > part:
        split //= 2
        part = ceil_div(k, split)
    if split > 1 and part % block_k:
        part = ceil_div(part, block_k) * block_k
        split = ceil_div(k, part)
    return split


@PATIENT
@given(st.integers(1, 20_000), st.integers(1, 32), st.sampled_from([16, 32, 64, 128, 256]))
def test_no_part_of_k_is_empty(k: int, split: int, block_k: int) -> None:
    """A split without an idle part is kept; another becomes AITER's."""
    shape = Shape("a16w16", 16, 128, k)
    solution, _ = entries.solution_of({**PLAIN, "BLOCK_SIZE_K": block_k, "NUM_KSPLIT": split}, shape, H200)
    assert solution is not None
    steps = ceil_div(k, block_k)
    adjusted = max(solution.split_k, 1)
    assert (adjusted - 1) * ceil_div(steps, adjusted) < steps
    parts = split if not has_idle_part(split, steps) else aiter_split(k, split, block_k)
    assert adjusted == ceil_div(steps, ceil_div(steps, parts)), "AITER keeps an idle part where K / split is just a block"


def test_an_impossible_split_is_dropped() -> None:
    """With more tiles than are counted the kernel runs unsplit, with a note."""
    solution, notes = entries.solution_of({**PLAIN, "NUM_KSPLIT": 4}, Shape("a16w16", 8192, 8192, 8192), H200)
    assert solution is not None
    assert solution.split_k == 0
    assert any("NUM_KSPLIT=4 is dropped: split-K counts at most" in note for note in notes)


def test_options_of_amd_are_dropped_elsewhere() -> None:
    """On NVIDIA each gets a note; on gfx950 only the k-pack."""
    entry = {**PLAIN, "waves_per_eu": 2, "matrix_instr_nonkdim": 16, "kpack": 2, "cache_modifier": ".cg"}
    solution, notes = entries.solution_of(entry, Shape("a16w16", 64, 1024, 1024), H200)
    assert solution is not None
    assert parse_name(solution.kernel_name) == Gemm(64, 128, 128, 1, 4, 2)
    assert {note.split()[0] for note in notes} == {"waves_per_eu", "matrix_instr_nonkdim", "kpack", "cache_modifier"}
    _, notes = entries.solution_of(entry, Shape("a16w16", 64, 1024, 1024), Device("gfx950", 256))
    assert notes == ("kpack has no effect on gfx950",)


def test_small_tiles_become_sixteen() -> None:
    """AITER's BLOCK_SIZE_M of 8 is a tile of 16 here, with a note."""
    solution, notes = entries.solution_of({**PLAIN, "BLOCK_SIZE_M": 8}, Shape("a16w16", 8, 1024, 1024), H200)
    assert solution is not None
    assert "_m16n" in solution.kernel_name
    assert notes == ("BLOCK_SIZE_M=8 runs as 16, the smallest side of a matrix instruction here",)


WRONG = [
    ({"BLOCK_SIZE_M": "64"}, "BLOCK_SIZE_M must be a whole number"),
    ({"BLOCK_SIZE_M": 48}, "BLOCK_SIZE_M must be a power of two"),
    ({"BLOCK_SIZE_K": True}, "BLOCK_SIZE_K must be a whole number"),
    ({"num_warp": 4}, "gemm kernels have no parameter 'num_warp'"),
    ({"num_warps": 3}, "num_warps must be a power of two"),
    ({"NUM_KSPLIT": 0}, "NUM_KSPLIT must be at least 1"),
    ({"GROUP_K": 64}, "GROUP_K must be 128"),
    ({"cache_modifier": ".ca"}, "cache_modifier must be null"),
    ({"kernel": "cute"}, "kernel must be one of"),
    ({"SWAP": 1}, "SWAP must be true or false"),
    ({"matrix_instr_nonkdim": 4}, "matrix_instr_nonkdim must be one of 0, 16, 32"),
]


def test_a_wrong_parameter_is_named() -> None:
    """An error names the parameter and its possible values."""
    for change, message in WRONG:
        with pytest.raises(UserError, match=message):
            entries.solution_of({**PLAIN, **change}, BLOCKS, MI300X)


def test_a_kernel_of_another_op_is_named() -> None:
    """A family that the op does not have is an error that lists the op's families."""
    for op, kernel in (("a4w4_blockscale", "gemm"), ("fmoe", "mx"), ("a16w16", "moe"), ("a8w8_bpreshuffle", "tma")):
        with pytest.raises(UserError, match=rf"kernel must be one of .* for {op} \(got '{kernel}'\)"):
            entries.parse_entry({**PLAIN, "kernel": kernel}, op)


def test_an_unfit_entry_has_a_reason() -> None:
    """A step over several blocks of scales is refused."""
    solution, notes = entries.solution_of({**PLAIN, "BLOCK_SIZE_K": 256}, BLOCKS, MI300X)
    assert solution is None
    assert "within one block of scales" in notes[-1]

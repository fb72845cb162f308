"""What JSON files say of kernels: both ways, AITER's files, and what is wrong in others."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tunedgemm.plugin import Device, Shape, UserError
from tunedgemm.tools import ops
from tunedgemm_triton import jsonfile, parameters, supports
from tunedgemm_triton.dialect import OURS
from tunedgemm_triton.fit import ceil_div
from tunedgemm_triton.limits import ARCHITECTURES
from tunedgemm_triton.names import Gemm, kernel_of

AITER = Path(__file__).parents[4] / "shared" / "aiter" / "triton"
FILES = sorted(AITER.glob("*.json"))
MI300X, H200 = Device("gfx942", 304), Device("sm_90", 132)
PLAIN = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "num_warps": 4, "num_stages": 2}
PLAIN_SHAPES = [Shape("a16w16", m, n, k) for m in (1, 3, 40, 300, 4096) for n, k in ((1280, 8192), (333, 501))]
BLOCKS = Shape("a8w8_blockscale", 100, 2112, 7168, "fp8_e4m3fnuz", "bf16", scale="block")


@pytest.mark.parametrize("gfx", ARCHITECTURES)
def test_every_solution_is_said_and_meant(gfx: str) -> None:
    """Of every op, on every architecture: what is listed becomes an entry, survives JSON, and comes back, with nothing left out."""
    device, count = Device(gfx, 120), 0
    for op in OURS.ops:
        for shape in (*ops()[op].examples, *ops()[op].large, *(PLAIN_SHAPES if op == "a16w16" else ())):
            if not shape.m or not supports(shape, device):
                continue
            for solution in OURS.listed(shape, device):
                entry = json.loads(json.dumps(OURS.entry_of(solution, shape, gfx)))
                assert OURS.solution_of(entry, shape, device) == (solution, ())
                count += 1
    assert count > 100


@pytest.mark.skipif(not FILES, reason="AITER's files are not beside the repository")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_aiters_files_round_trip(path: Path, tmp_path: Path) -> None:
    """Read and written: the same lines, but for blanks at their ends, and the same name."""
    entries, name = jsonfile.read(path), jsonfile.name_of(path)
    assert name is not None
    assert name.text == path.name
    jsonfile.write(tmp_path / name.text, entries)
    lines = [[line.rstrip() for line in file.read_text().splitlines()] for file in (tmp_path / name.text, path)]
    assert lines[0] == lines[1]


@pytest.mark.skipif(not FILES, reason="AITER's files are not beside the repository")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_aiters_entries_mean_kernels(path: Path) -> None:
    """Each entry becomes a kernel, and that kernel an entry which says the same, but for what follows from the shape."""
    name = jsonfile.name_of(path)
    assert name is not None
    shape = Shape("a16w16", 100, 4096, 4096) if "A16W16" in name.tag else attrs.evolve(BLOCKS, **_sizes(name))
    for entry in jsonfile.read(path).values():
        solution, _ = OURS.solution_of(entry, shape, MI300X)
        assert solution is not None
        again = OURS.entry_of(solution, shape, "gfx942")
        told = {"cache_modifier": None, **{key: value for key, value in entry.items() if key not in parameters.FOLLOWS}}
        assert {key: again[key] for key in told if key != "NUM_KSPLIT"} == {key: told[key] for key in told if key != "NUM_KSPLIT"}
        assert again["NUM_KSPLIT"] <= entry.get("NUM_KSPLIT", 1)


def _sizes(name: jsonfile.Name) -> dict[str, int]:
    return {letter.lower(): size for letter, size in name.sizes}


def aiters_split(k: int, split: int, block_k: int) -> int:
    """AITER's rule, step by step: halves while a part is shorter than a block, then parts of whole blocks."""
    part = ceil_div(k, split)
    while split > 1 and block_k > part:
        split //= 2
        part = ceil_div(k, split)
    if split > 1 and part % block_k:
        part = ceil_div(part, block_k) * block_k
        split = ceil_div(k, part)
    return split


@given(st.integers(1, 20_000), st.integers(1, 32), st.sampled_from([16, 32, 64, 128, 256]))
def test_no_part_of_k_is_empty(k: int, split: int, block_k: int) -> None:
    """A split stays as it is where every program has work; else it becomes AITER's."""
    shape = Shape("a16w16", 16, 128, k)
    solution, _ = parameters.solution_of({**PLAIN, "BLOCK_SIZE_K": block_k, "NUM_KSPLIT": split}, shape, H200)
    assert solution is not None
    steps = ceil_div(k, block_k)
    found = max(solution.split_k, 1)
    assert (found - 1) * ceil_div(steps, found) < steps
    assert found == (split if (split - 1) * ceil_div(steps, split) < steps else aiters_split(k, split, block_k))


def test_a_split_that_is_not_possible_is_left_out() -> None:
    """More tiles than are counted: the kernel runs unsplit, and that is said."""
    solution, notes = parameters.solution_of({**PLAIN, "NUM_KSPLIT": 4}, Shape("a16w16", 8192, 8192, 8192), H200)
    assert solution is not None
    assert solution.split_k == 0
    assert any("NUM_KSPLIT=4 is left out: split-K counts at most" in note for note in notes)


def test_options_of_amd_are_left_out_elsewhere() -> None:
    """On NVIDIA they have no effect, and each is named; on gfx950 the k-pack alone."""
    entry = {**PLAIN, "waves_per_eu": 2, "matrix_instr_nonkdim": 16, "kpack": 2, "cache_modifier": ".cg"}
    solution, notes = parameters.solution_of(entry, Shape("a16w16", 64, 1024, 1024), H200)
    assert solution is not None
    assert kernel_of(solution.kernel_name) == Gemm(64, 128, 128, 1, 4, 2)
    assert {note.split()[0] for note in notes} == {"waves_per_eu", "matrix_instr_nonkdim", "kpack", "cache_modifier"}
    _, notes = parameters.solution_of(entry, Shape("a16w16", 64, 1024, 1024), Device("gfx950", 256))
    assert notes == ("kpack has no effect on gfx950",)


def test_small_tiles_become_sixteen() -> None:
    """AITER's BLOCK_SIZE_M of 8 is a tile of 16 here, which is said."""
    solution, notes = parameters.solution_of({**PLAIN, "BLOCK_SIZE_M": 8}, Shape("a16w16", 8, 1024, 1024), H200)
    assert solution is not None
    assert "_m16n" in solution.kernel_name
    assert notes == ("BLOCK_SIZE_M=8 runs as 16, the least that a matrix instruction has here",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"BLOCK_SIZE_M": "64"}, "BLOCK_SIZE_M must be a whole number"),
        ({"BLOCK_SIZE_M": 48}, "BLOCK_SIZE_M must be a power of two"),
        ({"BLOCK_SIZE_K": True}, "BLOCK_SIZE_K must be a whole number"),
        ({"num_warp": 4}, "no kernel of the family gemm has a parameter 'num_warp'"),
        ({"num_warps": 3}, "num_warps must be a power of two"),
        ({"NUM_KSPLIT": 0}, "NUM_KSPLIT must be at least 1"),
        ({"GROUP_K": 64}, "GROUP_K must be 128"),
        ({"cache_modifier": ".ca"}, "cache_modifier must be null"),
        ({"kernel": "cute"}, "kernel must be one of"),
        ({"SWAP": 1}, "SWAP must be true or false"),
        ({"matrix_instr_nonkdim": 4}, "matrix_instr_nonkdim must be one of 0, 16, 32"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], said: str) -> None:
    """One line says which parameter and what it may be."""
    with pytest.raises(UserError, match=said):
        parameters.solution_of({**PLAIN, **change}, BLOCKS, MI300X)


@pytest.mark.parametrize(("op", "kernel"), [("a4w4_blockscale", "gemm"), ("fmoe", "mx"), ("a16w16", "moe"), ("a8w8_bpreshuffle", "tma")])
def test_a_kernel_of_another_op_is_named(op: str, kernel: str) -> None:
    """A family that the op does not have is a mistake that tells those that it has."""
    with pytest.raises(UserError, match=rf"kernel must be one of .* for {op} \(got '{kernel}'\)"):
        parameters.parsed({**PLAIN, "kernel": kernel}, op)


def test_a_missing_size_is_named() -> None:
    """A tile has no default."""
    with pytest.raises(UserError, match="lacks BLOCK_SIZE_N"):
        parameters.parsed({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 64}, "a16w16")


def test_a_kernel_that_cannot_serve_says_why() -> None:
    """A step over several blocks of scales is refused, not run wrongly."""
    solution, notes = parameters.solution_of({**PLAIN, "BLOCK_SIZE_K": 256}, BLOCKS, MI300X)
    assert solution is None
    assert "scales of several blocks" in notes[-1]

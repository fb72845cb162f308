"""Compiling without a GPU, in child processes: the right matrix instructions, shared memory within limits, no spills."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm_triton.fit import shared_bytes
from tunedgemm_triton.limits import ARCHITECTURES
from tunedgemm_triton.names import kernel_of
from tunedgemm_triton.solutions import MOST, enumerate_solutions

pytest.importorskip("triton")

DEVICES = {
    "gfx942": Device("gfx942", 304),
    "gfx950": Device("gfx950", 256),
    "gfx1201": Device("gfx1201", 64),
    "sm_90": Device("sm_90", 132),
}
OTHERS = {"sm_80": Device("sm_80", 108), "sm_86": Device("sm_86", 84), "gfx90a": Device("gfx90a", 104), "gfx1100": Device("gfx1100", 96)}

#: Of cases that name none.
SHAPE = Shape("a16w16", 1024, 4096, 4096)

#: What the tile product of 16-bit operands must use (AMD's ISA guides; PTX ISA, warpgroup-level matrix instructions).
INSTRUCTION = {
    "gfx942": "v_mfma_f32_",
    "gfx90a": "v_mfma_f32_",
    "gfx950": "v_mfma_f32_",
    "gfx1100": "v_wmma_f32_",
    "gfx1201": "v_wmma_f32_",
}
#: And of 8-bit ones; on sm_90 a tile of few rows that is not transposed has no wgmma and multiplies fp8 as fp16.
INSTRUCTIONS = {
    ("gfx942", "fp8_e4m3fnuz"): r"v_mfma_f32_\w+_fp8_fp8", ("gfx942", "int8"): r"v_mfma_i32_\w+i8",
    ("gfx950", "fp8_e4m3fn"): r"v_mfma_f32_\w+(f8f6f4|fp8_fp8)", ("gfx950", "int8"): r"v_mfma_i32_\w+i8",
    ("gfx1201", "fp8_e4m3fn"): r"v_wmma_f32_\w+_fp8_fp8", ("gfx1201", "int8"): r"v_wmma_i32_\w+iu8",
    ("sm_90", "fp8_e4m3fn"): r"wgmma.*e4m3\.e4m3|mma\.sync.*f32\.f16\.f16", ("sm_90", "int8"): r"wgmma.*s8\.s8|mma\.sync.*s8\.s8",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def compiled_once(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first guesses are part of the whole space: what one test has compiled the others find."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(compiled))


def _cases(device: Device, rows: tuple[int, ...], limit: int, bias: bool = False) -> list[dict[str, Any]]:
    cases = []
    for m in rows:
        shape = Shape("a16w16", m, 7168, 8192, epilogue="bias" if bias else "none")
        found = list(enumerate_solutions(shape, device))
        for solution in [*found[:limit], *found[-2:]]:
            cases.append(_case(device.gfx, solution.kernel_name, shape, max(solution.split_k, 1)))
    return cases


def _operands(gfx: str, m: int) -> list[Shape]:
    """Shapes of every op beside plain a16w16, with every kind of operands and scales, in the kind of fp8 of the architecture."""
    fp8 = {"dtype": ARCHITECTURES[gfx].fp8, "outdtype": "bf16"}
    int8, row, batch = {"dtype": "int8", "outdtype": "bf16"}, {"scale": "row"}, {"extra": {"B": 16}}
    shuffled = {"layout": "aiter16x16"}
    return [
        Shape("a8w8", m, 7168, 8192, epilogue="bias", **row, **fp8),
        Shape("a8w8", m, 7168, 8192, scale="tensor", **int8),
        Shape("a8w8_bpreshuffle", m, 7168, 8192, **row, **fp8, **shuffled),
        Shape("a8w8_bpreshuffle", m, 7168, 8192, **row, **int8, layout="aiter32x16"),
        Shape("a8w8_blockscale", m, 2112, 7168, scale="block", **fp8),
        Shape("a8w8_blockscale_bpreshuffle", m, 7168, 18432, scale="block", **fp8, **shuffled),
        Shape("a16w16", m, 7168, 8192, **shuffled),
        Shape("batched_bf16", m, 1280, 8192, **batch),
        Shape("batched_a8w8", m, 1280, 8192, **row, **int8, **batch),
        Shape("a8w8_blockscale", m, 130, 99, scale="block", **fp8),
    ]


def _first(shapes: list[Shape], device: Device, every: int) -> list[dict[str, Any]]:
    """Cases of the first solution of each shape, and of others that far apart."""
    found = [(shape, list(enumerate_solutions(shape, device))) for shape in shapes]
    assert all(solutions for _, solutions in found)
    return [
        _case(device.gfx, solution.kernel_name, shape, max(solution.split_k, 1))
        for shape, solutions in found
        for solution in solutions[::every]
    ]


def _compile(cases: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    command = [sys.executable, "-W", "error::UserWarning", str(Path(__file__).with_name("compile_cases.py"))]
    child = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=900)
    assert child.returncode == 0, child.stderr[-3000:]
    return list(zip(cases, json.loads(child.stdout), strict=True))


def _check(case: dict[str, Any], code: dict[str, Any]) -> None:
    gfx, kernel = case["gfx"], kernel_of(case["kernel"])
    assert "failed" not in code, f"{case}: {code['failed']}"
    assert code["shared"] <= ARCHITECTURES[gfx].shared_bytes, f"{case} takes {code['shared']} bytes of shared memory"
    if kernel.family == "gemv":
        assert not code["matrix"], f"{case} uses {code['matrix']}"
    else:
        wanted = INSTRUCTIONS[gfx, case["shape"]["dtype"]] if (gfx, case["shape"]["dtype"]) in INSTRUCTIONS else INSTRUCTION.get(gfx, "mma")
        assert any(re.search(wanted, text) for text in code["matrix"]), f"{case} uses {code['matrix']}"


@pytest.mark.parametrize("gfx", DEVICES)
def test_first_guesses_compile_within_the_limits(gfx: str) -> None:
    """The first guesses of each class of M use the architecture's matrix instruction, fit its memory and do not spill."""
    results = _compile(_cases(DEVICES[gfx], (1, 4, 16, 64, 1024), 3))
    for case, code in results:
        _check(case, code)
        assert code["spills"] == 0, f"{case} spills {code['spills']} registers"


@pytest.mark.parametrize("gfx", OTHERS)
def test_other_architectures_compile_a_kernel_of_each_family(gfx: str) -> None:
    """The first guess for a vector, for few rows and for many compiles elsewhere too."""
    for case, code in _compile(_cases(OTHERS[gfx], (1, 16, 1024), 1, bias=True)):
        _check(case, code)


@pytest.mark.parametrize("gfx", DEVICES)
def test_every_op_multiplies_its_operands_as_they_are(gfx: str) -> None:
    """First guesses of all ops, for few or many rows, use the matrix instruction of their operands, fit the memory and do not spill."""
    split = _case(gfx, "gemm_r1_m16n64k128_g1_w4s2", _operands(gfx, 16)[1], 4)  # sums of int32 that meet
    for case, code in _compile([split, *_first([*_operands(gfx, 16)[::2], *_operands(gfx, 1024)[1::2]], DEVICES[gfx], MOST)]):
        _check(case, code)
        assert code["spills"] == 0, f"{case} spills {code['spills']} registers"


@pytest.mark.sweep
@pytest.mark.parametrize("m", [4, 64, 1024])
@pytest.mark.parametrize("gfx", DEVICES)
def test_a_sample_of_every_space_compiles_within_the_limits(gfx: str, m: int) -> None:
    """Every 20th solution of each op and class of M compiles to the right instruction and fits the shared memory."""
    for case, code in _compile(_first(_operands(gfx, m), DEVICES[gfx], 20)):
        _check(case, code)


def test_sums_of_fp8_leave_the_matrix_unit_where_the_output_shows_it() -> None:
    """On Hopper an fp32 output of fp8 operands is summed in float32 beside the matrix unit, a bf16 output is not."""
    shapes = [Shape("a8w8", 64, 4096, 4096, "fp8_e4m3fn", outdtype, scale="row") for outdtype in ("bf16", "fp32")]
    found = [code for _, code in _compile([_case("sm_90", "gemm_r1_m64n128k128_g8_w4s3", shape) for shape in shapes])]
    assert found[0]["additions"] == 0
    assert found[1]["additions"] >= 64


def test_large_tiles_on_hopper_use_warpgroup_instructions() -> None:
    """A gemm tile with 64 rows, and a transposed one with few, multiply by wgmma."""
    names = ["gemm_r1_m128n128k64_g8_w4s3", "gemm_r1_m16n64k128_g1_w4s3_t", "tma_r1_m128n256k64_g8_w8s3"]
    results = _compile([_case("sm_90", name) for name in names])
    assert all(any("wgmma.mma_async" in text for text in code["matrix"]) for _, code in results), results
    assert "cp.async.bulk.tensor" in results[-1][1]["matrix"]


def test_streamk_is_one_pipelined_loop_on_hopper() -> None:
    """Whole tiles and shares take turns in one loop whose products overlap, and take no more shared memory than the grid counts on."""
    names = ["streamk_r1_m128n128k64_g8_w4s3", "streamk_r1_m128n256k64_g8_w8s4"]
    for case, code in _compile([_case("sm_90", name) for name in names]):
        _check(case, code)
        assert (code["products"], code["overlapped"]) == (1, True)
        assert code["shared"] <= shared_bytes(kernel_of(case["kernel"]), SHAPE, "sm_90")


def test_a_specialised_kernel_moves_registers_between_warp_groups() -> None:
    """Only a kernel whose PTX has setmaxnreg is really specialised: Triton drops the request silently."""
    names = ["tma_r1_m128n128k64_g8_w4s4_ws", "tma_r1_m64n128k128_g8_w4s4_ws"]
    assert all("setmaxnreg" in code["matrix"] for _, code in _compile([_case("sm_90", name) for name in names]))


def test_the_second_consumer_stores_and_scales_its_own_rows() -> None:
    """Triton gives each of two consumers half a tile's rows; adding half a tile to its first row as well would go elsewhere."""
    blocks = Shape("a8w8_blockscale", 4096, 2112, 7168, dtype="fp8_e4m3fn", outdtype="bf16", scale="block")
    cases = [_case("sm_90", "tma_r1_m128n128k64_g8_w4s4_ws"), _case("sm_90", "tma_r1_m128n128k128_g8_w4s4_ws", blocks)]
    for _, code in _compile(cases):
        assert "setmaxnreg" in code["matrix"]
        assert code["moved_by_consumers"] == 0


@pytest.mark.sweep
@pytest.mark.parametrize("gfx", DEVICES)
def test_the_whole_space_compiles_within_the_limits(gfx: str) -> None:
    """Every enumerated solution of plain a16w16 for a vector or two, few rows and many compiles and fits the shared memory."""
    for case, code in _compile(_cases(DEVICES[gfx], (2, 16, 1024), 99)):
        _check(case, code)


def _case(gfx: str, name: str, shape: Shape = SHAPE, split_k: int = 1) -> dict[str, Any]:
    return {"gfx": gfx, "kernel": name, "split_k": split_k, "shape": shape.to_dict()}

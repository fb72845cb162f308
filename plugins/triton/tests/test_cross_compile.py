"""Compiling without a GPU, in child processes: the right matrix instructions, shared memory within limits, no spills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm_triton.limits import ARCHITECTURES
from tunedgemm_triton.names import kernel_of
from tunedgemm_triton.solutions import enumerate_solutions

pytest.importorskip("triton")

DEVICES = {"gfx942": Device("gfx942", 304), "gfx950": Device("gfx950", 256), "sm_90": Device("sm_90", 132)}
OTHERS = {"sm_80": Device("sm_80", 108), "sm_86": Device("sm_86", 84), "gfx90a": Device("gfx90a", 104), "gfx1100": Device("gfx1100", 96)}

#: Of cases that name none.
SHAPE = Shape("a16w16", 1024, 4096, 4096)

#: What the tile product of 16-bit operands must use (AMD's ISA guides; PTX ISA, warpgroup-level matrix instructions).
INSTRUCTION = {"gfx942": "v_mfma_f32_", "gfx90a": "v_mfma_f32_", "gfx950": "v_mfma_f32_", "gfx1100": "v_wmma_f32_"}


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
        assert any(INSTRUCTION.get(gfx, "mma") in text for text in code["matrix"]), f"{case} uses {code['matrix']}"


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


def test_large_tiles_on_hopper_use_warpgroup_instructions() -> None:
    """A gemm tile with 64 rows, and a transposed one with few, multiply by wgmma."""
    names = ["gemm_r1_m128n128k64_g8_w4s3", "gemm_r1_m16n64k128_g1_w4s3_t", "tma_r1_m128n256k64_g8_w8s3"]
    results = _compile([_case("sm_90", name) for name in names])
    assert all("wgmma.mma_async" in code["matrix"] for _, code in results), results
    assert "cp.async.bulk.tensor" in results[-1][1]["matrix"]


def test_a_specialised_kernel_moves_registers_between_warp_groups() -> None:
    """Only a kernel whose PTX has setmaxnreg is really specialised: Triton drops the request silently."""
    names = ["tma_r1_m128n128k64_g8_w4s4_ws", "tma_r1_m64n128k128_g8_w4s4_ws"]
    assert all("setmaxnreg" in code["matrix"] for _, code in _compile([_case("sm_90", name) for name in names]))


def test_the_second_consumer_stores_its_own_rows() -> None:
    """Triton gives each of two consumers half a tile's rows; adding half a tile to its first row as well would store elsewhere."""
    [(_, code)] = _compile([_case("sm_90", "tma_r1_m128n128k64_g8_w4s4_ws")])
    assert "setmaxnreg" in code["matrix"]
    assert code["moved_by_consumers"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("gfx", DEVICES)
def test_the_whole_space_compiles_within_the_limits(gfx: str) -> None:
    """Every enumerated solution of each class of M compiles and fits the shared memory."""
    for case, code in _compile(_cases(DEVICES[gfx], (1, 2, 3, 4, 8, 16, 32, 64, 128, 1024), 99)):
        _check(case, code)


def _case(gfx: str, name: str, shape: Shape = SHAPE, split_k: int = 1) -> dict[str, Any]:
    return {"gfx": gfx, "kernel": name, "split_k": split_k, "shape": shape.to_dict()}

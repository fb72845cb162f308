"""Check that CK's and CK Tile's sources compile for gfx942 by clang, with the environment's
headers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tunedgemm.plugin import Device
from tunedgemm.tools.tables import op_named
from tunedgemm_ck.problem import Problem, problem_of
from tunedgemm_ck.stages import split_stages
from tunedgemm_ck.tile import template as tile_template
from tunedgemm_ck.tile.space import listed_instances as tile_instances
from tunedgemm_ck.xdl import FAMILY
from tunedgemm_ck.xdl import template as xdl_template
from tunedgemm_ck.xdl.limits import ACCEPTS
from tunedgemm_ck.xdl.names import FORMS
from tunedgemm_ck.xdl.space import listed_instances as xdl_instances

#: Folders of headers in the environment, separated by colons there.
HEADERS = [folder for name in ("CK_INCLUDE", "HIP_INCLUDE") for folder in os.environ.get(name, "").split(":") if folder]
SOURCES = Path(__file__).parents[1] / "tunedgemm_ck" / "sources"


def headers_of(needed: str) -> tuple[str, ...]:
    """Return the folders in CK_INCLUDE and HIP_INCLUDE; skip where they lack *needed*."""
    if not shutil.which("clang-19"):
        pytest.skip("clang-19 not found")
    if not HEADERS:
        pytest.skip("CK_INCLUDE and HIP_INCLUDE do not name the headers of Composable Kernel and HIP")
    if not any((Path(folder) / needed).is_file() for folder in HEADERS):
        pytest.skip(f"CK_INCLUDE names no headers with {needed}")
    return tuple(HEADERS)


def compile_for(gfx: str, source: str, flags: tuple[str, ...], headers: tuple[str, ...], folder: Path) -> str:
    """Return the assembly of a source, unlinked, so that it needs no device library."""
    path, out = folder / "one.hip", folder / "one.s"
    path.write_text(source)
    resources = subprocess.run(["clang-19", "-print-resource-dir"], check=True, capture_output=True, text=True).stdout.strip()
    include = [part for place in (f"{resources}/include/cuda_wrappers", *headers) for part in ("-isystem", place)]
    alone = ["-x", "hip", "--cuda-device-only", f"--offload-arch={gfx}", "-nogpulib", "-nogpuinc", "-O3", "-std=c++20", "-S"]
    wrapped = ["-include", "__clang_hip_runtime_wrapper.h", "-D__HIP_PLATFORM_AMD__=1", f"-I{SOURCES}"]
    command = ["clang-19", *alone, *include, *wrapped, *flags, str(path), "-o", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out.read_text()


@pytest.mark.slow
def test_an_instance_of_each_op_of_ck_compiles_for_gfx942(tmp_path: Path) -> None:
    """The smallest listed instance of each op compiles to matrix instructions."""
    for op in [op for op in sorted(FORMS) if op != "a4w4_blockscale"]:
        accepted = ACCEPTS[op]
        dtype = "fp8_e4m3fnuz" if "fp8_e4m3fnuz" in accepted.dtypes else accepted.dtypes[0]
        problem = Problem(op, "gfx942", dtype, "bf16", scale=accepted.scale, layout=accepted.layout)
        instance = min(xdl_instances(op), key=lambda instance: (instance.pipeline != 1, instance.m * instance.n))
        headers = headers_of(f"ck/tensor_operation/gpu/device/impl/{xdl_template.DEVICE_OPS[op].header}")
        source = xdl_template.render(instance, problem)
        assert compile_for("gfx942", source, xdl_template.flags(instance, problem), headers, tmp_path).count("v_mfma_") > 0


@pytest.mark.slow
def test_both_stages_of_fmoe_compile_for_gfx942(tmp_path: Path) -> None:
    """The first pair of each kind compiles to matrix instructions."""
    for kind, q_dtype in [("No", "bf16"), ("per_Token", "fp8_e4m3fnuz"), ("per_1x128", "fp8_e4m3fnuz")]:
        headers = headers_of("ck/tensor_operation/gpu/device/impl/device_moe_gemm_blockscale.hpp")
        sizes = {"token": "16", "model_dim": "7168", "inter_dim": "256", "expert": "256", "topk": "8"}
        words = {"q_type": kind, "q_dtype_a": q_dtype, "q_dtype_w": q_dtype, "act_type": "Silu", "use_g1u1": "1"}
        shape = op_named("fmoe").columns.parse(sizes | words)
        pair, _ = next(iter(FAMILY.enumerate_instances(shape, Device("gfx942", 304), False)))
        for instance, problem in split_stages(pair, problem_of(shape, "gfx942")):
            assembly = compile_for("gfx942", FAMILY.render(instance, problem), FAMILY.flags(instance, problem), headers, tmp_path)
            assert assembly.count("v_mfma_") > 0


@pytest.mark.slow
def test_an_instance_of_ck_tile_compiles_for_gfx942(tmp_path: Path) -> None:
    """The smallest listed instance of a8w8_bpreshuffle compiles to matrix instructions."""
    problem = Problem("a8w8_bpreshuffle", "gfx942", "fp8_e4m3fnuz", "bf16", scale="row", layout="aiter16x16")
    instances = [instance for instance in tile_instances(problem.op) if instance.warp_tile[2] == 64]
    instance = min(instances, key=lambda instance: instance.tile)
    headers = headers_of("ck_tile/ops/flatmm/kernel/flatmm_kernel.hpp")
    source = tile_template.render(instance, problem)
    assert compile_for("gfx942", source, tile_template.flags(instance, problem), headers, tmp_path).count("v_mfma_") > 0

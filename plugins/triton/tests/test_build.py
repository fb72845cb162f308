"""Compiling without a GPU, in child processes: the right matrix instructions, shared memory within
limits, no spills.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.plugin import Device, PluginError, Shape
from tunedgemm.tools.launching import ARCHITECTURES
from tunedgemm_triton import installed
from tunedgemm_triton.families import family_of, unsupported
from tunedgemm_triton.names import parse_name
from tunedgemm_triton.resources import shared_bytes, tensor_columns

pytest.importorskip("triton")

UNITS = {
    "gfx942": 304, "gfx950": 256, "gfx1201": 64, "sm_90": 132, "sm_80": 108, "sm_86": 84, "sm_100": 148, "sm_120": 188,
    "gfx90a": 104, "gfx1100": 96, "gfx1250": 256,
}  # fmt: skip
#: Architectures whose whole space is compiled.
MAIN = ("gfx942", "gfx950", "gfx1201", "sm_90")

SHAPE = Shape("a16w16", 1024, 4096, 4096)

#: (architecture, dtype) -> instruction (AMD's ISA guides; PTX ISA, warpgroup-level matrix
#: instructions). On sm_90 a tile of few rows that is not transposed has no wgmma and multiplies fp8
#: as fp16. mxfp4 is multiplied as bf16 except on gfx950.
INSTRUCTIONS = {
    ("gfx942", "fp8_e4m3fnuz"): r"v_mfma_f32_\w+_fp8_fp8", ("gfx942", "int8"): r"v_mfma_i32_\w+i8",
    ("gfx942", "fp4x2"): "v_mfma_f32.*_bf16",
    ("gfx950", "fp8_e4m3fn"): r"v_mfma_f32_\w+(f8f6f4|fp8_fp8)", ("gfx950", "int8"): r"v_mfma_i32_\w+i8",
    ("gfx950", "fp4x2"): "v_mfma_scale_f32_",
    ("gfx1250", "fp4x2"): "v_wmma_scale_f32_", ("gfx1251", "fp4x2"): "v_wmma_scale_f32_", ("gfx1250", "int8"): r"v_wmma_i32_\w+iu8",
    ("gfx1250", "fp8_e4m3fn"): r"v_wmma_(f32|scale)\w+(_fp8_fp8|f8f6f4)", ("gfx1100", "int8"): r"v_wmma_i32_\w+iu8",
    ("gfx1201", "fp8_e4m3fn"): r"v_wmma_f32_\w+_fp8_fp8", ("gfx1201", "int8"): r"v_wmma_i32_\w+iu8", ("gfx1201", "fp4x2"): "v_wmma.*_bf16",
    ("sm_90", "fp8_e4m3fn"): r"wgmma.*e4m3\.e4m3|mma\.sync.*f32\.f16\.f16", ("sm_90", "int8"): r"wgmma.*s8\.s8|mma\.sync.*s8\.s8",
    ("sm_90", "fp4x2"): r"\.bf16\.bf16", ("sm_100", "fp4x2"): r"tcgen05\.mma.*kind::mxf4", ("sm_103", "fp4x2"): r"tcgen05\.mma.*kind::mxf4",
    ("sm_120", "fp4x2"): r"mma\.sync.*kind::mxf4",
}  # fmt: skip
#: Matrix instruction -> instruction of 16-bit operands.
SIXTEEN_BITS = {"mfma": "v_mfma_f32_", "wmma": "v_wmma_f32_", "mma": r"mma\.sync", "wgmma": "mma", "tcgen05": r"tcgen05\.mma|mma\.sync"}
#: Registers that a first guess may spill: gfx950's largest tile none with Triton 3.6, 29 with 3.7,
#: one with 3.9; gated experts in mxfp4 on sm_90 36 with 3.6, 38 with 3.7 and 3.8, 40 with 3.9. Too
#: large a tile spills hundreds.
SPILLS = 40
#: Functions without a product.
HELPERS = ("gemv.", "wnv.", "moe_sort.", "moe_quantise.")

Compile = Callable[[Iterable[dict[str, Any]]], list[tuple[dict[str, Any], dict[str, Any]]]]


@pytest.fixture(scope="module")
def compile_cases(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Return a function that compiles cases in a child, which must write nothing to stderr; all
    tests share the artifact cache.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEDGEMM_CACHE", str(tmp_path_factory.mktemp("compiled")))

        def compile_all(cases: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
            cases = list(cases)
            command = [sys.executable, "-W", "error::UserWarning", str(Path(__file__).with_name("compile_cases.py"))]
            child = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=3600)
            assert (child.returncode, child.stderr) == (0, ""), child.stderr[-3000:]
            results = zip(cases, json.loads(child.stdout), strict=True)
            return [(case, code) for case, codes in results for code in codes]

        yield compile_all


def _case(gfx: str, name: str, shape: Shape = SHAPE, split_k: int = 1) -> dict[str, Any]:
    return {"gfx": gfx, "kernel": name, "split_k": split_k, "shape": shape.to_dict()}


def _listed(gfx: str, shape: Shape, places: slice) -> list[dict[str, Any]]:
    """Return cases of some of a shape's solutions."""
    solutions = list(family_of(shape.op).enumerate_solutions(shape, Device(gfx, UNITS[gfx])))
    assert bool(solutions) is not bool(unsupported(shape, Device(gfx, UNITS[gfx]))), f"{shape} on {gfx}"
    return [_case(gfx, solution.kernel_name, shape, max(solution.split_k, 1)) for solution in solutions[places]]


def _faults(results: list[tuple[dict[str, Any], dict[str, Any]]], spills: bool = False) -> list[str]:
    """Return a line for each program that fails, exceeds the shared memory, has a wrong instruction
    or spills more than `SPILLS` registers.
    """
    faults = []
    for case, code in results:
        gfx, shape = case["gfx"], Shape.from_dict(case["shape"])
        if "failed" in code or code["shared"] > ARCHITECTURES[gfx].shared_bytes or (code["spills"] > SPILLS and not spills):
            faults.append(f"{case}: {code}")
            continue
        dtype = str(shape["q_dtype_w"]) if shape.op == "fmoe" else shape.dtype
        wanted = INSTRUCTIONS.get((gfx, dtype), SIXTEEN_BITS[ARCHITECTURES[gfx].matrix])
        is_helper = code["function"].startswith(HELPERS)
        if bool(code["matrix"]) is is_helper or not (is_helper or any(re.search(wanted, text) for text in code["matrix"])):
            faults.append(f"{case}: {code}")
    return faults


def _moe(m: int, dtype: str, kind: str, **extra: Any) -> Shape:
    fields = {"expert": 32, "topk": 4, "act": "silu", "g1u1": True, "doweight_stage1": False}
    fields |= {"q_dtype_a": dtype, "q_dtype_w": dtype, "q_type": kind, **extra}
    return Shape("fmoe", m, 2048, 768, layout="aiter16x16", extra=fields)


def _weight(m: int, name: str, group: int, dtype: str = "bf16") -> Shape:
    return Shape("a16wn", m, 4096, 4096, dtype=dtype, outdtype=dtype, scale="block", extra={"w_format": name, "w_group": group})


#: One of each way in which formats are packed, scaled and decoded.
WEIGHTS = [
    ("gptq_int4", 128, "bf16"), ("awq_int4", 64, "fp16"), ("ct_int4_zp", 0, "bf16"), ("int8_channel", 0, "fp16"),
    ("fp8_block", 128, "bf16"), ("mxfp8", 32, "bf16"), ("nvfp4", 16, "bf16"), ("mxfp4", 32, "fp16"), ("gptq_int4_zp_order", 128, "bf16"),
]  # fmt: skip


def _mx(m: int) -> Shape:
    return Shape("a4w4_blockscale", m, 4096, 4096, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16")


def _every_op(gfx: str, m: int) -> list[Shape]:
    """Return shapes of every op, with every kind of operands and scales, in the architecture's kind
    of fp8.
    """
    fp8 = {"dtype": ARCHITECTURES[gfx].fp8, "outdtype": "bf16"}
    int8, row, batch = {"dtype": "int8", "outdtype": "bf16"}, {"scale": "row"}, {"extra": {"B": 16}}
    shuffled = {"layout": "aiter16x16"}
    decoded = [Shape("a16w4_blockscale", m, 4096, 4096, scale="block"), *(_weight(m, *each) for each in WEIGHTS)]
    return [
        Shape("a16w16", m, 7168, 8192),
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
        _moe(m // 4, "bf16", "No"),
        _moe(m // 4, "int8", "per_Token", act="gelu"),
        _moe(m // 4, fp8["dtype"], "per_1x128"),
        _moe(m // 4, "fp4x2", "per_1x32", act="swiglu"),
        _moe(max(m // 16, 1), fp8["dtype"], "per_Tensor", doweight_stage1=True),
        _moe(m // 4, fp8["dtype"], "per_Token", g1u1=False),
        _mx(m),
        *(decoded if ARCHITECTURES[gfx].matrix != "wmma" else []),
    ]


#: First guesses that between them have every family, architecture and kind of operands.
FIRST: dict[str, list[Shape]] = {
    "gfx942": [
        Shape("a16w16", 1, 7168, 8192),
        Shape("a8w8", 1024, 1280, 8192, "int8", "bf16", scale="row"),
        _mx(16),
        _weight(16, "gptq_int4_zp", 128),
    ],
    "gfx950": [Shape("a16w16", 1024, 7168, 8192), _moe(4, "fp8_e4m3fn", "per_1x128"), _mx(1024), _weight(16, "nvfp4", 16)],
    "gfx1201": [Shape("batched_bf16", 16, 1280, 8192, extra={"B": 16}), _every_op("gfx1201", 16)[3]],
    "sm_90": [
        Shape("a16w16", 16, 7168, 8192),
        _every_op("sm_90", 16)[6],
        _moe(256, "fp8_e4m3fn", "per_Tensor"),
        _moe(256, "fp4x2", "per_1x32"),
    ],
    "sm_100": [_mx(16), _mx(1024), _moe(64, "fp4x2", "per_1x32", g1u1=False), Shape("a16w16", 1024, 7168, 8192)],
    "sm_120": [_mx(16), _mx(1024), _moe(64, "fp4x2", "per_1x32", g1u1=False), Shape("a16w16", 1024, 7168, 8192)],
    "sm_80": [_weight(16, "awq_int4", 128), Shape("a16w16", 16, 7168, 8192, epilogue="bias")],
    "sm_86": [Shape("a16w16", 1024, 7168, 8192, epilogue="bias")],
    "gfx90a": [Shape("a16w16", 16, 7168, 8192, epilogue="bias")],
    "gfx1100": [Shape("a16w16", 1024, 7168, 8192, epilogue="bias")],
}


#: An architecture of each generation, and others.
GENERATIONS = ("sm_80", "sm_89", "sm_100", "sm_120", "gfx90a", "gfx950", "gfx1100", "gfx1200", "gfx1250")
OTHERS = (
    "sm_87", "sm_103", "sm_107", "sm_110", "sm_121", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153",
    "gfx1154", "gfx1170", "gfx1171", "gfx1172", "gfx1201", "gfx1251",
)  # fmt: skip
#: Beginning of a kernel's name, one for each family -> a shape that lists such kernels.
FAMILY_SHAPES = {
    "gemv_": Shape("a16w16", 1, 4096, 4096), "gemm_": SHAPE, "tma_": SHAPE,
    "streamk_": Shape("a16w16", 1040, 4096, 4096),
    "mx_": _mx(16), "wn_": _weight(16, "ct_int4", 128), "wnv_": _weight(1, "gptq_int4", 128), "moe_": _moe(4, "bf16", "No"),
}  # fmt: skip


@pytest.mark.parametrize("architectures", [GENERATIONS, pytest.param(OTHERS, marks=pytest.mark.nightly)], ids=["generations", "others"])
def test_a_kernel_of_each_family_compiles_for_every_architecture(compile_cases: Compile, architectures: tuple[str, ...]) -> None:
    """Programs compile with the architecture's instruction, within its shared memory."""
    cases = []
    for gfx in (gfx for gfx in architectures if not installed.target_fault(gfx)):
        for start, shape in FAMILY_SHAPES.items():
            listed = family_of(shape.op).enumerate_solutions(shape, Device(gfx, 128))
            first = next((solution for solution in listed if solution.kernel_name.startswith(start)), None)
            assert first or unsupported(shape, Device(gfx, 128)) or (start in ("tma_", "streamk_") and not ARCHITECTURES[gfx].tma), (
                f"{start} on {gfx}"
            )
            cases += [_case(gfx, first.kernel_name, shape, max(first.split_k, 1))] if first else []
    assert not _faults(compile_cases(cases))


def test_streamk_compiles_for_wavefronts_of_32_lanes(compile_cases: Compile) -> None:
    """A row may name streamk where no list has it; it neither spills nor exceeds the LDS."""
    cases = [_case(gfx, "streamk_r1_m64n64k32_g8_w4s2", FAMILY_SHAPES["streamk_"]) for gfx in ("gfx1100", "gfx1201", "gfx1250")]
    results = compile_cases(case for case in cases if not installed.target_fault(case["gfx"]))
    assert not _faults(results) and not any(code["spills"] for _, code in results)


@pytest.mark.parametrize("vendor", ["gfx", "sm_"])
def test_first_guesses_compile_within_the_limits(compile_cases: Compile, vendor: str) -> None:
    """They use the right instruction for their operands, fit the memory and do not spill."""
    cases = [case for gfx, shapes in FIRST.items() if gfx.startswith(vendor) for shape in shapes for case in _listed(gfx, shape, slice(1))]
    assert not _faults(compile_cases(cases))


def test_decoded_weights_compile_for_hopper(compile_cases: Compile) -> None:
    """Of every way to pack, scale and decode, the first guess for one row, and for few or many,
    fits and does not spill.
    """
    rows = ((1, 16), (1, 1024))
    shapes = [_weight(m, *each) for index, each in enumerate(WEIGHTS) for m in rows[index % 2]]
    assert not _faults(compile_cases(case for shape in shapes for case in _listed("sm_90", shape, slice(1))))


def test_int8_splits_compile(compile_cases: Compile) -> None:
    """Partial sums of int8 are int32."""
    shape = Shape("a8w8", 16, 7168, 8192, "int8", "bf16", scale="tensor")
    assert not _faults(compile_cases([_case("gfx942", "gemm_r1_m16n64k128_g1_w4s2", shape, 4)]))


def test_sums_of_fp8_leave_the_matrix_unit_where_the_output_shows_it(compile_cases: Compile) -> None:
    """On Hopper an fp32 output of fp8 operands is summed in float32 outside the matrix unit; a bf16
    output is not.
    """
    shapes = [Shape("a8w8", 64, 4096, 4096, "fp8_e4m3fn", outdtype, scale="row") for outdtype in ("bf16", "fp32")]
    codes = [code for _, code in compile_cases([_case("sm_90", "gemm_r1_m64n128k128_g8_w4s3", shape) for shape in shapes])]
    assert codes[0]["additions"] == 0
    assert codes[1]["additions"] >= 64


def test_large_tiles_on_hopper_use_warpgroup_instructions(compile_cases: Compile) -> None:
    """A gemm tile with 64 rows, and a transposed one with few, multiply by wgmma."""
    names = ["gemm_r1_m128n128k64_g8_w4s3", "gemm_r1_m16n64k128_g1_w4s3_t", "tma_r1_m128n256k64_g8_w8s3"]
    results = compile_cases([_case("sm_90", name) for name in names])
    assert all(any("wgmma.mma_async" in text for text in code["matrix"]) for _, code in results), results
    assert "cp.async.bulk.tensor" in results[-1][1]["matrix"]


def test_streamk_is_one_pipelined_loop_on_hopper(compile_cases: Compile) -> None:
    """Whole tiles and shares take turns in one loop with overlapping products, within the estimated
    shared memory.
    """
    [(case, code)] = compile_cases([_case("sm_90", "streamk_r1_m128n256k64_g8_w8s4")])
    assert not _faults([(case, code)])
    assert (code["products"], code["overlapped"]) == (1, True)
    assert code["shared"] <= shared_bytes(parse_name(case["kernel"]), SHAPE, "sm_90")


def test_specialised_warps_move_registers_and_only_their_own_rows(compile_cases: Compile) -> None:
    """The PTX has setmaxnreg, since Triton drops the request silently, and the second consumer's
    rows move once.
    """
    blocks = Shape("a8w8_blockscale", 4096, 2112, 7168, dtype="fp8_e4m3fn", outdtype="bf16", scale="block")
    cases = [_case("sm_90", "tma_r2_m128n128k64_g8_w4s4_ws"), _case("sm_90", "tma_r1_m64n128k64_g8_w4s3_ws")]
    cases += [_case("sm_90", f"tma_r2_m128n{block_n}k128_g8_w4s4_ws", blocks) for block_n in (64, 128)]
    for case, code in compile_cases(cases):
        assert not _faults([(case, code)])
        assert code["shared"] <= shared_bytes(parse_name(case["kernel"]), Shape.from_dict(case["shape"]), "sm_90")
        assert "setmaxnreg" in code["matrix"]
        assert code["moved_by_consumers"] == 0


def test_blackwell_has_its_own_instructions_within_the_estimates(compile_cases: Compile) -> None:
    """Kernels fed by descriptors multiply by tcgen05 or mma, and take no more memory than is
    estimated.
    """
    names = ["tma_r1_m128n128k64_g8_w8s3", "streamk_r1_m128n128k64_g8_w8s3", "tma_r1_m16n64k128_g1_w4s3_t"]
    cases = [_case(gfx, name) for gfx in ("sm_100", "sm_103", "sm_120", "sm_121") for name in names]
    if not installed.target_fault("sm_100", "tcgen05 by specialised warps"):
        cases += [_case("sm_100", name) for name in ("tma_r2_m128n256k64_g8_w8s3_ws", "tma_r1_m64n128k64_g8_w8s3_ws")]
    results = compile_cases(cases)
    assert not _faults(results)
    for case, code in results:
        kernel = parse_name(case["kernel"])
        assert "cp.async.bulk.tensor" in code["matrix"]
        assert any(("tcgen05" if case["gfx"] < "sm_12" else "mma.sync") in text for text in code["matrix"])
        assert code["shared"] <= shared_bytes(kernel, SHAPE, case["gfx"])
        assert code["tensor_columns"] <= (tensor_columns(kernel, SHAPE) if case["gfx"] < "sm_12" else 0)


def test_the_loads_of_every_descriptor_fill_its_box(compile_cases: Compile) -> None:
    """A box larger than the loads would overrun their buffer; Triton halves those of specialised
    warps.
    """
    names = [
        "tma_r2_m128n128k64_g8_w4s4_ws",
        "tma_r1_m64n128k64_g8_w4s3_ws",
        "tma_r1_m128n128k64_g8_w4s3",
        "streamk_r1_m128n128k64_g8_w8s3",
    ]
    for case, code in compile_cases(map(partial(_case, "sm_90"), names)):
        assert code["boxes"] and all(block == loaded for block, loaded in code["boxes"]), (case, code["boxes"])


def test_a_program_that_does_not_compile_costs_one_line(compile_cases: Compile) -> None:
    """The error has the compiler's reason, and the report of the whole module is not written."""
    [(_, code)] = compile_cases([_case("sm_90", "tma_r1_m64n256k64_g8_w4s3_ws")])
    assert re.search(r"^triton tma_r1_m64n256k64_g8_w4s3_ws for sm_90: compile failed: \w+: .{40,}", code["failed"])
    assert "\n" not in code["failed"]


@pytest.mark.parametrize("default", ["0", "1"])
def test_fused_multiply_adds_do_not_depend_on_a_default(compile_cases: Compile, monkeypatch: pytest.MonkeyPatch, default: str) -> None:
    """Triton's default changes in 3.10, and a user's variable sets it."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", default)
    assert all(code["fused"] for _, code in compile_cases([_case("sm_90", "gemm_r1_m16n32k32_g1_w4s2")]))


def test_what_is_written_while_a_program_compiles_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """Only the compiler's report of a program that does not compile is left out, and nothing else
    that is written to stderr.
    """
    from tunedgemm_triton.build import reports_held

    with reports_held():
        os.write(2, b"a.py:1:2: error: not of a failure\n")
    with pytest.raises(RuntimeError), reports_held() as errors:
        os.write(2, b"before\na.py:1:2: error: refused\nmodule {\n}\n")
        raise RuntimeError
    with pytest.raises(RuntimeError), reports_held():
        os.write(2, b"other\n")
        raise RuntimeError
    assert errors == ["refused"]
    assert capfd.readouterr().err == "a.py:1:2: error: not of a failure\nbefore\nother\n"


def test_unknown_compiler_options_are_refused() -> None:
    """Triton ignores unknown options, so a misspelt one must not reach it."""
    from tunedgemm_triton.build import checked_options, target_of

    assert checked_options({"num_warps": 4, "num_stages": 3}, target_of("sm_90")) == {"num_warps": 4, "num_stages": 3}
    with pytest.raises(PluginError, match="waves_per_eu"):
        checked_options({"waves_per_eu": 2}, target_of("sm_90"))
    assert checked_options({"waves_per_eu": 2}, target_of("gfx942"))


@pytest.mark.nightly
@pytest.mark.parametrize("gfx", MAIN)
def test_first_guesses_of_every_op_compile_within_the_limits(compile_cases: Compile, gfx: str) -> None:
    """Of each op and class of rows the first guess uses the right instruction, fits the memory and
    does not spill.
    """
    dense = [Shape("a16w16", m, 7168, 8192) for m in (1, 4, 16, 64, 1024)]
    cases = [case for shape in dense for case in (*_listed(gfx, shape, slice(3)), *_listed(gfx, shape, slice(-2, None)))]
    cases += [case for m in (16, 1024) for shape in _every_op(gfx, m) for case in _listed(gfx, shape, slice(1))]
    assert not _faults(compile_cases(cases))


@pytest.mark.nightly
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx1250"])
def test_first_guesses_compile_for_other_wavefronts_of_32_lanes(compile_cases: Compile, gfx: str) -> None:
    """Of each op that the architecture has, the first guess compiles to the right instruction."""
    shapes = [shape for shape in _every_op("gfx1250", 16) if not unsupported(shape, Device(gfx, UNITS[gfx]))]
    assert len(shapes) == {"gfx1100": 10, "gfx1250": 18}[gfx]
    assert not _faults(compile_cases([case for shape in shapes for case in _listed(gfx, shape, slice(1))]), spills=True)


@pytest.mark.nightly
@pytest.mark.parametrize("gfx", MAIN)
def test_a_sample_of_every_space_compiles_within_the_limits(compile_cases: Compile, gfx: str) -> None:
    """Every 20th solution of each op and class of M compiles to the right instruction and fits the
    shared memory.
    """
    cases = [case for m in (4, 64, 1024) for shape in _every_op(gfx, m) for case in _listed(gfx, shape, slice(None, None, 20))]
    assert not _faults(compile_cases(cases), spills=True)


@pytest.mark.nightly
@pytest.mark.parametrize("gfx", MAIN)
def test_the_whole_space_compiles_within_the_limits(compile_cases: Compile, gfx: str) -> None:
    """Every solution of plain a16w16 for a vector or two, few rows and many compiles and fits the
    shared memory.
    """
    cases = [case for m in (2, 16, 1024) for case in _listed(gfx, Shape("a16w16", m, 7168, 8192), slice(None))]
    assert not _faults(compile_cases(cases), spills=True)

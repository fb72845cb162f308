"""Names and numbers match AMD's Python bindings and NVIDIA's headers, where installed."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT, Abi
from tunedgemm_hipblaslt.library import bind_functions

#: Our name of a number -> the vendors' name, with the prefixes {lt}, {blas} and {data}.
NAMES: Mapping[str, Mapping[str, str]] = {
    "dtypes": {
        "fp32": "{data}_R_32F", "fp16": "{data}_R_16F", "bf16": "{data}_R_16BF", "int8": "{data}_R_8I", "int32": "{data}_R_32I",
        "fp8_e4m3fn": "{data}_R_8F_E4M3", "fp8_e4m3fnuz": "{data}_R_8F_E4M3_FNUZ",
    },
    "compute": {"32f": "{blas}_COMPUTE_32F", "32i": "{blas}_COMPUTE_32I"},
    "operation": {"n": "{blas}_OP_N", "t": "{blas}_OP_T"},
    "layout": {
        "order": "{lt}_MATRIX_LAYOUT_ORDER", "batch_count": "{lt}_MATRIX_LAYOUT_BATCH_COUNT",
        "batch_offset": "{lt}_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET",
    },
    "order": {"shuffled8": "{lt}_ORDER_COL16_4R16", "shuffled16": "{lt}_ORDER_COL16_4R8"},
    "desc": {
        "transpose_a": "{lt}_MATMUL_DESC_TRANSA", "transpose_b": "{lt}_MATMUL_DESC_TRANSB",
        "epilogue": "{lt}_MATMUL_DESC_EPILOGUE", "bias": "{lt}_MATMUL_DESC_BIAS_POINTER", "bias_dtype": "{lt}_MATMUL_DESC_BIAS_DATA_TYPE",
        "a_scale": "{lt}_MATMUL_DESC_A_SCALE_POINTER", "b_scale": "{lt}_MATMUL_DESC_B_SCALE_POINTER",
        "fast_accum": "{lt}_MATMUL_DESC_FAST_ACCUM", "a_scale_mode": "{lt}_MATMUL_DESC_A_SCALE_MODE",
        "b_scale_mode": "{lt}_MATMUL_DESC_B_SCALE_MODE",
    },
    "epilogue": {"bias": "{lt}_EPILOGUE_BIAS"},
    "scale": {
        "row": "{lt}_MATMUL_MATRIX_SCALE_OUTER_VEC_32F",
        "block": "{lt}_MATMUL_MATRIX_SCALE_VEC128_32F", "square": "{lt}_MATMUL_MATRIX_SCALE_BLK128x128_32F",
    },
    "preference": {
        "max_workspace": "{lt}_MATMUL_PREF_MAX_WORKSPACE_BYTES",
        **{f"align_{x}": f"{{lt}}_MATMUL_PREF_MIN_ALIGNMENT_{x.upper()}_BYTES" for x in "abcd"},
    },
    "config": {
        "id": "{lt}_ALGO_CONFIG_ID", "tile": "{lt}_ALGO_CONFIG_TILE_ID", "split_k": "{lt}_ALGO_CONFIG_SPLITK_NUM",
        "reduction": "{lt}_ALGO_CONFIG_REDUCTION_SCHEME", "swizzle": "{lt}_ALGO_CONFIG_CTA_SWIZZLING",
        "option": "{lt}_ALGO_CONFIG_CUSTOM_OPTION", "stages": "{lt}_ALGO_CONFIG_STAGES_ID", "inner": "{lt}_ALGO_CONFIG_INNER_SHAPE_ID",
        "cluster": "{lt}_ALGO_CONFIG_CLUSTER_SHAPE_ID",
    },
    "capability": {
        "split_k": "{lt}_ALGO_CAP_SPLITK_SUPPORT", "reductions": "{lt}_ALGO_CAP_REDUCTION_SCHEME_MASK",
        "swizzle": "{lt}_ALGO_CAP_CTA_SWIZZLING_SUPPORT", "tiles": "{lt}_ALGO_CAP_TILE_IDS", "options": "{lt}_ALGO_CAP_CUSTOM_OPTION_MAX",
        "stages": "{lt}_ALGO_CAP_STAGES_IDS",
    },
}  # fmt: skip
PREFIXES = {
    "cublaslt": {"lt": "CUBLASLT", "blas": "CUBLAS", "data": "CUDA"},
    "hipblaslt": {"lt": "HIPBLASLT", "blas": "HIPBLAS", "data": "HIP"},
}
FUNCTIONS = (
    "Create", "Destroy", "MatrixLayoutCreate", "MatrixLayoutDestroy", "MatrixLayoutSetAttribute", "MatmulDescCreate", "MatmulDescDestroy",
    "MatmulDescSetAttribute", "MatmulPreferenceCreate", "MatmulPreferenceDestroy", "MatmulPreferenceSetAttribute", "MatmulAlgoGetHeuristic",
    "Matmul",
)  # fmt: skip
#: First cuBLAS whose header has all names used here, block scales the last.
COMPLETE = (12, 9)


def our_numbers(abi: Abi) -> dict[str, int]:
    """Return each number of a library's tables by the vendor's name."""
    prefixes = PREFIXES[abi.libtype]
    numbers = {f"{prefixes['blas']}_STATUS_{name}": number for name, number in abi.statuses.items()}
    for table, names in NAMES.items():
        for name, number in getattr(abi, table).items():
            numbers[names[name].format(**prefixes)] = number
    return numbers


def parse_argument(declared: str) -> tuple[bool, int]:
    """Return (is a pointer, bytes) of an argument in a header's declaration."""
    kind = declared.replace("const", "").strip()
    opaque = re.match(r"\w+(Handle_t|MatmulDesc_t|MatrixLayout_t|MatmulPreference_t|Stream_t)\b", kind)
    if "*" in kind or "[" in kind or opaque:
        return True, 8
    return False, 8 if re.match(r"(size_t|u?int64_t)\b", kind) else 4


def passed_arguments(function: Any) -> list[tuple[bool, int]]:
    """Return (is a pointer, bytes) of the arguments that ctypes passes."""
    return [(not issubclass(x, ctypes._SimpleCData) or x is ctypes.c_void_p, ctypes.sizeof(x)) for x in function.argtypes]


@pytest.fixture(scope="module")
def bindings() -> Any:
    """Return AMD's module, which needs no GPU and no ROCm."""
    return pytest.importorskip("rocm.bindings.hipblaslt")


@pytest.fixture(scope="module")
def amd_numbers(bindings: Any) -> dict[str, int]:
    """Return each number of AMD's enumerations."""
    modules = [bindings, pytest.importorskip("rocm.bindings.hip"), pytest.importorskip("rocm.bindings.hipblas")]
    kinds = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, IntEnum)]
    return {member.name: int(member) for kind in kinds for member in kind}


class TestAmd:
    """hipBLASLt against hip-python, which AMD generates from its headers."""

    def test_numbers(self, amd_numbers: dict[str, int]) -> None:
        """Each number equals AMD's."""
        numbers = our_numbers(HIPBLASLT)
        assert numbers == {name: amd_numbers[name] for name in numbers}

    def test_every_status_has_its_name(self, amd_numbers: dict[str, int]) -> None:
        """The status codes are AMD's."""
        assert {f"HIPBLAS_STATUS_{name}" for name in HIPBLASLT.statuses} == {
            name for name in amd_numbers if name.startswith("HIPBLAS_STATUS_")
        }

    def test_structures(self, bindings: Any) -> None:
        """The sizes of algorithm and result and the result's offsets are AMD's."""
        assert bindings.hipblasLtMatmulAlgo_t.allocate(1).c_sizeof() == HIPBLASLT.algo_bytes
        memory = ctypes.create_string_buffer(HIPBLASLT.result_bytes)
        result = bindings.hipblasLtMatmulHeuristicResult_t.fromObj(ctypes.addressof(memory))
        assert result.c_sizeof() == HIPBLASLT.result_bytes
        result.set_workspaceSize(0, 0x1122334455667788)
        result.set_state(0, bindings.hipblasStatus_t.HIPBLAS_STATUS_NOT_SUPPORTED)
        result.set_wavesCount(0, 0.5)
        written = memory.raw[HIPBLASLT.algo_bytes : HIPBLASLT.algo_bytes + 16]
        assert written == 0x1122334455667788.to_bytes(8, "little") + (7).to_bytes(4, "little") + bytes(ctypes.c_float(0.5))

    def test_arguments(self, bindings: Any, fake_library: Callable[[str], Path]) -> None:
        """Each function gets pointers and numbers in AMD's order and widths."""
        library = bind_functions(HIPBLASLT, str(fake_library("hipblaslt")))
        for name in FUNCTIONS:
            declared = re.search(rf"hipblasStatus_t hipblasLt{name}\((.*)\)", getattr(bindings, f"hipblasLt{name}").__doc__)
            assert declared, name
            assert passed_arguments(library.functions[name]) == [parse_argument(argument) for argument in declared[1].split(",")], name


@pytest.fixture(scope="module")
def nvidia_numbers(header_text: str) -> dict[str, int]:
    """Return each enumerator with a plain number."""
    return {
        name: int(number, 0)
        for name, number in re.findall(r"\b(CU\w+)\s*=\s*(-?\w+)\s*[,}]", header_text)
        if number.strip("-")[0].isdigit()
    }


class TestNvidia:
    """cuBLASLt against its headers."""

    def test_numbers(self, header_text: str, nvidia_numbers: dict[str, int]) -> None:
        """Each number equals NVIDIA's; headers older than block scales lack some."""
        numbers = our_numbers(CUBLASLT)
        version = tuple(int(x) for x in re.findall(r"#define CUBLAS_VER_(?:MAJOR|MINOR) (\d+)", header_text))
        known = numbers if version >= COMPLETE else {name: number for name, number in numbers.items() if name in nvidia_numbers}
        assert len(known) > 0.9 * len(numbers)
        assert known == {name: nvidia_numbers[name] for name in known}

    def test_every_status_has_its_name(self, nvidia_numbers: dict[str, int]) -> None:
        """The status codes are NVIDIA's."""
        assert {f"CUBLAS_STATUS_{name}" for name in CUBLASLT.statuses} == {
            name for name in nvidia_numbers if name.startswith("CUBLAS_STATUS_")
        }

    def test_structures(self, header_text: str, headers: Any, tmp_path: Path) -> None:
        """The compiled sizes of algorithm and result and the result's offsets are equal."""
        compiler = shutil.which("cc") or pytest.skip("no C compiler")
        result = "cublasLtMatmulHeuristicResult_t"
        expressions = [
            "sizeof(cublasLtMatmulAlgo_t)",
            f"sizeof({result})",
            *(f"offsetof({result}, {x})" for x in ("workspaceSize", "state", "wavesCount")),
        ]
        source = tmp_path / "sizes.c"
        arguments = ", ".join(f"(int){expression}" for expression in expressions)
        source.write_text(
            f'#include <cublasLt.h>\n#include <stdio.h>\nint main(void) {{ printf("%d %d %d %d %d", {arguments}); return 0; }}\n'
        )
        folders = [f"-I{folder}" for folder in headers.include_folders() if folder.is_dir()]
        done = subprocess.run([compiler, *folders, source, "-o", tmp_path / "sizes"], capture_output=True, text=True)
        if done.returncode and "No such file" in done.stderr:
            pytest.skip(f"headers that cublasLt.h includes not found: {done.stderr[:200]}")
        assert done.returncode == 0, done.stderr
        sizes = [int(x) for x in subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout.split()]
        bytes_of_algo = CUBLASLT.algo_bytes
        assert sizes == [bytes_of_algo, CUBLASLT.result_bytes, bytes_of_algo, bytes_of_algo + 8, bytes_of_algo + 12]

    def test_arguments(self, header_text: str, fake_library: Callable[[str], Path]) -> None:
        """Each function gets pointers and numbers in NVIDIA's order and widths."""
        library = bind_functions(CUBLASLT, str(fake_library("cublaslt")))
        config_functions = [name for name in library.functions if name.startswith("MatmulAlgo")]
        for name in dict.fromkeys([*FUNCTIONS, *config_functions]):
            declared = re.search(rf"cublasLt{name}\(([^)]*)\)\s*;", header_text)
            assert declared, name
            assert passed_arguments(library.functions[name]) == [parse_argument(argument) for argument in declared[1].split(",")], name


def test_both_libraries_have_the_same_tables() -> None:
    """The tables of both libraries have the same names, except those listed here."""
    only_one = {
        "dtypes": {"fp8_e4m3fnuz"}, "order": {"shuffled8", "shuffled16"}, "layout": {"order"}, "desc": {"fast_accum"},
        "scale": {"block", "square"}, "preference": {"align_a", "align_b", "align_c", "align_d"},
    }  # fmt: skip
    for table in NAMES:
        if table in ("config", "capability"):
            assert not getattr(HIPBLASLT, table), "algorithms of hipBLASLt are opaque"
        else:
            assert set(getattr(CUBLASLT, table)) ^ set(getattr(HIPBLASLT, table)) == only_one.get(table, set())

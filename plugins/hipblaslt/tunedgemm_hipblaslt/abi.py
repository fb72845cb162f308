"""Describe names, numbers and sizes that differ between the two libraries, as data.

Sources: cublasLt.h, cublas_api.h and library_types.h of CUDA 12.9 to 13.1; hipblaslt.h,
hipblas-common.h and library_types.h of ROCm 6.2 to 7.1. Functions that both have take the same
arguments in the same order. Nearly all enumerations have different numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs


def _table(**values: int) -> Mapping[str, int]:
    return MappingProxyType(values)


@attrs.frozen(eq=False)
class Abi:
    """Names and numbers of one library.

    Attributes:
        libtype: name of its backend.
        kind: kind of its devices, as `Device.kind`.
        prefix: prefix of its functions.
        libraries: its file names, newest first.
        algo_bytes: size of ``MatmulAlgo_t``.
        result_bytes: size of ``MatmulHeuristicResult_t``: the algorithm, workspace (size_t),
            status (int), waves (float), 4 ints.
        dtypes: by our short name, and ``int32``.
        compute: computation types ``32f`` and ``32i``.
        operation: ``n`` as stored, ``t`` transposed.
        layout: attributes of a matrix layout that are set after its creation.
        order: memory orders of shuffled weights, by the bits of an element.
        desc: attributes of a matmul descriptor.
        epilogue: ``bias``; the default has none.
        scale: modes of scales finer than ``tensor``: ``row``, ``block`` (1x128),
            ``square`` (128x128).
        preference: attributes of a search preference.
        config: attributes of an algorithm that can be set; empty where algorithms are opaque.
        capability: attributes of an algorithm that can be read.
        statuses: names of the status codes.
        namers: symbols of hipblaslt-ext.hpp's functions of an algorithm's names: the kernel's,
            then the solution's. They return libstdc++'s C++11 strings.
        workspace: limit of an algorithm's workspace in bytes.
    """

    libtype: str
    kind: str
    prefix: str
    libraries: tuple[str, ...]
    algo_bytes: int
    result_bytes: int
    dtypes: Mapping[str, int]
    compute: Mapping[str, int]
    operation: Mapping[str, int]
    layout: Mapping[str, int]
    order: Mapping[str, int]
    desc: Mapping[str, int]
    epilogue: Mapping[str, int]
    scale: Mapping[str, int]
    preference: Mapping[str, int]
    config: Mapping[str, int]
    capability: Mapping[str, int]
    statuses: Mapping[str, int]
    namers: tuple[str, ...]
    workspace: int

    def status(self, code: int) -> str:
        """Return the name of a status code."""
        return next((name for name, number in self.statuses.items() if number == code), f"status {code}")


_EPILOGUE = _table(bias=4)
_PREFERENCE = _table(max_workspace=1)
_DTYPES = {"fp32": 0, "fp16": 2, "bf16": 14, "int8": 3, "int32": 10, "fp8_e4m3fn": 28}

CUBLASLT = Abi(
    libtype="cublaslt",
    kind="nvidia",
    prefix="cublasLt",
    libraries=("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"),
    algo_bytes=64,
    result_bytes=96,
    dtypes=_table(**_DTYPES),
    compute=_table(**{"32f": 68, "32i": 72}),
    operation=_table(n=0, t=1),
    layout=_table(batch_count=5, batch_offset=6),
    order=_table(),
    desc=_table(
        transpose_a=3,
        transpose_b=4,
        epilogue=7,
        bias=8,
        a_scale=17,
        b_scale=18,
        fast_accum=25,
        bias_dtype=26,
        a_scale_mode=31,
        b_scale_mode=32,
    ),
    epilogue=_EPILOGUE,
    scale=_table(row=3, block=4, square=5),
    preference=_table(**_PREFERENCE, align_a=5, align_b=6, align_c=7, align_d=8),
    config=_table(id=0, tile=1, split_k=2, reduction=3, swizzle=4, option=5, stages=6, inner=7, cluster=8),
    capability=_table(split_k=0, reductions=1, swizzle=2, tiles=6, options=7, stages=13),
    statuses=_table(
        SUCCESS=0,
        NOT_INITIALIZED=1,
        ALLOC_FAILED=3,
        INVALID_VALUE=7,
        ARCH_MISMATCH=8,
        MAPPING_ERROR=11,
        EXECUTION_FAILED=13,
        INTERNAL_ERROR=14,
        NOT_SUPPORTED=15,
        LICENSE_ERROR=16,
    ),
    namers=(),
    workspace=32 << 20,  # torch's limit on Hopper
)

HIPBLASLT = Abi(
    libtype="hipblaslt",
    kind="amd",
    prefix="hipblasLt",
    libraries=("libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"),
    algo_bytes=24,
    result_bytes=56,
    dtypes=_table(**_DTYPES, fp8_e4m3fnuz=1000),
    compute=_table(**{"32f": 2, "32i": 9}),
    operation=_table(n=111, t=112),
    layout=_table(batch_count=0, batch_offset=1, order=3),
    order=_table(shuffled8=100, shuffled16=101),
    desc=_table(
        transpose_a=0,
        transpose_b=1,
        epilogue=2,
        bias=3,
        bias_dtype=4,
        a_scale=5,
        b_scale=6,
        a_scale_mode=31,
        b_scale_mode=32,
    ),
    epilogue=_EPILOGUE,
    scale=_table(row=3),
    preference=_PREFERENCE,
    config=_table(),
    capability=_table(),
    statuses=_table(
        SUCCESS=0,
        NOT_INITIALIZED=1,
        ALLOC_FAILED=2,
        INVALID_VALUE=3,
        MAPPING_ERROR=4,
        EXECUTION_FAILED=5,
        INTERNAL_ERROR=6,
        NOT_SUPPORTED=7,
        ARCH_MISMATCH=8,
        HANDLE_IS_NULLPTR=9,
        INVALID_ENUM=10,
        UNKNOWN=11,
    ),
    namers=tuple(
        f"_ZN13hipblaslt_ext{len(name)}{name}B5cxx11EPvR22_hipblasLtMatmulAlgo_t"
        for name in ("getKernelNameFromAlgo", "getSolutionNameFromAlgo")
    ),
    workspace=76 << 20,  # torch's limit on an MI300X
)

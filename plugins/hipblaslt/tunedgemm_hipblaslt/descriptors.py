"""Describe a problem by the library's objects, and read the library's answers about it.

A `ProblemDescriptors` is shared under its lock; each launcher owns its descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Iterator

import attrs
from tunedgemm.tools.launching import ForkSafeLock

from tunedgemm_hipblaslt.abi import Abi
from tunedgemm_hipblaslt.library import Library, OpaqueObject, StatusError, device_context, library_handle
from tunedgemm_hipblaslt.limits import Matrix, Problem
from tunedgemm_hipblaslt.names import KernelConfig

#: Guaranteed alignment of operands in bytes. Outputs and workspace have more.
ALIGNMENT = 16
#: Address of bias and scales during a search. The library reads its alignment alone, which is the
#: least guaranteed.
_PLACEHOLDER = (1 << 20) + ALIGNMENT

#: ``struct`` formats of an algorithm's attributes that are not of 32 bits (cublasLt.h).
_CONFIG_FORMATS = {"inner": "H", "cluster": "H"}


@attrs.frozen
class HeuristicResult:
    """Algorithm that fits a problem.

    Attributes:
        algo: its ``MatmulAlgo_t``.
        workspace: bytes of workspace that it needs.
        waves: waves of CTAs on the device; 0 where the library does not say.
    """

    algo: bytes
    workspace: int
    waves: float


@attrs.frozen
class Capabilities:
    """Attribute values that an algorithm of cuBLASLt accepts."""

    tiles: tuple[int, ...]
    stages: tuple[int, ...]
    reductions: int
    swizzles: int
    options: int
    split_k: bool


class ProblemDescriptors:
    """Descriptor and layouts of a problem on one device, which must be current in every call."""

    def __init__(self, library: Library, problem: Problem, index: int) -> None:
        abi = library.abi
        self.library, self.problem, self.handle = library, problem, library_handle(library, index)
        self.desc = library.create("MatmulDesc", abi.compute[problem.compute], abi.dtypes[scale_type(problem)])
        self.desc.set_attributes(abi.desc, **desc_values(abi, problem))
        self.a, self.b, self.d = (_create_layout(library, matrix, problem.batch) for matrix in (problem.a, problem.b, problem.d))

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of handle, descriptor, and the layouts of A, B, C and D; C is D."""
        return (self.handle.address, self.desc.address, self.a.address, self.b.address, self.d.address, self.d.address)

    def heuristic_results(self, count: int, workspace: int) -> list[HeuristicResult]:
        """Return up to *count* algorithms within *workspace* bytes, best first."""
        library, abi = self.library, self.library.abi
        preference = library.create("MatmulPreference")
        preference.set_attributes(abi.preference, max_workspace=workspace)
        preference.set_attributes(abi.preference, **{name: ALIGNMENT for name in abi.preference if name.startswith("align_")})
        buffer, returned = ctypes.create_string_buffer(count * abi.result_bytes), ctypes.c_int()
        try:
            library.call("MatmulAlgoGetHeuristic", *self.addresses, preference.address, count, buffer, ctypes.byref(returned))
        except StatusError:  # no algorithm: NOT_SUPPORTED, or INVALID_VALUE from some versions
            return []
        content, size = bytes(memoryview(buffer)[: returned.value * abi.result_bytes]), abi.result_bytes
        parts = (content[start : start + size] for start in range(0, len(content), size))
        results = [result for part in parts if (result := _parse_result(abi, part)) is not None]
        return [result for result in results if result.workspace <= workspace]

    def check(self, config: KernelConfig) -> HeuristicResult | str:
        """Return the algorithm of a configuration, or why it does not fit the problem."""
        try:
            return self.check_algo(self.init_algo(config))
        except StatusError as error:
            return str(error)
        except struct.error as error:  # a name may hold any number
            return f"kernelName: value out of range: {error}"

    def check_algo(self, algo: bytes) -> HeuristicResult:
        """Ask the library whether a configured ``MatmulAlgo_t`` fits the problem.

        Raises:
            StatusError: it does not fit.
        """
        abi = self.library.abi
        buffer = ctypes.create_string_buffer(abi.result_bytes)
        self.library.call("MatmulAlgoCheck", *self.addresses, algo, buffer)
        workspace, _, waves = struct.unpack_from("Qif", buffer.raw, abi.algo_bytes)
        return HeuristicResult(algo, workspace, waves)

    def init_algo(self, config: KernelConfig) -> bytes:
        """Return the ``MatmulAlgo_t`` of a configuration.

        Raises:
            StatusError: the library has no such algorithm, or it takes no such value.
            struct.error: a number is wider than its attribute.
        """
        return _init_algo(self.library, self.handle, self._types(), config)

    def read_config(self, algo: bytes) -> KernelConfig:
        """Return the configuration of a ``MatmulAlgo_t``."""
        values = {}
        for name, attribute in self.library.abi.config.items():
            form = _CONFIG_FORMATS.get(name, "i")
            value, written = ctypes.create_string_buffer(struct.calcsize(form)), ctypes.c_size_t()
            self.library.call("MatmulAlgoConfigGetAttribute", algo, attribute, value, len(value), ctypes.byref(written))
            [values[name]] = struct.unpack(form, value.raw)
        return KernelConfig(**values)

    def capabilities(self, algorithm_id: int) -> Capabilities:
        """Return the attribute values that an algorithm accepts."""
        algo = _init_default_algo(self.library, self.handle, self._types(), algorithm_id)
        numbers = self.library.abi.capability
        lists = [self._read_capability(algo, numbers[name]) or (0,) for name in ("tiles", "stages")]
        single = [self._read_capability(algo, numbers[name], 1)[0] for name in ("reductions", "swizzle", "options", "split_k")]
        return Capabilities(*lists, *single[:3], split_k=bool(single[3]))

    def _types(self) -> tuple[int, ...]:
        abi, problem = self.library.abi, self.problem
        a, b, d = (abi.dtypes[matrix.dtype] for matrix in (problem.a, problem.b, problem.d))
        return abi.compute[problem.compute], abi.dtypes[scale_type(problem)], a, b, d, d

    def _read_capability(self, algo: bytes, attribute: int, count: int | None = None) -> tuple[int, ...]:
        """Return 32-bit numbers: *count* of them, or all where it is None."""
        written = ctypes.c_size_t()
        if count is None:
            self.library.call("MatmulAlgoCapGetAttribute", algo, attribute, None, 0, ctypes.byref(written))
            count = written.value // 4
        values = (ctypes.c_int * max(count, 1))()
        if count:
            self.library.call("MatmulAlgoCapGetAttribute", algo, attribute, values, 4 * count, ctypes.byref(written))
        return tuple(values[:count])


@contextlib.contextmanager
def locked_descriptors(library: Library, problem: Problem, index: int) -> Iterator[ProblemDescriptors]:
    """Yield a problem's shared descriptors to one thread at a time, the device made current."""
    with device_context(index):
        descriptors, lock = _shared_descriptors(library, problem, index)
        with lock:
            yield descriptors


def scale_type(problem: Problem) -> str:
    """Return the dtype of alpha and beta."""
    return "int32" if problem.compute == "32i" else "fp32"


def desc_values(abi: Abi, problem: Problem) -> dict[str, int]:
    """Return the attributes of a problem's matmul descriptor."""
    values = {"transpose_a": abi.operation["t"], "transpose_b": abi.operation["n"]}
    if problem.bias_dtype:
        values |= {"epilogue": abi.epilogue["bias"], "bias_dtype": abi.dtypes[problem.bias_dtype], "bias": _PLACEHOLDER}
    for name, kind in (("a_scale", problem.a_scale), ("b_scale", problem.b_scale)):
        values |= {name: _PLACEHOLDER} if kind else {}
        # Tensor scales are the default mode, and the only one of older libraries.
        if kind not in ("", "tensor"):
            values[f"{name}_mode"] = abi.scale[kind]
    if problem.fast_accum:
        values["fast_accum"] = 1
    return values


@functools.lru_cache(maxsize=256)
def _shared_descriptors(library: Library, problem: Problem, index: int) -> tuple[ProblemDescriptors, ForkSafeLock]:
    return ProblemDescriptors(library, problem, index), ForkSafeLock()


@functools.lru_cache(maxsize=4096)
def _init_algo(library: Library, handle: OpaqueObject, types: tuple[int, ...], config: KernelConfig) -> bytes:
    """Return the ``MatmulAlgo_t`` of a configuration, which depends on types and device alone."""
    content = ctypes.create_string_buffer(_init_default_algo(library, handle, types, config.id), library.abi.algo_bytes)
    for name, attribute in library.abi.config.items():
        if name != "id":
            value = struct.pack(_CONFIG_FORMATS.get(name, "i"), getattr(config, name))
            library.call("MatmulAlgoConfigSetAttribute", content, attribute, value, len(value))
    return content.raw


def _init_default_algo(library: Library, handle: OpaqueObject, types: tuple[int, ...], algorithm_id: int) -> bytes:
    content = ctypes.create_string_buffer(library.abi.algo_bytes)
    library.call("MatmulAlgoInit", handle.address, *types, algorithm_id, content)
    return content.raw


def _create_layout(library: Library, matrix: Matrix, batch: int) -> OpaqueObject:
    abi = library.abi
    layout = library.create("MatrixLayout", abi.dtypes[matrix.dtype], matrix.rows, matrix.columns, matrix.ld)
    if matrix.order != "col":
        layout.set_attributes(abi.layout, order=abi.order[matrix.order])
    if batch > 1:
        layout.set_attributes(abi.layout, batch_count=batch, batch_offset=matrix.stride)
    return layout


def _parse_result(abi: Abi, content: bytes) -> HeuristicResult | None:
    """Parse a ``MatmulHeuristicResult_t``; None where its own status is a refusal."""
    workspace, status, waves = struct.unpack_from("Qif", content, abi.algo_bytes)
    return None if status else HeuristicResult(content[: abi.algo_bytes], workspace, waves)

"""Descriptors: a problem in the library's own objects, and what can be asked about it: its answers, and whether a configuration fits.

Whoever asks a `Described` holds its lock; launchers have descriptors of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Iterator

import attrs

from tunedgemm_hipblaslt.abi import Abi
from tunedgemm_hipblaslt.library import Created, Library, StatusError, device_context, handle
from tunedgemm_hipblaslt.names import Algorithm
from tunedgemm_hipblaslt.problem import Matrix, Problem

#: Operands are at least so aligned, outputs and workspace more.
ALIGNMENT = 16
#: Stands for a bias or for scales while algorithms are sought: the library reads its alignment only, which is the least that there is.
_SOME_ADDRESS = (1 << 20) + ALIGNMENT

#: ``struct`` formats of the attributes of an algorithm (cublasLt.h).
_CONFIG_FORMATS = {"inner": "H", "cluster": "H"}


@attrs.frozen
class Found:
    """An algorithm that fits a problem.

    Attributes:
        algo: its ``MatmulAlgo_t``.
        workspace: bytes of scratch that it wants.
        waves: how often it fills the device, 0 where it does not tell.
    """

    algo: bytes
    workspace: int
    waves: float


@attrs.frozen
class Capabilities:
    """What can be configured of one algorithm of cuBLASLt: the numbers that each attribute may have."""

    tiles: tuple[int, ...]
    stages: tuple[int, ...]
    reductions: int
    swizzles: int
    options: int
    split_k: bool


class Described:
    """A problem's descriptor and layouts on one device, which must be the current one while they are used."""

    def __init__(self, library: Library, problem: Problem, index: int) -> None:
        abi = library.abi
        self.library, self.problem, self.handle = library, problem, handle(library, index)
        scalar = scale_type(problem)
        self.desc = library.create("MatmulDesc", abi.compute[problem.compute], abi.dtypes[scalar])
        self.desc.put(abi.desc, **desc_values(abi, problem))
        self.a, self.b, self.d = (_layout(library, matrix, problem.batch) for matrix in (problem.a, problem.b, problem.d))

    @property
    def addresses(self) -> tuple[int, ...]:
        """Handle, descriptor, and the layouts of A, B, C and D: what the library's functions start with."""
        return (self.handle.address, self.desc.address, self.a.address, self.b.address, self.d.address, self.d.address)

    def answers(self, count: int, workspace: int) -> list[Found]:
        """The library's first *count* answers within *workspace* bytes; none where it knows no algorithm."""
        library, abi = self.library, self.library.abi
        preference = library.create("MatmulPreference")
        preference.put(abi.preference, max_workspace=workspace)
        preference.put(abi.preference, **{name: ALIGNMENT for name in abi.preference if name.startswith("align_")})
        results, given = ctypes.create_string_buffer(count * abi.result_bytes), ctypes.c_int()
        try:
            library.call("MatmulAlgoGetHeuristic", *self.addresses, preference.address, count, results, ctypes.byref(given))
        except StatusError:  # NOT_SUPPORTED or, from some versions, INVALID_VALUE: the same as none
            return []
        content, size = bytes(memoryview(results)[: given.value * abi.result_bytes]), abi.result_bytes
        parts = (content[start : start + size] for start in range(0, len(content), size))
        found = [result for part in parts if (result := _result(abi, part)) is not None]
        return [result for result in found if result.workspace <= workspace]

    def check(self, algorithm: Algorithm) -> Found | str:
        """A configuration as the library has it, or why it does not fit the problem."""
        try:
            return self.checked(self.initialised(algorithm))
        except StatusError as error:
            return str(error)
        except struct.error as error:  # a name may hold any number
            return f"no attribute of an algorithm has such a value: {error}"

    def checked(self, algo: bytes) -> Found:
        """Ask the library about a configured algorithm.

        Raises:
            StatusError: it does not fit the problem.
        """
        abi = self.library.abi
        result = ctypes.create_string_buffer(abi.result_bytes)
        self.library.call("MatmulAlgoCheck", *self.addresses, algo, result)
        workspace, _, waves = struct.unpack_from("Qif", result.raw, abi.algo_bytes)
        return Found(algo, workspace, waves)

    def initialised(self, algorithm: Algorithm) -> bytes:
        """The ``MatmulAlgo_t`` of a configuration.

        Raises:
            StatusError: there is no such algorithm, or it takes no such value.
            struct.error: a number is wider than its attribute.
        """
        return _initialised(self.library, self.handle, self._types(), algorithm)

    def _initial(self, number: int) -> bytes:
        return _initial(self.library, self.handle, self._types(), number)

    def _types(self) -> tuple[int, ...]:
        abi, problem = self.library.abi, self.problem
        a, b, d = (abi.dtypes[matrix.dtype] for matrix in (problem.a, problem.b, problem.d))
        return abi.compute[problem.compute], abi.dtypes[scale_type(problem)], a, b, d, d

    def configured(self, algo: bytes) -> Algorithm:
        """The configuration of a ``MatmulAlgo_t``."""
        numbers = {name: self._number(algo, name, attribute) for name, attribute in self.library.abi.config.items()}
        return Algorithm(**numbers)

    def _number(self, algo: bytes, name: str, attribute: int) -> int:
        form = _CONFIG_FORMATS.get(name, "i")
        value, written = ctypes.create_string_buffer(struct.calcsize(form)), ctypes.c_size_t()
        self.library.call("MatmulAlgoConfigGetAttribute", algo, attribute, value, len(value), ctypes.byref(written))
        return int(struct.unpack(form, value.raw)[0])

    def numbers(self) -> list[int]:
        """Which algorithms of cuBLASLt there are for the problem's types."""
        found, count = (ctypes.c_int * 256)(), ctypes.c_int()
        self.library.call("MatmulAlgoGetIds", self.handle.address, *self._types(), len(found), found, ctypes.byref(count))
        return list(found[: count.value])

    def capabilities(self, number: int) -> Capabilities:
        """What can be configured of an algorithm."""
        algo = self._initial(number)
        names = self.library.abi.capability
        single = {name: self._asked(algo, names[name], 1)[0] for name in ("split_k", "reductions", "swizzle", "options")}
        return Capabilities(
            tiles=self._asked(algo, names["tiles"]) or (0,),
            stages=self._asked(algo, names["stages"]) or (0,),
            reductions=single["reductions"],
            swizzles=single["swizzle"],
            options=single["options"],
            split_k=bool(single["split_k"]),
        )

    def _asked(self, algo: bytes, attribute: int, count: int | None = None) -> tuple[int, ...]:
        """32-bit numbers; as many as there are where *count* is None."""
        written = ctypes.c_size_t()
        if count is None:
            self.library.call("MatmulAlgoCapGetAttribute", algo, attribute, None, 0, ctypes.byref(written))
            count = written.value // 4
        values = (ctypes.c_int * max(count, 1))()
        if count:
            self.library.call("MatmulAlgoCapGetAttribute", algo, attribute, values, 4 * count, ctypes.byref(written))
        return tuple(values[:count])


def _initial(library: Library, handle: Created, types: tuple[int, ...], number: int) -> bytes:
    content = ctypes.create_string_buffer(library.abi.algo_bytes)
    library.call("MatmulAlgoInit", handle.address, *types, number, content)
    return content.raw


@functools.lru_cache(maxsize=4096)
def _initialised(library: Library, handle: Created, types: tuple[int, ...], algorithm: Algorithm) -> bytes:
    """See `Described.initialised`: of the types and the device alone, so that another M need not make it again."""
    content = ctypes.create_string_buffer(_initial(library, handle, types, algorithm.id), library.abi.algo_bytes)
    for name, attribute in library.abi.config.items():
        if name != "id":
            value = struct.pack(_CONFIG_FORMATS.get(name, "i"), getattr(algorithm, name))
            library.call("MatmulAlgoConfigSetAttribute", content, attribute, value, len(value))
    return content.raw


def scale_type(problem: Problem) -> str:
    """The dtype of alpha and beta."""
    return "int32" if problem.compute == "32i" else "fp32"


def desc_values(abi: Abi, problem: Problem) -> dict[str, int]:
    """The attributes of a problem's descriptor."""
    values = {"transpose_a": abi.operation["t"], "transpose_b": abi.operation["n"]}
    if problem.bias_dtype:
        values |= {"epilogue": abi.epilogue["bias"], "bias_dtype": abi.dtypes[problem.bias_dtype], "bias": _SOME_ADDRESS}
    for name, kind in (("a_scale", problem.a_scale), ("b_scale", problem.b_scale)):
        values |= {name: _SOME_ADDRESS} if kind else {}
        if kind not in ("", "tensor"):  # the mode of a whole tensor is the default, and older libraries have no other
            values[f"{name}_mode"] = abi.scale[kind]
    if problem.fast:
        values["fast_accum"] = 1
    return values


def _layout(library: Library, matrix: Matrix, batch: int) -> Created:
    abi = library.abi
    made = library.create("MatrixLayout", abi.dtypes[matrix.dtype], matrix.rows, matrix.columns, matrix.ld)
    if matrix.order != "col":
        made.put(abi.layout, order=abi.order[matrix.order])
    if batch > 1:
        made.put(abi.layout, batch_count=batch, batch_offset=matrix.stride)
    return made


def _result(abi: Abi, content: bytes) -> Found | None:
    """A ``MatmulHeuristicResult_t``; None where its own status is a refusal."""
    workspace, status, waves = struct.unpack_from("Qif", content, abi.algo_bytes)
    return None if status else Found(content[: abi.algo_bytes], workspace, waves)


@functools.lru_cache(maxsize=256)
def _described(library: Library, problem: Problem, index: int) -> tuple[Described, threading.Lock]:
    return Described(library, problem, index), threading.Lock()


@contextlib.contextmanager
def asking(library: Library, problem: Problem, index: int) -> Iterator[Described]:
    """A problem's descriptors for questions: one thread at a time, the device made current."""
    with device_context(index):
        described, lock = _described(library, problem, index)
        with lock:
            yield described

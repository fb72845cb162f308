"""Launch algorithms, through the C extension or, where it was not built, ctypes."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

from tunedgemm.tools.launching import ForkSafeLock

from tunedgemm_hipblaslt.descriptors import HeuristicResult, ProblemDescriptors
from tunedgemm_hipblaslt.library import Library


def _load_extension() -> Any:
    try:
        return importlib.import_module("tunedgemm_hipblaslt._shim")
    except ImportError:  # installed without a C compiler
        return None


_extension = _load_extension()

#: Addresses (stream, d, a, b, workspace, bias, a_scale, b_scale) -> the library's status.
Launch = Callable[[int, int, int, int, int, int, int, int], int]

#: Pointers that the descriptor holds and each launch sets.
_POINTERS = ("bias", "a_scale", "b_scale")


def launch_of(descriptors: ProblemDescriptors, result: HeuristicResult) -> Launch:
    """Return the thread-safe launch of an algorithm on descriptors that it owns.

    The descriptor holds the pointers of bias and scales. Setting them and launching is one step
    under the launch's lock. Both implementations release the interpreter meanwhile.
    """
    library, problem = descriptors.library, descriptors.problem
    present = (problem.bias_dtype, problem.a_scale, problem.b_scale)
    attributes = tuple(library.abi.desc[name] if used else -1 for name, used in zip(_POINTERS, present, strict=True))
    if _extension is None:
        return by_ctypes(descriptors, result, attributes)
    return by_extension(descriptors, result, attributes)


def by_extension(descriptors: ProblemDescriptors, result: HeuristicResult, attributes: tuple[int, ...]) -> Launch:
    """Return the launch through `shim.c`."""
    library = descriptors.library
    handle, desc, a, b, d, _ = descriptors.addresses
    launcher = _extension.Launch(
        library.address("Matmul"), library.address("MatmulDescSetAttribute"), handle, desc, a, b, d, result.algo, result.workspace,
        descriptors.problem.compute == "32i", attributes, descriptors,
    )  # fmt: skip
    return launcher.launch  # type: ignore[no-any-return]


def by_ctypes(descriptors: ProblemDescriptors, result: HeuristicResult, attributes: tuple[int, ...]) -> Launch:
    """Return the launch through ctypes."""
    library: Library = descriptors.library
    matmul, set_attribute = library.functions["Matmul"], library.functions["MatmulDescSetAttribute"]
    scalar: Any = ctypes.c_int32 if descriptors.problem.compute == "32i" else ctypes.c_float
    alpha, beta, algo, nbytes = ctypes.byref(scalar(1)), ctypes.byref(scalar(0)), result.algo, result.workspace
    size, lock = ctypes.sizeof(ctypes.c_void_p), ForkSafeLock()

    def launch(stream: int, d: int, a: int, b: int, workspace: int, *pointers: int) -> int:
        handle, desc, a_layout, b_layout, d_layout, _ = descriptors.addresses
        with lock:
            for attribute, pointer in zip(attributes, pointers, strict=True):
                if attribute >= 0 and (status := set_attribute(desc, attribute, ctypes.byref(ctypes.c_void_p(pointer)), size)):
                    return int(status)
            return int(
                matmul(handle, desc, alpha, a, a_layout, b, b_layout, beta, d, d_layout, d, d_layout, algo, workspace, nbytes, stream)
            )

    return launch

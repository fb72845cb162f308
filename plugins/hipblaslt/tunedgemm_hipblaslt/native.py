"""Native: the launch itself, by the C extension, or by ctypes where that was not built."""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable
from typing import Any

from tunedgemm_hipblaslt.descriptors import Described, Found
from tunedgemm_hipblaslt.library import Library


def _loaded() -> Any:
    try:
        return importlib.import_module("tunedgemm_hipblaslt._shim")
    except ImportError:  # installed without a C compiler
        return None


_extension = _loaded()

#: (stream, d, a, b, workspace, bias, a_scale, b_scale) as addresses -> the library's status
Launch = Callable[[int, int, int, int, int, int, int, int], int]

#: Pointers that a descriptor holds and each launch sets.
_POINTERS = ("bias", "a_scale", "b_scale")


def launch_of(described: Described, found: Found) -> Launch:
    """The launch of an algorithm on descriptors that nobody else uses; safe to call from several threads.

    The pointers of bias and scales lie in the descriptor, so that setting them and launching are one step under a lock of the
    launch's own. Other threads of the interpreter run meanwhile, both ways.
    """
    library, problem = described.library, described.problem
    present = (problem.bias_dtype, problem.a_scale, problem.b_scale)
    attributes = tuple(library.abi.desc[name] if used else -1 for name, used in zip(_POINTERS, present, strict=True))
    if _extension is None:
        return by_ctypes(described, found, attributes)
    return by_extension(described, found, attributes)


def by_extension(described: Described, found: Found, attributes: tuple[int, ...]) -> Launch:
    """Through `shim.c`."""
    library = described.library
    handle, desc, a, b, d, _ = described.addresses
    made = _extension.Launch(
        library.address("Matmul"), library.address("MatmulDescSetAttribute"), handle, desc, a, b, d, found.algo, found.workspace,
        described.problem.compute == "32i", attributes, described,
    )  # fmt: skip
    return made.launch  # type: ignore[no-any-return]


def by_ctypes(described: Described, found: Found, attributes: tuple[int, ...]) -> Launch:
    """Through ctypes."""
    library: Library = described.library
    matmul, put = library.functions["Matmul"], library.functions["MatmulDescSetAttribute"]
    number: Any = ctypes.c_int32 if described.problem.compute == "32i" else ctypes.c_float
    alpha, beta, algo, nbytes = ctypes.byref(number(1)), ctypes.byref(number(0)), found.algo, found.workspace
    size, lock = ctypes.sizeof(ctypes.c_void_p), threading.Lock()

    def launch(stream: int, d: int, a: int, b: int, workspace: int, *pointers: int) -> int:
        handle, desc, a_layout, b_layout, d_layout, _ = described.addresses
        with lock:
            for attribute, pointer in zip(attributes, pointers, strict=True):
                if attribute >= 0 and (status := put(desc, attribute, ctypes.byref(ctypes.c_void_p(pointer)), size)):
                    return int(status)
            return int(
                matmul(handle, desc, alpha, a, a_layout, b, b_layout, beta, d, d_layout, d, d_layout, algo, workspace, nbytes, stream)
            )

    return launch

"""Load the vendor's Lt library through ctypes, and own its opaque objects.

For slow calls only: launches go through `native`. Needs no compiler, header or vendor package.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.launching import device_context, first_usable, mapped_files

from tunedgemm_hipblaslt.abi import Abi

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_HANDLES = ctypes.POINTER(ctypes.c_void_p)
_INTS = ctypes.POINTER(ctypes.c_int)

#: Arguments of the functions called from here, by name without the prefix. All return a status.
ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "Create": (_HANDLES,),
    "Destroy": (_POINTER,),
    "MatrixLayoutCreate": (_HANDLES, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "MatrixLayoutDestroy": (_POINTER,),
    "MatrixLayoutSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "MatmulDescCreate": (_HANDLES, _INT, _INT),
    "MatmulDescDestroy": (_POINTER,),
    "MatmulDescSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "MatmulPreferenceCreate": (_HANDLES,),
    "MatmulPreferenceDestroy": (_POINTER,),
    "MatmulPreferenceSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "MatmulAlgoGetHeuristic": (*(_POINTER,) * 7, _INT, _POINTER, _INTS),
    "Matmul": (*(_POINTER,) * 14, _SIZE, _POINTER),
}
#: Functions of cuBLASLt alone.
_CONFIG_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "MatmulAlgoInit": (_POINTER, *(_INT,) * 7, _POINTER),
    "MatmulAlgoCheck": (*(_POINTER,) * 8,),
    "MatmulAlgoCapGetAttribute": (_POINTER, _INT, _POINTER, _SIZE, ctypes.POINTER(_SIZE)),
    "MatmulAlgoConfigSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "MatmulAlgoConfigGetAttribute": (_POINTER, _INT, _POINTER, _SIZE, ctypes.POINTER(_SIZE)),
}

#: C++'s ``operator delete``, from the library or those that it needs.
_DELETE = "_ZdlPv"

#: ``struct`` formats of attributes that are not of 32 bits.
_FORMATS = {"batch_offset": "q", "bias": "Q", "a_scale": "Q", "b_scale": "Q", "max_workspace": "Q", "fast_accum": "b"}


class StatusError(PluginError):
    """Refusal of a call by the library; *code* is its status."""

    def __init__(self, abi: Abi, function: str, code: int) -> None:
        super().__init__(f"{abi.prefix}{function}: {abi.status(code)}")
        self.code = code


class _String(ctypes.Structure):
    """libstdc++'s ``std::string``; short text is in *local*, where a copied *data* does not point."""

    _fields_ = (("data", _POINTER), ("size", _SIZE), ("local", ctypes.c_char * 16))


@attrs.frozen(eq=False)
class Library:
    """Loaded Lt library.

    Attributes:
        abi: its names and numbers.
        path: the file.
        functions: by name without the prefix; `call` checks their status.
        namers: the functions of `Abi.namers` that this version has.
        release: frees the text of a long ``std::string``.
    """

    abi: Abi
    path: str
    functions: Mapping[str, Any]
    namers: tuple[Any, ...] = ()
    release: Any = None

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            StatusError: the status is not SUCCESS.
        """
        code = self.functions[function](*arguments)
        if code:
            raise StatusError(self.abi, function, code)

    def address(self, function: str) -> int:
        """Return the address of a function."""
        return int(ctypes.cast(self.functions[function], ctypes.c_void_p).value or 0)

    def names(self, handle: OpaqueObject, algo: bytes) -> Iterator[str]:
        """Yield the library's names of an algorithm, the kernel's and the solution's."""
        for namer in self.namers:
            answer = namer(handle.address, ctypes.create_string_buffer(algo, len(algo)))
            if answer.size < _String.local.size:
                yield bytes(answer)[_String.local.offset :][: answer.size].decode(errors="replace")
            else:
                yield ctypes.string_at(answer.data, answer.size).decode(errors="replace")
                self.release(answer.data)

    def create(self, kind: str, *arguments: Any) -> OpaqueObject:
        """Create an object of a kind, such as ``MatrixLayout``; "" creates a handle."""
        pointer = ctypes.c_void_p()
        self.call(f"{kind}Create", ctypes.byref(pointer), *arguments)
        return OpaqueObject(self, kind, int(pointer.value or 0))


class OpaqueObject:
    """Handle, layout, descriptor or preference; destroyed with its last reference."""

    def __init__(self, library: Library, kind: str, address: int) -> None:
        self.library, self.kind, self.address = library, kind, address
        # At exit the driver may have been unloaded.
        weakref.finalize(self, library.functions[f"{kind}Destroy"], ctypes.c_void_p(address)).atexit = False

    def set_attributes(self, numbers: Mapping[str, int], **values: int) -> None:
        """Set attributes by their names in `abi`; *numbers* maps names to the library's numbers.

        Raises:
            StatusError: the object takes no such attribute or value.
        """
        for name, value in values.items():
            content = struct.pack(_FORMATS.get(name, "i"), value)
            self.library.call(f"{self.kind}SetAttribute", self.address, numbers[name], content, len(content))


def bind_functions(abi: Abi, path: str) -> Library:
    """Load a library file and declare the arguments of its functions.

    Raises:
        PluginError: the file does not load, or lacks a function.
    """
    try:
        native = ctypes.CDLL(path)
        functions = {}
        for name, arguments in {**ARGUMENTS, **(_CONFIG_ARGUMENTS if abi.config else {})}.items():
            function = getattr(native, f"{abi.prefix}{name}")
            function.argtypes, function.restype = arguments, ctypes.c_int
            functions[name] = function
        functions["GetVersion"] = getattr(native, f"{abi.prefix}GetVersion")
        if not abi.config:
            functions["GetGitRevision"] = getattr(native, f"{abi.prefix}GetGitRevision")
    except (OSError, AttributeError) as error:
        raise PluginError(f"{abi.libtype}: cannot load the library: {error}") from error
    namers = [getattr(native, name) for name in abi.namers if hasattr(native, name) and hasattr(native, _DELETE)]
    for namer in namers:
        namer.argtypes, namer.restype = (_POINTER, _POINTER), _String
    if namers:
        getattr(native, _DELETE).argtypes = (_POINTER,)
    return Library(abi, path, functions, tuple(namers), getattr(native, _DELETE) if namers else None)


@functools.cache
def load_library(abi: Abi) -> Library:
    """Return this process's library: the file that torch has loaded, else the loader's first match.

    Raises:
        PluginError: no file loads.
    """
    import torch

    del torch  # its import loads the library that it was built with
    return first_usable((*mapped_files(abi.libraries[-1]), *abi.libraries), lambda path: bind_functions(abi, path))


@functools.cache
def library_handle(library: Library, index: int) -> OpaqueObject:
    """Return the library's handle on a device, which must be the current one.

    It is created once, before any capture.
    """
    del index
    return library.create("")


@functools.cache
def library_build(library: Library, index: int) -> tuple[int, str]:
    """Return the version and the revision of the library on a device: the scope of hipBLASLt's indices.

    The version is such as 130100 or 100200. cuBLASLt has no revision.
    """
    functions, number, text = library.functions, ctypes.c_int(), ctypes.create_string_buffer(256)
    if library.abi.config:
        functions["GetVersion"].argtypes, functions["GetVersion"].restype = (), ctypes.c_size_t
        return int(functions["GetVersion"]()), ""
    functions["GetVersion"].argtypes, functions["GetGitRevision"].argtypes = (_POINTER, _INTS), (_POINTER, ctypes.c_char_p)
    with device_context(index):
        handle = library_handle(library, index).address
        library.call("GetVersion", handle, ctypes.byref(number))
        library.call("GetGitRevision", handle, text)
    return number.value, text.value.decode(errors="replace").strip() or "unknown"

"""Library: the Lt library that torch has already loaded, through ctypes; its descriptors as objects that end with their owner.

Slow calls only: launches go through `native`. Nothing of it needs a compiler, headers or a package of a vendor.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from collections.abc import Mapping
from typing import Any

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools import device_context, first_usable, mapped_files

from tunedgemm_hipblaslt.abi import Abi

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_HANDLES = ctypes.POINTER(ctypes.c_void_p)
_INTS = ctypes.POINTER(ctypes.c_int)

#: Arguments of the functions that are called from here, after their prefix; all return a status.
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
#: Those of cuBLASLt alone.
_OWN_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "MatmulAlgoInit": (_POINTER, *(_INT,) * 7, _POINTER),
    "MatmulAlgoGetIds": (_POINTER, *(_INT,) * 7, _INTS, _INTS),
    "MatmulAlgoCheck": (*(_POINTER,) * 8,),
    "MatmulAlgoCapGetAttribute": (_POINTER, _INT, _POINTER, _SIZE, ctypes.POINTER(_SIZE)),
    "MatmulAlgoConfigSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "MatmulAlgoConfigGetAttribute": (_POINTER, _INT, _POINTER, _SIZE, ctypes.POINTER(_SIZE)),
}

#: ``struct`` formats of attributes, all others being of 32 bits.
_FORMATS = {"batch_offset": "q", "bias": "Q", "a_scale": "Q", "b_scale": "Q", "max_workspace": "Q", "fast_accum": "b"}


class StatusError(PluginError):
    """The library refused a call; *code* is its status."""

    def __init__(self, abi: Abi, function: str, code: int) -> None:
        super().__init__(f"{abi.prefix}{function}: {abi.status(code)}")
        self.code = code


@attrs.frozen(eq=False)
class Library:
    """A loaded library.

    Attributes:
        abi: its names and numbers.
        path: the file.
        functions: by name without the prefix, checked with `call`.
    """

    abi: Abi
    path: str
    functions: Mapping[str, Any]

    def call(self, function: str, *arguments: Any) -> None:
        """Call one of its functions.

        Raises:
            StatusError: its status is not SUCCESS.
        """
        code = self.functions[function](*arguments)
        if code:
            raise StatusError(self.abi, function, code)

    def address(self, function: str) -> int:
        """Where a function lies."""
        return int(ctypes.cast(self.functions[function], ctypes.c_void_p).value or 0)

    def create(self, kind: str, *arguments: Any) -> Created:
        """An object of the library, as ``MatrixLayout``; "" is a handle."""
        made = ctypes.c_void_p()
        self.call(f"{kind}Create", ctypes.byref(made), *arguments)
        return Created(self, kind, int(made.value or 0))


class Created:
    """An object that the library made; destroyed with the last reference to this one."""

    def __init__(self, library: Library, kind: str, address: int) -> None:
        self.library, self.kind, self.address = library, kind, address
        weakref.finalize(self, library.functions[f"{kind}Destroy"], ctypes.c_void_p(address)).atexit = False  # the driver may be gone

    def put(self, names: Mapping[str, int], **values: int) -> None:
        """Set attributes by our names for them.

        Raises:
            StatusError: it takes no such attribute or value.
        """
        for name, value in values.items():
            content = struct.pack(_FORMATS.get(name, "i"), value)
            self.library.call(f"{self.kind}SetAttribute", self.address, names[name], content, len(content))


def bind_functions(abi: Abi, path: str) -> Library:
    """Load a library file and give its functions their arguments.

    Raises:
        PluginError: it cannot be loaded, or lacks a function.
    """
    try:
        loaded = ctypes.CDLL(path)
        functions = {}
        for name, arguments in {**ARGUMENTS, **(_OWN_ARGUMENTS if abi.config else {})}.items():
            function = getattr(loaded, f"{abi.prefix}{name}")
            function.argtypes, function.restype = arguments, ctypes.c_int
            functions[name] = function
        functions["GetVersion"] = getattr(loaded, f"{abi.prefix}GetVersion")
        if not abi.config:
            functions["GetGitRevision"] = getattr(loaded, f"{abi.prefix}GetGitRevision")
    except (OSError, AttributeError) as error:
        raise PluginError(f"{abi.libtype}: {path} cannot be used: {error}") from error
    return Library(abi, path, functions)


@functools.cache
def loaded(abi: Abi) -> Library:
    """The library of this kind in this process: the file that torch has loaded, else the first that the loader finds.

    Raises:
        PluginError: there is none.
    """
    import torch

    del torch  # it loads the library that it was built with
    return first_usable((*mapped_files(abi.libraries[-1]), *abi.libraries), lambda path: bind_functions(abi, path))


@functools.cache
def handle(library: Library, index: int) -> Created:
    """The library's handle on the device with this index, which must be the current one; made once, before any capture."""
    del index
    return library.create("")


@functools.cache
def version(library: Library, index: int) -> int:
    """The version that the library itself tells, as 130100 or 100200."""
    if library.abi.config:
        function = library.functions["GetVersion"]
        function.argtypes, function.restype = (), ctypes.c_size_t
        return int(function())
    found = ctypes.c_int()
    library.functions["GetVersion"].argtypes = (_POINTER, _INTS)
    library.call("GetVersion", handle(library, index).address, ctypes.byref(found))
    return found.value


@functools.cache
def revision(library: Library, index: int) -> str:
    """The source revision of a hipBLASLt, which its numbers of algorithms belong to; "" for cuBLASLt."""
    if library.abi.config:
        return ""
    text = ctypes.create_string_buffer(256)
    library.functions["GetGitRevision"].argtypes = (_POINTER, ctypes.c_char_p)
    library.call("GetGitRevision", handle(library, index).address, text)
    return text.value.decode(errors="replace").strip() or "unknown"


def build(library: Library, index: int) -> tuple[int, str]:
    """Version and revision of the library on the device with this index: what a hipBLASLt's numbers of algorithms hold for."""
    with device_context(index):
        return version(library, index), revision(library, index)

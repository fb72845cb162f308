"""Run-time compilers: NVRTC and hipRTC through ctypes, from a program's text to a code object. Neither needs a device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools import first_usable, mapped_files

_POINTER, _INT, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
_TEXTS, _SIZE = ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_size_t)


@attrs.frozen(eq=False)
class Interface:
    """What differs between the two compilers (nvrtc.h of CUDA 12 and 13, hiprtc.h of ROCm 6 and 7).

    Attributes:
        kind: whose devices it compiles for, as `Device.kind`.
        prefix: what its functions' names start with.
        libraries: its file names, newest first; the last is what all start with.
        code: what its functions for the code object end with: of the size, and of the bytes.
        packages: folders of packages where pip puts it, as patterns below the folder that a package is in.
        hint: how to get it.
    """

    kind: str
    prefix: str
    libraries: tuple[str, ...]
    code: tuple[str, str]
    packages: tuple[tuple[str, str], ...]
    hint: str


NVRTC = Interface(
    kind="nvidia",
    prefix="nvrtc",
    libraries=("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"),
    code=("GetCUBINSize", "GetCUBIN"),
    packages=(("nvidia", "cu*/lib"), ("torch", "lib")),  # cu13, or cuda_nvrtc for CUDA 12
    hint="pip install nvidia-cuda-nvrtc",
)
HIPRTC = Interface(
    kind="amd",
    prefix="hiprtc",
    libraries=("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"),
    code=("GetCodeSize", "GetCode"),
    packages=(("torch", "lib"), ("_rocm_sdk_core", "lib")),
    hint="it comes with ROCm and with torch for ROCm",
)
INTERFACES = {interface.kind: interface for interface in (NVRTC, HIPRTC)}


class RefusedError(PluginError):
    """The compiler refused a program.

    Attributes:
        log: all that it said.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


@attrs.frozen(eq=False)
class Compiler:
    """A loaded compiler.

    Attributes:
        interface: which.
        path: the file.
        functions: by name without the prefix; all but ``GetErrorString`` return a status.
        version: as ``nvrtc 13.0``.
    """

    interface: Interface
    path: str
    functions: Mapping[str, Any]
    version: str

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        """The code object of a program.

        Args:
            source: its text, which includes nothing.
            name: what messages call it.
            options: as on a command line.

        Raises:
            RefusedError: it does not compile, or the options are wrong.
        """
        program, functions = ctypes.c_void_p(), self.functions
        self._check("CreateProgram", functions["CreateProgram"](program, source.encode(), name.encode(), 0, None, None))
        try:
            texts = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
            status = functions["CompileProgram"](program, len(options), texts)
            if status:
                raise RefusedError(
                    self._told("CompileProgram", status),
                    self._bytes(program, "GetProgramLogSize", "GetProgramLog").decode(errors="replace").rstrip("\0"),
                )
            return self._bytes(program, *self.interface.code)
        finally:
            functions["DestroyProgram"](program)

    def _bytes(self, program: ctypes.c_void_p, size_function: str, function: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(size_function, self.functions[size_function](program, size))
        content = ctypes.create_string_buffer(max(size.value, 1))
        self._check(function, self.functions[function](program, content))
        return content.raw[: size.value]

    def _check(self, function: str, status: int) -> None:
        if status:
            raise RefusedError(self._told(function, status), "")

    def _told(self, function: str, status: int) -> str:
        text = self.functions["GetErrorString"](status) or b""
        return f"{self.interface.prefix}{function}: {text.decode(errors='replace') or f'status {status}'}"


def _load_builtins(path: str) -> None:
    """Load the library that a compiler opens by its bare name when it compiles, from the folder of the compiler.

    Torch loads it, too; where torch is not loaded nothing may know that folder.
    """
    if "/" in path:
        for builtins in Path(path).parent.glob(f"{Path(path).name.partition('.so')[0]}-builtins.so*"):
            with contextlib.suppress(OSError):  # the compiler says what it misses
                ctypes.CDLL(str(builtins))


def bind_functions(interface: Interface, path: str) -> Compiler:
    """Load a compiler's library and give its functions their arguments.

    Raises:
        PluginError: it cannot be loaded, or lacks a function.
    """
    size, code = interface.code
    arguments: Mapping[str, tuple[Any, ...]] = {
        "CreateProgram": (ctypes.POINTER(_POINTER), _TEXT, _TEXT, _INT, _TEXTS, _TEXTS),
        "CompileProgram": (_POINTER, _INT, _TEXTS),
        "GetProgramLogSize": (_POINTER, _SIZE),
        "GetProgramLog": (_POINTER, _POINTER),
        size: (_POINTER, _SIZE),
        code: (_POINTER, _POINTER),
        "DestroyProgram": (ctypes.POINTER(_POINTER),),
        "GetErrorString": (_INT,),
        "Version": (ctypes.POINTER(_INT), ctypes.POINTER(_INT)),
    }
    try:
        _load_builtins(path)
        loaded = ctypes.CDLL(path)
        functions = {name: getattr(loaded, f"{interface.prefix}{name}") for name in arguments}
    except (OSError, AttributeError) as error:
        raise PluginError(f"skinny: {path} cannot be used: {error}") from error
    for name, function in functions.items():
        function.argtypes, function.restype = arguments[name], _TEXT if name == "GetErrorString" else _INT
    major, minor = ctypes.c_int(), ctypes.c_int()
    if status := functions["Version"](major, minor):
        raise PluginError(f"skinny: {path} does not tell its version: status {status}")
    return Compiler(interface, path, functions, f"{interface.prefix} {major.value}.{minor.value}")


@functools.cache
def loaded(interface: Interface) -> Compiler:
    """The compiler of this kind in this process: the file that is loaded already, else one beside torch, else the loader's.

    Raises:
        PluginError: there is none; the message says how to get it.
    """
    paths = (*mapped_files(interface.libraries[-1]), *beside(interface), *interface.libraries)
    try:
        return first_usable(paths, lambda path: bind_functions(interface, path))
    except PluginError as error:
        raise PluginError(f"{error}; the kernels are compiled by {interface.libraries[-1].split('.')[0]}: {interface.hint}") from error


def beside(interface: Interface) -> list[str]:
    """Files of the compiler in packages that are installed; that of the major version that torch was built with first, then the newest."""
    stem, built = interface.libraries[-1], _torch_version()
    major = str(built.cuda or built.hip or "").partition(".")[0]

    def order(file: Path) -> tuple[bool, list[int]]:
        version = file.name[len(stem) :].split(".")
        return not file.name.startswith(f"{stem}.{major}"), [-int(part) for part in version if part.isdigit()]

    return [str(file) for file in sorted(_files(interface), key=order)]


def _torch_version() -> ModuleType:
    """`torch.version`; read alone where torch is not loaded, which takes seconds in each process that compiles."""
    if "torch" in sys.modules:
        return sys.modules["torch.version"]
    torch = importlib.util.find_spec("torch")
    places = torch.submodule_search_locations if torch else None
    file = importlib.util.spec_from_file_location("torch_version", Path(places[0]) / "version.py") if places else None
    if file is None or file.loader is None:
        raise PluginError("skinny: torch is not installed")
    module = importlib.util.module_from_spec(file)
    file.loader.exec_module(module)
    return module


def _files(interface: Interface) -> Iterator[Path]:
    for package, pattern in interface.packages:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            for folder in sorted(Path(place).glob(pattern)):
                yield from sorted(folder.glob(f"{interface.libraries[-1]}*"))

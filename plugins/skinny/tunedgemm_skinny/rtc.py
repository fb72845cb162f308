"""Compile at run time through ctypes: NVRTC and hipRTC. They need no device."""

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
from tunedgemm.tools.launching import first_usable, mapped_files

_POINTER, _INT, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
_TEXTS, _SIZE = ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_size_t)


@attrs.frozen(eq=False)
class Interface:
    """Names of one compiler's library (nvrtc.h of CUDA 12 and 13, hiprtc.h of ROCm 6 and 7).

    Attributes:
        kind: `Device.kind` that it compiles for.
        prefix: prefix of its functions.
        libraries: file names, newest first; the last is the common stem.
        code: suffixes of the functions for the code object's size and bytes.
        packages: (package, pattern) of the folders where pip installs it.
        hint: how to install it.
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
        log: the compiler's log.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


@attrs.frozen(eq=False)
class Compiler:
    """A loaded compiler.

    Attributes:
        interface: names of its library.
        path: the library's file.
        functions: functions by name without the prefix; all but ``GetErrorString`` return a status.
        version: such as ``nvrtc 13.0``.
    """

    interface: Interface
    path: str
    functions: Mapping[str, Any]
    version: str

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        """Compile a program to a code object.

        Args:
            source: text without includes.
            name: file name in the compiler's messages.
            options: command-line options.

        Raises:
            RefusedError: the program or an option is wrong.
        """
        program, functions = ctypes.c_void_p(), self.functions
        self._check("CreateProgram", functions["CreateProgram"](program, source.encode(), name.encode(), 0, None, None))
        try:
            texts = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
            status = functions["CompileProgram"](program, len(options), texts)
            if status:
                raise RefusedError(
                    self._message("CompileProgram", status),
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
            raise RefusedError(self._message(function, status), "")

    def _message(self, function: str, status: int) -> str:
        text = self.functions["GetErrorString"](status) or b""
        return f"{self.interface.prefix}{function}: {text.decode(errors='replace') or f'status {status}'}"


def _load_builtins(path: str) -> None:
    """Load the builtins library from the compiler's folder; the compiler opens it by its bare name.

    Torch loads it, too, but without torch the system's loader may not know that folder.
    """
    if "/" in path:
        for builtins in Path(path).parent.glob(f"{Path(path).name.partition('.so')[0]}-builtins.so*"):
            with contextlib.suppress(OSError):  # the compiler reports a missing one
                ctypes.CDLL(str(builtins))


def bind_functions(interface: Interface, path: str) -> Compiler:
    """Load a compiler's library and declare its functions.

    Raises:
        PluginError: the library does not load, or lacks a function.
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
        library = ctypes.CDLL(path)
        functions = {name: getattr(library, f"{interface.prefix}{name}") for name in arguments}
    except (OSError, AttributeError) as error:
        raise PluginError(f"skinny: cannot load {path}: {error}") from error
    for name, function in functions.items():
        function.argtypes, function.restype = arguments[name], _TEXT if name == "GetErrorString" else _INT
    major, minor = ctypes.c_int(), ctypes.c_int()
    if status := functions["Version"](major, minor):
        raise PluginError(f"skinny: {path} has no version: status {status}")
    return Compiler(interface, path, functions, f"{interface.prefix} {major.value}.{minor.value}")


@functools.cache
def loaded(interface: Interface) -> Compiler:
    """Load the compiler once: one already loaded, else one next to torch, else the system's.

    Raises:
        PluginError: none loads; the message says how to install one.
    """
    paths = (*mapped_files(interface.libraries[-1]), *beside(interface), *interface.libraries)
    try:
        return first_usable(paths, lambda path: bind_functions(interface, path))
    except PluginError as error:
        raise PluginError(f"{error}; install {interface.libraries[-1].split('.')[0]}: {interface.hint}") from error


def beside(interface: Interface) -> list[str]:
    """List the compiler's files in packages: torch's major version, then the newest."""
    stem, torch_version = interface.libraries[-1], _torch_version()
    major = str(torch_version.cuda or torch_version.hip or "").partition(".")[0]

    def order(file: Path) -> tuple[bool, list[int]]:
        version = file.name[len(stem) :].split(".")
        return not file.name.startswith(f"{stem}.{major}"), [-int(part) for part in version if part.isdigit()]

    return [str(file) for file in sorted(_files(interface), key=order)]


def _torch_version() -> ModuleType:
    """Return `torch.version` without a load of torch, which takes seconds."""
    if "torch" in sys.modules:
        return sys.modules["torch.version"]
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations if torch else None
    spec = importlib.util.spec_from_file_location("torch_version", Path(folders[0]) / "version.py") if folders else None
    if spec is None or spec.loader is None:
        raise PluginError("skinny: torch not found; install torch")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _files(interface: Interface) -> Iterator[Path]:
    for package, pattern in interface.packages:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            for folder in sorted(Path(root).glob(pattern)):
                yield from sorted(folder.glob(f"{interface.libraries[-1]}*"))

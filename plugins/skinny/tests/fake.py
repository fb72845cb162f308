"""Fake GPU: build the fake compilers and drivers, and call them through ctypes.

The C++ sources are in ``fake/``: an emulator runs the kernels' own source on the host. Each source
documents its checks and its settings (``FAKE_*``).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

SOURCES = Path(__file__).with_name("fake")
FLAGS = ("-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique")
#: Library -> its files. A fortified longjmp would refuse to switch stacks.
PARTS = {
    "nvrtc": ("rtc.cpp",),
    "hiprtc": ("rtc.cpp",),
    "cuda": ("driver.cpp", "emulator.cpp", "-U_FORTIFY_SOURCE"),
    "hip": ("driver.cpp", "emulator.cpp", "-U_FORTIFY_SOURCE"),
}
#: Statuses of both drivers.
SUCCESS, INVALID_VALUE, INVALID_IMAGE, NO_BINARY, INVALID_HANDLE, NOT_FOUND = 0, 1, 200, 209, 400, 500
ILLEGAL_ADDRESS, OUT_OF_RESOURCES, MISALIGNED_ADDRESS, LAUNCH_FAILED = 700, 701, 716, 719
#: Attributes of a function.
MAX_THREADS, LOCAL_BYTES, REGISTERS, DYNAMIC_SHARED = 0, 3, 4, 8
#: Results of both compilers.
INVALID_OPTION, COMPILATION = 5, 6
OPERANDS = ("x", "weight", "bias", "out", "partial", "counters", "x_scale", "w_scale")


class NoCompilerError(RuntimeError):
    """No C++ compiler was found, or it cannot compile the fake libraries."""


@functools.cache
def folder() -> Path:
    """Make a folder that is removed at exit."""
    path = tempfile.mkdtemp(prefix="tunedgemm-fake-gpu-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


@functools.cache
def build(name: str) -> Path:
    """Compile the fake library ``nvrtc``, ``hiprtc``, ``cuda`` or ``hip``, once per process.

    Raises:
        NoCompilerError: ``g++`` was not found or refuses the source; the message ends with its
            output.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCompilerError("g++ not found on PATH; install GCC's C++ compiler")
    target = folder() / f"libfake_{name}.so"
    words = [str(SOURCES / part) if part.endswith(".cpp") else part for part in PARTS[name]]
    defines = [f"-DFAKE_{name.upper()}", f'-DCOMPILER="{compiler}"', f'-DHOST_H="{SOURCES / "host.h"}"']
    done = subprocess.run([compiler, *FLAGS, *defines, *words, "-o", str(target), "-ldl"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompilerError(f"{compiler} cannot compile the fake {name}: {done.stderr[-2000:]}")
    return target


def copy_of(name: str) -> Path:
    """Copy a fake library to a new file, so that its counts are private."""
    return Path(shutil.copy(build(name), Path(tempfile.mkdtemp(dir=folder()), f"lib{name}.so")))


class Args(ctypes.Structure):
    """Arguments of the kernels."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in OPERANDS), ("n", ctypes.c_longlong), ("k", ctypes.c_longlong), ("m", ctypes.c_int),
        ("splits", ctypes.c_int), ("per_split", ctypes.c_longlong),
    ]  # fmt: skip


class RefusedError(Exception):
    """The compiler refused a program; the arguments are its result and its log."""


class Compiler:
    """Fake run-time compiler, ``nvrtc`` or ``hiprtc``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.native = ctypes.CDLL(str(copy_of(name)))
        self.code = {"nvrtc": "GetCUBIN", "hiprtc": "GetCode"}[name]

    def call(self, function: str, *arguments: Any) -> int:
        """Call a function, named without its prefix, and return its result."""
        return int(self.native[self.name + function](*arguments))

    def compile(self, source: str, options: Sequence[str], name: str = "program.cpp") -> bytes:
        """Compile a program to a code object.

        Raises:
            RefusedError: the program or an option is wrong.
        """
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        assert self.call("CreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None) == 0
        result = self.call("CompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options)))
        if result:
            assert self.call("GetProgramLogSize", program, ctypes.byref(size)) == 0
            log = ctypes.create_string_buffer(size.value)
            assert self.call("GetProgramLog", program, log) == 0
            assert self.call("DestroyProgram", ctypes.byref(program)) == 0
            raise RefusedError(result, log.value.decode())
        assert self.call(self.code + "Size", program, ctypes.byref(size)) == 0
        code = ctypes.create_string_buffer(size.value)
        assert self.call(self.code, program, code) == 0
        assert self.call("DestroyProgram", ctypes.byref(program)) == 0
        return code.raw


@attrs.frozen
class Grid:
    """Grid of a launch: blocks along N, splits, batch.

    Threads and dynamic shared bytes of a block.
    """

    blocks: int
    splits: int
    threads: int
    shared: int
    batches: int = 1


class Driver:
    """Fake driver, ``cuda`` or ``hip``."""

    def __init__(self, name: str) -> None:
        self.amd = name == "hip"
        self.native = ctypes.CDLL(str(copy_of(name)))
        self.native.fake_last_reason.restype = ctypes.c_char_p
        self.native.fake_calls.restype = ctypes.c_long
        self.native.fake_loaded.restype = self.native.fake_stored.restype = ctypes.c_longlong
        self.prefix = "hip" if self.amd else "cu"

    def call(self, function: str, *arguments: Any) -> int:
        """Call a function, named without its prefix, and return its status."""
        return int(self.native[self.prefix + function](*arguments))

    def reason(self) -> str:
        """Return why the last call was refused."""
        return self.native.fake_last_reason().decode()

    def counted(self, function: str) -> int:
        """Return the calls of a function since the last reset."""
        return int(self.native.fake_calls((self.prefix + function).encode()))

    def load(self, code: bytes) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """Load a code object; return its module and its kernel."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        status = self.call("ModuleLoadData", ctypes.byref(module), code)
        assert status == SUCCESS, f"{status}: {self.reason()}"
        status = self.call("ModuleGetFunction", ctypes.byref(function), module, b"skinny")
        assert status == SUCCESS, f"{status}: {self.reason()}"
        return module, function

    def launch(self, function: ctypes.c_void_p, grid: Grid, args: Args) -> int:
        """Launch a function and return the status."""
        name = "ModuleLaunchKernel" if self.amd else "LaunchKernel"
        params = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        return self.call(name, function, grid.blocks, grid.splits, grid.batches, grid.threads, 1, 1, grid.shared, None, params, None)

    def moved(self) -> dict[str, tuple[int, int]]:
        """Return the bytes that this thread's last launch loaded and stored, by operand."""
        return {name: (int(self.native.fake_loaded(i)), int(self.native.fake_stored(i))) for i, name in enumerate(OPERANDS)}

"""The fake GPU: compiles the fake compilers and drivers, and drives them by ctypes with numbers of its own.

The C++ source is in ``fake/``: an emulator that runs the kernels' own source on the host, and what is around it. Its checks and its
settings (``FAKE_*``) are described where they are.
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
#: library -> its files; a fortified longjmp would refuse to switch stacks.
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
    """There is no C++ compiler, or it cannot compile the fake libraries."""


@functools.cache
def folder() -> Path:
    """A folder of this process that goes with it."""
    made = tempfile.mkdtemp(prefix="tunedgemm-fake-gpu-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@functools.cache
def build(name: str) -> Path:
    """The fake library ``nvrtc``, ``hiprtc``, ``cuda`` or ``hip``, compiled once in a process.

    Raises:
        NoCompilerError: ``g++`` is missing or refuses the source, with what it said.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCompilerError("the fake GPU is compiled with `g++`, which is not on PATH; install GCC's C++ compiler")
    target = folder() / f"libfake_{name}.so"
    words = [str(SOURCES / part) if part.endswith(".cpp") else part for part in PARTS[name]]
    told = [f"-DFAKE_{name.upper()}", f'-DCOMPILER="{compiler}"', f'-DHOST_H="{SOURCES / "host.h"}"']
    done = subprocess.run([compiler, *FLAGS, *told, *words, "-o", str(target), "-ldl"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompilerError(f"{compiler} cannot compile the fake {name}: {done.stderr[-2000:]}")
    return target


def copy_of(name: str) -> Path:
    """A fake library in a file of its own: whoever loads it shares its counts with nobody."""
    return Path(shutil.copy(build(name), Path(tempfile.mkdtemp(dir=folder()), f"lib{name}.so")))


class Args(ctypes.Structure):
    """What the kernels take."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in OPERANDS), ("n", ctypes.c_longlong), ("k", ctypes.c_longlong), ("m", ctypes.c_int),
        ("splits", ctypes.c_int), ("per_split", ctypes.c_longlong),
    ]  # fmt: skip


class RefusedError(Exception):
    """The compiler refused a program: its result, then its log."""


class Compiler:
    """A fake run-time compiler, ``nvrtc`` or ``hiprtc``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.native = ctypes.CDLL(str(copy_of(name)))
        self.code = {"nvrtc": "GetCUBIN", "hiprtc": "GetCode"}[name]

    def call(self, function: str, *arguments: Any) -> int:
        """The result of a function named without its prefix."""
        return int(self.native[self.name + function](*arguments))

    def compile(self, source: str, options: Sequence[str], name: str = "program.cpp") -> bytes:
        """The code object of a program.

        Raises:
            RefusedError: it does not compile, or the options are wrong.
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
    """Blocks along N, splits, threads of a block, bytes of dynamic shared memory, products of a batch."""

    blocks: int
    splits: int
    threads: int
    shared: int
    batches: int = 1


class Driver:
    """A fake driver, ``cuda`` or ``hip``."""

    def __init__(self, name: str) -> None:
        self.amd = name == "hip"
        self.native = ctypes.CDLL(str(copy_of(name)))
        self.native.fake_last_reason.restype = ctypes.c_char_p
        self.native.fake_calls.restype = ctypes.c_long
        self.native.fake_loaded.restype = self.native.fake_stored.restype = ctypes.c_longlong
        self.native.fake_register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.prefix = "hip" if self.amd else "cu"

    def call(self, function: str, *arguments: Any) -> int:
        """The status of a function named without its prefix."""
        return int(self.native[self.prefix + function](*arguments))

    def reason(self) -> str:
        """Why the last call was refused."""
        return self.native.fake_last_reason().decode()

    def counted(self, function: str) -> int:
        """Calls of a function since the last reset."""
        return int(self.native.fake_calls((self.prefix + function).encode()))

    def load(self, code: bytes) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """The module of a code object, and its kernel."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        status = self.call("ModuleLoadData", ctypes.byref(module), code)
        assert status == SUCCESS, f"{status}: {self.reason()}"
        status = self.call("ModuleGetFunction", ctypes.byref(function), module, b"skinny")
        assert status == SUCCESS, f"{status}: {self.reason()}"
        return module, function

    def launch(self, function: ctypes.c_void_p, grid: Grid, args: Args) -> int:
        """The status of a launch."""
        name = "ModuleLaunchKernel" if self.amd else "LaunchKernel"
        params = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        return self.call(name, function, grid.blocks, grid.splits, grid.batches, grid.threads, 1, 1, grid.shared, None, params, None)

    def moved(self) -> dict[str, tuple[int, int]]:
        """Bytes that the last launch of this thread loaded and stored, by operand."""
        return {name: (int(self.native.fake_loaded(i)), int(self.native.fake_stored(i))) for i, name in enumerate(OPERANDS)}

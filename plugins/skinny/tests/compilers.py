"""The vendors' compilers without a GPU: NVRTC from PyPI, and clang for AMD."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from tunedgemm_skinny import rtc

#: clang 19 is the first that knows gfx942 and compiles HIP without ROCm; it does not know gfx950.
CLANG = "clang-19"


class RefusedError(Exception):
    """A compiler refused a program; the message is its log."""


@attrs.frozen
class Code:
    """Compiled code of a program.

    Attributes:
        text: PTX or AMDGCN assembly.
        registers: 32-bit registers per thread; on AMD vector registers.
        spilled: spilled registers (AMD) or bytes of them (NVIDIA).
        stack: bytes of local memory per thread.
        shared: bytes of static shared memory.
    """

    text: str
    registers: int
    spilled: int
    stack: int
    shared: int


class Nvrtc:
    """NVRTC through ctypes; its log has the output of ptxas."""

    def __init__(self, path: str) -> None:
        self.native = ctypes.CDLL(path)

    def compile(self, source: str, options: Sequence[str]) -> Code:
        """Compile a program for a real architecture.

        Raises:
            RefusedError: the program does not compile.
        """
        program, given = ctypes.c_void_p(), [*options, "--ptxas-options=-v"]
        assert self.native.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"program.cpp", 0, None, None) == 0
        result = self.native.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*map(str.encode, given)))
        log = self._text("ProgramLog", program)
        if result:
            raise RefusedError(log)
        assert len(self._text("CUBIN", program)) > 1000
        text = self._text("PTX", program)
        assert self.native.nvrtcDestroyProgram(ctypes.byref(program)) == 0
        spilled = [int(number) for number in re.findall(r"(\d+) bytes spill", log)]
        assert len(spilled) == 2, log
        return Code(text, _number(r"Used (\d+) registers", log), sum(spilled), _number(r"(\d+) bytes stack frame", log), _smem(log))

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        assert self.native[f"nvrtcGet{what}Size"](program, ctypes.byref(size)) == 0
        content = ctypes.create_string_buffer(size.value)
        assert self.native[f"nvrtcGet{what}"](program, content) == 0
        return content.raw.decode(errors="replace").rstrip("\0")


def nvrtc() -> Nvrtc | None:
    """Load the NVRTC of an installed package; None without one."""
    files = rtc.beside(rtc.NVRTC)
    return Nvrtc(files[0]) if files else None


class Clang:
    """clang for AMD without ROCm's headers and libraries, like hipRTC."""

    def __init__(self, path: str, folder: Path) -> None:
        self.path, self.folder = path, folder

    def compile(self, source: str, options: Sequence[str]) -> Code:
        """Compile a program to assembly.

        Raises:
            RefusedError: the program does not compile.
        """
        file = self.folder / "program.hip"
        file.write_text(source)
        flags = ["-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "--no-gpu-bundle-output", "-S", "-o", "-"]
        done = subprocess.run([self.path, *options, *flags, str(file)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RefusedError(done.stderr)
        names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size", "group_segment_fixed_size")
        count: Any = {name: _number(rf"\.{name}:\s+(\d+)", done.stdout) for name in names}
        spilled = count["vgpr_spill_count"] + count["sgpr_spill_count"]
        stack, shared = count["private_segment_fixed_size"], count["group_segment_fixed_size"]
        return Code(done.stdout, count["vgpr_count"], spilled, stack, shared)


def clang(folder: Path) -> Clang | None:
    """Find clang, which writes to *folder*; None without one."""
    path = shutil.which(CLANG)
    return Clang(path, folder) if path else None


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match, f"no {pattern} in {text[-400:]}"
    return int(match[1])


def _smem(log: str) -> int:
    match = re.search(r"(\d+) bytes smem", log)
    return int(match[1]) if match else 0

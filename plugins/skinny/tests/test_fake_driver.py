"""The fake drivers and compilers accept and refuse like the real ones, with reasons."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

pytestmark = pytest.mark.nightly

both = pytest.mark.parametrize("machine", [32, 64], indirect=True, ids=["nvidia", "amd"])
nvidia = pytest.mark.parametrize("machine", [32], indirect=True, ids=["nvidia"])
amd = pytest.mark.parametrize("machine", [64], indirect=True, ids=["amd"])


#: Part of the driver's reason -> changed arguments; the launch has 3 blocks and 1 split.
BAD_ARGUMENTS = {
    "3 blocks for 49 rows by 16": {"n": 49},
    "rows of x": {"m": 2},
    "a grid of": {"splits": 2},
    "leave some": {"per_split": 64},
    "below 1": {"k": 0},
    "an operand is missing": {"x": None},
    "no multiple of 16": {"weight": 4104},
}


@both
@pytest.mark.cases("reason", BAD_ARGUMENTS)
def test_arguments_that_do_not_fit_the_program(machine: Any, programs: Any, reason: str) -> None:
    """Arguments that do not fit the program or the grid are refused before the launch."""
    fake, function = (
        machine.fake,
        machine.loaded(programs.Tiny(machine.wave, "if (thread < 16) put(args, host_block_x() * 16 + thread, 1);")),
    )
    operands, out = programs.small(n=48), torch.empty(1, 48)
    right = {"x": operands.x.data_ptr(), "weight": operands.weight.data_ptr(), "out": out.data_ptr(), "n": 48, "k": 128, "m": 1}
    right |= {"splits": 1, "per_split": 128}
    grid = fake.Grid(3, 1, machine.wave * programs.WARPS, 0)
    assert machine.driver.launch(function, grid, fake.Args(**right)) == 0
    assert machine.driver.launch(function, grid, fake.Args(**right | BAD_ARGUMENTS[reason])) == fake.INVALID_VALUE
    assert reason in machine.driver.reason()


@both
def test_grids_and_blocks_beyond_the_limits(machine: Any, programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with too many threads, registers or bytes are refused like by a driver."""
    fake, driver = machine.fake, machine.driver
    function = machine.loaded(programs.Tiny(machine.wave, ""))
    args, grid = fake.Args(n=1, k=1, m=1, splits=1, per_split=1), fake.Grid(1, 1, machine.wave * programs.WARPS, 0)
    for wrong in ({"threads": 2048}, {"threads": 0}, {"blocks": 0}, {"splits": 65536}, {"shared": 1 << 20}):
        assert driver.launch(function, attrs.evolve(grid, **wrong), args) == fake.INVALID_VALUE
    monkeypatch.setenv("FAKE_REGISTERS", "1024")
    assert driver.launch(function, attrs.evolve(grid, threads=128), args) == fake.OUT_OF_RESOURCES
    monkeypatch.setenv("FAKE_LAUNCH_STATUS", "719")
    assert driver.launch(function, grid, args) == fake.LAUNCH_FAILED


@nvidia
def test_cuda_grants_large_shared_memory_on_request(machine: Any, programs: Any) -> None:
    """Above 48 KiB a launch needs the attribute, up to the limit of an H200."""
    fake, driver = machine.fake, machine.driver
    program, out = programs.Tiny(32, "if (thread < 16) put(args, thread, host_shared()[65535]);", bytes_shared=65536), torch.empty(1, 16)
    args = programs.small()
    function = machine.loaded(program)
    assert driver.call("FuncSetAttribute", function, fake.DYNAMIC_SHARED, 65535) == 0
    grid = fake.Grid(1, 1, 64, 65536)
    given = {"x": args.x.data_ptr(), "weight": args.weight.data_ptr(), "out": out.data_ptr(), "n": 16, "k": 128, "m": 1}
    full = fake.Args(**given, splits=1, per_split=128)
    assert driver.launch(function, grid, full) == fake.INVALID_VALUE
    assert driver.call("FuncSetAttribute", function, fake.DYNAMIC_SHARED, 65536) == 0
    assert driver.launch(function, grid, full) == 0
    assert (out == 255).all()
    assert driver.call("FuncSetAttribute", function, fake.DYNAMIC_SHARED, (227 << 10) + 1) == fake.INVALID_VALUE
    assert driver.call("FuncSetAttribute", function, fake.LOCAL_BYTES, 1) == fake.INVALID_VALUE


@amd
def test_hip_grants_all_shared_memory(machine: Any, programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB need no attribute on HIP; more is refused."""
    fake, driver = machine.fake, machine.driver
    program = programs.Tiny(64, "if (thread < 16) put(args, thread, 1);", bytes_shared=65536)
    assert driver.call("FuncSetAttribute", machine.loaded(program), fake.DYNAMIC_SHARED, 65536) == 98
    assert (machine.run(program, programs.small()) == 1).all()
    more = attrs.evolve(program, bytes_shared=65537)
    assert machine.refusal(more, programs.small())[0] == fake.INVALID_VALUE
    assert driver.native.hipFuncGetAttribute(ctypes.byref(ctypes.c_int()), 77, machine.loaded(program)) == fake.INVALID_VALUE


@both
def test_attributes_of_functions(machine: Any, monkeypatch: pytest.MonkeyPatch, programs: Any) -> None:
    """A function has the set registers and spills, and the threads that they allow."""
    fake, function, value = machine.fake, machine.loaded(programs.Tiny(machine.wave, "")), ctypes.c_int()
    monkeypatch.setenv("FAKE_REGISTERS", "255")
    monkeypatch.setenv("FAKE_LOCAL_BYTES", "16")
    values = []
    for attribute in (fake.MAX_THREADS, fake.LOCAL_BYTES, fake.REGISTERS):
        assert machine.driver.call("FuncGetAttribute", ctypes.byref(value), attribute, function) == 0
        values.append(value.value)
    assert values == [256, 16, 255]
    assert machine.driver.call("FuncGetAttribute", ctypes.byref(value), 0, ctypes.c_void_p(8)) == fake.INVALID_HANDLE


@both
def test_modules(machine: Any, machines: dict[int, Any], programs: Any) -> None:
    """Damaged and foreign images and unknown or unloaded functions are refused."""
    fake, driver, module = machine.fake, machine.driver, ctypes.c_void_p()
    tiny = programs.Tiny(machine.wave, "")
    code = machine.compiler.compile(tiny.source(), machine.options(tiny))
    other = programs.Tiny(96 - machine.wave, "")
    foreign = machines[other.wave].compiler.compile(other.source(), machines[other.wave].options(other))
    edited = bytearray(code)
    edited[len(code) // 2] ^= 1
    torn = [b"", b"\x7fELF", code[: len(code) // 2], bytes(edited), code[:-8] + bytes(8)]
    assert {driver.call("ModuleLoadData", ctypes.byref(module), bytes(bad)) for bad in torn} == {fake.INVALID_IMAGE}
    assert driver.call("ModuleLoadData", ctypes.byref(module), foreign) == fake.NO_BINARY
    module, function = driver.load(code)
    assert driver.call("ModuleGetFunction", ctypes.byref(ctypes.c_void_p()), module, b"other") == fake.NOT_FOUND
    assert driver.call("ModuleUnload", module) == 0
    assert driver.call("ModuleUnload", module) == fake.INVALID_HANDLE
    assert driver.launch(function, fake.Grid(1, 1, 64, 0), fake.Args()) == fake.INVALID_HANDLE
    assert driver.counted("ModuleUnload") == 2


@nvidia
def test_launch_with_a_structure(machine: Any, programs: Any) -> None:
    """``cuLaunchKernelEx`` takes grid, block and shared memory in a structure."""

    class Config(ctypes.Structure):
        _fields_ = [("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]

    function, out, operands = (
        machine.loaded(programs.Tiny(32, "if (thread < 16) put(args, thread, 1);")),
        torch.empty(1, 16),
        programs.small(),
    )
    given = {"x": operands.x.data_ptr(), "weight": operands.weight.data_ptr(), "out": out.data_ptr(), "n": 16, "k": 128, "m": 1}
    args = machine.fake.Args(**given, splits=1, per_split=128)
    config = Config((ctypes.c_uint * 7)(1, 1, 1, 64, 1, 1, 64))
    params = (ctypes.c_void_p * 1)(ctypes.addressof(args))
    assert machine.driver.call("LaunchKernelEx", ctypes.byref(config), function, params, None) == 0
    assert (out == 1).all()


def test_error_texts(machines: dict[int, Any]) -> None:
    """Both drivers and both compilers have texts for their statuses."""
    text = ctypes.c_char_p()
    assert machines[32].driver.call("GetErrorString", 700, ctypes.byref(text)) == 0
    assert text.value == b"an illegal memory access was encountered"
    assert machines[32].driver.call("GetErrorString", 12345, ctypes.byref(text)) != 0
    machines[64].driver.native.hipGetErrorString.restype = ctypes.c_char_p
    assert machines[64].driver.native.hipGetErrorString(1) == b"invalid argument"
    for wave, words in ((32, b"NVRTC_ERROR_COMPILATION"), (64, b"HIPRTC_ERROR_COMPILATION")):
        named = machines[wave].compiler.native[machines[wave].compiler.name + "GetErrorString"]
        named.restype = ctypes.c_char_p
        assert named(6) == words


@both
def test_programs_that_do_not_compile(machine: Any, monkeypatch: pytest.MonkeyPatch, programs: Any) -> None:
    """Errors of the source are in the log with their line.

    Unknown options, no architecture and a wrong width of warps are errors.
    """
    fake, tiny = machine.fake, programs.Tiny(machine.wave, "return 1;")
    options = machine.options(tiny)

    def log(source: str, given: list[str]) -> str:
        with pytest.raises(fake.RefusedError) as error:
            machine.compiler.compile(source, given, "some_kernel.cpp")
        return f"{error.value.args[0]}: {error.value.args[1]}"

    assert log(tiny.source(), options).startswith(f"{fake.COMPILATION}: some_kernel.cpp: In function")
    fine = programs.Tiny(machine.wave, "").source()
    assert log(fine, [*options, "--frobnicate"]).startswith(f"{fake.INVALID_OPTION}: error: unrecognized option --frobnicate")
    assert log(fine, options[1:]).startswith(f"{fake.INVALID_OPTION}: error: no architecture")
    assert "sm_12" in log(fine, [options[0].rpartition("=")[0] + "=sm_12", *options[1:]])
    assert "width of this architecture" in log(fine, [*options[:-2], f"-DWAVE={96 - machine.wave}", options[-1]])
    assert "UNROLL" in log(fine, [option for option in options if "UNROLL" not in option])
    monkeypatch.setenv("FAKE_RTC_FAIL", "no such thing")
    assert log(fine, options).startswith(f"{fake.COMPILATION}: some_kernel.cpp(12): error: no such thing")


@both
def test_compilations_are_counted_and_last(machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Any) -> None:
    """Compilations are counted, take the set time, and report the set version."""
    tiny, counted = programs.Tiny(machine.wave, ""), tmp_path / "count"
    monkeypatch.setenv("FAKE_RTC_COUNT", str(counted))
    monkeypatch.setenv("FAKE_RTC_SECONDS", "0.3")
    begun = time.perf_counter()
    for _ in range(2):
        machine.compiler.compile(tiny.source(), machine.options(tiny))
    assert time.perf_counter() - begun >= 0.6
    assert counted.stat().st_size == 2
    monkeypatch.setenv("FAKE_RTC_VERSION", "12.8")
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert machine.compiler.call("Version", ctypes.byref(major), ctypes.byref(minor)) == 0
    assert (major.value, minor.value) == (12, 8)


@both
def test_arguments_of_another_size(machine: Any, programs: Any) -> None:
    """A kernel with arguments of another size does not load."""
    tiny = programs.Tiny(machine.wave, "")
    code = machine.compiler.compile(tiny.source().replace("long long per_split;", "long long per_split, more;"), machine.options(tiny))
    assert machine.driver.call("ModuleLoadData", ctypes.byref(ctypes.c_void_p()), code) == machine.fake.INVALID_IMAGE
    assert "104 bytes instead of 96" in machine.driver.reason()

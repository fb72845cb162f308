"""Run-time compilers: the loaded file, errors, versions and threads."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, PluginError
from tunedgemm_skinny import Skinny, rtc
from tunedgemm_skinny.rtc import HIPRTC, NVRTC, Compiler, Interface, RefusedError, beside, bind_functions, loaded

both = pytest.mark.parametrize("interface", [NVRTC, HIPRTC], ids=lambda interface: interface.prefix)
TARGETS = {NVRTC.prefix: "--gpu-architecture=sm_90", HIPRTC.prefix: "--offload-arch=gfx942"}
#: Macros that the fake compilers require.
MACROS = (
    "FAMILY_rows=1",
    "M=1",
    "N_EACH=1",
    "WARPS_N=1",
    "WARPS_K=1",
    "UNROLL=1",
    "VEC=8",
    "X_SHARED=0",
    "OUT=0",
    "BIAS=0",
    "DTYPE=0",
    "SCALE=0",
    "BATCHED=0",
)
SOURCE = 'struct Args { int number; };\nextern "C" void skinny(Args args) {}\n'


def options(interface: Interface) -> list[str]:
    """Return options with which a program compiles."""
    wave = {"nvrtc": 32, "hiprtc": 64}[interface.prefix]
    return [TARGETS[interface.prefix], *(f"-D{macro}" for macro in MACROS), f"-DWAVE={wave}"]


@pytest.fixture
def compiler(fake: ModuleType, interface: Interface) -> Compiler:
    """Load the fake compiler of the test's interface."""
    return bind_functions(interface, str(fake.copy_of(interface.prefix)))


BUILTINS = """
import sys
from tunedgemm.tools.launching import mapped_files
from tunedgemm_skinny.rtc import NVRTC, bind_functions
bind_functions(NVRTC, sys.argv[1])
print(*mapped_files("libmine-builtins"))
"""


def test_builtins_are_loaded_from_the_compilers_folder(fake: ModuleType, tmp_path: Path) -> None:
    """The builtins that NVRTC opens by name are loaded from its own folder."""
    for name in ("libmine.so.13", "libmine-builtins.so.13.0", "libmine-builtins.alt.so.13.0", "libother-builtins.so.13.0"):
        shutil.copy(fake.build("nvrtc"), tmp_path / name)
    done = subprocess.run([sys.executable, "-c", BUILTINS, str(tmp_path / "libmine.so.13")], capture_output=True, text=True)
    assert done.stdout.split() == [str(tmp_path / "libmine-builtins.so.13.0")], done.stderr


@both
def test_a_program_becomes_a_code_object(compiler: Compiler, interface: Interface) -> None:
    """A program compiles to a whole ELF file, of the same size each time."""
    code = compiler.compile(SOURCE, "program.cpp", options(interface))
    assert code.startswith(b"\x7fELF")
    assert len(compiler.compile(SOURCE, "program.cpp", options(interface))) == len(code) > 4096


@both
def test_a_refused_program_comes_with_its_log(compiler: Compiler, interface: Interface) -> None:
    """A refused program raises the compiler's error name and its log."""
    with pytest.raises(RefusedError, match=f"{interface.prefix}CompileProgram: {interface.prefix.upper()}_ERROR_COMPILATION") as error:
        compiler.compile(SOURCE.replace("{}", "{ wrong }"), "mine.cpp", options(interface))
    assert "mine.cpp:2" in error.value.log
    assert "wrong" in error.value.log
    assert "\0" not in error.value.log
    with pytest.raises(RefusedError, match="INVALID_OPTION") as error:
        compiler.compile(SOURCE, "mine.cpp", [*options(interface), "--no-such-option"])
    assert "--no-such-option" in error.value.log
    with pytest.raises(RefusedError, match="INVALID_OPTION") as error:
        compiler.compile(SOURCE, "mine.cpp", options(interface)[1:])
    assert "no architecture" in error.value.log


@both
def test_the_version_comes_from_the_library(fake: ModuleType, interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is read when the library is loaded."""
    monkeypatch.setenv("FAKE_RTC_VERSION", "12.9")
    assert bind_functions(interface, str(fake.copy_of(interface.prefix))).version == f"{interface.prefix} 12.9"


@both
def test_a_library_that_cannot_be_used(interface: Interface, fake: ModuleType, tmp_path: Path) -> None:
    """A missing file and a wrong library raise errors with the file and the reason."""
    with pytest.raises(PluginError, match=f"skinny: cannot load {tmp_path}/nowhere.so: .*No such file"):
        bind_functions(interface, str(tmp_path / "nowhere.so"))
    with pytest.raises(PluginError, match=f"undefined symbol: {interface.prefix}CreateProgram"):
        bind_functions(interface, str(fake.build("cuda")))


def test_a_missing_compiler_has_a_remedy() -> None:
    """The error names the first file tried and the package to install."""
    absent = attrs.evolve(NVRTC, libraries=("libabsent.so.2", "libabsent.so"), packages=())
    with pytest.raises(PluginError, match=r"cannot load libabsent\.so\.2.*install libabsent: pip install nvidia-cuda-nvrtc"):
        loaded(absent)


@both
def test_details_name_the_compiler(compiler: Compiler, interface: Interface) -> None:
    """`details` names the compiler of a device's maker, or the reason why none loads; a CPU has none."""
    device = Device("sm_90", 132) if interface is NVRTC else Device("gfx942", 304)
    assert Skinny(compiler=lambda _: compiler).details(device) == [f"{compiler.version}: {compiler.path}"]

    def absent(_: Interface) -> Compiler:
        raise PluginError("skinny: cannot load libabsent.so")

    assert Skinny(compiler=absent).details(device) == ["skinny: cannot load libabsent.so"]
    assert Skinny(compiler=absent).details(Device("cpu-avx2", 2)) == []


def test_packages_are_searched(fake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's major version comes first, then the newest.

    Other folders and libraries are ignored.
    """
    import torch

    for name in (
        "cu13/lib/libmine.so.13",
        "cuda_mine/lib/libmine.so.12",
        "cuda_mine/lib/libmine-builtins.so.12",
        "other/lib/libmine.so.11",
    ):
        file = tmp_path / "vendor_of_mine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(fake.build("nvrtc"), file)
    (tmp_path / "vendor_of_mine" / "cu9" / "lib").mkdir(parents=True)
    shutil.copy(fake.build("nvrtc"), tmp_path / "vendor_of_mine" / "cu9" / "lib" / "libmine.so.9")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = attrs.evolve(NVRTC, libraries=("libmine.so",), packages=(("vendor_of_mine", "cu*/lib"), ("no_such_package", "lib")))

    def names() -> list[str]:
        return [Path(path).name for path in beside(mine)]

    for cuda, wanted in (("12.8", [12, 13, 9]), ("13.0", [13, 12, 9]), (None, [13, 12, 9])):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert names() == [f"libmine.so.{number}" for number in wanted]
    assert loaded(mine).path == beside(mine)[0]


ALONE = """
import sys
from tunedgemm_skinny.rtc import _torch_version
alone, early = _torch_version(), "torch" in sys.modules
import torch
print(early, [alone.cuda, alone.hip] == [torch.version.cuda, torch.version.hip], _torch_version() is torch.version)
"""


def test_the_search_does_not_load_torch() -> None:
    """Torch's version is read without a load of torch, which takes seconds."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "True"], done.stderr


@both
def test_programs_are_destroyed(compiler: Compiler, interface: Interface) -> None:
    """Compiled and refused programs are destroyed in the compiler."""
    destroyed: list[Any] = []
    functions = dict(compiler.functions)
    functions["DestroyProgram"] = lambda program: destroyed.append(program) or compiler.functions["DestroyProgram"](program)
    spied = attrs.evolve(compiler, functions=functions)
    spied.compile(SOURCE, "p.cpp", options(interface))
    with pytest.raises(RefusedError):
        spied.compile("wrong", "p.cpp", options(interface))
    gc.collect()
    assert len(destroyed) == 2


def test_interfaces_by_kind_of_device() -> None:
    """NVIDIA has NVRTC, AMD hipRTC."""
    assert {kind: interface.prefix for kind, interface in rtc.INTERFACES.items()} == {"nvidia": "nvrtc", "amd": "hiprtc"}

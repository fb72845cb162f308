"""Builds: macros and options, the artifact cache, failed compilations."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import LaunchError, Shape, Solution
from tunedgemm.tools.launching import ARCHITECTURES
from tunedgemm_skinny import rtc
from tunedgemm_skinny.build import Build, build_of, code, defines, options, source
from tunedgemm_skinny.names import FAMILIES, Packed, Rows, Tiles, Wgmma

SHAPE = Shape("a16w16", 3, 48, 64, epilogue="bias", bias_dtype="fp32", outdtype="fp16")
BUILD = build_of(Rows(2, 1, 1, 1), 1, Shape("a16w16", 2, 8, 64), "sm_90")
both = pytest.mark.parametrize("skinny", ["nvidia", "amd"], indirect=True)


def compiler(skinny: Any) -> rtc.Compiler:
    """Return the fake compiler of a backend."""
    return skinny.hooks.compiler(rtc.INTERFACES[skinny.host.kind])


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty artifact cache, and a file that counts compilations."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_RTC_COUNT", str(tmp_path / "count"))
    return tmp_path


def counted(folder: Path) -> int:
    """Return the number of compiled programs."""
    return len((folder / "count").read_text()) if (folder / "count").exists() else 0


def stored(folder: Path) -> list[Path]:
    """List the files of the artifact cache."""
    return [file for file in (folder / "cache").rglob("*") if file.is_file()]


def test_macros_and_options() -> None:
    """A build has every macro, the numbers of its dtypes, and the architecture."""
    build = build_of(Rows(4, 2, 1, 8, True), 1, SHAPE, "sm_90")
    wanted = {
        "FAMILY_rows": 1, "DTYPE": 0, "OUT": 1, "BIAS": 3, "M": 3, "N_EACH": 4, "WARPS_N": 2, "WARPS_K": 1, "UNROLL": 8, "VEC": 8,
        "WAVE": 32, "X_SHARED": 1, "STAGES": 0, "SCALE": 0, "BATCHED": 0, "CLUSTER": 0, "SHUFFLED": 0,
        "X_WIDE": 0,
    }  # fmt: skip
    assert defines(build) == wanted
    assert options(build)[:3] == ["--gpu-architecture=sm_90", "--std=c++17", "-default-device"]
    assert options(build)[3:] == [f"-D{name}={value}" for name, value in wanted.items()]
    amd = build_of(Tiles(1, 2, 4, 2), 1, attrs.evolve(SHAPE, dtype="fp16", outdtype="fp32", epilogue="none", k=66), "gfx942")
    expected = {"FAMILY_tiles": 1, "DTYPE": 1, "OUT": 2, "BIAS": 0, "M": 16, "VEC": 2, "WAVE": 64, "X_SHARED": 0}
    assert defines(amd).items() >= expected.items()
    assert options(amd)[:3] == ["--offload-arch=gfx942", "-std=c++17", "-O3"]
    numbers = {("int8", "tensor"): (2, 1), ("fp8_e4m3fn", "row"): (3, 2), ("fp8_e4m3fnuz", "block"): (4, 3)}
    for (dtype, scale), (number, kind) in numbers.items():
        scaled = build_of(Tiles(1, 2, 4, 2), 1, Shape("a8w8", 3, 8, 64, dtype=dtype, outdtype="bf16", scale=scale), "sm_90")
        assert defines(scaled).items() >= {"DTYPE": number, "SCALE": kind, "VEC": 16, "BATCHED": 0}.items()
    fp4 = Shape("a16w4_blockscale", 3, 32, 64, outdtype="bf16", scale="block", layout="aiter16x16")
    assert defines(build_of(Tiles(1, 2, 4, 2), 1, fp4, "sm_90")).items() >= {"DTYPE": 5, "SHUFFLED": 16, "X_WIDE": 1, "VEC": 16}.items()
    batch = Shape("batched_bf16", 3, 8, 64, extra={"B": 2})
    assert defines(build_of(Rows(1, 1, 1, 1), 1, batch, "sm_90")).items() >= {"BATCHED": 1, "SCALE": 0, "M": 3}.items()


def test_every_macro_of_the_sources_is_defined() -> None:
    """Every macro that the sources test is defined by them, by the build or by the compiler."""
    machine = {"SKINNY_HOST", "COLUMNS", "STEPS", "BYTES"}
    families = {f"FAMILY_{family.family}" for family in FAMILIES}
    packed = Shape("a16wn", 1, 64, 256, scale="block", extra={"w_format": "ct_int4", "w_group": 128})
    for kernel in (Rows(1, 1, 1, 1), Tiles(1, 1, 1, 1), Wgmma(1, 1, 1, 1), Packed(1, 1, 1, 1)):
        text, shape = source(kernel.family), packed if isinstance(kernel, Packed) else SHAPE
        conditions = "\n".join(line.split("//")[0] for line in text.splitlines() if line.startswith(("#if", "#elif")))
        own = set(re.findall(r"#define (\w+)", text))
        tested = set(re.findall(r"\b[A-Z]\w+", conditions)) - own - machine - families
        assert {"DTYPE", "BIAS", "OUT"} <= tested <= set(defines(build_of(kernel, 1, shape, "sm_90")))
        assert "#include" not in text, "run-time compilers have no headers"


def test_one_build_serves_every_n_and_split() -> None:
    """A build depends on M in whole matrix instructions and on the divisors of K, not on N."""
    kernel = Rows(1, 2, 2, 1)
    builds = {build_of(kernel, 1, Shape("a16w16", 4, n, k), "sm_90") for n in (1, 333, 8192) for k in (8, 4096, 8200)}
    assert len(builds) == 1
    assert {build_of(kernel, 1, Shape("a16w16", 4, 8, k), "sm_90").vec for k in (8, 12, 10, 9)} == {8, 4, 2, 1}
    assert {build_of(kernel, 1, Shape("a8w8", 4, 8, k, dtype="int8", outdtype="bf16"), "sm_90").vec for k in (48, 8, 12, 10, 9)} == {
        16,
        8,
        4,
        2,
        1,
    }
    batches = {build_of(kernel, 1, Shape("batched_bf16", 4, 8, 8, extra={"B": number}), "sm_90").batched for number in (2, 3, 64)}
    assert batches == {True}
    assert [build_of(kernel, 1, Shape("a16w16", m, 8, 8), "sm_90").rows for m in (1, 3, 8)] == [1, 3, 8]
    tiles = Tiles(1, 1, 1, 1)
    assert [build_of(tiles, 1, Shape("a16w16", m, 8, 8), "sm_90").rows for m in (1, 8, 9, 64)] == [8, 8, 16, 64]
    assert [build_of(Wgmma(1, 1, 1, 1), 1, Shape("a16w16", m, 8, 8), "sm_90").rows for m in (1, 9, 17, 33)] == [8, 16, 32, 64]
    assert [build_of(tiles, 1, Shape("a16w16", m, 8, 8), "gfx950").rows for m in (1, 16, 17, 64)] == [16, 16, 32, 64]


@pytest.mark.cases(("field", "value"), [("gfx", "gfx906"), ("dtype", "fp32"), ("outdtype", "int8"), ("bias_dtype", "fp64")])
def test_a_build_is_checked(field: str, value: str) -> None:
    """A dtype or architecture that the sources do not know is refused."""
    with pytest.raises(ValueError, match=field):
        attrs.evolve(BUILD, **{field: value})
    assert {build_of(Rows(1, 1, 1, 1), 1, SHAPE, gfx).gfx for gfx in ARCHITECTURES} == set(ARCHITECTURES)


def test_only_a_cluster_fixes_its_splits() -> None:
    """A build with a cluster depends on the splits; one with partials does not."""
    shape = Shape("a16w16", 4, 64, 4096)
    assert [build_of(Tiles(1, 1, 1, 1, cluster=True), splits, shape, "sm_90").cluster for splits in (2, 8)] == [2, 8]
    assert build_of(Tiles(1, 1, 1, 1), 2, shape, "sm_90") == build_of(Tiles(1, 1, 1, 1), 8, shape, "sm_90")


def test_wgmma_targets_sm_90a() -> None:
    """wgmma compiles for sm_90a, every other family for sm_90."""
    assert options(build_of(Wgmma(1, 1, 1, 1), 1, SHAPE, "sm_90"))[0] == "--gpu-architecture=sm_90a"
    assert options(build_of(Tiles(1, 1, 1, 1), 1, SHAPE, "sm_90"))[0] == "--gpu-architecture=sm_90"


@both
def test_a_code_object_is_cached(skinny: Any, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A code object is compiled once per compiler version and option."""
    build = attrs.evolve(BUILD, gfx=skinny.host.gfx)
    first = code(build, compiler(skinny))
    assert code(build, compiler(skinny)) == first
    assert (counted(empty), len(stored(empty))) == (1, 1)
    newer = attrs.evolve(compiler(skinny), version="another 99.1")
    code(build, newer)
    assert counted(empty) == 2
    code(attrs.evolve(build, rows=1), newer)
    assert counted(empty) == 3


@both
def test_a_compile_error_names_kernel_architecture_and_first_lines(skinny: Any, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's own words come through, nothing is kept, and the next try compiles."""
    build = attrs.evolve(BUILD, gfx=skinny.host.gfx)
    with monkeypatch.context() as failing:
        failing.setenv("FAKE_RTC_FAIL", "expected a better kernel")
        with pytest.raises(LaunchError) as error:
            code(build, compiler(skinny))
    message = str(error.value)
    assert f"skinny {build.kernel.name}: {compiler(skinny).version} cannot compile it for {build.gfx}: " in message
    assert f"{build.kernel.name}.cpp(12): error: expected a better kernel" in message
    assert not stored(empty)
    assert code(build, compiler(skinny))


PROCESS = """
import sys
from tunedgemm.plugin import Shape
from tunedgemm_skinny import rtc
from tunedgemm_skinny.build import build_of, code
from tunedgemm_skinny.names import FAMILIES, Packed, Rows, Tiles, Wgmma
compiler = rtc.bind_functions(rtc.NVRTC, sys.argv[1])
sys.stdin.readline()
print(len(code(build_of(Rows(2, 1, 1, 1), 1, Shape("a16w16", 2, 8, 64), "sm_90"), compiler)))
"""


def test_two_processes_compile_at_once(fake: ModuleType, backends: dict[str, Any], empty: Path) -> None:
    """Two processes get whole code objects, and a third reads the cached one."""
    environment = {**os.environ, "FAKE_RTC_SECONDS": "0.5"}
    command = [sys.executable, "-c", PROCESS, str(fake.build("nvrtc"))]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    sizes = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        sizes.append(int(out))
    assert counted(empty) == 2
    assert len(stored(empty)) == 1
    assert len(code(BUILD, compiler(backends["nvidia"]))) == sizes[0] == sizes[1]
    assert counted(empty) == 2


@both
def test_bind_uses_what_prepare_compiled(skinny: Any, over: ModuleType, empty: Path) -> None:
    """After prepare, which loads no driver, bind compiles nothing.

    Refused solutions are not compiled.
    """

    def load(_: object) -> object:
        raise AssertionError("it must not be loaded")

    shape = Shape("a16w16", 2, 40, 64)
    solution = next(iter(skinny.solutions(shape, over.CPU)))
    attrs.evolve(skinny, hooks=attrs.evolve(skinny.hooks, driver=load)).prepare(solution, shape, over.CPU)
    assert counted(empty) == 1
    assert over.bound(skinny, solution.kernel_name, shape, solution.split_k)
    assert counted(empty) == 1
    attrs.evolve(skinny, hooks=attrs.evolve(skinny.hooks, compiler=load)).prepare(Solution("skinny", "rows_r0_n1w1x1u1"), shape, over.CPU)
    attrs.evolve(skinny, hooks=attrs.evolve(skinny.hooks, compiler=load)).prepare(solution, attrs.evolve(shape, m=65), over.CPU)


def test_builds_are_values() -> None:
    """Builds with equal parameters are equal."""
    again = Build(BUILD.kernel, BUILD.gfx, BUILD.dtype, BUILD.outdtype, BUILD.bias_dtype, BUILD.rows, BUILD.vec)
    assert again == BUILD
    assert hash(again) == hash(BUILD)

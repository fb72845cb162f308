"""Share fake compilers and headers, an artifact cache per test, and stand-ins for instances."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Backend, Device, Shape, device_of
from tunedgemm.testing.siblings import module_at
from tunedgemm_ck import backend_of, toolchain
from tunedgemm_ck.build import Target
from tunedgemm_ck.problem import problem_of

FAKE = Path(__file__).with_name("fake")
#: Variables that affect the search for toolchains, and compilation.
VARIABLES = (
    "CUDACXX", "HIPCXX", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH", "CUTLASS_INCLUDE", "CK_INCLUDE", "GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH",
    "AITER_REBUILD", "PREBUILD_KERNELS", "TUNEDGEMM_CK_COMPILE", "TUNEDGEMM_CK_SPACE", "FAKE_CK_DOES", "FAKE_CK_LOG", "FAKE_CK_VERSION",
    "FAKE_CK_WAITS",
)  # fmt: skip


@attrs.define
class Fakes:
    """A folder with fake compilers and headers.

    Attributes:
        folder: of both.
        log: what the compilers write about each compilation.
    """

    folder: Path
    log: Path

    def install(self, name: str) -> Path:
        """Install a compiler of that name, ``nvcc`` or ``clang++``."""
        path = self.folder / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\nFAKE_CK_NAME={name} exec {sys.executable} -S {FAKE / "compiler.py"} "$@"\n')
        path.chmod(0o755)
        return path

    def headers(self, library: str, version: tuple[int, int, int]) -> Path:
        """Write headers of ``cutlass`` or ``ck`` with a version."""
        include = self.folder / f"{library}-include"
        (include / library).mkdir(parents=True, exist_ok=True)
        if library == "cutlass":
            parts = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
            (include / "cutlass" / "version.h").write_text("".join(f"#define CUTLASS_{part} {number}\n" for part, number in parts))
        else:
            (include / "ck" / "ck.hpp").write_text("#pragma once\n")
            (include / "ck" / "version.h").write_text(f"#define CK_VERSION {'.'.join(map(str, version))}\n")
        return include

    @property
    def compilations(self) -> list[dict[str, Any]]:
        """Return the compilations, in order."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture(scope="session")
def kept_cache() -> str:
    """Return the artifact cache of the environment, "" for the user's, for GPU compilations."""
    return os.environ.get("TUNEDGEMM_CACHE", "")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, kept_cache: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up an artifact cache for the test, and remove the user's variables."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiling(kept_cache: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow compilation, into a cache that all tests of a GPU share."""
    if kept_cache:
        monkeypatch.setenv("TUNEDGEMM_CACHE", kept_cache)
    else:
        monkeypatch.delenv("TUNEDGEMM_CACHE")
    monkeypatch.setenv("TUNEDGEMM_CK_COMPILE", "1")


@pytest.fixture(scope="session")
def device() -> Device:
    """Return the first GPU."""
    return device_of(0)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the fake compilers' objects: each command compiles once per session."""
    return tmp_path_factory.mktemp("ck-compiled")


@pytest.fixture
def fakes(tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Set up both fake toolchains, found by their variables."""
    if not shutil.which("cc") or not shutil.which("c++"):
        pytest.skip("C and C++ compilers not found")
    made = Fakes(tmp_path / "fakes", tmp_path / "compilations.jsonl")
    monkeypatch.setenv(toolchain.NVCC, str(made.install("nvcc")))
    monkeypatch.setenv(toolchain.HIPCC, str(made.install("clang++")))
    monkeypatch.setenv(toolchain.CUTLASS_INCLUDE, str(made.headers("cutlass", (4, 2, 0))))
    monkeypatch.setenv(toolchain.CK_INCLUDE, str(made.headers("ck", (1, 2, 0))))
    monkeypatch.setenv("FAKE_CK_LOG", str(made.log))
    monkeypatch.setenv("FAKE_CK_OBJECTS", str(compiled))
    return made


H200 = Device("sm_90", 132, "nvidia-h200")
SHAPE = Shape("a16w16", 5, 48, 64)


@pytest.fixture(scope="session")
def stand_in() -> ModuleType:
    """Return the module of stand-ins for instances."""
    return module_at(Path(__file__).with_name("stand_in"))


@pytest.fixture
def backend(stand_in: ModuleType) -> Backend:
    """Return a backend of stand-ins for NVIDIA, which the CPU emulates."""
    return backend_of(stand_in.family("standin", "nvidia"), toolchain.cuda, H200)


@pytest.fixture
def target(backend: Backend, stand_in: ModuleType) -> Target:
    """Return one instance for a small product."""
    return Target(backend.hooks.family, stand_in.StandIn(64), problem_of(SHAPE, "sm_90"), toolchain.cuda)

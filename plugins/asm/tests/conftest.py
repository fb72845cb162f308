"""Provide the fake HIP runtime, made-up code objects, emulators and the backend over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.plugin import Device, device_of
from tunedgemm.testing.siblings import module_at
from tunedgemm_asm import packs, sources


def _module(stem: str) -> ModuleType:
    """Return a module or package next to this file."""
    return module_at(Path(__file__).with_name(stem))


@pytest.fixture(autouse=True)
def no_other_packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the packs of the machine that runs the tests."""
    for variable in (sources.VARIABLE, sources.OF_AITER):
        monkeypatch.delenv(variable, raising=False)
    for name in ("entry_points", "_folders_of"):
        monkeypatch.setattr(sources, name, lambda *_, **__: [])
    packs.reload()
    yield
    packs.reload()


@pytest.fixture(scope="session")
def failing() -> Callable[..., list[str]]:
    """Return a function that runs a check on every case and lists the cases that fail."""

    def failing(check: Callable[..., None], cases: Iterable[tuple[Any, ...]]) -> list[str]:
        faults = []
        for case in cases:
            try:
                check(*case)
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception) as error:
                faults.append(f"{case}: {type(error).__name__}: {str(error)[:1000]}")
        return faults

    return failing


@pytest.fixture(scope="session")
def objects() -> ModuleType:
    """Return the module that makes code objects."""
    return _module("objects")


@pytest.fixture(scope="session")
def ptx() -> ModuleType:
    """Return the emulator of PTX text."""
    return _module("ptx")


@pytest.fixture(scope="session")
def device() -> Device:
    """Return the first GPU."""
    return device_of(0)


@pytest.fixture(scope="session")
def ptx_families() -> dict[str, ModuleType]:
    """Return the modules with the cases and planted mistakes of each family of PTX kernels."""
    stems = {"plain": "run", "eight bits": "eight_bits", "columns": "columns", "panels": "panels", "turns": "turns", "stream-K": "stream"}
    return {name: _module(f"test_ptx_{stem}") for name, stem in stems.items()}


@pytest.fixture(scope="session")
def gpu_kinds() -> dict[str, dict[str, Any]]:
    """Return the cases of the Hopper GPU tests by test module: shape, configuration and splits."""
    modules = {"plain": "test_ptx_gpu", "columns": "test_ptx_columns_gpu", "stream-K": "test_ptx_stream_gpu"}
    return {name: _module(stem).KINDS for name, stem in modules.items()}


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """Return the module that compiles the fake HIP runtime and writes AITER's tree."""
    return _module("fake")


@pytest.fixture(scope="session")
def over() -> ModuleType:
    """Return the module with the backend over the fake."""
    return _module("over")


@pytest.fixture(scope="session")
def tree(fake: ModuleType, objects: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write AITER's tree with made-up code objects, and a pack of the plugin's own layout next to
    it.
    """
    return fake.tree(tmp_path_factory.mktemp("packs") / "hsa", objects)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def backends(over: ModuleType, fake: ModuleType, tree: Path) -> dict[str, Any]:
    """Return the backend over the fake, on CPUs that stand for an MI300X and an MI355X."""
    return {gfx: over.backend(fake, tree, gfx) for gfx in ("gfx942", "gfx950")}


@pytest.fixture
def asm(backends: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the backend of the architecture in the test's parameter."""
    monkeypatch.setenv("FAKE_GFX", request.param)
    return backends[request.param]

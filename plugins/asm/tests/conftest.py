"""What the tests of this plugin share: the fake HIP runtime, code objects made up by the tests, the plugin's backend over both."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm_asm import packs, sources


def _module(stem: str) -> ModuleType:
    """A module or package beside this file: pytest imports tests by path, so they cannot import their siblings by name."""
    name = f"tunedgemm_asm_tests_{stem}"
    if name not in sys.modules:
        package = Path(__file__).with_name(stem) / "__init__.py"
        where = {"submodule_search_locations": [str(package.parent)]} if package.exists() else {}
        path = package if package.exists() else Path(__file__).with_name(f"{stem}.py")
        spec = importlib.util.spec_from_file_location(name, path, **where)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(autouse=True)
def no_other_packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packs of the machine that runs the tests, named or installed, are none of theirs."""
    for variable in (sources.VARIABLE, sources.OF_AITER):
        monkeypatch.delenv(variable, raising=False)
    for name in ("entry_points", "_locations"):
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
    """The module that makes up code objects."""
    return _module("objects")


@pytest.fixture(scope="session")
def gcn() -> ModuleType:
    """The emulator of AMDGCN text."""
    return _module("gcn")


@pytest.fixture(scope="session")
def ptx() -> ModuleType:
    """The emulator of PTX text."""
    return _module("ptx")


@pytest.fixture(scope="session")
def gpu_kinds() -> dict[str, dict[str, Any]]:
    """What the tests of generated PTX on a GPU run, by the tests: a name to a shape, a plan and, but for stream-K, a number of splits."""
    modules = {"plain": "test_ptx_gpu", "columns": "test_ptx_columns_gpu", "stream-K": "test_ptx_stream_gpu"}
    return {name: _module(stem).KINDS for name, stem in modules.items()}


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module that compiles the fake HIP runtime, and makes up AITER's tree."""
    return _module("fake")


@pytest.fixture(scope="session")
def over() -> ModuleType:
    """The module with the plugin's backend over the fake."""
    return _module("over")


@pytest.fixture(scope="session")
def tree(fake: ModuleType, objects: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AITER's tree with made-up code objects of all its kinds; a pack of our own kind lies beside it."""
    return fake.tree(tmp_path_factory.mktemp("packs") / "hsa", objects)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def backends(over: ModuleType, fake: ModuleType, tree: Path) -> dict[str, Any]:
    """The backend over the fake with kernels of all kinds, on a CPU that stands for an MI300X (``gfx942``) and an MI355X (``gfx950``)."""
    return {gfx: over.backend(fake, tree, gfx) for gfx in ("gfx942", "gfx950")}


@pytest.fixture
def asm(backends: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend of the architecture that is the test's parameter."""
    monkeypatch.setenv("FAKE_GFX", request.param)
    return backends[request.param]

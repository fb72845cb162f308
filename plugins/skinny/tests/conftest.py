"""Shared fixtures of this plugin's tests: fake GPUs, driven by ctypes or by the plugin's backend.

The mark ``cases(names, values)`` runs a test once for each of the values and lists the faults of
all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.plugin import Device, device_of
from tunedgemm.testing.siblings import module_at


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark ``cases``."""
    config.addinivalue_line("markers", "cases(names, values): run the test for each of the values, and list all faults")


def _names(mark: pytest.Mark) -> tuple[str, ...]:
    return (mark.args[0],) if isinstance(mark.args[0], str) else tuple(mark.args[0])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Declare the names of ``cases`` as arguments of one test."""
    for mark in metafunc.definition.iter_markers("cases"):
        for name in _names(mark):
            metafunc.parametrize(name, [pytest.param(None, id="each")])


def _cases(item: pytest.Function) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each case: the product of all marks ``cases``."""
    marks = list(item.iter_markers("cases"))
    for values in itertools.product(*(mark.args[1] for mark in marks)):
        arguments: dict[str, Any] = {}
        for mark, value in zip(marks, values, strict=True):
            arguments.update(zip(_names(mark), (value,) if isinstance(mark.args[0], str) else value, strict=True))
        yield arguments


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with marks ``cases`` for each case; skip it where every case skips."""
    if pyfuncitem.get_closest_marker("cases") is None:
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    faults, skips, passed = [], [], 0
    for case in _cases(pyfuncitem):
        try:
            pyfuncitem.obj(**{**fixtures, **case})
            passed += 1
        except pytest.skip.Exception as skip:
            skips.append(str(skip))
        except (Exception, pytest.fail.Exception) as error:
            faults.append(f"{case}: {type(error).__name__}: {error}")
    if faults:
        pytest.fail(f"{len(faults)} cases fail:\n" + "\n".join(faults), pytrace=False)
    if skips and not passed:
        pytest.skip(skips[0])
    return True


def _module(stem: str) -> ModuleType:
    """Return a module or package next to this file."""
    return module_at(Path(__file__).with_name(stem))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the session's artifact cache; real drivers must not load fake code."""
    folder = tmp_path_factory.getbasetemp() / "artifacts"
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def device() -> Device:
    """Return the first GPU."""
    return device_of(0)


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """Load the module that drives the fake libraries by ctypes."""
    return _module("fake")


@pytest.fixture(scope="session")
def programs(fake: ModuleType) -> ModuleType:
    """Load the module of kernel programs, their operands and references."""
    return _module("programs")


@pytest.fixture(scope="session")
def machines(programs: ModuleType, fake: ModuleType) -> dict[int, Any]:
    """Make both fake GPUs, by the width of their warps."""
    return {32: programs.Machine(fake, 32), 64: programs.Machine(fake, 64)}


@pytest.fixture
def machine(machines: dict[int, Any], request: pytest.FixtureRequest) -> Any:
    """Return the fake GPU of the parameter's warp width, with its buffers and counts reset."""
    machine = machines[request.param]
    machine.driver.native.fake_reset()
    return machine


@pytest.fixture(scope="session")
def over(fake: ModuleType) -> ModuleType:
    """Load the module that runs the plugin's backend over the fakes."""
    return _module("over")


@pytest.fixture(scope="session")
def drawing() -> ModuleType:
    """Load the module that draws random products with hypothesis."""
    return _module("drawing")


@pytest.fixture(scope="session")
def compilers() -> ModuleType:
    """Load the module of the vendors' compilers."""
    return _module("compilers")


@pytest.fixture(scope="session")
def backends(over: ModuleType, fake: ModuleType) -> dict[str, Any]:
    """Make the backends over the fakes, with an H200 (``nvidia``) and an MI300X (``amd``)."""
    return {kind: over.backend(fake, kind) for kind in ("nvidia", "amd")}


@pytest.fixture
def skinny(backends: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    """Return the backend of the parameter's kind of device."""
    return backends[request.param]

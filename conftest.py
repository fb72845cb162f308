"""The rules for all tests: GPUs, interpreters, coverage, and what each test starts from."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from tunedgemm.text.printable import warn_once

CORE = Path(__file__).parent / "tests"


@pytest.hookimpl(tryfirst=True)  # before pytest picks by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and mark the conformance suite of a GPU and the plugins' tests.

    Processes of pytest-xdist start with the files that take longest.
    """
    has_gpu, fault = torch.cuda.is_available(), _interpreter_fault()
    for item in items:
        if CORE not in item.path.parents:
            item.add_marker("no_cover")
        if fault and item.get_closest_marker("interpreter"):
            item.add_marker(pytest.mark.skip(reason=fault))
        if not has_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if has_gpu and any(base.__module__.startswith("tunedgemm.testing.") for base in getattr(item.cls, "__mro__", ())):
            item.add_marker("gpu")  # the suite runs on the present device
    if hasattr(config, "workerinput"):  # of pytest-xdist
        long = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("nightly")}
        items.sort(key=lambda item: item.path not in long)


def _interpreter_fault() -> str:
    """Return why Triton's interpreter does not run, "" if it does: numpy may break every loop in it."""
    try:
        triton, numpy = (tuple(map(int, re.findall(r"\d+", version(name))[:2])) for name in ("triton", "numpy"))
    except PackageNotFoundError as error:
        return f"{error.name} is not installed"
    return "Triton 3.6's interpreter does not run with numpy 2.4 or later" if triton <= (3, 6) and numpy >= (2, 4) else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Do not trace the children of a test marked ``no_cover`` either.

    Tracing makes Python's lines four times as slow.
    """
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("no_cover"):
            patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        return (yield)


#: Tests after which this process had no usable GPU, the first of them.
_lost: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip what would fail for another test's fault: a lost context of a GPU does not come back."""
    if _lost:
        pytest.skip(f"the GPU's context was lost in {_lost[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail the test that lost the GPU's context: kernels fail after their launch."""
    try:
        return (yield)
    finally:
        if torch.cuda.is_initialized() and not _lost:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                _lost.append(item.nodeid)
                raise


@pytest.fixture(scope="module", autouse=True)
def collect_new_objects_only() -> None:
    """Leave the objects of earlier files out of garbage collections, of which the tuner asks for many.

    At the end of a run each takes 0.3 s with them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> None:
    """Start each test with the same random numbers and no warning given, whatever ran before."""
    torch.manual_seed(0)
    warn_once.cache_clear()

"""Shared fixtures of this plugin's tests."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm_quack import Quack, quack


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the session's artifact cache."""
    return tmp_path_factory.getbasetemp() / "artifacts"


@pytest.fixture(autouse=True)
def cache(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the session's artifact cache, no folder of QuACK's, and let `bind` compile."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(artifacts))
    monkeypatch.setenv("TUNEDGEMM_QUACK_COMPILE", "1")
    for name in ("QUACK_CACHE_DIR", "QUACK_ARCH", "CUTE_DSL_ARCH"):
        monkeypatch.delenv(name, raising=False)
    return artifacts


@pytest.fixture(scope="session")
def compile_on_all_cores(artifacts: Path) -> Callable[..., None]:
    """Return a function that prepares solutions in processes without devices."""

    def compile_all(jobs: Sequence[tuple[Solution, Shape, Device]]) -> None:
        processes = min(len(jobs), os.cpu_count() or 1, 16)
        if not jobs:
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            patch.setenv("TUNEDGEMM_CACHE", str(artifacts))
            with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
                list(pool.map(quack.prepare, *zip(*jobs, strict=True)))

    return compile_all


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Load the fake of ``quack.gemm``, with no launches yet."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("installed")))
    from fake_quack import gemm

    gemm.launches.clear()
    yield gemm
    gemm._kernels.clear()


@pytest.fixture
def backend(fake: ModuleType) -> Quack:
    """Return the plugin's backend over the fake."""
    plugin: Quack = sys.modules["fake_quack"].fakequack
    return plugin

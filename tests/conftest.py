"""Fixtures that several test modules share."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm.backends import registry
from tunedgemm.device import Device
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.timing import Timing
from tunedgemm.tuner.log import line

HERE = Path(__file__).parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what goes on in the background so, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Hide an installed libtype in this process."""

    def hidden(libtype: str) -> None:
        real = registry.entry_points
        monkeypatch.setattr(registry, "entry_points", lambda **asked: [entry for entry in real(**asked) if entry.name != libtype])

    return hidden


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep each test away from the user's tables, captured shapes, compiled kernels and terminal."""
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "cache"))
    for variable in [name for name in os.environ if name.startswith(("AITER_", "GTUNE_", "HIP_ONLINE_", "TUNEDGEMM_ONLINE"))]:
        monkeypatch.delenv(variable)
    monkeypatch.delenv("COLUMNS", raising=False)  # set in processes of pytest-xdist
    monkeypatch.setenv("TUNEDGEMM_BATCH_INVARIANT", "")  # set by engines' switches of the mode, and undone after the test


@pytest.fixture
def faults_of() -> Callable[..., list[str]]:
    """Return a function that runs a check on each case and lists the cases that fail, with their errors."""

    def run(check: Callable[..., None], cases: Iterable[Any]) -> list[str]:
        faults = []
        for case in cases:
            try:
                check(*(case if isinstance(case, tuple) else (case,)))
            except (Exception, pytest.fail.Exception) as error:
                faults.append(f"{case!r}: {type(error).__name__}: {error}")
        return faults

    return run


@pytest.fixture
def shape() -> Shape:
    """Return a small shape of the first op."""
    return Shape("a16w16", 4, 32, 64)


@pytest.fixture
def cpu() -> Device:
    """Return the CPU as the present device."""
    from tunedgemm.device import device_of

    return device_of(-1)


@pytest.fixture
def mi300(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Make the present device's fp8 that of an MI300X; return that device."""
    monkeypatch.setattr("tunedgemm.dtype._present_gfx", lambda: "gfx942")
    return Device("gfx942", 304)


@pytest.fixture(scope="session")
def as_module() -> Callable[[Path], ModuleType]:
    """Load a script as a module of its name, with its folder on the path meanwhile."""

    def load(path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(path.parent))
            spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def trial_log(tmp_path: Path) -> Callable[..., Path]:
    """Write a trial log of correct solutions of the libtype ``fake`` on a CPU.

    Each is (shape, kernel, splits of K, microseconds).
    """

    def write(*trials: tuple[Shape, str, int, float]) -> Path:
        texts = [line("run", "r", op="a16w16")]
        for shape, name, splits, us in trials:
            trial = json.loads(Timing(shape, Solution("fake", name, splits), "ok", us=us).to_json())
            del trial["schema"]
            texts.append(line("trial", "r", **trial, gfx="cpu-avx2", cu_num=2, device="cpu"))
        path = tmp_path / "tuned.trials.jsonl"
        path.write_text("".join(texts))
        return path

    return write


@pytest.fixture
def child() -> Callable[..., str]:
    """Run Python source in a fresh process with these folders first on its path; return its output."""

    def run(source: str, *folders: Path) -> str:
        path = os.pathsep.join([*map(str, folders), *filter(None, sys.path)])
        command = [sys.executable, "-W", "error::UserWarning", "-c", source]
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}  # pytest runs there, too
        done = subprocess.run(command, capture_output=True, text=True, env={**own, "PYTHONPATH": path}, check=False, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture
def fake_plugins(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the distributions ``fake-plugin`` and ``fake-plugin-rival`` on the path, as if installed."""
    monkeypatch.syspath_prepend(str(HERE))
    return HERE


@pytest.fixture
def faulty_plugin(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the distribution ``faulty-backend`` on the path, also of processes that a test starts."""
    folder = HERE / "faulty_plugin"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads of several processes that wait for each other make times of milliseconds
    return folder


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use one CPU thread here and in processes that a test starts, so that they have the same device.

    One thread never waits for others on a busy machine.
    """
    import torch

    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def file_limit() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """Limit the files of this process to so many bytes inside a block.

    Writing stores a part and then fails.
    """

    @contextlib.contextmanager
    def limit(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the thread that writes captured counts idle during the test."""
    monkeypatch.setattr("tunedgemm.workload.capture._INTERVAL", 3600.0)


@pytest.fixture
def repository() -> Path:
    """Return the root of the repository."""
    return HERE.parent


@pytest.fixture
def golden() -> Path:
    """Return the folder of files of earlier versions, which are never rewritten."""
    return HERE / "golden"


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder from which this process and its children import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), *sys.path])))
    return tmp_path

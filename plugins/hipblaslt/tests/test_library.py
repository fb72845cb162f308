"""The library: which file is taken, what it is asked at first, and that nothing of it is left behind."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import tunedgemm_hipblaslt
from tunedgemm.plugin import Device, PluginError, Shape, Solution, Unsupported
from tunedgemm_hipblaslt import descriptors, launch, library
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT, Abi
from tunedgemm_hipblaslt.descriptors import ProblemDescriptors
from tunedgemm_hipblaslt.library import StatusError, bind_functions, library_handle, load_library, revision, version
from tunedgemm_hipblaslt.limits import make_problem

both = pytest.mark.parametrize("abi", [CUBLASLT, HIPBLASLT], ids=lambda abi: abi.libtype)
SHAPE = Shape("a16w16", 5, 48, 64, epilogue="bias")


@pytest.fixture
def copy(fake_library: Callable[[str], Path], tmp_path: Path, over: Any) -> Callable[[Abi], Any]:
    """A library of its own, with its own counts and objects."""

    def copied(abi: Abi) -> Any:
        return bind_functions(abi, str(shutil.copy(fake_library(abi.libtype), tmp_path / f"copy_{abi.libtype}.so")))

    return copied


def live(found: Any) -> int:
    """Objects that were created and not destroyed."""
    count = ctypes.CDLL(found.path).fake_live
    count.restype = ctypes.c_long
    return int(count())


@both
def test_a_library_that_is_not_there(abi: Abi, tmp_path: Path) -> None:
    """The error names the file, and the reason of the loader."""
    with pytest.raises(PluginError, match=f"{abi.libtype}: cannot load the library: {tmp_path}/nowhere.so: .*No such file"):
        bind_functions(abi, str(tmp_path / "nowhere.so"))


@both
def test_a_library_of_another_kind(abi: Abi, fake_library: Callable[[str], Path]) -> None:
    """A file without the functions is refused, and the error names the first that is missing."""
    other = fake_library("hipblaslt" if abi is CUBLASLT else "cublaslt")
    with pytest.raises(PluginError, match=f"undefined symbol: {abi.prefix}Create"):
        bind_functions(abi, str(other))


def test_a_library_of_nobody() -> None:
    """Where no name is found the first reason is told, for the newest version of the library; the backend tells it, too."""
    abi = attrs.evolve(HIPBLASLT, libraries=("libnobody.so.2", "libnobody.so.1"))
    with pytest.raises(PluginError, match=r"cannot load the library: libnobody\.so\.2"):
        load_library(abi)


PROCESS = """
import ctypes, sys
import attrs
from tunedgemm_hipblaslt.abi import CUBLASLT
from tunedgemm_hipblaslt.library import load_library
abi = attrs.evolve(CUBLASLT, libraries=("libcublasLtOfMine.so.13", "libcublasLtOfMine.so"))
ctypes.CDLL(sys.argv[1])
assert load_library(abi).path == sys.argv[1]
assert load_library(abi) is load_library(abi)
"""


def test_the_mapped_file_is_taken(fake_library: Callable[[str], Path], tmp_path: Path) -> None:
    """The file that is in the process's memory is used, wherever it lies, before the one that the loader would find."""
    place, other = tmp_path / "a folder" / "libcublasLtOfMine.so.13.1", tmp_path / "found" / "libcublasLtOfMine.so.13"
    for file in (place, other):
        file.parent.mkdir()
        shutil.copy(fake_library("cublaslt"), file)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(other.parent)}
    done = subprocess.run([sys.executable, "-c", PROCESS, str(place)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("abi", "wanted", "text", "told"),
    [
        (CUBLASLT, 120900, "", "cublaslt 120900"),
        (HIPBLASLT, 100300, "0a1b2c3d", "hipblaslt 100300 0a1b2c3d"),
    ],
    ids=["cublaslt", "hipblaslt"],
)
def test_version_and_revision(
    abi: Abi, wanted: int, text: str, told: str, copy: Callable[[Abi], Any], over: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library itself is asked, once; a table's rows name the answer."""
    monkeypatch.setenv("FAKE_LT_VERSION", str(wanted))
    monkeypatch.setenv("FAKE_LT_REVISION", text)
    found = copy(abi)
    assert (version(found, -1), revision(found, -1)) == (wanted, text)
    lt = tunedgemm_hipblaslt.LtBackend(abi, load=lambda _: found, emulated=over.HOSTS[abi.libtype])
    assert lt.library_version(over.CPU) == told
    assert lt.library_version(attrs.evolve(over.HOSTS[abi.libtype], index=-1)) == "", "the device is described, not present"
    monkeypatch.setenv("FAKE_LT_VERSION", "1")
    assert lt.library_version(over.CPU) == told


def test_a_library_without_a_revision(copy: Callable[[Abi], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that tells none has an unknown one, so that names stay complete."""
    monkeypatch.setenv("FAKE_LT_REVISION", " ")
    assert revision(copy(HIPBLASLT), -1) == "unknown"


@both
def test_objects_end_with_their_owner(abi: Abi, copy: Callable[[Abi], Any]) -> None:
    """A descriptor and its three layouts are destroyed with the object that holds them; one handle is kept."""
    found = copy(abi)
    assert live(found) == 0
    first, second = (ProblemDescriptors(found, make_problem(SHAPE), -1) for _ in range(2))
    assert live(found) == 1 + 2 * 4
    assert first.heuristic_results(8, abi.workspace)
    assert live(found) == 1 + 2 * 4, "the preference is gone"
    del first
    assert live(found) == 1 + 4
    del second
    assert live(found) == 1
    assert library_handle(found, -1) is library_handle(found, -1)


@both
def test_launchers_leave_nothing(abi: Abi, copy: Callable[[Abi], Any], over: Any) -> None:
    """A launcher has descriptors of its own, which end with it; what is asked for a shape is remembered once."""
    found = copy(abi)
    lt = tunedgemm_hipblaslt.LtBackend(abi, load=lambda _: found, emulated=over.HOSTS[abi.libtype])
    launchers = [over.bound(lt, over.FIRST, SHAPE) for _ in range(3)]
    assert live(found) == 1 + 3 * 4
    launchers[0].call(*over.case(SHAPE).plain)
    call = launchers.pop().call
    launchers.clear()
    gc.collect()
    assert live(found) == 1 + 4, "the call alone keeps what it needs"
    del call
    gc.collect()
    assert live(found) == 1
    assert list(lt.enumerate_solutions(SHAPE, over.CPU))
    assert live(found) == 1 + 2 * 4, "with the bias within the product and after it"
    launch.results_by_index.cache_clear()
    descriptors._shared_descriptors.cache_clear()
    assert live(found) == 1


@both
def test_a_refused_attribute_names_function_and_status(abi: Abi, copy: Callable[[Abi], Any]) -> None:
    """Errors tell what was called and what the library said, and leave nothing behind."""
    found = copy(abi)
    made = found.create("MatmulPreference")
    with pytest.raises(StatusError, match=f"{abi.prefix}MatmulPreferenceSetAttribute: INVALID_VALUE") as error:
        made.set_attributes({"what": 999}, what=1)
    assert error.value.code == abi.statuses["INVALID_VALUE"]
    del made, error
    gc.collect()
    assert live(found) == 0
    assert abi.status(12345) == "status 12345"


@both
def test_described_devices_need_no_library(abi: Abi) -> None:
    """For an absent device nothing is loaded: there is one solution, and it does not bind."""

    def load(_: Abi) -> Any:
        raise AssertionError("it must not be loaded")

    lt = tunedgemm_hipblaslt.LtBackend(abi, load=load)
    device = Device("sm_90", 132, "nvidia-h200") if abi is CUBLASLT else Device("gfx942", 304, "amd-instinct-mi300x")
    assert list(lt.enumerate_solutions(SHAPE, device)) == [Solution(abi.libtype, "heuristic")]
    assert isinstance(lt.bind(Solution(abi.libtype, "heuristic"), SHAPE, device), Unsupported)
    assert list(lt.refine(Solution(abi.libtype, "heuristic"), SHAPE, device)) == []
    assert lt.library_version(device) == ""
    lt.heuristic_fallback(SHAPE, device)


@both
def test_questions_from_many_threads(abi: Abi, copy: Callable[[Abi], Any], over: Any) -> None:
    """Threads that ask about one shape at once get the same answers."""
    found = copy(abi)
    lt = tunedgemm_hipblaslt.LtBackend(abi, load=lambda _: found, emulated=over.HOSTS[abi.libtype])
    answers: list[Any] = []

    def ask() -> None:
        answers.append(list(lt.enumerate_solutions(SHAPE, over.CPU)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]


@both
def test_loading_waits_for_a_present_device(abi: Abi) -> None:
    """Importing the plugin loads neither torch nor a library."""
    code = "import sys, tunedgemm_hipblaslt; assert 'torch' not in sys.modules; assert 'tunedgemm_hipblaslt.launch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert library.load_library.cache_info().currsize >= 0

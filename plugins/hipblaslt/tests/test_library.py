"""The loaded library: its file, its version, and the lifetime of its objects."""

from __future__ import annotations

import ctypes
import gc
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import tunedgemm_hipblaslt
from tunedgemm.plugin import PluginError, Shape
from tunedgemm_hipblaslt import descriptors, launch
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT, Abi
from tunedgemm_hipblaslt.library import StatusError, bind_functions, library_build, load_library

both = pytest.mark.parametrize("abi", [CUBLASLT, HIPBLASLT], ids=lambda abi: abi.libtype)
SHAPE = Shape("a16w16", 5, 48, 64, epilogue="bias")


@pytest.fixture
def copy(fake_library: Callable[[str], Path], tmp_path: Path, harness: Any) -> Callable[[Abi], Any]:
    """Return a function that loads a copy of a fake library, with separate counters and objects."""

    def copied(abi: Abi) -> Any:
        return bind_functions(abi, str(shutil.copy(fake_library(abi.libtype), tmp_path / f"copy_{abi.libtype}.so")))

    return copied


def count_live(library: Any) -> int:
    """Return the number of live objects."""
    count = ctypes.CDLL(library.path).fake_live
    count.restype = ctypes.c_long
    return int(count())


@both
def test_a_missing_library(abi: Abi, tmp_path: Path) -> None:
    """The error names the file and the loader's reason."""
    with pytest.raises(PluginError, match=f"{abi.libtype}: cannot load the library: {tmp_path}/nowhere.so: .*No such file"):
        bind_functions(abi, str(tmp_path / "nowhere.so"))


@both
def test_the_wrong_library(abi: Abi, fake_library: Callable[[str], Path]) -> None:
    """A file without the functions is refused with the first missing function."""
    other = fake_library("hipblaslt" if abi is CUBLASLT else "cublaslt")
    with pytest.raises(PluginError, match=f"undefined symbol: {abi.prefix}Create"):
        bind_functions(abi, str(other))


def test_no_library() -> None:
    """Where no file loads, the error is that of the newest version."""
    abi = attrs.evolve(HIPBLASLT, libraries=("libmissing.so.2", "libmissing.so.1"))
    with pytest.raises(PluginError, match=r"cannot load the library: libmissing\.so\.2"):
        load_library(abi)


@pytest.mark.parametrize(
    ("abi", "number", "text", "expected"),
    [
        (CUBLASLT, 120900, "", "cublaslt 120900"),
        (HIPBLASLT, 100300, "0a1b2c3d", "hipblaslt 100300 0a1b2c3d"),
    ],
    ids=["cublaslt", "hipblaslt"],
)
def test_version_and_revision(
    abi: Abi, number: int, text: str, expected: str, copy: Callable[[Abi], Any], harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version and revision are the library's own, read once."""
    monkeypatch.setenv("FAKE_LT_VERSION", str(number))
    monkeypatch.setenv("FAKE_LT_REVISION", text)
    library = copy(abi)
    assert library_build(library, -1) == (number, text)
    lt = tunedgemm_hipblaslt.backend_of(abi, load=lambda _: library, host=harness.EMULATED[abi.libtype])
    assert lt.library_version(harness.CPU) == expected
    assert lt.library_version(attrs.evolve(harness.EMULATED[abi.libtype], index=-1)) == "", "the device is absent"
    monkeypatch.setenv("FAKE_LT_VERSION", "1")
    assert lt.library_version(harness.CPU) == expected


def test_a_library_without_a_revision(copy: Callable[[Abi], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without a revision has the revision unknown, so that names parse."""
    monkeypatch.setenv("FAKE_LT_REVISION", " ")
    assert library_build(copy(HIPBLASLT), -1)[1] == "unknown"


@both
def test_launchers_release_their_objects(abi: Abi, copy: Callable[[Abi], Any], harness: Any) -> None:
    """A launcher owns its descriptors; those shared for questions are cached per problem."""
    library = copy(abi)
    lt = tunedgemm_hipblaslt.backend_of(abi, load=lambda _: library, host=harness.EMULATED[abi.libtype])
    launchers = [harness.bind(lt, harness.FIRST, SHAPE) for _ in range(3)]
    assert count_live(library) == 1 + 3 * 4
    launchers[0].call(*harness.make_case(SHAPE).operands)
    call = launchers.pop().call
    launchers.clear()
    gc.collect()
    assert count_live(library) == 1 + 4, "the call keeps its descriptors"
    del call
    gc.collect()
    assert count_live(library) == 1
    assert list(lt.solutions(SHAPE, harness.CPU))
    assert count_live(library) == 1 + 2 * 4, "with the bias in the epilogue and after it"
    launch.results_by_index.cache_clear()
    descriptors._shared_descriptors.cache_clear()
    assert count_live(library) == 1


@both
def test_a_refused_attribute_names_function_and_status(abi: Abi, copy: Callable[[Abi], Any]) -> None:
    """The error names function and status, and no object leaks."""
    library = copy(abi)
    preference = library.create("MatmulPreference")
    with pytest.raises(StatusError, match=f"{abi.prefix}MatmulPreferenceSetAttribute: INVALID_VALUE") as error:
        preference.set_attributes({"what": 999}, what=1)
    assert error.value.code == abi.statuses["INVALID_VALUE"]
    del preference, error
    gc.collect()
    assert count_live(library) == 0
    assert abi.status(12345) == "status 12345"


@both
def test_listing_from_many_threads(abi: Abi, copy: Callable[[Abi], Any], harness: Any) -> None:
    """Concurrent threads list the same solutions of one shape."""
    library = copy(abi)
    lt = tunedgemm_hipblaslt.backend_of(abi, load=lambda _: library, host=harness.EMULATED[abi.libtype])
    lists: list[Any] = []

    def work() -> None:
        lists.append(list(lt.solutions(SHAPE, harness.CPU)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lists) == 8
    assert all(solutions == lists[0] for solutions in lists)
    assert lists[0]

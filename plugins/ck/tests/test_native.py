"""Check that an object is loaded from its bytes and called."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess

import pytest
import torch
from tunedgemm.plugin import LaunchError
from tunedgemm.testing.launching import without_extension
from tunedgemm_ck import native
from tunedgemm_ck.build import build_object
from tunedgemm_ck.native import MOE_POINTERS, POINTERS, load_object

#: Records its call, a struct of WORDS words, and returns the last of them.
SPY = """
#include <stdint.h>
#include <string.h>
#define EXPORT __attribute__((visibility("default")))
static uint64_t recorded[WORDS];
static void *stream_recorded;
EXPORT int tunedgemm_launch(const uint64_t *call, void *stream) {
  memcpy(recorded, call, sizeof recorded);
  stream_recorded = stream;
  return (int)call[WORDS - 1];
}
EXPORT int64_t tunedgemm_workspace(const uint64_t *call) {
  memcpy(recorded, call, sizeof recorded);
  return call[WORDS - 5] ? 3 : -1;
}
EXPORT void spy(uint64_t *words, void **stream) { memcpy(words, recorded, sizeof recorded); *stream = stream_recorded; }
"""
#: Addresses and sizes of the structs.
FORMS = {"plain": (POINTERS, 5), "routed": (MOE_POINTERS, 6)}


def spying(words, folder):
    """Return an object that records how it was called."""
    (folder / "spy.c").write_text(SPY)
    made = folder / f"spy{words}.so"
    subprocess.run(["cc", "-shared", "-fPIC", f"-DWORDS={words}", "-o", str(made), str(folder / "spy.c")], check=True)
    return load_object(made.read_bytes())


@pytest.fixture
def spy(fakes, tmp_path):
    """Return one for the plain struct."""
    return spying(12, tmp_path)


def recorded(spy, words=12):
    """Return the addresses, sizes and stream of its last call."""
    call, stream = (ctypes.c_uint64 * words)(), ctypes.c_void_p()
    spy.library.spy(ctypes.byref(call), ctypes.byref(stream))
    return list(call), stream.value


@pytest.mark.parametrize("form", FORMS)
def test_every_field_reaches_the_object(fakes, tmp_path, form):
    """Every address, size, the stream and the status pass through, also beyond 32 bits."""
    pointers, sizes = FORMS[form]
    addresses = [2**63 + place for place in range(pointers)]
    given = (*(2**40 + place for place in range(sizes - 1)), 17)
    spy = spying(pointers + sizes, tmp_path)
    assert spy.launcher(given, pointers)(2**62, *addresses) == 17
    assert recorded(spy, pointers + sizes) == ([*addresses, *given], 2**62)


def test_the_workspace_query_has_no_addresses(spy):
    """The workspace query gets sizes only, and returns -1 for those refused."""
    assert spy.workspace_bytes((5, 6, 7, 8, 9)) == 3
    assert recorded(spy)[0] == [0] * 7 + [5, 6, 7, 8, 9]
    assert spy.workspace_bytes((0, 6, 7, 8, 9)) == native.UNSUPPORTED


def test_the_runtime_query_has_no_sizes(spy):
    """The runtime query passes zeros, and a refusal of sizes is not an error."""
    spy.launcher((9,) * 5)(2**62, *range(1, 8))
    assert spy.runtime_error(5) == 0
    assert recorded(spy) == ([0] * 12, None)


@pytest.mark.parametrize(("status", "error"), [(native.UNSUPPORTED, 0), (35, 35)])
def test_a_runtime_error_differs_from_a_refusal(fakes, tmp_path, status, error):
    """A runtime error differs from a refusal; 35 means a driver older than the runtime."""
    (tmp_path / "x.c").write_text(
        f"int tunedgemm_launch(void *c, void *s) {{ return {status}; }}\nlong tunedgemm_workspace(void *c) {{ return -1; }}"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "x.so"), str(tmp_path / "x.c")], check=True)
    assert load_object((tmp_path / "x.so").read_bytes()).runtime_error(5) == error


def test_two_objects_stay_separate(fakes, target, spy):
    """Equal names of functions and variables in two objects stay separate."""
    first = load_object(build_object(target).code)
    assert first.workspace_bytes((1, 1, 1, 1, 2)) == 128
    assert spy.workspace_bytes((1, 1, 1, 1, 2)) == 3


def test_bytes_that_are_no_object_are_an_error():
    """Invalid bytes raise, also at the second attempt."""
    for code in [b"", b"text", b"\x7fELF" + bytes(100)]:
        for _ in range(2):
            with pytest.raises(LaunchError, match="the compiled object cannot be loaded"):
                load_object(code)


def test_an_object_without_the_functions_is_an_error(fakes, tmp_path):
    """An object of another program raises."""
    subprocess.run(["cc", "-shared", "-o", str(tmp_path / "x.so"), "-x", "c", "-"], input=b"int x;", check=True)
    with pytest.raises(LaunchError, match="tunedgemm_launch"):
        load_object((tmp_path / "x.so").read_bytes())


def test_an_object_that_was_refused_is_not_taken_for_the_next(fakes, tmp_path, target):
    """A refused object stays loaded, and the next one is not confused with it."""
    subprocess.run(["cc", "-shared", "-o", str(tmp_path / "y.so"), "-x", "c", "-"], input=b"int y;", check=True)
    with pytest.raises(LaunchError, match="lacks this plugin's functions"):
        load_object((tmp_path / "y.so").read_bytes())
    assert load_object(build_object(target).code).workspace_bytes((1, 1, 1, 1, 1)) == 0


@pytest.mark.parametrize("extension", [True, False])
def test_an_object_launches(fakes, target, extension):
    """An object launches through the C extension of the core, and through ctypes."""
    x, out = torch.ones(1, 4, dtype=torch.float32).bfloat16(), torch.empty(1, 1, dtype=torch.bfloat16)
    with contextlib.nullcontext() if extension else without_extension():
        launch = load_object(build_object(target).code).launcher((1, 1, 4, 1, 1))
    assert launch(0, x.data_ptr(), x.data_ptr(), 0, 0, 0, out.data_ptr(), 0) == 0
    assert out.item() == 4

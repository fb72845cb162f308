"""native: an object is loaded from its bytes, and called with what Python says, by the C extension and by ctypes."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import threading

import pytest
import torch
from tunedgemm.plugin import LaunchError
from tunedgemm_ck import native
from tunedgemm_ck.build import built
from tunedgemm_ck.native import Call, loaded

WAYS = {"extension": native._by_extension, "ctypes": native._by_ctypes}
#: Writes down what it was told.
SPY = """
#include "call.h"
#include <string.h>
static TunedGemmCall told;
static void *stream_told;
int tunedgemm_launch(const TunedGemmCall *call, void *stream) { told = *call; stream_told = stream; return (int)call->split; }
int64_t tunedgemm_workspace(const TunedGemmCall *call) { told = *call; return call->m ? 3 : -1; }
__attribute__((visibility("default"))) void spy(TunedGemmCall *call, void **stream) { *call = told; *stream = stream_told; }
"""


@pytest.fixture
def spy(fakes, tmp_path):
    """An object that tells how it was called."""
    (tmp_path / "spy.c").write_text(SPY)
    include = f"-I{__file__.rpartition('/')[0]}/fake"
    subprocess.run(["cc", "-shared", "-fPIC", include, "-o", str(tmp_path / "spy.so"), str(tmp_path / "spy.c")], check=True)
    return loaded((tmp_path / "spy.so").read_bytes())


def told(spy):
    """What the last call of it was told: seven addresses, five sizes, the stream."""
    call, stream = Call(), ctypes.c_void_p()
    spy.library.spy(ctypes.byref(call), ctypes.byref(stream))
    return [getattr(call, name) or 0 for name, _ in Call._fields_], stream.value


@pytest.mark.parametrize("way", WAYS)
def test_every_field_reaches_the_object(spy, way):
    """Each address, each size, beyond 32 bits, too, the stream, and back the status."""
    if way == "extension" and native._shim is None:
        pytest.skip("installed without the C extension")
    addresses = [2**63 + place for place in range(7)]
    sizes = (*(2**40 + place for place in range(4)), 17)
    launch = WAYS[way](spy, sizes)
    assert launch(2**62, *addresses) == 17
    assert told(spy) == ([*addresses, *sizes], 2**62)


def test_the_workspace_is_asked_for_without_addresses(spy):
    """Bytes, and -1 for sizes that the instance refuses."""
    assert spy.workspace_bytes((5, 6, 7, 8, 9)) == 3
    assert told(spy)[0] == [0] * 7 + [5, 6, 7, 8, 9]
    assert spy.workspace_bytes((0, 6, 7, 8, 9)) == native.UNSUPPORTED


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [(1,) * 7, (1,) * 9, (1, "x", *(1,) * 6)])
def test_a_call_with_other_arguments_is_an_error(spy, way, wrong):
    """Nothing is launched with addresses that were not given."""
    if way == "extension" and native._shim is None:
        pytest.skip("installed without the C extension")
    before = told(spy)
    with pytest.raises((TypeError, ctypes.ArgumentError)):
        WAYS[way](spy, (1, 1, 1, 1, 1))(*wrong)
    assert told(spy) == before


def test_an_object_is_loaded_once(fakes, target):
    """By its bytes, whatever the file."""
    code = built(target).code
    assert loaded(code) is loaded(bytes(bytearray(code)))


def test_objects_beside_each_other_stay_apart(fakes, target, spy):
    """Equal names in several objects, of functions and variables, are several things."""
    first = loaded(built(target).code)
    assert first.workspace_bytes((1, 1, 1, 1, 2)) == 128
    assert spy.workspace_bytes((1, 1, 1, 1, 2)) == 3


@pytest.mark.parametrize("code", [b"", b"text", b"\x7fELF" + bytes(100)])
def test_bytes_that_are_no_object_are_an_error(code):
    """Also at the second try."""
    for _ in range(2):
        with pytest.raises(LaunchError, match="the compiled object cannot be loaded"):
            loaded(code)


def test_an_object_without_the_functions_is_an_error(fakes, tmp_path):
    """One that another program made."""
    subprocess.run(["cc", "-shared", "-o", str(tmp_path / "x.so"), "-x", "c", "-"], input=b"int x;", check=True)
    with pytest.raises(LaunchError, match="tunedgemm_launch"):
        loaded((tmp_path / "x.so").read_bytes())


def test_an_object_that_was_refused_is_not_taken_for_the_next(fakes, tmp_path, target):
    """What is loaded stays so, and the next object must not get its place."""
    subprocess.run(["cc", "-shared", "-o", str(tmp_path / "y.so"), "-x", "c", "-"], input=b"int y;", check=True)
    with pytest.raises(LaunchError, match="none of this plugin"):
        loaded((tmp_path / "y.so").read_bytes())
    assert loaded(built(target).code).workspace_bytes((1, 1, 1, 1, 1)) == 0


def test_threads_load_one_object(fakes, target):
    """Once, also where they come at a time."""
    code, found = built(target).code, []
    threads = [threading.Thread(target=lambda: found.append(loaded(code))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_without_the_extension_ctypes_launches(fakes, target, monkeypatch):
    """A plugin installed without a C compiler."""
    monkeypatch.setattr(native, "_shim", None)
    x, out = torch.ones(1, 4, dtype=torch.float32).bfloat16(), torch.empty(1, 1, dtype=torch.bfloat16)
    launch = loaded(built(target).code).launcher((1, 1, 4, 1, 1))
    assert launch(0, x.data_ptr(), x.data_ptr(), 0, 0, 0, out.data_ptr(), 0) == 0
    assert out.item() == 4


def test_the_extension_is_found_where_it_was_built():
    """What tests call `by_extension` is the extension."""
    try:
        module = importlib.import_module("tunedgemm_ck._shim")
    except ImportError:
        pytest.skip("installed without the C extension")
    assert native._shim is module

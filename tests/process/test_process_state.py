"""switches: variables of the environment for a block, one thread at a time."""

import os
import posix
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tunedgemm.process.process_state import kept_switches
from tunedgemm.tools.launching import environment_with


def test_variables_are_restored(monkeypatch):
    """They are in effect in the block alone; the user's values come back, also after an error."""
    monkeypatch.setenv("DG_SET", "users")
    monkeypatch.delenv("DG_UNSET", raising=False)
    before, changes = dict(os.environ), {"DG_SET": "ours", "DG_UNSET": "1"}
    with pytest.raises(KeyError), environment_with(changes), environment_with({"DG_SET": "inner"}):
        assert (os.environ["DG_SET"], os.environ["DG_UNSET"]) == ("inner", "1")
        os.environ["DG_ABSENT"]
    assert dict(os.environ) == before


def test_blocks_of_two_threads_do_not_overlap(monkeypatch):
    """The second thread waits, so that neither loses its variables nor restores the other's."""
    monkeypatch.delenv("DG_UNSET", raising=False)
    started = threading.Event()

    def block(value):
        started.set()
        with environment_with({"DG_UNSET": value}):
            return os.environ["DG_UNSET"]

    with ThreadPoolExecutor(1) as pool:
        with environment_with({"DG_UNSET": "first"}):
            second = pool.submit(block, "second")
            assert started.wait(10)
            assert not second.done()
        assert second.result(10) == "second"
    assert "DG_UNSET" not in os.environ


def test_an_import_meanwhile_does_not_restore_them(monkeypatch):
    """What restores a process's variables after an import waits, so that it never saw those of a block."""
    monkeypatch.delenv("DG_UNSET", raising=False)
    entered, left = threading.Event(), threading.Event()

    def imported():
        with kept_switches():
            entered.set()
            assert left.wait(10)

    with ThreadPoolExecutor(1) as pool:
        with environment_with({"DG_UNSET": "1"}):
            importing = pool.submit(imported)
            assert not entered.wait(0.3)
        left.set()
        importing.result(10)
    assert "DG_UNSET" not in os.environ


def test_variables_that_other_threads_set_meanwhile_stay(monkeypatch):
    """Changes by an import and by threads that it starts are undone; those of other threads stay."""
    for name in ("DG_DELETED", "DG_CHANGED", "DG_IMPORTS"):
        monkeypatch.setenv(name, "before")
    for name in ("DG_NEW", "DG_BYTES", "DG_OF_IMPORT", "DG_OF_ITS_THREAD"):
        monkeypatch.delenv(name, raising=False)

    def of_the_user():
        os.environ.update(DG_NEW="users", DG_CHANGED="users")
        os.environb[b"DG_BYTES"] = b"users"
        del os.environ["DG_DELETED"]

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result(10)  # starts the thread
        with kept_switches() as changed:
            os.environ["DG_CHANGED"] = "imports"
            pool.submit(of_the_user).result(10)
            os.environ.update(DG_OF_IMPORT="imports", DG_IMPORTS="imports")
            with ThreadPoolExecutor(1) as own:
                own.submit(os.environ.update, DG_OF_ITS_THREAD="imports").result(10)
    values = {name: value for name, value in os.environ.items() if name.startswith("DG_")}
    assert values == {"DG_NEW": "users", "DG_CHANGED": "users", "DG_BYTES": "users", "DG_IMPORTS": "before"}
    assert changed == ["DG_IMPORTS", "DG_OF_IMPORT", "DG_OF_ITS_THREAD"]
    assert (os.putenv, os.unsetenv) == (posix.putenv, posix.unsetenv)

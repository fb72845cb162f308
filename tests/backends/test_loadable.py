"""loadable: whatever a library does on load costs a child process, and the answer is remembered."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tunedgemm.backends import loadable
from tunedgemm.tools.launching import load_fault

DLOPEN = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], os.RTLD_NOW)"
SOURCES = {
    "sound": "int answer(void) { return 42; }",
    "other_abi": "extern int _ZN3c1021symbol_of_another_torchEv(void); int answer(void) { return _ZN3c1021symbol_of_another_torchEv(); }",
    "aborts": '__attribute__((constructor)) void load(void) { fputs("bad driver\\n", stderr); abort(); }',
    "exits": "__attribute__((constructor)) void load(void) { exit(0); }",
}
FAULTS = {
    "sound": "",
    "other_abi": "OSError: {file}: undefined symbol: _ZN3c1021symbol_of_another_torchEv",
    "aborts": "loading it ends the process by SIGABRT: bad driver",
    "exits": "loading it ends the process with status 0",
}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Start each test with an empty memory, as a new process does; its cache is empty, too."""
    monkeypatch.setattr(loadable, "_known", {})


@pytest.fixture
def children(monkeypatch):
    """Count the children that are started."""
    started, real = [], loadable._fault_in_child
    monkeypatch.setattr(loadable, "_fault_in_child", lambda *asked: started.append(asked) or real(*asked))
    return started


def library(folder: Path, name: str) -> Path:
    """Compile one of the libraries above, with its symbols unresolved."""
    file = folder / f"lib{name}.so"
    command = [shutil.which("cc") or "", "-shared", "-fPIC", "-xc", "-", "-o", file, "-Wl,-z,undefs"]
    subprocess.run(command, input=f"#include <stdio.h>\n#include <stdlib.h>\n{SOURCES[name]}", text=True, check=True)
    return file


def is_running(pid: int) -> bool:
    """Tell whether a process runs; one that has ended may stay a zombie if no parent reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize("name", SOURCES)
def test_a_shared_object_is_loaded_in_a_child(tmp_path, name):
    """A missing symbol is a reason, and so is the signal or the status that ends the process."""
    file = library(tmp_path, name)
    assert load_fault(DLOPEN, file) == FAULTS[name].format(file=file)


def test_a_file_that_is_no_library(tmp_path, children):
    """A damaged file is a reason; a missing one too, without a child."""
    damaged = tmp_path / "libdamaged.so"
    assert load_fault(DLOPEN, damaged) == f"{damaged}: No such file or directory"
    assert not children
    damaged.write_text("half of a download")
    assert load_fault(DLOPEN, damaged).startswith("OSError: ") and str(damaged) in load_fault(DLOPEN, damaged)


def test_a_load_that_hangs_is_killed(tmp_path):
    """The child is killed at its timeout, with the processes that it started."""
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time\nhelper = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{helper.pid}}')\ntime.sleep(600)"
    )
    start = time.monotonic()
    assert load_fault(code, timeout=1.0) == "it does not load within 1 s"
    assert time.monotonic() - start < 30
    own, helper = map(int, pids.read_text().split())
    assert not Path(f"/proc/{own}").exists()
    while is_running(helper):
        assert time.monotonic() - start < 30


HANGING = """
import sys
from tunedgemm.tools.launching import load_fault
from tunedgemm.plugin import Backend, Unsupported, hookimpl
@hookimpl
def supports():
    return Unsupported(load_fault("import os, time; print(os.getpid(), file=open('pid', 'w')); time.sleep(600)"))
@hookimpl
def enumerate_solutions(): return []
@hookimpl
def bind(): return Unsupported("hangs")
backend = Backend("hanging", sys.modules[__name__], ops=("a16w16",))
"""


@pytest.mark.parametrize(
    "command",
    ["plugins", "doctor --seconds 0", "tune -i untuned.csv -o t.csv --libtype hanging"],
    ids=lambda command: command.split()[0],
)
def test_an_interrupt_ends_a_load_that_hangs(importable, monkeypatch, command):
    """Ctrl-C ends each command within seconds, though the load has a minute, and the child with it."""
    (importable / "hanging.py").write_text(HANGING)
    info = importable / "hanging-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tunedgemm.backends]\nhanging = hanging:backend\n")
    (importable / "untuned.csv").write_text("M,N,K,bias,dtype,outdtype\n4,64,64,False,bf16,bf16\n")
    monkeypatch.chdir(importable)
    pid = importable / "pid"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    asking = subprocess.Popen([sys.executable, "-m", "tunedgemm", *command.split()], **pipes)
    start = time.monotonic()
    while not (pid.exists() and pid.read_text().endswith("\n")):
        assert asking.poll() is None and time.monotonic() - start < 100, asking.communicate()
        time.sleep(0.02)
    start = time.monotonic()
    asking.send_signal(signal.SIGINT)
    output, _ = asking.communicate(timeout=100)
    assert asking.returncode == 130 and "interrupted" in output
    while is_running(int(pid.read_text())):
        assert time.monotonic() - start < 25
    assert time.monotonic() - start < 25  # less than 1 s on an idle machine; the load's own limit is 60 s
    assert not list((importable / "cache").glob("??/*")), "the cache remembers an interrupt as the library's fault"


def test_an_interrupt_ends_threads_though_their_caller_sleeps(children):
    """A signal that another thread receives wakes no wait of the main thread; the children end anyway."""

    def ask(interrupting: bool) -> str:
        if interrupting:
            time.sleep(0.3)  # the caller waits by then
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            return ""
        with contextlib.suppress(KeyboardInterrupt):  # as whatever calls a plugin's function
            load_fault("import time; time.sleep(600)", timeout=50)
        return load_fault("import time; time.sleep(601)", timeout=50)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loadable.in_threads(ask, [False, True])
    assert time.monotonic() - start < 25 and len(children) == 1


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import a_library_that_is_absent", "ModuleNotFoundError: No module named 'a_library_that_is_absent'"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise ValueError('of\\ntwo lines')", "ValueError: of two lines"),
        ("raise OSError('no load') from KeyError('why')", "OSError: no load, from KeyError: 'why'"),
        ("import os; os.kill(os.getpid(), 11)", "loading it ends the process by SIGSEGV"),
        ("import os; os._exit(3)", "loading it ends the process with status 3"),
        ("import warnings, sys; warnings.warn('old'); print('a line', file=sys.stderr)", ""),
    ],
)
def test_python_code_that_loads_a_library(code, fault):
    """An exception is a reason, exits included; a warning is none."""
    assert load_fault(code) == fault


def test_the_child_has_the_search_path_of_this_process(importable, monkeypatch, tmp_path):
    """It finds what this process finds, and not the modules of its working folder."""
    (importable / "a_wheel.py").write_text("import sys\nassert sys.argv[1:] == []\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a_stray_file.py").write_text("")
    (elsewhere / "resource.py").write_text("raise SystemExit('stray')")  # a module of the standard library
    monkeypatch.chdir(elsewhere)
    monkeypatch.delenv("PYTHONPATH")
    assert load_fault("import a_wheel") == ""
    assert load_fault("import a_stray_file") == "ModuleNotFoundError: No module named 'a_stray_file'"


class TestMemory:
    """One child answers all processes, until something changes."""

    CODE = "import sys; assert open(sys.argv[1]).read() == 'sound', 'damaged'"

    @pytest.fixture
    def ask(self, tmp_path, monkeypatch):
        file = tmp_path / "library"
        file.write_text("sound")

        def asked() -> str:
            monkeypatch.setattr(loadable, "_known", {})  # as in another process
            return load_fault(self.CODE, file)

        return asked

    def test_an_answer_is_kept_between_processes(self, ask, children):
        """Neither this process nor the next starts a second child."""
        assert [ask(), ask(), ask()] == ["", "", ""]
        assert len(children) == 1

    def test_a_changed_file_is_tried_again(self, ask, children, tmp_path):
        """Another time or size of the file is another question, also within a process."""
        file = tmp_path / "library"
        ask()
        file.write_text("damage")
        assert load_fault(self.CODE, file) == ask() == "AssertionError: damaged"
        file.write_text("sound")
        os.utime(file, (1, 1))
        assert ask() == ""
        assert len(children) == 3

    def test_another_torch_or_search_path_is_another_question(self, ask, children, monkeypatch):
        """The answer belongs to torch's version and to the dynamic linker's path."""
        ask()
        monkeypatch.setattr(loadable, "_torch_version", lambda: "9.9")
        ask()
        monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/other")
        ask()
        assert len(children) == 3

    def test_a_failure_counts_for_an_hour(self, ask, children, tmp_path, monkeypatch):
        """What the library lacked may be installed since; a success stays."""
        (tmp_path / "library").write_text("damage")
        assert ask() == ask() == "AssertionError: damaged"
        assert len(children) == 1
        later = time.time() + 3700
        monkeypatch.setattr(loadable.time, "time", lambda: later)
        ask()
        assert len(children) == 2
        (tmp_path / "library").write_text("sound")
        ask()
        monkeypatch.setattr(loadable.time, "time", lambda: later * 2)
        assert ask() == "" and len(children) == 3

    def test_a_cache_that_cannot_be_used_costs_a_child_each_time(self, ask, children, monkeypatch, tmp_path):
        """Damaged entries are ignored; without a folder the answer is as good."""
        ask()
        (entry,) = (tmp_path / "cache").glob("??/*")
        entry.write_text('{"fault": "", "until"')
        assert ask() == ""
        monkeypatch.setenv("TUNEDGEMM_CACHE", "/proc/cache")
        assert ask() == "" and len(children) == 3


def test_without_processes_there_is_a_reason(monkeypatch):
    """Where no process can be started, the library is not tried in this one."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert load_fault("pass").startswith("no process to load it in: ")


def test_threads_ask_about_libraries_at_the_same_time(tmp_path, children):
    """Each child waits for the other's mark; a second question about a library waits for the first."""
    code = "import pathlib, sys, time\nown, other = (pathlib.Path(name + '.mark') for name in sys.argv[1:])\nown.touch()\n"
    code += "while not other.exists():\n    time.sleep(0.01)"
    files = [tmp_path / "one", tmp_path / "other"]
    for file in files:
        file.write_text("untried")
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(load_fault, code, *pair, timeout=30.0) for pair in (files, files[::-1], files)]
        assert [each.result() for each in asked] == ["", "", ""]
    assert len(children) == 2

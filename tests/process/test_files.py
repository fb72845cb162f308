"""Files: only regular files are read, and a replaced file is the old one or the new one."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
from tunedgemm.process import files
from tunedgemm.process.files import STALE, read_regular, replace_file, target_of

CORE = Path(files.__file__).parents[1]

#: Modules that read files of the package or of the kernel's /proc and /sys.
OF_THE_SYSTEM = {
    "analysis/doctor/machine.py", "backends/driver.py", "backends/file_trust.py",
    "cli/new_plugin.py", "device.py", "tuner/processes.py", "tuner/rounds.py", "workload/models/confine.py",
}  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.csv"


def reason_of(path: Path) -> str:
    """Return why a file is not read."""
    start = time.perf_counter()
    with pytest.raises(OSError) as caught:
        read_regular(path)
    assert time.perf_counter() - start < 1.0
    return caught.value.strerror


def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path, path):
    """A pipe, a socket, a device and a folder are refused without waiting or reading."""
    os.mkfifo(path)
    assert reason_of(path) == "not a regular file (got a named pipe)"
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(str(tmp_path / "socket"))
        assert reason_of(tmp_path / "socket").startswith("not a regular file")
    finally:
        listening.close()
    assert reason_of(Path("/dev/zero")) == "not a regular file (got a device)"
    assert reason_of(tmp_path) == "Is a directory"
    link = tmp_path / "link"
    link.symlink_to("/dev/zero")
    assert reason_of(link) == "not a regular file (got a device)"


def test_a_size_limit_that_a_variable_raises(path, monkeypatch):
    """A larger file is refused by its size and by its content; the variable raises the limit."""
    with path.open("wb") as sparse:
        sparse.truncate(3 << 30)
    assert reason_of(path) == "larger than 1024 MiB; raise TUNEDGEMM_MAX_FILE_MIB to read it"
    os.truncate(path, 2 << 20)
    monkeypatch.setenv("TUNEDGEMM_MAX_FILE_MIB", "1")
    assert reason_of(path).startswith("larger than 1 MiB")
    monkeypatch.setenv("TUNEDGEMM_MAX_FILE_MIB", "2")
    assert len(read_regular(path)) == 2 << 20
    monkeypatch.setenv("TUNEDGEMM_MAX_FILE_MIB", "1")
    assert Path("/proc/kallsyms").stat().st_size == 0
    assert reason_of(Path("/proc/kallsyms")).startswith("larger than 1 MiB")


def test_a_planted_temporary_is_neither_followed_nor_written(tmp_path, path, monkeypatch):
    """The name of the temporary is random; a link of that name is refused and its target stays."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".{path.name}.tmp").symlink_to(victim)
    replace_file(path, b"new")
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "0" * 2 * count)
    (tmp_path / f".{path.name}.{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(OSError) as caught:
        replace_file(path, b"newer")
    assert caught.value.errno in (errno.EEXIST, errno.ELOOP)
    assert (victim.read_text(), path.read_text()) == ("precious", "new")


def test_the_mode_is_kept_and_never_wider(path, monkeypatch):
    """The new file has the old one's mode, and its content is private until then."""
    path.write_text("old")
    path.chmod(0o604)
    modes = []
    real = os.fchmod
    monkeypatch.setattr(files.os, "fchmod", lambda handle, mode: (modes.append(stat.S_IMODE(os.fstat(handle).st_mode)), real(handle, mode)))
    replace_file(path, b"new")
    assert (modes, stat.S_IMODE(path.stat().st_mode)) == ([0o600], 0o604)
    before = os.umask(0o027)
    try:
        replace_file(path.with_name("fresh"), b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.with_name("fresh").stat().st_mode) == 0o640


def test_a_failure_removes_the_temporary(path, monkeypatch):
    """A failed or interrupted write leaves the old file alone in its folder."""
    path.write_text("old")
    for error in (OSError(errno.ENOSPC, "full"), KeyboardInterrupt()):

        def fail(_: int, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(files.os, "fsync", fail)
        with pytest.raises(type(error)):
            replace_file(path, b"new")
    assert ([file.name for file in path.parent.iterdir()], path.read_text()) == ([path.name], "old")


def test_only_a_regular_file_is_replaced(path):
    """A pipe or a folder in the file's place stays."""
    os.mkfifo(path)
    for taken in (path, path.parent):
        with pytest.raises(OSError, match="not a regular file"):
            replace_file(taken, b"new")
    assert path.is_fifo()


def test_stale_temporaries_are_removed(tmp_path, path):
    """A killed writer's temporary is removed after an hour, and no other file."""
    stale, fresh, foreign = (tmp_path / f".{name}.{'ab' * 8}.tmp" for name in (path.name, path.name.upper(), "other.csv"))
    fresh = tmp_path / f".{path.name}.{'cd' * 8}.tmp"
    for file, age in ((stale, STALE + 60), (fresh, STALE - 60), (foreign, 2 * STALE)):
        file.touch()
        os.utime(file, (time.time() - age,) * 2)
    replace_file(path, b"new")
    assert sorted(tmp_path.iterdir()) == sorted([path, fresh, foreign])


def test_a_long_name(tmp_path):
    """The longest name that its lock leaves room for can be replaced."""
    path = tmp_path / ("\u20ac" * 83)
    replace_file(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_links_lead_to_their_file(tmp_path, path):
    """A link, a link to a link and a link to a missing file lead to the file."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.symlink_to(path)
    second.symlink_to(first)
    replace_file(second, b"new")
    assert (target_of(second), path.read_text()) == (path, "new")
    assert second.is_symlink()
    assert first.is_symlink()


def test_a_pipe_that_appears_later_is_refused_too(path):
    """The kind is that of the file that was opened, whatever its path was before."""
    path.write_text("x")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for make in (os.mkfifo, Path.touch):
                path.unlink(missing_ok=True)
                make(path)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(300):
            try:
                assert read_regular(path) in (b"", b"x")
            except FileNotFoundError:
                continue
            except OSError as error:
                assert error.strerror == "not a regular file (got a named pipe)"
    finally:
        stop.set()
        thread.join()


def test_every_reader_opens_files_at_this_place():
    """No other module opens a file that a user or a stranger wrote."""
    opens = re.compile(r"\.read_text\(|\.read_bytes\(|= open\(|with open\(|io\.FileIO|\.open\(\"r")
    found = {str(file.relative_to(CORE)) for file in CORE.rglob("*.py") if opens.search(file.read_text())}
    assert found - {"process/files.py"} <= OF_THE_SYSTEM

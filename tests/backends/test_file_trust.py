"""private: the cache is this user's alone, and bytes that another user may change are never used."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tunedgemm.backends import artifact as artifact_module
from tunedgemm.backends import file_trust
from tunedgemm.backends.artifact import SHARED, artifact, cache_folder
from tunedgemm.backends.file_trust import UntrustedError, make_private, read_trusted
from tunedgemm.errors import PluginError

#: A user without rights or files.
OTHER = 54321
KEY, PLACE = "key", hashlib.sha256(b"key").hexdigest()
STORED = f"{PLACE[:2]}/{PLACE}"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no bytes in memory."""
    monkeypatch.setattr(artifact_module, "_memory", {})


@pytest.fixture
def entered() -> Iterator[Path]:
    """Return a folder that every user may enter; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def whole(payload: bytes) -> bytes:
    """Return the file of an artifact."""
    return hashlib.sha256(payload).digest() + payload


def plant(file: Path) -> None:
    """Write an artifact as the other user."""
    source = (
        "import os, pathlib, sys\n"
        f"os.umask(0); os.setgid({OTHER}); os.setuid({OTHER})\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "file.parent.mkdir(parents=True, exist_ok=True)\n"
        f"file.write_bytes(bytes.fromhex('{whole(b'planted').hex()}'))\n"
    )
    subprocess.run([sys.executable, "-c", source, str(file)], check=True)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077, 0o277])
def test_every_folder_that_is_made_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    """Each level of the cache has mode 0700 and its files are closed to others, whatever the umask."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "a" / "b" / "cache"))
    before = os.umask(umask)
    try:
        artifact(KEY, lambda: b"built")
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", *(tmp_path / "a").rglob("*"))}
    assert {f"{mode:04o}" for path, mode in modes.items() if path.is_dir()} == {"0700"}
    assert [mode & 0o177 for path, mode in modes.items() if path.is_file()] == [0]


def open_cache(folder: Path) -> Path:
    """Make a cache as an earlier version did under umask 000."""
    (folder / "cache" / PLACE[:2]).mkdir(parents=True)
    for path in (folder / "cache", folder / "cache" / PLACE[:2]):
        path.chmod(0o777)
    return folder / "cache"


def in_open_parent(folder: Path) -> Path:
    """Let the other user make the cache in a folder that all may write."""
    (folder / "shared").mkdir()
    (folder / "shared").chmod(0o777)
    return folder / "shared" / "cache"


def in_sticky_parent(folder: Path) -> Path:
    """Let the other user make the cache first in a folder such as /tmp."""
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    return folder / "tmp" / "cache"


def through_a_link(folder: Path) -> Path:
    """Link a level of a private cache to the other user's folder."""
    (folder / "theirs").mkdir()
    os.chown(folder / "theirs", OTHER, OTHER)
    (folder / "cache").mkdir(mode=0o755)
    (folder / "cache" / PLACE[:2]).symlink_to(folder / "theirs")
    return folder / "cache"


@as_root
@pytest.mark.parametrize("place", [open_cache, in_open_parent, in_sticky_parent, through_a_link])
def test_what_another_user_plants_is_not_used(
    entered: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: Callable[[Path], Path]
) -> None:
    """A whole artifact of another user is refused with the remedy, and built in memory instead."""
    cache = place(entered)
    plant(cache / STORED)
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(cache))
    assert [artifact(KEY, lambda: b"built") for _ in range(2)] == [b"built"] * 2
    warnings = [record.getMessage() for record in caplog.records if "only you may write" in record.getMessage()]
    assert (
        len(warnings) == 1
        and str(entered) in warnings[0]
        and ("owned by another user" in warnings[0] or "writable by others" in warnings[0])
    )
    with pytest.raises(PluginError, match="set TUNEDGEMM_CACHE to a folder that only you may write"):
        artifact(KEY, lambda: b"built", on_disk=True)


@as_root
@pytest.mark.parametrize("change", [lambda file: os.chown(file, OTHER, -1), lambda file: file.chmod(0o666)], ids=["owned", "writable"])
def test_a_file_that_others_may_change_is_built_again(change: Callable[[Path], object], tmp_path: Path) -> None:
    """In a private folder, too, another user's file or one that others may write is replaced."""
    artifact(KEY, lambda: b"old")
    file = cache_folder() / STORED
    change(file)
    assert artifact(KEY, lambda: b"new") == b"new"
    assert file.stat().st_uid == os.geteuid() and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_special_file_is_not_opened(tmp_path: Path) -> None:
    """A FIFO or a device in place of an artifact does not hang or fill the memory."""
    folder = make_private(cache_folder() / PLACE[:2])
    os.mkfifo(folder / PLACE)
    assert artifact(KEY, lambda: b"built") == b"built"


@pytest.mark.parametrize("mode", [0o775, 0o777])
def test_a_folder_above_that_others_may_write(tmp_path: Path, mode: int) -> None:
    """A folder in which others may replace ours is refused with its name and mode; a sticky one is not."""
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(mode)
    with pytest.raises(UntrustedError, match=rf"above: writable by others \(got mode 0{mode:o}\)"):
        make_private(tmp_path / "above" / "cache")
    (tmp_path / "above").chmod(mode | stat.S_ISVTX)
    assert make_private(tmp_path / "above" / "cache") == tmp_path / "above" / "cache"


def test_a_link_of_the_user_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache may be a link to another folder of its user."""
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "cache"))
    assert artifact(KEY, lambda: b"built") == artifact(KEY, lambda: b"again") == b"built"
    assert (tmp_path / "disk" / STORED).is_file()


def test_a_shared_cache_is_read_and_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Artifacts of a shared folder serve where the private cache has none, and it stays as it was."""
    shared = tmp_path / "shared"
    (shared / PLACE[:2]).mkdir(parents=True)
    (shared / STORED).write_bytes(whole(b"shared"))
    monkeypatch.setenv(SHARED, str(shared))
    before = sorted(shared.rglob("*"))
    assert artifact(KEY, lambda: b"built") == b"shared"
    assert artifact(KEY, lambda: b"built", fresh=True) == b"built" == artifact(KEY, lambda: b"again")
    assert artifact("other", lambda: b"built") == b"built"
    assert sorted(shared.rglob("*")) == before


@as_root
def test_a_shared_cache_of_root_serves_other_users(entered: Path) -> None:
    """A user without rights gets root's artifacts through this variable alone."""
    (entered / "root" / PLACE[:2]).mkdir(parents=True)
    (entered / "root" / STORED).write_bytes(whole(b"of root"))
    (entered / "own").mkdir(mode=0o700)
    os.chown(entered / "own", OTHER, OTHER)
    source = (
        "import os, sys\n"
        "from tunedgemm.backends.artifact import artifact\n"
        f"os.setgid({OTHER}); os.setuid({OTHER})\n"
        "print(artifact('key', lambda: b'built').decode())\n"
    )

    def printed(**variables: str) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
        return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=True).stdout.strip()

    assert printed(TUNEDGEMM_CACHE=str(entered / "own"), TUNEDGEMM_SHARED_CACHE=str(entered / "root")) == "of root"
    assert printed(TUNEDGEMM_CACHE=str(entered / "root")) == "built"


@as_root
def test_a_shared_cache_of_another_user_is_refused(
    entered: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The variable does not lend trust to files that a third user wrote."""
    (entered / "shared").mkdir()
    os.chown(entered / "shared", OTHER, OTHER)
    plant(entered / "shared" / STORED)
    monkeypatch.setenv(SHARED, str(entered / "shared"))
    assert artifact(KEY, lambda: b"built") == b"built"
    assert f"{SHARED} must be a folder that only root or you may write" in caplog.text


@as_root
def test_root_of_a_user_namespace_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where root has no identity, files of the system count although they appear as another user's."""
    (tmp_path / "file").write_bytes(b"bytes")
    os.chown(tmp_path / "file", OTHER, -1)
    with pytest.raises(UntrustedError, match=f"owned by another user .got uid {OTHER}"):
        read_trusted(tmp_path / "file")
    (tmp_path / "unmapped").write_text(f"{OTHER}\n")
    (tmp_path / "map").write_text("0 1000 1\n")
    monkeypatch.setattr(file_trust, "_UNMAPPED", str(tmp_path / "unmapped"))
    monkeypatch.setattr(file_trust, "_USERS", str(tmp_path / "map"))
    file_trust._system_owners.cache_clear()
    try:
        assert read_trusted(tmp_path / "file") == b"bytes"
    finally:
        file_trust._system_owners.cache_clear()


def test_files_of_killed_writers_are_deleted(tmp_path: Path) -> None:
    """A temporary file of a day ago goes with the next write; one of now, perhaps being written, stays."""
    artifact(KEY, lambda: b"built")
    folder = cache_folder() / PLACE[:2]
    old, new, strange = folder / "tmpabcd1234", folder / "tmpabcd5678", folder / "tmp-of-the-user"
    of_a_compiler = cache_folder() / "compiler" / "KEY" / "tmp.pid_1_a"
    of_a_compiler.mkdir(parents=True)
    for file in (old, new, strange, of_a_compiler / "part"):
        file.write_bytes(b"part")
    for path in (old, strange, of_a_compiler, cache_folder() / "swept"):
        os.utime(path, (time.time() - 90000,) * 2)
    artifact("other", lambda: b"built")
    assert [path.exists() for path in (old, of_a_compiler, new, strange)] == [False, False, True, True]
    assert artifact(KEY, lambda: b"again") == b"built"

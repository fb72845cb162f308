"""artifact: bytes built once, private, whole, and rebuilt when damaged."""

import stat
from pathlib import Path

import pytest
from tunedgemm.backends import artifact as artifact_module
from tunedgemm.backends.artifact import artifact, cache_folder
from tunedgemm.errors import PluginError


@pytest.fixture
def built():
    """Calls of the builder, and the builder."""
    calls = []
    return calls, lambda: calls.append(1) or b"kernel" * 100


def files():
    return [path for path in cache_folder().rglob("*") if path.is_file()]


def test_built_once(built):
    """The second request reads what the first one stored."""
    calls, build = built
    assert artifact("key", build) == artifact("key", build) == b"kernel" * 100
    assert len(calls) == 1
    assert artifact("another key", build) == b"kernel" * 100
    assert len(calls) == 2


def test_private(built):
    """No other user may read or replace what will be run."""
    artifact("key", built[1])
    (file,) = files()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) & 0o022 == 0


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 700])
def test_damaged_files_are_rebuilt(built, damage):
    """An empty, truncated or edited file is built again, and then complete."""
    calls, build = built
    artifact("key", build)
    (file,) = files()
    file.write_bytes(damage)
    assert artifact("key", build) == b"kernel" * 100
    assert artifact("key", build) == b"kernel" * 100
    assert len(calls) == 2


def test_a_folder_that_cannot_be_written(built, monkeypatch, tmp_path):
    """If nothing can be stored, the bytes stay in this process's memory."""
    calls, build = built
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(artifact_module, "_memory", {})
    assert artifact("key", build) == artifact("key", build) == b"kernel" * 100
    assert len(calls) == 1


def test_a_full_disk(built, monkeypatch):
    """A file that cannot be completed is not left behind, and the bytes are kept in memory."""

    def full(self, target):
        raise OSError(28, "No space left on device")

    calls, build = built
    monkeypatch.setattr(artifact_module, "_memory", {})
    monkeypatch.setattr(Path, "replace", full)
    assert artifact("key", build) == artifact("key", build) == b"kernel" * 100
    assert len(calls) == 1
    assert files() == []


def test_builders_return_bytes():
    """Another type is an error with the artifact and the type."""
    with pytest.raises(PluginError, match=r"artifact 'key': build\(\) must return bytes \(got str\)"):
        artifact("key", lambda: "text")


def test_the_default_folder(monkeypatch):
    """Without the variable the cache is the user's own."""
    monkeypatch.delenv("TUNEDGEMM_CACHE")
    assert cache_folder().name == "tunedgemm"


def test_fresh_builds_again_and_replaces(monkeypatch, tmp_path):
    """The new bytes replace the stored ones."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    artifact("key", lambda: b"old")
    assert artifact("key", lambda: b"new", fresh=True) == b"new"
    assert artifact("key", lambda: b"newer") == b"new"


def test_bytes_that_must_be_on_disk_are_not_kept_in_memory(monkeypatch, tmp_path):
    """Another process will look for it: a folder that cannot be written is an error, each time."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        with pytest.raises(PluginError, match=r"the artifact cache cannot be written .* set TUNEDGEMM_CACHE"):
            artifact("on disk", lambda: b"payload", on_disk=True)
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "cache"))
    assert artifact("on disk", lambda: b"another", on_disk=True) == b"another"

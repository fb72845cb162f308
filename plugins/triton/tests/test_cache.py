"""Test that Triton's files are used only where another user cannot have written them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton import knobs
from tunedgemm.tools.files import cache_folder
from tunedgemm_triton import build
from tunedgemm_triton.build import triton_cache
from tunedgemm_triton.cache import PrivateCache

OTHER = 54321
FILES = {"one.json": b"{}", "one.cubin": b"code"}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


@pytest.fixture(autouse=True)
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use Triton's folder of this test's cache, as compiles do."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "cache"))
    build._folder.cache_clear()
    with triton_cache():
        yield
    build._folder.cache_clear()


def stored() -> PrivateCache:
    """Store the files of a compile; return their cache."""
    cache = PrivateCache("KEY")
    cache.put_group("one.json", {name: cache.put(content, name) for name, content in FILES.items()})
    return cache


def test_files_are_private_and_found_again() -> None:
    """A compile's files are found again, with mode 0600 in folders of 0700 under umask 000."""
    before = os.umask(0)
    try:
        stored()
    finally:
        os.umask(before)
    group = PrivateCache("KEY").get_group("one.json")
    assert group is not None and {name: Path(path).read_bytes() for name, path in group.items()} == FILES
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in (cache_folder() / "triton").rglob("*")}
    assert modes == {True: 0o700, False: 0o600} and knobs.cache.dir == str(cache_folder() / "triton")


@as_root
@pytest.mark.parametrize("name", ["one.cubin", "__grp__one.json"])
def test_a_file_of_another_user_is_missing(name: str) -> None:
    """One file that another user owns makes Triton compile again."""
    stored()
    os.chown(cache_folder() / "triton" / "KEY" / name, OTHER, -1)
    assert PrivateCache("KEY").get_group("one.json") is None
    assert PrivateCache("KEY").get_file(name) is None


def test_a_file_elsewhere_is_missing(tmp_path: Path) -> None:
    """A list may name only files of its folder."""
    (tmp_path / "one.cubin").write_bytes(b"code")
    stored().put_group("one.json", {"one.cubin": str(tmp_path / "one.cubin")})
    assert PrivateCache("KEY").get_group("one.json") is None


def test_a_folder_that_others_may_write_is_refused() -> None:
    """A program's folder that others may write is an error with its name."""
    stored()
    (cache_folder() / "triton" / "KEY").chmod(0o777)
    with pytest.raises(OSError, match=r"KEY: writable by others \(got mode 0777\)"):
        PrivateCache("KEY")


def test_a_cache_that_others_may_write_is_replaced_by_a_temporary_one() -> None:
    """Triton compiles into a temporary folder of this process where the cache is not private."""
    cache_folder().chmod(0o777)
    build._folder.cache_clear()
    assert not Path(build._folder(cache_folder())).is_relative_to(cache_folder())

"""Test which packs are trusted: code of a pack runs, so others must not be able to change it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tunedgemm_asm import packs, sources

HEAD = "knl_name,co_name,tn,tileM,tileN\n"
OTHER = 54321


@pytest.fixture
def pack(objects: ModuleType, tmp_path: Path) -> Path:
    """Write a pack with one kernel, and return its folder."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "pack.json").write_text(json.dumps({"abi": "aiter-bf16gemm", "gfx": "gfx942", "manifest": "m.csv"}))
    (folder / "m.csv").write_text(f"{HEAD}a,a.co,1,96,64\n")
    (folder / "a.co").write_bytes(objects.made(["a"], "gfx942"))
    return folder


@pytest.fixture
def faults(pack: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return a function that reads the pack anew, and returns why its kernel may not be launched."""

    def faults() -> str:
        monkeypatch.setenv(sources.VARIABLE, str(pack))
        packs.reload()
        found = packs.catalog_of("gfx942")
        return " ".join((*found.problems, found.missing("a")))

    return faults


@pytest.mark.parametrize("part", ["pack.json", "m.csv", "a.co", "."])
def test_a_pack_that_others_may_write_is_refused(pack: Path, faults: Callable[[], str], part: str) -> None:
    """A file or folder of a pack that others may write costs the kernel, with path, mode and remedy."""
    assert not faults().strip()
    (pack / part).chmod(0o777)
    assert f"{(pack / part).resolve()}: writable by others (got mode 0777); copy the pack to a folder that only you" in faults()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
@pytest.mark.parametrize("part", ["pack.json", "m.csv", "a.co", "."])
def test_a_pack_of_another_user_is_refused(pack: Path, faults: Callable[[], str], part: str) -> None:
    """A file or folder of a pack that another user owns costs the kernel."""
    os.chown(pack / part, OTHER, -1)
    assert f"{(pack / part).resolve()}: owned by another user (got uid {OTHER}" in faults()


def test_a_link_to_a_folder_that_others_may_write(pack: Path, faults: Callable[[], str]) -> None:
    """A link inside the pack counts as the file that it leads to."""
    (pack / "open").mkdir()
    (pack / "a.co").rename(pack / "open" / "b.co")
    (pack / "a.co").symlink_to(pack / "open" / "b.co")
    assert not faults().strip()
    (pack / "open").chmod(0o777)
    assert "open: writable by others" in faults()

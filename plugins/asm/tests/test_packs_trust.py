"""Test which packs are trusted: code of a pack runs, so others must not be able to change it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tunedgemm_asm import command, packs, sources

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


def test_a_pack_needs_a_signature_where_one_is_required(
    pack: Path, faults: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signature of pack.json covers each file whose hash it has; others are refused."""
    minisign: Any = pytest.importorskip("minisign")
    pair = minisign.KeyPair.generate()
    (tmp_path / "keys").write_bytes(bytes(pair.public_key) + b"\n")
    monkeypatch.setenv("TUNEDGEMM_REQUIRE_SIGNED", "1")
    monkeypatch.setenv("TUNEDGEMM_TRUSTED_KEYS", str(tmp_path / "keys"))
    assert "pack.json: unsigned; sign it with `minisign -Sm pack.json`" in faults()
    said = json.loads((pack / "pack.json").read_text())
    for files, fault in (((), "m.csv: unsigned"), (("m.csv",), "a.co: unsigned"), (("m.csv", "a.co"), "")):
        hashes = {file: hashlib.sha256((pack / file).read_bytes()).hexdigest() for file in files}
        (pack / "pack.json").write_text(json.dumps({**said, "sha256": hashes}))
        pair.secret_key.sign_file(pack / "pack.json", prehash=True, drop_signature=True)
        assert fault in faults() and bool(fault) == bool(faults().strip())
    assert not [fault for verdict in command.verdicts([pack]) for fault in verdict.faults]
    (pack / "m.csv").write_text((pack / "m.csv").read_text() + "\n")
    assert "m.csv: sha256 mismatch" in faults()
    (pack / "pack.json").write_text((pack / "pack.json").read_text().replace("gfx942", "gfx950"))
    assert "pack.json: changed after it was signed" in faults()

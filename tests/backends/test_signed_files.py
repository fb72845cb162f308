"""signature: where signatures are required, tables and shared kernels of others need a trusted one."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.backends.artifact import SHARED, artifact
from tunedgemm.backends.signed_files import KEYS, REQUIRED, SignatureError, check_signature
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.table import folders, source
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.published import checked_body
from tunedgemm.table.source import open_source

minisign: Any = pytest.importorskip("minisign")

OP = op_named("a16w16")
#: A key and two signatures that minisign's author published, of a file "test" with the text "test".
KEY = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3"
PUBLISHED = (
    "untrusted comment: signature from minisign secret key\n"
    "RWQf6LRCGA9i59SLOFxz6NxvASXDJeRtuZykwQepbDEGt87ig1BNpWaVWuNrm73YiIiJbq71Wi+dP9eKL8OC351vwIasSSbXxwA=\n"
    "trusted comment: timestamp:1555779966\tfile:test\n"
    "QtKMXWyYcwdpZAlPF7tE2ENJkRd1ujvKjlj1m9RtHTBnZPa5WKU5uWRs5GoP5M/VqE81QFuMKI5k/SfNQUaOAA==\n",
    "untrusted comment: signature from minisign secret key\n"
    "RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=\n"
    "trusted comment: timestamp:1556193335\tfile:test\n"
    "y/rUw2y8/hOUYjZU71eHp/Wo1KZ40fGy2VJEDl34XMJM+TX48Ss/17u3IvIfbVR1FkZZSNCisQbuQY+bHwhEBg==\n",
)


@pytest.fixture
def sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Require signatures, trust one new key, and return the function that signs a file."""
    pair = minisign.KeyPair.generate()
    (tmp_path / "keys").write_bytes(b"# of the tests\n" + bytes(pair.public_key) + b"\n")
    monkeypatch.setenv(REQUIRED, "1")
    monkeypatch.setenv(KEYS, str(tmp_path / "keys"))
    return lambda path, key=pair.secret_key: key.sign_file(path, prehash=True, drop_signature=True)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a table with a header alone."""
    write_rows(tmp_path / "tuned.csv", OP, [])
    return tmp_path / "tuned.csv"


@pytest.mark.parametrize("text", PUBLISHED, ids=["whole", "hashed"])
def test_published_signatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Both kinds of minisign's signatures are checked against the bytes, the comment and the key."""
    monkeypatch.setenv(REQUIRED, "1")
    monkeypatch.setenv(KEYS, str(tmp_path / "keys"))
    (tmp_path / "keys").write_text(f"untrusted comment: of minisign's author\n{KEY}\n")
    (tmp_path / "test.minisig").write_text(text)
    check_signature(tmp_path / "test", b"test")
    with pytest.raises(SignatureError, match="changed after it was signed"):
        check_signature(tmp_path / "test", b"Test")
    (tmp_path / "test.minisig").write_text(text.replace("file:test", "file:best"))
    with pytest.raises(SignatureError, match="changed after it was signed"):
        check_signature(tmp_path / "test", b"test")


def test_tables(sign: Callable[..., Any], table: Path) -> None:
    """An unsigned, changed, renamed or strangely signed table is refused; a signed one serves."""
    with pytest.raises(TableError, match=rf"tuned.csv: unsigned; sign it with `minisign -Sm tuned.csv`, or unset {REQUIRED}"):
        open_source(table, OP)
    sign(table)
    assert len(open_source(table, OP)) == 0
    for suffix in ("", ".minisig"):
        Path(f"{table}{suffix}").rename(f"{table.with_name('other.csv')}{suffix}")
    with pytest.raises(TableError, match=r"other.csv: signed as another file \(got '.*file:tuned.csv"):
        open_source(table.with_name("other.csv"), OP)
    table = table.with_name("other.csv")
    sign(table, minisign.KeyPair.generate().secret_key)
    with pytest.raises(TableError, match=f"signed by a key that {KEYS} does not list"):
        open_source(table, OP)
    sign(table)
    table.write_text(table.read_text() + "\n")
    with pytest.raises(TableError, match=r"other.csv: changed after it was signed"):
        open_source(table, OP)
    Path(f"{table}.minisig").write_text("no signature")
    with pytest.raises(TableError, match=r"other.csv.minisig: not a signature of minisign"):
        open_source(table, OP)


def test_the_bytes_that_were_checked_are_read(sign: Callable[..., Any], table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is read once, so that it cannot be replaced between the check and its use."""
    reads = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more, **rest: reads.append(str(path)) or real(path, *more, **rest))
    table.write_text(table.read_text() + "not,a,row\n")  # read by both parsers
    sign(table)
    open_source(table, OP)
    assert reads.count(str(table)) == 1


def test_shipped_tables_need_none(sign: Callable[..., Any], table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of the package count as its code; an unsigned table of a variable is left out."""
    monkeypatch.setenv(OP.columns.variable, f"{table}:default")
    loaded = Table.load(OP)
    assert [problem.path for problem in loaded.problems if "unsigned" in problem.reason] == [table]
    assert len(loaded.problems) == 1


@pytest.mark.parametrize("shipped_first", [True, False])
def test_a_link_that_changes(sign: Callable[..., Any], table: Path, monkeypatch: pytest.MonkeyPatch, shipped_first: bool) -> None:
    """A link that leads to a shipped table at one moment does not spare another file its signature."""
    shipped = next(folders.SHIPPED.rglob("h200_bf16_tuned_gemm.csv"))
    link = table.with_name("link.csv")
    table.write_text("not a table of the package\n")
    link.symlink_to(shipped if shipped_first else table)
    real = source.read_raw

    def swapped(path: Path) -> bytes:
        if shipped_first:
            link.unlink()
            link.symlink_to(table)
        content = real(path)
        if not shipped_first:
            link.unlink()
            link.symlink_to(shipped)
        return content

    monkeypatch.setattr(source, "read_raw", swapped)
    if shipped_first:
        assert source._signed(link) == checked_body(shipped, shipped.read_bytes())
    else:
        with pytest.raises(TableError, match=r"link.csv: unsigned"):
            source._signed(link)


def test_shared_artifacts(
    sign: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A shared kernel needs a signature under its name; one that this user built needs none."""
    name = hashlib.sha256(b"key").hexdigest()
    file = tmp_path / "shared" / name[:2] / name
    file.parent.mkdir(parents=True)
    file.write_bytes(hashlib.sha256(b"shared").digest() + b"shared")
    monkeypatch.setenv(SHARED, str(tmp_path / "shared"))
    with caplog.at_level(logging.WARNING):
        assert artifact("key", lambda: b"built") == artifact("key", lambda: b"again") == b"built"
    assert f"{SHARED}: {file}: unsigned" in caplog.text
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path / "empty"))
    sign(file)
    assert artifact("key", lambda: b"built") == b"shared"


def test_keys_that_cannot_be_used(sign: Callable[..., Any], table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing, damaged or writable list of keys refuses everything with its reason."""
    sign(table)
    keys = Path(os.environ[KEYS])
    keys.chmod(0o666)
    with pytest.raises(TableError, match=rf"{KEYS}: cannot be read: .*writable by others"):
        open_source(table, OP)
    keys.chmod(0o600)
    keys.write_text("RWQf6LRCGA9i5\n")
    with pytest.raises(TableError, match="has a line that is not a public key of minisign"):
        open_source(table, OP)
    keys.write_text("")
    with pytest.raises(TableError, match="does not list"):
        open_source(table, OP)
    monkeypatch.delenv(KEYS)
    with pytest.raises(TableError, match=f"{REQUIRED}: no trusted keys; set {KEYS}"):
        open_source(table, OP)
    monkeypatch.setenv(REQUIRED, "0")
    assert len(open_source(table, OP)) == 0

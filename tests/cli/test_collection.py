"""``tunedgemm table put`` and ``get``: folders, an OCI registry and a Hub here; bad collections."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.backends.signed_files import KEYS
from tunedgemm.cli import main
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.collection import INDEX
from tunedgemm.table.csvfile import Row, read_rows, write_rows

minisign: Any = pytest.importorskip("minisign")

OP = op_named("a16w16")
NAME = "mi300x_bf16_tuned_gemm.csv"


class Server(ThreadingHTTPServer):
    """Serves files from memory, as a registry of containers and as the Hub."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.blobs: dict[str, bytes] = {}
        self.manifest: bytes | None = None
        self.files: dict[str, bytes] = {}
        self.commit = "0" * 40
        self.truncates = False


class Handler(BaseHTTPRequestHandler):
    """Answers what the clients ask: OCI distribution below /v2, and the Hub's API."""

    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def reply(self, code: int, content: bytes | None = b"", **headers: str) -> None:
        if content is None:
            code, content = 404, b""
            headers = {"X-Error-Code": "EntryNotFound"}
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            cut = self.server.truncates and content.startswith(b"# tunedgemm-table")
            self.wfile.write(content[: len(content) // 2] if cut else content)
            self.close_connection = self.close_connection or cut

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if found := re.fullmatch(r"/v2/.*/blobs/(sha256:\w+)", self.path):
            self.reply(200, self.server.blobs.get(found[1]))
        elif "/manifests/" in self.path:
            kind = json.loads(self.server.manifest or b"{}").get("mediaType", "")
            self.reply(200, self.server.manifest if kind in self.headers["Accept"] else None)
        elif found := re.fullmatch(r"/datasets/acme/tables/resolve/[^/]+/([^?]+)", self.path):
            content = self.server.files.get(found[1].replace("%2F", "/"))
            self.reply(200, content, ETag=f'"{hashlib.sha1(content or b"").hexdigest()}"', X_Repo_Commit=self.server.commit)
        else:
            self.reply(200, json.dumps({"id": "acme/tables", "sha": self.server.commit}).encode(), Content_Type="application/json")

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self) -> None:
        content = self.body()
        if "/manifests/" in self.path:
            self.server.manifest = content
        else:
            self.server.blobs["sha256:" + hashlib.sha256(content).hexdigest()] = content
        self.reply(201)

    def do_POST(self) -> None:
        content = self.body()
        if self.path.endswith("/uploads/"):
            self.reply(202, Location=f"http://127.0.0.1:{self.server.server_port}/upload?x=1")
        elif "/preupload/" in self.path:
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(content)["files"]]
            self.reply(200, json.dumps({"files": modes}).encode(), Content_Type="application/json")
        else:
            lines = [json.loads(line) for line in content.splitlines()]
            if lines[0]["value"].get("parentCommit") != self.server.commit:
                self.reply(412, b"another commit came")
                return
            for line in (line["value"] for line in lines if line["key"] == "file"):
                self.server.files[line["path"]] = base64.b64decode(line["content"])
            self.server.commit = hashlib.sha1(content).hexdigest()
            answer = {"success": True, "commitOid": self.server.commit, "commitUrl": "http://127.0.0.1/datasets/acme/tables/commit/1"}
            self.reply(200, json.dumps(answer).encode(), Content_Type="application/json")


@pytest.fixture
def server() -> Iterator[Server]:
    with contextlib.closing(Server()) as started:
        started.close = started.server_close  # type: ignore[attr-defined]
        threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield started
        started.shutdown()


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trust one new key, and return its pair."""
    pair = minisign.KeyPair.generate()
    (tmp_path / "keys").write_bytes(bytes(pair.public_key) + b"\n")
    monkeypatch.setenv(KEYS, str(tmp_path / "keys"))
    return pair


@pytest.fixture
def table(tmp_path: Path, keys: Any) -> Path:
    """Return a published and signed table."""
    rows = [Row(Shape("a16w16", m, 64, 128), "gfx942", 304, "mi300x", Solution("torch", "native"), 5.0) for m in (1, 2)]
    write_rows(tmp_path / "raw.csv", OP, rows)
    assert main(["table", "publish", str(tmp_path / "raw.csv"), "-o", str(tmp_path / NAME)]) == 0
    keys.secret_key.sign_file(tmp_path / NAME, prehash=True, drop_signature=True)
    return tmp_path / NAME


@pytest.fixture
def collection(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of an empty collection of the kind of the test's parameter."""
    if request.param == "folder":
        return str(tmp_path / "shared")
    server: Server = request.getfixturevalue("server")
    monkeypatch.setenv("HOME", str(tmp_path))
    if request.param == "oci":
        pytest.importorskip("oras")
        return f"oci://127.0.0.1:{server.server_port}/acme/tables:v1"
    hub = pytest.importorskip("huggingface_hub")
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    kind = hub.HfApi
    monkeypatch.setattr(hub, "HfApi", lambda **given: kind(endpoint=f"http://127.0.0.1:{server.server_port}", token="hf_x", **given))
    return "hf://acme/tables"


everywhere = pytest.mark.parametrize("collection", ["folder", "oci", "hub"], indirect=True)
in_a_folder = pytest.mark.parametrize("collection", ["folder"], indirect=True)
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: object) -> tuple[int, str]:
        code = main(["table", *map(str, words)])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def report(path: Path, exact: float = 0.75) -> Path:
    """Write the part of a coverage report that is read."""
    ways = {"exact": exact, "pinned": 0.125, "fine": 0.0625}
    served = {word: {"shares": {"calls": share, "time": share}} for word, share in ways.items()}
    device = {"gfx": "gfx942", "cu_num": 304, "name": "mi300x"}
    facts = {"device": device, "served_by": served, "regrets": {"padded": {"weighted": 0.031}, "untuned": None}}
    path.write_text(json.dumps({"schema": "tunedgemm.coverage", "version": 1, **facts}))
    return path


@everywhere
def test_a_table_comes_back_with_its_signature(collection: str, table: Path, tmp_path: Path, command: Command) -> None:
    """What was put is listed with its coverage, and got byte by byte by name and by digest."""
    code, shown = command("put", table, collection, "--coverage", f"Qwen3-8B={report(tmp_path / 'coverage.json')}")
    assert code == 0, shown
    assert command("put", table, collection, "--coverage", f"Qwen3-8B={tmp_path / 'coverage.json'}")[0] == 0  # an entry, once
    code, shown = command("get", collection)
    digest = hashlib.sha256(table.read_bytes()).hexdigest()
    assert code == 0 and shown.splitlines() == [
        f"{NAME} {digest[:12]}: 2 rows of a16w16 for gfx942:304:mi300x, signed",
        "  Qwen3-8B on gfx942:304:mi300x: 87.5% of calls by rows of their M, 6.2% of another; "
        "rows of another M: 3.1% slower than the best known",
    ]
    for text in (NAME, digest[:12]):
        code, shown = command("get", collection, text, "-o", out := tmp_path / f"got-{len(text)}")
        assert code == 0 and "signed by a trusted key" in shown, shown
        assert (out / NAME).read_bytes() == table.read_bytes() and len(read_rows(out / NAME, OP)[0]) == 2
        assert (out / f"{NAME}.minisig").read_bytes() == Path(f"{table}.minisig").read_bytes()


@everywhere
def test_two_tables_stay(collection: str, table: Path, keys: Any, tmp_path: Path, command: Command) -> None:
    """A second table leaves the first one."""
    rows, _ = read_rows(table, OP)
    write_rows(tmp_path / "more.csv", OP, rows[:1])
    other = tmp_path / "other.csv"
    assert command("publish", tmp_path / "more.csv", "-o", other)[0] == 0
    keys.secret_key.sign_file(other, prehash=True, drop_signature=True)
    assert command("put", table, collection)[0] == 0
    code, shown = command("put", other, collection)
    assert code == 0, shown
    shown = command("get", collection)[1]
    assert [line.split()[0] for line in shown.splitlines()] == [NAME, "other.csv"]
    for name in (NAME, "other.csv"):
        assert command("get", collection, name, "-o", tmp_path / "out")[0] == 0


@pytest.mark.parametrize("collection", ["oci", "hub"], indirect=True)
def test_a_truncated_download_writes_nothing(
    collection: str, table: Path, server: Server, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that ends early is an error, and no file is left."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the Hub's library waits before it resumes
    assert command("put", table, collection)[0] == 0
    server.truncates = True
    code, shown = command("get", collection, NAME, "-o", out := tmp_path / "out")
    assert code == 2 and "error: " in shown and not list(out.glob("*.csv*"))


def changed(folder: Path, **fields: object) -> None:
    """Change fields of the only entry of an index."""
    document = json.loads((folder / INDEX).read_text())
    document["tables"][0].update(fields)
    (folder / INDEX).write_text(json.dumps(document))


def damages(folder: Path, table: Path) -> dict[str, tuple[Callable[[], object], str]]:
    """Return what may be wrong with a collection, and the error."""
    (blob,) = [path for path in (folder / "sha256").iterdir() if path.read_bytes() == table.read_bytes()]
    stranger = minisign.KeyPair.generate().secret_key.sign(table.read_bytes(), trusted_comment=f"file:{NAME}")
    signed = hashlib.sha256(bytes(stranger)).hexdigest()
    index = folder / INDEX
    return {
        "another file": (lambda: blob.write_bytes(blob.read_bytes().replace(b"5.0", b"4.0")), "is not the file of the index (got "),
        "a shorter file": (lambda: blob.write_bytes(blob.read_bytes()[:100]), "is not the file of the index (got 100 bytes"),
        "a longer file": (lambda: blob.write_bytes(blob.read_bytes() * 9), "is not the file of the index"),
        "no file": (blob.unlink, "is missing (got no file of sha256 "),
        "a name that climbs": (lambda: changed(folder, name="../../evil.csv"), "damaged index (got "),
        "an absolute name": (lambda: changed(folder, name="/tmp/evil.csv"), "damaged index (got "),
        "a digest that climbs": (lambda: changed(folder, sha256="../../../../etc/passwd"), "damaged index (got "),
        "a hidden name": (lambda: changed(folder, name=".bashrc.csv"), "damaged index (got "),
        "a signature of a stranger": (
            lambda: (changed(folder, signature=signed), (folder / "sha256" / signed).write_bytes(bytes(stranger))),
            f"signed by a key that {KEYS} does not list",
        ),
        "no signature": (lambda: changed(folder, signature=""), "unsigned; ask its author to sign it, or pass --unsigned"),
        "another name than was signed": (lambda: changed(folder, name="other.csv"), "signed as another file"),
        "a later index": (
            lambda: index.write_text('{"format": 2, "tables": []}'),
            "an index of a later format (got 2; this tunedgemm reads 1)",
        ),
        "an index without a format": (lambda: index.write_text("{}"), "damaged index (got 'format')"),
        "an index that is a list": (lambda: index.write_text("[]"), "damaged index"),
        "a share beyond any float": (
            lambda: changed(folder, measured=[{"model": "m", "device": "d", "exact": 10**400, "padded": 0}]),
            "damaged index",
        ),
        "half an index": (lambda: index.write_bytes(index.read_bytes()[:99]), "damaged index"),
        "a size of no table": (lambda: changed(folder, size=True and "9"), "damaged index"),
        "a table of many terabytes": (lambda: changed(folder, size=1 << 50), "too large (got 1125899906842624 bytes)"),
    }


@in_a_folder
def test_bad_collections_write_nothing(collection: str, table: Path, tmp_path: Path, command: Command, monkeypatch) -> None:
    """Each fault is an error of one line, exit code 2, and nothing is written."""
    folder = Path(collection)
    assert command("put", table, collection)[0] == 0
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for what in damages(folder, table):
        for path, content in kept.items():
            path.write_bytes(content)
        damage, message = damages(folder, table)[what]
        damage()
        name = "other.csv" if what == "another name than was signed" else NAME
        before = sorted(tmp_path.rglob("*.csv*"))
        code, shown = command("get", collection, name, "-o", tmp_path / "out")
        assert (code, shown.count("\n")) == (2, 1) and message in shown, (what, shown)
        assert sorted(tmp_path.rglob("*.csv*")) == before, what
        if "index" in what:
            assert command("put", table, collection)[0] == 2 and (folder / INDEX).read_bytes() != kept[folder / INDEX], what


@in_a_folder
def test_what_is_not_put(collection: str, table: Path, keys: Any, tmp_path: Path, command: Command, monkeypatch) -> None:
    """An unpublished, unsigned, changed or badly named table, and a bad report, make no collection."""
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "bad name.csv"
    bad.write_bytes(table.read_bytes())
    keys.secret_key.sign_file(bad, prehash=True, drop_signature=True)
    (tmp_path / "list.json").write_text("[]")
    unsigned = tmp_path / "unsigned.csv"
    unsigned.write_bytes(table.read_bytes())
    for words, message in (
        ([tmp_path / "raw.csv", collection], "not a published table"),
        ([bad, collection], "rename it to letters, digits"),
        ([unsigned, collection], "unsigned; sign it with `minisign -Sm unsigned.csv`, or pass --unsigned"),
        ([tmp_path / "none.csv", collection], "no such file"),
        ([table, "s3://bucket"], "unknown scheme"),
        ([table, collection, "--coverage", "x"], "--coverage: must be MODEL=FILE"),
        ([table, collection, "--coverage", f"x={tmp_path / 'list.json'}"], "not a report of `tunedgemm coverage --json`"),
        ([table, collection, "--coverage", f"x={report(tmp_path / 'huge.json', 10**400)}"], "not a report of `tunedgemm coverage --json`"),
        ([table, "oci:/host/name"], "unknown scheme"),
        ([table, ""], "the name of a collection is empty"),
        ([table, "oci://host"], "names no artefact"),
        ([table, "oci://host/a/b:c:d"], "oci://host/a/b:c:d: "),
    ):
        code, shown = command("put", *words)
        assert code == 2 and message in shown, shown
    assert not Path(collection).exists() or not (Path(collection) / INDEX).exists()
    code, shown = command("get", collection)
    assert code == 2 and "no collection of tables" in shown
    assert command("put", unsigned, collection, "--unsigned")[0] == 0
    assert "unsigned; ask" in command("get", collection, "unsigned.csv", "-o", tmp_path / "o")[1]
    assert command("get", collection, "unsigned.csv", "-o", tmp_path / "o", "--unsigned")[0] == 0


@in_a_folder
def test_another_file_of_the_name_stays(collection: str, table: Path, tmp_path: Path, command: Command) -> None:
    """Getting a table twice is fine; a file with another content is left."""
    assert command("put", table, collection)[0] == 0
    for _ in range(2):
        assert command("get", collection, NAME, "-o", tmp_path / "out")[0] == 0
    (tmp_path / "out" / NAME).write_text("mine")
    code, shown = command("get", collection, NAME, "-o", tmp_path / "out")
    assert code == 2 and "exists already, with another content" in shown and (tmp_path / "out" / NAME).read_text() == "mine"
    code, shown = command("get", collection, "none.csv")
    assert code == 2 and "no such table (got 'none.csv')" in shown


@in_a_folder
def test_another_signature_stays(collection: str, table: Path, tmp_path: Path, command: Command) -> None:
    """A signature that was not checked does not replace the one next to the table."""
    assert command("put", table, collection)[0] == 0
    signature = tmp_path / "out" / f"{NAME}.minisig"
    signature.parent.mkdir()
    signature.write_text("mine")
    code, shown = command("get", collection, NAME, "-o", tmp_path / "out", "--unsigned")
    assert code == 2 and f"{signature}: exists already" in shown
    assert signature.read_text() == "mine" and not (tmp_path / "out" / NAME).exists()


@in_a_folder
def test_what_others_measured_stays(collection: str, table: Path, tmp_path: Path, command: Command) -> None:
    """The same table put for another model, or for none, keeps the first one's coverage."""
    assert command("put", table, collection, "--coverage", f"first={report(tmp_path / 'c.json')}")[0] == 0
    assert command("put", table, collection, "--coverage", f"second={report(tmp_path / 'c.json', 0.5)}")[0] == 0
    assert command("put", table, collection, "--coverage", f"first={report(tmp_path / 'c.json', 0.25)}")[0] == 0
    assert command("put", table, collection)[0] == 0
    shown = command("get", collection)[1].splitlines()[1:]
    assert [line.split(" of calls")[0] for line in shown] == [
        "  first on gfx942:304:mi300x: 37.5%", "  second on gfx942:304:mi300x: 62.5%"
    ]  # fmt: skip


@in_a_folder
def test_a_full_index_is_refused(collection: str, table: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger one could not be read any more."""
    monkeypatch.setattr("tunedgemm.table.collection.MAX_INDEX", 100)
    code, shown = command("put", table, collection)
    assert code == 2 and "its index is full" in shown and not (Path(collection) / INDEX).exists()


def test_a_damaged_configuration_of_docker_is_named(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one line with the place, not a traceback."""
    pytest.importorskip("oras")
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker" / "config.json").write_text("{bad")
    monkeypatch.setenv("HOME", str(tmp_path))
    code, shown = command("get", "oci://localhost:1/acme/tables")
    assert code == 2 and "error: oci://localhost:1/acme/tables: " in shown and shown.count("\n") == 1


@in_a_folder
@pytest.mark.parametrize("name", [INDEX, "sha256", "table"])
def test_links_in_a_collection_are_not_followed(collection: str, table: Path, tmp_path: Path, command: Command, name: str) -> None:
    """Another writer of the folder cannot lead a put to a file outside; the folder itself may be a link."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    Path(collection).symlink_to(elsewhere)
    link = elsewhere / (f"sha256/{hashlib.sha256(table.read_bytes()).hexdigest()}" if name == "table" else name)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "victim")
    if name == "sha256":
        (tmp_path / "victim").mkdir()
    code, shown = command("put", table, collection)
    assert code == 2 and "a symbolic link, which leads out of the collection" in shown
    assert not (tmp_path / "victim").exists() or not list((tmp_path / "victim").iterdir())
    link.unlink()
    assert command("put", table, collection)[0] == 0


@pytest.mark.parametrize("collection", ["oci"], indirect=True)
@pytest.mark.parametrize("kind", ["oci.image.manifest.v1", "oci.image.index.v1", "docker.distribution.manifest.list.v2"])
def test_an_image_is_not_replaced(collection: str, table: Path, server: Server, command: Command, kind: str) -> None:
    """A name that has a container's image, of one platform or several, stays."""
    parts = {"layers": [{"digest": "sha256:1", "size": 1}]} if "manifest.v1" in kind else {"manifests": []}
    server.manifest = image = json.dumps({"mediaType": f"application/vnd.{kind}+json", **parts}).encode()
    for words in (("put", table, collection), ("get", collection)):
        code, shown = command(*words)
        assert code == 2 and "is no collection of tables (got " in shown, shown
    assert server.manifest == image

"""Places of collections: folders, OCI artefacts, data sets of the Hugging Face Hub. Torch-free."""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunedgemm.errors import TableError, UserError
from tunedgemm.process.files import read_regular, replace_file
from tunedgemm.process.paths import expanded
from tunedgemm.table.collection import INDEX, MAX_INDEX, Place, digest_of
from tunedgemm.table.sheet import locked

OCI, HUB = "oci://", "hf://"
#: Hosts of registries without TLS.
_LOCAL = ("localhost", "127.0.0.1")
#: Annotation of a layer with its file's name, and media types of layers.
_TITLE, _MEDIA_TYPE = "org.opencontainers.image.title", "application/vnd.tunedgemm.table"
_ABSENT, _CHUNK = 404, 1 << 20
#: Media types of what a name may have. A registry answers "absent" for one that is not asked for.
_MANIFESTS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in ("oci.image.manifest.v1", "oci.image.index.v1", "docker.distribution.manifest.v2", "docker.distribution.manifest.list.v2")
)


def place_of(text: str) -> Place:
    """Return the place that a text names: ``oci://HOST/NAME:TAG``, ``hf://OWNER/NAME`` or a folder.

    Raises:
        UserError: no name, another scheme, or the library of that place is not installed.
    """
    if text.startswith(OCI):
        return _Oci(text)
    if text.startswith(HUB):
        return _Hub(text)
    if not text.strip():
        raise UserError(f"the name of a collection is empty (got {text!r}); name a folder, {OCI}HOST/NAME:TAG or {HUB}OWNER/NAME")
    if re.match(r"\w+:/", text):
        raise UserError(f"{text}: unknown scheme; name {OCI}HOST/NAME:TAG, {HUB}OWNER/NAME or a folder")
    return _Folder(expanded(text))


class _Folder:
    """A folder with the index, and the other files below ``sha256``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str, most: int) -> bytes | None:
        """Return a file, at most *most* bytes and one more."""
        try:
            return read_regular(self._folder / name)[: most + 1]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TableError(f"{self._folder / name}: cannot be read: {error.strerror or error}") from error

    def update(self, files: Mapping[str, bytes], change: Callable[[bytes | None], bytes]) -> None:
        """Write files and the index under its lock."""
        with locked(self._folder / INDEX):
            index = change(self.read(INDEX, MAX_INDEX))
            try:
                for name, content in [*files.items(), (INDEX, index)]:
                    path = self._folder / name
                    if path.is_symlink() or (path.parent.is_symlink() and path.parent != self._folder):  # of another writer
                        raise TableError(f"{path}: a symbolic link, which leads out of the collection; delete it")
                    path.parent.mkdir(exist_ok=True)
                    replace_file(path, content)
            except OSError as error:
                raise TableError(f"{self._folder}: cannot be written: {error.strerror or error}; name another folder") from error


@contextlib.contextmanager
def _failing_as(where: str, remedy: str) -> Iterator[None]:
    """Raise TableError for what a client library raises: errors of the network, refusals, bad answers."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise TableError(f"{where}: {str(error) or type(error).__name__}; {remedy}".replace("\n", " ")) from error


class _Oci:
    """An artefact of an OCI registry, whose layers are the files; layers have their digests' names."""

    def __init__(self, where: str) -> None:
        try:
            from oras.client import OrasClient
        except ImportError as error:
            raise UserError(f"{where}: needs the library oras; pip install 'tunedgemm[oci]'") from error
        host, slash, name = where.removeprefix(OCI).partition("/")
        if not (host and slash and name):
            raise UserError(f"{where}: names no artefact; write {OCI}HOST/NAME:TAG")
        self._where = where
        with _failing_as(where, "check the name, and the configuration of docker"):
            self._client: Any = OrasClient(hostname=host, insecure=host.partition(":")[0] in _LOCAL)
            once = getattr(OrasClient.do_request, "__wrapped__", OrasClient.do_request)
            self._client.do_request = functools.partial(once, self._client)  # the library would try again for two minutes, in silence
            self._container = self._client.get_container(f"{host}/{name}")
            self._client.auth.load_configs(self._container)

    def read(self, name: str, most: int) -> bytes | None:
        """Return a layer, at most *most* bytes and one chunk more."""
        with _failing_as(self._where, "check the name, the network and `docker login`"):
            digest = name.replace("sha256/", "sha256:")
            if name == INDEX:
                digest = next((layer["digest"] for layer in self._layers() if _title(layer) == INDEX), "")
            return self._blob(digest, most) if digest else None

    def _layers(self) -> list[dict[str, Any]]:
        """Return the layers of the artefact, none of an absent one.

        Raises:
            TableError: the name has something else, such as a container's image.
        """
        url = f"{self._client.prefix}://{self._container.manifest_url()}"
        response = self._client.do_request(url, headers={"Accept": _MANIFESTS})
        if response.status_code == _ABSENT:
            return []
        response.raise_for_status()
        layers = list(response.json().get("layers", ()))
        if all(_title(layer) != INDEX for layer in layers):
            raise TableError(f"{self._where}: is no collection of tables (got {len(layers)} layers without {INDEX}); name another tag")
        return layers

    def _blob(self, digest: str, most: int) -> bytes | None:
        response = self._client.get_blob(self._container, digest, stream=True)
        if response.status_code == _ABSENT:
            return None
        response.raise_for_status()
        content = bytearray()
        for chunk in response.iter_content(_CHUNK):
            content += chunk
            if len(content) > most:
                break
        return bytes(content)

    def update(self, files: Mapping[str, bytes], change: Callable[[bytes | None], bytes]) -> None:
        """Upload files, and a manifest that adds them; of two at a time the later one's stays."""
        from oras.oci import ManifestConfig, NewManifest

        index = change(self.read(INDEX, MAX_INDEX))
        with _failing_as(self._where, "check the name, the network and `docker login`"):
            old = [layer for layer in self._layers() if _title(layer) != INDEX]
            new = [self._uploaded(name, content) for name, content in [*files.items(), (INDEX, index)]]
            config, _ = ManifestConfig()
            self._upload(b"{}", config)
            added = {layer["digest"] for layer in new}
            manifest = {**NewManifest(), "config": config, "layers": [layer for layer in old if layer["digest"] not in added] + new}
            self._client.upload_manifest(manifest, self._container).raise_for_status()

    def _uploaded(self, name: str, content: bytes) -> dict[str, Any]:
        layer = {"mediaType": _MEDIA_TYPE, "digest": f"sha256:{digest_of(content)}", "size": len(content), "annotations": {_TITLE: name}}
        self._upload(content, layer)
        return layer

    def _upload(self, content: bytes, layer: dict[str, Any]) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            self._client.upload_blob(file.name, self._container, layer).raise_for_status()


def _title(layer: Mapping[str, Any]) -> str:
    return str((layer.get("annotations") or {}).get(_TITLE, ""))


class _Hub:
    """A data set of the Hugging Face Hub; a change is one commit on top of the one that was read."""

    def __init__(self, where: str) -> None:
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise UserError(f"{where}: needs the library huggingface_hub; pip install 'tunedgemm[hub]'") from error
        self._where, (self._repo, _, revision) = where, where.removeprefix(HUB).partition("@")
        self._revision: str | None = revision or None
        self._api = HfApi(library_name="tunedgemm")

    def read(self, name: str, most: int) -> bytes | None:
        """Return a file of the revision."""
        return self._read(name, most, self._revision)

    def _read(self, name: str, most: int, revision: str | None) -> bytes | None:
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        with _failing_as(self._where, "check the name, the network and `hf auth login`"):
            try:
                path = self._api.hf_hub_download(self._repo, name, repo_type="dataset", revision=revision)
            except LocalEntryNotFoundError:  # the network failed, and nothing is in the cache
                raise
            except EntryNotFoundError:
                return None
            return read_regular(Path(path))[: most + 1]

    def update(self, files: Mapping[str, bytes], change: Callable[[bytes | None], bytes]) -> None:
        """Commit files and the index; the Hub refuses it if another commit came meanwhile."""
        from huggingface_hub import CommitOperationAdd

        with _failing_as(self._where, "check the name, the network and `hf auth login`, and put it again"):
            head = self._api.repo_info(self._repo, repo_type="dataset", revision=self._revision).sha
            index = change(self._read(INDEX, MAX_INDEX, head))
            added = [CommitOperationAdd(name, content) for name, content in [*files.items(), (INDEX, index)]]
            message = "Add a table of tunedgemm"
            self._api.create_commit(
                self._repo, added, commit_message=message, repo_type="dataset", revision=self._revision, parent_commit=head
            )

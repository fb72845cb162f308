"""The artifact cache: compiled kernels and other derived bytes, kept between processes.

One file per artifact, in a private folder of the user (``TUNEDGEMM_CACHE`` overrides it).
A file is the SHA-256 of its payload, then the payload; a torn or edited one is rebuilt.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tunedgemm.errors import PluginError

_DIGEST = hashlib.sha256().digest_size
_memory: dict[str, bytes] = {}


def cache_folder() -> Path:
    """Return the folder of the artifact cache; it need not exist yet."""
    if override := os.environ.get("TUNEDGEMM_CACHE"):
        return Path(override)
    import platformdirs

    return Path(platformdirs.user_cache_dir("tunedgemm", appauthor=False))


def artifact(key: str, build: Callable[[], bytes], *, fresh: bool = False, on_disk: bool = False) -> bytes:
    """Return the bytes stored under *key*, building and storing them when they are missing or damaged.

    Args:
        key: everything that the bytes depend on: source, architecture, compiler and version,
            options.
        build: returns the bytes; called at most once, outside any lock.
        fresh: rebuild, and replace the stored bytes.
        on_disk: the bytes are for another process, so a failure to store them is an error.

    Without *on_disk*, an unwritable folder only means that this process keeps the bytes in memory.

    Raises:
        PluginError: *build* did not return bytes, or they cannot be stored and must be *on_disk*.
    """
    name = hashlib.sha256(key.encode()).hexdigest()
    path = cache_folder() / name[:2] / name
    payload = None if fresh else (None if on_disk else _memory.get(name)) or _read(path)
    if payload is None:
        payload = build()
        if not isinstance(payload, bytes):
            raise PluginError(f"artifact {key[:60]!r}: build() must return bytes (got {type(payload).__name__})")
        failed = _write(path, payload)
        if failed and on_disk:
            raise PluginError(f"the artifact cache cannot be written ({failed}); set TUNEDGEMM_CACHE to a writable folder")
        if failed:
            _memory[name] = payload
        else:
            _memory.pop(name, None)
    return payload


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, payload = content[:_DIGEST], content[_DIGEST:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def _write(path: Path, payload: bytes) -> OSError | None:
    """Store the payload; return the error where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent)  # created with mode 0600
    except OSError as error:
        return error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).digest() + payload)
        Path(temporary).replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        return error
    return None

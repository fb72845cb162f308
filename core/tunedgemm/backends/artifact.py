"""Artifact cache: compiled kernels and other derived bytes on disk, shared by processes.

One file per artifact, in a private folder of the user (``TUNEDGEMM_CACHE`` overrides it).
``TUNEDGEMM_SHARED_CACHE`` names a second folder, which is only read.
A file is the SHA-256 of its payload, then the payload; a truncated or modified one is rebuilt.
Files and folders that others may write are not used, since a kernel runs with the user's rights.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tunedgemm.backends.file_trust import UntrustedError, make_private, read_private, read_trusted
from tunedgemm.backends.signed_files import SignatureError, check_signature
from tunedgemm.errors import PluginError
from tunedgemm.process.paths import expanded, user_folder
from tunedgemm.process.variables import read
from tunedgemm.text.printable import warn_once

#: Environment variables of the two folders.
PRIVATE, SHARED = "TUNEDGEMM_CACHE", "TUNEDGEMM_SHARED_CACHE"
_DIGEST = hashlib.sha256().digest_size
#: Age in seconds at which temporary files are deleted, and interval of the search for them.
_STALE_S = 24 * 3600.0
#: Temporary files of `tempfile.mkstemp`, and folders of a compiler's cache below ours.
_TEMPORARY = ("*/tmp????????", "*/*/tmp.pid_*")
_memory: dict[str, bytes] = {}


def cache_folder() -> Path:
    """Return the folder of the artifact cache; it need not exist yet."""
    return user_folder(PRIVATE, "cache")


def artifact(key: str, build: Callable[[], bytes], *, fresh: bool = False, on_disk: bool = False) -> bytes:
    """Return the cached bytes of *key*; build and store them if missing or damaged.

    Args:
        key: all that determines the bytes: source, architecture, compiler, version, options.
        build: returns the bytes; called at most once, outside any lock.
        fresh: rebuild and replace the cached bytes.
        on_disk: raise if the bytes cannot be stored, since another process needs them.

    Without *on_disk*, an unwritable folder only disables the cache on disk.

    Raises:
        PluginError: *build* did not return bytes, or they cannot be stored and must be *on_disk*.
    """
    name = hashlib.sha256(key.encode()).hexdigest()
    place = f"{name[:2]}/{name}"
    payload = None if fresh else (None if on_disk else _memory.get(name)) or _stored(place)
    if payload is None:
        payload = build()
        if not isinstance(payload, bytes):
            raise PluginError(f"artifact {key[:60]!r}: build() must return bytes (got {type(payload).__name__})")
        try:
            write_cached(place, [hashlib.sha256(payload).digest(), payload])
            _memory.pop(name, None)
        except OSError as error:
            if on_disk:
                raise PluginError(
                    f"the artifact cache cannot be written ({error}); set {PRIVATE} to a folder that only you may write"
                ) from error
            _memory[name] = payload
    return payload


def private_folder(name: str) -> Path:
    """Make a folder of the cache, check that it is private, and return its path.

    Raises:
        UntrustedError: others may change it.
        OSError: it cannot be made.
    """
    try:
        return make_private(cache_folder() / name)
    except UntrustedError as error:
        _warn(error)
        raise


def read_cached(place: str) -> bytes:
    """Read a file of the private cache by its relative path.

    Raises:
        OSError: it cannot be read, or others may change it.
    """
    try:
        return read_private(cache_folder() / place)
    except UntrustedError as error:
        _warn(error)
        raise


def write_cached(place: str, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file of the private cache atomically by its relative path.

    Raises:
        OSError: it cannot be written, or others may change its folder.
    """
    folder, _, name = place.rpartition("/")
    path = private_folder(folder) / name
    handle, temporary = tempfile.mkstemp(dir=path.parent)  # created with mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        Path(temporary).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    _sweep(cache_folder())


def _stored(place: str) -> bytes | None:
    """Return the payload in the private or else the shared cache; None if missing or damaged."""
    with contextlib.suppress(OSError):
        if (payload := _whole(read_cached(place))) is not None:
            return payload
    if not (shared := read(SHARED)):
        return None
    file = expanded(shared, SHARED) / place
    try:
        check_signature(file, content := read_trusted(file))
    except SignatureError as error:
        warn_once(f"{SHARED}: {error}")
    except UntrustedError as error:
        warn_once(f"{error}; {SHARED} must be a folder that only root or you may write")
    except OSError:
        pass
    else:
        return _whole(content)
    return None


def _whole(content: bytes) -> bytes | None:
    digest, payload = content[:_DIGEST], content[_DIGEST:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def _warn(error: UntrustedError) -> None:
    """Log what in the private cache is not used, with the remedy."""
    remedy = f"set {PRIVATE} to a folder that only you may write, or read a cache of root through {SHARED}"
    warn_once(f"{error}; the cache is not used: empty it and mend owner and mode (`chmod go-w`), {remedy}")


def _sweep(folder: Path) -> None:
    """Delete temporary files of killed writers, once a day.

    The modification time of the empty folder ``swept`` is that of the last search.
    """
    swept, now = folder / "swept", time.time()
    with contextlib.suppress(OSError):
        if now - swept.stat().st_mtime < _STALE_S:
            return
    with contextlib.suppress(OSError):
        os.utime(make_private(swept))
        for pattern in _TEMPORARY:
            for path in folder.glob(pattern):
                with contextlib.suppress(OSError):
                    if now - path.lstat().st_mtime > _STALE_S:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()

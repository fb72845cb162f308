"""Read regular files, and replace them atomically; imports nothing from the package."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import BinaryIO

from tunedgemm.process.variables import read

#: Variable with the largest file size to read, in MiB.
LARGEST = "TUNEDGEMM_MAX_FILE_MIB"

#: Its defaults for tables, and for JSON, which takes ten times its size in memory.
TABLE_MIB = 1024
JSON_MIB = 64

#: Age in seconds at which temporary files of killed writers are removed.
STALE = 3600.0

_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def largest_file(mib: int = TABLE_MIB) -> int:
    """Return the largest file size to read in bytes: the variable's, else *mib* MiB."""
    return int(read(LARGEST) or mib) << 20


def open_regular(path: Path, mode: str = "rb", *, flags: int = 0, mib: int = TABLE_MIB) -> BinaryIO:
    """Open a regular file, without blocking on pipes or devices.

    Args:
        mode: as `open`; a file that is also written is not buffered.
        flags: more flags, such as ``os.O_APPEND``.
        mib: the largest size, unless `LARGEST` names another.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or is larger than `LARGEST`
            allows.
    """

    def opener(name: str, needed: int) -> int:
        # Without O_NONBLOCK, a pipe would keep its reader waiting before fstat could reveal it.
        return os.open(name, needed | flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)

    try:
        file = open(path, mode, buffering=-1 if mode == "rb" else 0, opener=opener)  # noqa: SIM115
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.EINVAL, "not a regular file (got a socket or a device)") from None
    try:
        status = os.fstat(file.fileno())
        _check_kind(status.st_mode)
        _check_size(status.st_size, largest_file(mib))
    except BaseException:
        file.close()
        raise
    return file  # type: ignore[return-value]


def _check_kind(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"not a regular file (got {_KINDS.get(stat.S_IFMT(mode), 'a folder')})")


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB; raise {LARGEST} to read it")


def read_regular(path: Path, mib: int = TABLE_MIB) -> bytes:
    """Return the content of a regular file; see `open_regular`."""
    with open_regular(path, mib=mib) as file:
        content = file.read(largest_file(mib) + 1)  # a file of /proc has size 0, and any file may grow
    _check_size(len(content), largest_file(mib))
    return content


def target_of(path: Path) -> Path:
    """Resolve all links of a path; the target need not exist.

    Raises:
        OSError: the links lead to themselves, or the path can only be a folder.
    """
    target = Path(os.path.realpath(path))  # unlike Path.resolve, it returns a loop as it found it
    if not target.name:
        raise OSError(errno.EISDIR, "a folder; name a file in it")
    if target.is_symlink():
        raise OSError(errno.ELOOP, "the symbolic links lead to themselves; name the file itself")
    return target


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file atomically: after a crash it has the old content or the new.

    A link is followed, and the file's mode is kept.

    Args:
        durable: sync to the disk, so that the content also survives a power cut.

    Raises:
        OSError: it is not a regular file, the folder cannot be written, or the disk is full; the
            old content remains.
    """
    target = target_of(path)
    mode = None
    with contextlib.suppress(FileNotFoundError):
        _check_kind(mode := target.stat().st_mode)
    _remove_stale(target)
    temporary = target.with_name(f".{_shortened(target)}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o666 if mode is None else 0o600)  # the umask applies
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            if mode is not None:
                with contextlib.suppress(PermissionError):
                    os.fchmod(handle, stat.S_IMODE(mode))
            if durable:
                os.fsync(handle)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        _sync_folder(target.parent)


def _shortened(target: Path) -> str:
    """Return the name, truncated to leave room for the suffix of a temporary file."""
    return os.fsdecode(os.fsencode(target.name)[:200])


def _remove_stale(target: Path) -> None:
    """Remove the temporary files that killed writers of this file left behind."""
    pattern = re.compile(rf"\.{re.escape(_shortened(target))}\.[0-9a-f]{{16}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process removes it, too
                if pattern.fullmatch(entry.name) and time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE:
                    Path(entry).unlink()


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder; the content itself is safe
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

"""Check the ownership and permissions of files before their bytes are run or trusted.

A file is used only if its owner is trusted and others cannot write it, nor replace a folder above
it: who can write a cache or a pack can run code as this user.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from tunedgemm.process.files import open_regular

_OTHERS = stat.S_IWGRP | stat.S_IWOTH  # an access control list that lets others write sets the group's bit
_USERS, _UNMAPPED = "/proc/self/uid_map", "/proc/sys/kernel/overflowuid"


class UntrustedError(PermissionError):
    """A file or folder that others own or may write."""


def make_private(folder: Path) -> Path:
    """Make a folder that only this user may enter, or check an existing one; return its real path.

    Raises:
        UntrustedError: others own it or may write it, or may replace a folder above it.
        OSError: it cannot be made.
    """
    path = Path(os.path.realpath(folder))
    for level in _levels(path):
        if not os.path.lexists(level):
            with contextlib.suppress(FileExistsError):  # made by another process meanwhile
                level.mkdir(mode=0o700)
                level.chmod(0o700)  # a umask may clear the owner's bits
        _check_folder(level)
    _check(path, path.stat(), {os.geteuid()})
    return path


def fault_of(folder: Path) -> str:
    """Return why an existing folder is not private; "" if it is."""
    try:
        make_private(Path(os.path.realpath(folder, strict=True)))
    except OSError as error:
        return str(error)
    return ""


def read_private(file: Path) -> bytes:
    """Return the bytes of a file in a folder that `make_private` made; raises as `read_trusted`."""
    return read_trusted(file, owners={os.geteuid()})


def read_trusted(file: Path, most: int = -1, *, owners: Iterable[int] = ()) -> bytes:
    """Return the bytes of a regular file, after checking the opened file.

    Args:
        most: most bytes to read; -1 for all.
        owners: users that may own it and its folder; by default root, this user and the owner of
            this package.

    Raises:
        UntrustedError: another user owns it or may write it, or may replace a folder above it.
        OSError: it cannot be read.
    """
    path = Path(os.path.realpath(file))
    for level in _levels(path.parent):
        _check_folder(level)
    if owners:
        _check(path.parent, path.parent.stat(), owners)
    with open_regular(path, flags=os.O_NOFOLLOW) as opened:
        _check(path, os.fstat(opened.fileno()), owners or _trusted_owners())
        return opened.read(most)


def _levels(path: Path) -> list[Path]:
    """Return the folders above a resolved path, and the path, from the root down.

    Those above a folder are checked before it, so that others cannot put a link in its place later.
    """
    return [*reversed(path.parents), path]


def _check_folder(level: Path) -> None:
    status = level.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(level))
    # In a sticky folder, such as /tmp, others cannot replace what they do not own.
    _check(level, status, _trusted_owners(), sticky=True)


def _check(path: Path, status: os.stat_result, owners: Iterable[int], *, sticky: bool = False) -> None:
    if status.st_uid not in owners:
        raise UntrustedError(f"{path}: owned by another user (got uid {status.st_uid}, this process has {os.geteuid()})")
    if status.st_mode & _OTHERS and not (sticky and status.st_mode & stat.S_ISVTX):
        raise UntrustedError(f"{path}: writable by others (got mode {stat.S_IMODE(status.st_mode):04o})")


def _trusted_owners() -> set[int]:
    return {os.geteuid(), *_system_owners()}


@functools.cache
def _system_owners() -> frozenset[int]:
    """Return root, the owner of this code, and the user as which root appears in a namespace."""
    owners = {0}
    try:
        owners.add(Path(__file__).stat().st_uid)
        if Path(_USERS).read_text().split() != ["0", "0", str(2**32 - 1)]:
            owners.add(int(Path(_UNMAPPED).read_text()))
    except (OSError, ValueError):  # a zipped package, or a system without user namespaces
        pass
    return frozenset(owners)

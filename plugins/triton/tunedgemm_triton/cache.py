"""Keep Triton's files of a program where others may not change them, since their code is run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager
from tunedgemm.tools.files import private_folder


class PrivateCache(FileCacheManager):  # type: ignore[misc]
    """Folder of one program's files; a file that others own or may write counts as missing."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        if not override and not dump:
            private_folder(str(Path(knobs.cache.dir, key)))
        super().__init__(key, override, dump)

    def has_file(self, filename: str) -> bool:
        """Return whether the folder has a file that only this user may have written."""
        return _is_private(self._make_path(filename))

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a compile's files, None where one is missing or elsewhere."""
        group: dict[str, str] | None = super().get_group(filename)
        inside = group and all(os.path.dirname(path) == self.cache_dir and _is_private(path) for path in group.values())  # noqa: PTH120
        return group if inside else None

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Store a file that only this user may read or write, whatever the umask."""
        path: str = super().put(data, filename, binary)
        os.chmod(path, 0o600)  # noqa: PTH101
        return path


def _is_private(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)

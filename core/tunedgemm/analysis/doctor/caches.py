"""Folders of tables and compiled kernels: their sizes and permissions."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from tunedgemm.analysis.doctor.finding import Fact, Fault, Section, Value
from tunedgemm.backends.artifact import PRIVATE, SHARED, cache_folder
from tunedgemm.backends.file_trust import fault_of
from tunedgemm.process.paths import expanded
from tunedgemm.process.variables import read
from tunedgemm.table.folders import home_folder

#: Seconds after which the files of a folder are no longer counted.
SECONDS = 2.0


def caches() -> Section:
    """List the user's folders; one that others may change is not used, which is a fault."""
    home, cache, shared = home_folder(), cache_folder(), read(SHARED)
    facts = [_fact("tables and captured shapes", home), _fact("compiled kernels", cache)]
    faults = [*_unwritable(home, "TUNEDGEMM_HOME"), *_unwritable(cache, PRIVATE), *_loose(cache)]
    if shared:
        folder = expanded(shared, SHARED)
        facts.append(_fact("shared kernels", folder))
        if not folder.is_dir():
            faults.append(Fault(str(folder), "no such folder", f"name a folder of root's or yours with {SHARED}, or unset it"))
    return Section("caches", tuple(facts), tuple(faults))


def _fact(name: str, folder: Path) -> Fact:
    try:
        status = folder.stat()
    except OSError as error:
        return Fact(name, str(folder), {"exists": False, "reason": error.strerror or str(error)})
    size, count, complete = 0, 0, True
    deadline = time.monotonic() + SECONDS
    for entry in _entries(folder):
        size, count = size + entry.st_size, count + 1
        if time.monotonic() > deadline:
            complete = False
            break
    more: dict[str, Value] = {"exists": True, "bytes": size, "files": count, "counted_all": complete}
    return Fact(name, str(folder), more | {"mode": f"{stat.S_IMODE(status.st_mode):04o}", "uid": status.st_uid})


def _entries(folder: Path) -> Iterator[os.stat_result]:
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                yield os.lstat(Path(parent, file))
            except OSError:  # removed meanwhile
                continue


def _unwritable(folder: Path, variable: str) -> Iterator[Fault]:
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if not existing.is_dir():
        yield Fault(str(folder), f"not a folder (got {existing})", f"name another with {variable}")
    elif not os.access(existing, os.W_OK | os.X_OK):
        mode = stat.S_IMODE(existing.stat().st_mode)
        yield Fault(str(folder), f"this user cannot write it (got mode {mode:04o} of {existing})", f"name another with {variable}")


def _loose(cache: Path) -> Iterator[Fault]:
    """Yield why the cache, or a folder inside it, is not used: others may change it."""
    if not cache.is_dir():
        return
    folders = [cache, *sorted(path for path in cache.glob("*") if path.is_dir())]
    remedy = f"it is not used until you mend owner and mode (`chmod go-w`), or name another folder with {PRIVATE}"
    seen = set()
    for folder in folders:
        if (fault := fault_of(folder)) and fault not in seen:
            seen.add(fault)
            thing, _, rest = fault.rpartition(": ")
            yield Fault(thing, rest, remedy)

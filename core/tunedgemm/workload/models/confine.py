"""Confine: a process without network, writes, other files or much memory, for the rest of its life."""

from __future__ import annotations

import itertools
import os
import resource
import sys
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.errors import UserError

#: Audit events, by the beginning of their names, of calls that leave the process or change files.
_REFUSED = (
    "socket.", "http.", "urllib.", "ftplib.", "smtplib.", "ssl.", "subprocess.", "pty.", "webbrowser.", "sqlite3.", "os.exec", "os.fork",
    "os.posix_spawn", "os.system", "os.kill", "os.putenv", "signal.pthread_kill", "shutil.", "tempfile.", "os.remove", "os.rename",
    "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.chdir",
)  # fmt: skip
#: The audit events of files whose content is read or run, and the index of the path.
_PATHS = {"open": 0, "import": 1, "ctypes.dlopen": 0}


@attrs.frozen
class Limits:
    """Limits on describing one model, beyond those of any real one.

    Attributes:
        modules: most modules and parameters.
        memory: most bytes of address space beyond those of the idle process.
        seconds: most seconds of processor time.
    """

    modules: int = 1 << 17
    memory: int = 4 << 30
    seconds: int = 30


def beyond(folder: str, limit: str) -> str:
    """Write the fault of a model that exceeds a limit."""
    return f"{folder}/config.json: building its model takes more than {limit}; check the sizes in the file"


def too_deep(folder: str) -> str:
    """Write the fault of a file with too many levels."""
    return f"{folder}/config.json: nested too deeply; no model has such a file"


def confine(limits: Limits, folder: str = "") -> None:
    """Limit this process until it ends; `PermissionError` refuses what is not allowed.

    Files are read where Python's packages are, and nowhere else.
    """
    _limit_resources(limits)
    _limit_modules(limits.modules, folder)
    packages = (getattr(module, "__path__", ()) for name, module in list(sys.modules.items()) if "." not in name)
    folders = {sys.prefix, sys.base_prefix, *sys.path, *(folder for path in packages for folder in path)}
    roots = (*(f"{os.path.realpath(folder)}{os.sep}" for folder in folders), "/proc/", "/sys/", os.devnull)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(f"{event} is refused while a model is built from its config.json")
        path = arguments[_PATHS[event]] if event in _PATHS else None
        if isinstance(path, str | bytes):
            place = os.path.realpath(os.fsdecode(path))
            if not place.startswith(roots) or (event == "open" and _writes(arguments)):
                raise PermissionError(f"{event} of {place} is refused while a model is built from its config.json")

    sys.addaudithook(refuse)


def lift_time_limit() -> None:
    """Let this process go on for as long as it takes."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def _limit_resources(limits: Limits) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime) + 1 + limits.seconds,
        resource.RLIMIT_AS: _address_space() + limits.memory,
    }
    for kind, value in wanted.items():
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _address_space() -> int:
    """Return the bytes of address space of this process (the first field of /proc/PID/statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit_modules(most: int, folder: str) -> None:
    """Make torch refuse more than so many modules and parameters."""
    from torch.nn.modules import module

    count = itertools.count(1)

    def refuse(*_: object) -> None:
        if next(count) > most:
            raise UserError(beyond(folder, f"{most} modules and parameters"))

    module.register_module_module_registration_hook(refuse)
    module.register_module_parameter_registration_hook(refuse)


def _writes(arguments: tuple[Any, ...]) -> bool:
    """Tell whether the arguments of the audit event `open` may change a file."""
    _, mode, flags = arguments
    return bool(set(mode or "") & set("wax+")) or bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))

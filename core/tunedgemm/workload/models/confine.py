"""Confine: a process that writes no file and has little memory and time, for the rest of its life."""

from __future__ import annotations

import resource
from pathlib import Path

import attrs


@attrs.frozen
class Limits:
    """Limits on describing one model, beyond those of any real one.

    Attributes:
        memory: most bytes of address space beyond those of the idle process.
        seconds: most seconds of processor time.
    """

    memory: int = 4 << 30
    seconds: int = 30


def beyond(folder: str, limit: str) -> str:
    """Write the fault of a model that exceeds a limit."""
    return f"{folder}/config.json: building its model takes more than {limit}; check the sizes in the file"


def too_deep(folder: str) -> str:
    """Write the fault of a file with too many levels."""
    return f"{folder}/config.json: nested too deeply; no model has such a file"


def confine(limits: Limits) -> None:
    """Limit this process's memory, processor time and file sizes until it ends."""
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


def lift_time_limit() -> None:
    """Let this process go on for as long as it takes."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def _address_space() -> int:
    """Return the bytes of address space of this process (the first field of /proc/PID/statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

"""Confine this process permanently: limits on memory and CPU time, no file writes."""

from __future__ import annotations

import resource
from pathlib import Path

import attrs


@attrs.frozen
class Limits:
    """Limits on describing one model, beyond those of any real one.

    Attributes:
        memory: most bytes of address space in addition to the idle process's.
        seconds: most CPU seconds.
    """

    memory: int = 4 << 30
    seconds: int = 30


def beyond(folder: str, limit: str) -> str:
    """Return the message for a model that exceeds a limit."""
    return f"{folder}/config.json: building its model takes more than {limit}; check the sizes in the file"


def too_deep(folder: str) -> str:
    """Return the message for a file that is nested too deeply."""
    return f"{folder}/config.json: nested too deeply; no model has such a file"


def confine(limits: Limits) -> None:
    """Limit this process's address space, CPU time and file sizes permanently."""
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
    """Lift the limit on CPU time."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def _address_space() -> int:
    """Return the bytes of address space of this process (the first field of /proc/PID/statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

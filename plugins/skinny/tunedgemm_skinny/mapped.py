"""Mapped: files of a shared library that are in the process's memory, which torch mostly has loaded already."""

from __future__ import annotations

from pathlib import Path


def mapped(stem: str) -> list[str]:
    """Paths of the mapped files whose name starts with *stem*, as ``libcuda.so``."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in lines if stem in line)
    return [path for path in dict.fromkeys(paths) if Path(path).name.startswith(stem)]

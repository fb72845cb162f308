"""Child processes of Python: the variables with which one imports the same code, and how one ended."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def import_variables() -> dict[str, str]:
    """Return the environment variables with which a child imports from the same folders, and no others."""
    path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def signal_name(code: int) -> str:
    """Return the name of the signal that ended a process with this exit code, or ""."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return ""

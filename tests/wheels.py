"""Wheels of the examples, each in a separate environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any


def run(*command: object, code: int | None = 0, **settings: Any) -> str:
    """Run a command and return its output; *code* is the expected exit code, None for any."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, **settings)
    assert done.returncode == code or code is None, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def install(source: Path, folder: Path) -> tuple[Path, Path]:
    """Build the wheel of a source, and install it beneath the running environment's packages.

    Returns:
        The environment's python, and the wheel.
    """
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-build-isolation", "--no-deps"]
    run(*pip, "wheel", *offline, "--wheel-dir", folder / "wheels", source)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    # Paths from .pth files of the running environment (editable installs) must be found as well.
    (site / "running.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (wheel,) = (folder / "wheels").glob("*.whl")
    run(*pip, "--python", python, "install", *offline, wheel)
    return python, wheel

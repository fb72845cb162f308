"""Resolve every requirement of this repository against the plain index, without downloading it.

    python .ci/resolve.py [CONSTRAINTS]

For each Python and machine, the core with all of its extras, all plugins with theirs, and the
examples must install together: with the newest libraries, and with the oldest that the ranges
allow. uv reads the metadata of wheels alone, and nothing of pip's configuration. It prints each
conflict in uv's words, and ends with 1; with 2 where an index does not answer. CONSTRAINTS is a
file of further pins that must hold.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = tuple(f"3.{minor}" for minor in range(10, 15))
MACHINES = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
#: what is preferred within the ranges
ENDS = ("highest", "lowest-direct")


def requirements(root: Path) -> list[str]:
    """Return a requirement for each distribution of the repository, with all of its extras."""
    lines = []
    for file in (root / "pyproject.toml", *sorted(root.glob("plugins/*/pyproject.toml")), *sorted(root.glob("examples/*/pyproject.toml"))):
        text = file.read_text()
        name = re.search(r'^name = "([^"]+)"', text, re.MULTILINE)
        assert name, file
        table = re.search(r"^\[project\.optional-dependencies\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
        extras = re.findall(r"^([\w-]+) = \[", table[1], re.MULTILINE) if table else []
        lines.append(f"{name[1]}{'[' + ','.join(extras) + ']' if extras else ''} @ {file.parent.as_uri()}")
    return lines


def resolve(lines: list[str], python: str, machine: str, end: str, *words: str) -> tuple[int, str]:
    """Return uv's exit status, 1 for a conflict and 2 for any other fault, and its words."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    assert uv, "uv: not installed; pip install uv"
    command = [uv, "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate", "--no-python-downloads", "-"]
    command += ["--python-version", python, "--python-platform", machine, "--resolution", end, "--python", sys.executable]
    # The core's version is read from its source, so its metadata must be built.
    command += ["--only-binary", ":all:", "--no-binary", "tunedgemm", *words]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, env=plain, check=False)
    return done.returncode, done.stderr


def main(words: list[str]) -> int:
    """Resolve for each Python, machine and end; print conflicts, and return the exit status."""
    ways = list(itertools.product(PYTHONS, MACHINES, ENDS))
    more = ["--constraint", str(Path(words[0]).resolve())] if words else []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:
        # Building the metadata writes into the source tree.
        source = shutil.copytree(ROOT, Path(folder, "source"), ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info"))
        lines = requirements(source)
        answers = list(pool.map(lambda way: resolve(lines, *way, *more), ways))
    for (python, machine, end), (status, fault) in zip(ways, answers, strict=True):
        if status:
            print(f"Python {python}, {machine}, {end}: {'these requirements conflict' if status == 1 else 'not resolved'}\n{fault}")
    statuses = [status for status, _ in answers]
    print(f"{statuses.count(0)} of {len(ways)} resolved: {', '.join(PYTHONS)}; {', '.join(MACHINES)}; {', '.join(ENDS)}")
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

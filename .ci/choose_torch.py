"""Give .venv its torch, then the rest: keep the torch that PYTHON has, or install the build for this
machine. Triton follows torch: builds for GPUs require theirs, and one that requires none gets the
newest.

    .venv/bin/python .ci/choose_torch.py PYTHON WORDS-OF-PIP-FOR-THE-REST

TORCH_INDEX names the index of the build, one of PyTorch's: its address ends in the label of its
builds, as .../whl/cpu or .../whl/rocm7.1. Empty, pip's own configuration decides alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: label of a build without numbers -> size of 2.13 and 2.14 for x86-64 with what they require
SIZES = {"cpu": "0.2 GB to download, 0.8 GB on disk", "cu": "3 GB to download, 5 GB on disk for CUDA"}
#: what a Python says of its torch: its own version, torch's, and the folder that has it
ASK = """
import importlib.metadata as m, json, sys
torch = m.distribution("torch")
print(json.dumps([sys.version_info[:2], torch.version, str(torch.locate_file(""))]))
"""


def release(words: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", words)[:2]))


def least() -> str:
    """Return the oldest torch that the core takes."""
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found
    return found[1]


def kept(python: str) -> str:
    """Return the torch that .venv has, or has from now on by the folder of `python`; else nothing."""
    try:
        if release(version("torch")) >= release(least()):
            return f"{version('torch')} of .venv"
    except PackageNotFoundError:
        pass
    answer = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=False)
    if answer.returncode:
        return ""
    running, torch, folder = json.loads(answer.stdout)
    if tuple(running) != sys.version_info[:2] or release(torch) < release(least()):
        return ""
    # What .venv has itself comes first, so that pip can still replace a library that is too old.
    Path(sysconfig.get_path("purelib"), "torch_of_python.pth").write_text(f"{folder}\n")
    return f"{torch} in {folder}"


def gpu() -> str:
    """Return the vendor of this machine's GPUs, or an empty text."""
    if shutil.which("nvidia-smi") and not subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode:
        return "NVIDIA"
    return "AMD" if Path("/dev/kfd").exists() else ""


def builds(index: str) -> list[tuple[str, ...]]:
    """Return pip's words for each version with the label of `index`, newest first.

    It may be in that index or wherever pip looks anyway.
    """
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--extra-index-url", index, "--retries", "1", "--timeout", "15"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    listed = re.search(r"Available versions: (.*)", answer.stdout)
    label = "+" + index.rstrip("/").rpartition("/")[2]
    versions = [one for one in (listed[1].split(", ") if listed else []) if one.endswith(label) and release(one) >= release(least())]
    # An index that did not answer would cost each dependency its retries.
    where = () if "Retrying" in answer.stderr else ("--extra-index-url", index)
    return [(f"torch=={version}", *where) for version in versions]


def choose(index: str | None, vendor: str) -> tuple[str, ...]:
    """Return pip's words for the build of torch, by the index asked for or by the GPU's vendor.

    Raises:
        SystemExit: no index has the build.
    """
    plain = (f"torch>={least()}",)
    if index is None and vendor == "AMD":
        raise SystemExit(
            "torch: this machine has an AMD GPU, and the plain index has only CUDA builds (got no torch in PY); "
            "use a Python that has torch for ROCm (PY=python3), or name an index, by your ROCm or for the CPU alone: "
            f"make install TORCH_INDEX=https://download.pytorch.org/whl/rocm7.1, or {CPU_INDEX}"
        )
    index = ("" if vendor else CPU_INDEX) if index is None else index
    if not index:
        return plain
    if found := builds(index):
        return found[0]
    words = f"torch: no build for Python {sys.version_info[0]}.{sys.version_info[1]} was found (got {index})"
    if index != CPU_INDEX:
        raise SystemExit(f"{words}; check the address and the network")
    print(f"{words}; this machine has no GPU, but the plain index's build works, too", flush=True)
    return plain


def install(*words: str) -> None:
    """Install into .venv.

    Raises:
        SystemExit: pip failed.
    """
    if status := subprocess.run([sys.executable, "-m", "pip", "install", *words], check=False).returncode:
        raise SystemExit(
            f"make install: pip could not install what .venv needs (got status {status}, see above); "
            f"without a network, install into a Python that has torch: make install OFFLINE=1 PY={sys.argv[1]}"
        )


def size(build: str) -> str:
    """Return how much pip downloads for a requirement of torch."""
    label = build.partition("+")[2].rstrip("0123456789.") or "cu"  # the plain index's
    return f"about {SIZES[label]}; less where pip has some of it" if label in SIZES else "some GB to download"


def main() -> None:
    """Keep a torch or install one, say how much that will download, and install the rest."""
    python, *rest = sys.argv[1:]
    if torch := kept(python):
        print(f"torch: keeps {torch}", flush=True)
    else:
        words = choose(os.environ.get("TORCH_INDEX"), gpu())
        print(f"torch: installs {words[0]}, {size(words[0])}", flush=True)
        install(*words)
    if subprocess.run([sys.executable, "-c", "import triton"], capture_output=True, check=False).returncode:
        print("triton: this torch requires none; the newest is for tests in its interpreter, about 0.3 GB to download", flush=True)
        install("triton")
    print("make install: installs the development tools, about 1.4 GB on disk", flush=True)
    install("-q", *rest)


if __name__ == "__main__":
    main()

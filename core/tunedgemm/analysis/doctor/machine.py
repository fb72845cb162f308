"""Versions of what is installed, and the devices with their drivers."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from tunedgemm import __file__ as package
from tunedgemm.analysis.doctor.finding import Fact, Fault, Section
from tunedgemm.backends.registry import GROUP
from tunedgemm.device import device_of, drivers
from tunedgemm.process.plugin_guard import entry_points
from tunedgemm.version import __version__

#: Folder and pattern of files that exist where the machine, or the container, has a GPU.
GPU_FILES = (Path("/dev"), ("nvidia[0-9]*", "kfd"))
_REQUIRED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def versions() -> Section:
    """List the versions of Python, torch, the core, its plugins, and the libraries that they require."""
    import torch

    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}" if torch.version.cuda else "none"
    facts = [
        Fact("python", platform.python_version(), {"executable": sys.executable}),
        Fact("system", platform.platform()),
        Fact("torch", str(torch.__version__), {"path": str(Path(torch.__file__).parent)}),
        Fact("torch's GPU runtime", runtime),
        Fact("tunedgemm", __version__, {"path": str(Path(package).parent)}),
    ]
    plugins = {point.dist.name: point.dist.version for point in entry_points(group=GROUP) if point.dist}
    facts += [Fact(name, version) for name, version in sorted(plugins.items())]
    facts += [Fact(name, version) for name, version in _libraries(["torch", "tunedgemm", *plugins]) if name not in plugins]
    return Section("versions", tuple(facts))


def devices() -> Section:
    """List the GPUs that torch sees, the CPU and the driver; a GPU that torch does not see is a fault."""
    import torch

    gpus = [device_of(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    facts = [Fact(f"GPU {gpu.index}", str(gpu), {"bytes": int(torch.cuda.get_device_properties(gpu.index).total_memory)}) for gpu in gpus]
    facts.append(Fact("CPU", str(device_of(-1)), {"cores": os.cpu_count() or 0}))
    facts += [Fact(f"driver of {maker}", version) for maker, version in drivers().items()]
    return Section("device", tuple(facts), () if gpus else (_no_gpu(str(torch.__version__)),))


def _no_gpu(torch_version: str) -> Fault:
    folder, patterns = GPU_FILES
    if present := sorted(str(file) for pattern in patterns for file in folder.glob(pattern)):
        remedy = "install a torch that is built for this GPU and driver, and check the variables that hide devices"
        return Fault("GPU", f"torch sees none (got {present[0]}, torch {torch_version})", remedy)
    remedy = "the CPU serves; in a container, pass the GPUs through when it starts"
    return Fault("GPU", f"none on this machine (got torch {torch_version})", remedy, harmless=True)


def _libraries(distributions: Iterable[str]) -> list[tuple[str, str]]:
    """Return the installed requirements of distributions, apart from those of extras, with versions."""
    required: set[str] = set()
    for name in distributions:
        try:
            stated = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        required |= {found[0].lower() for text in stated if "extra ==" not in text and (found := _REQUIRED.match(text))}
    known = {}
    for name in sorted(required - {"torch", "tunedgemm"}):
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # for another platform
            continue
    return list(known.items())

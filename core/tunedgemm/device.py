"""Device: a device as a frozen value, present or only described."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.errors import UserError

if TYPE_CHECKING:
    import torch

#: CPU instruction sets, most capable first, named as in /proc/cpuinfo.
_CPU_FLAGS = (
    ("amx_bf16", "amx"), ("avx512_bf16", "avx512_bf16"), ("avx512f", "avx512"), ("avx2", "avx2"),
    ("sve", "sve"), ("asimd", "neon"),
)  # fmt: skip


#: Files with the version of a kernel driver.
DRIVERS = {"NVIDIA": Path("/proc/driver/nvidia/version"), "AMD": Path("/sys/module/amdgpu/version")}
_RELEASE = re.compile(r"\d+\.\d+(?:\.\d+)*")

#: The kernel driver's list of AMD GPUs, which ROCm's runtime and rocminfo read.
TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
#: HIP's variable for WGP or CU mode, and its value for CU mode.
_WGP_MODE, _CU_MODE = "GPU_ENABLE_WGP_MODE", "0"
#: Lanes of a wavefront where compute units have no pairs.
_CDNA_LANES = 64


def slug(name: str) -> str:
    """Return the slug of a device name: lower-case words joined by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@attrs.frozen(cache_hash=True)
class Device:
    """A device on which shapes run.

    Attributes:
        gfx: the architecture: ``gfx942``, ``gfx950``, ``sm_90``; on a CPU ``cpu-`` and its best
            instruction set.
        cu_num: compute units (see `compute_units`), streaming multiprocessors, or torch's threads
            on a CPU.
        name: slug of the product's name; "" in tables without the column.
        index: CUDA or HIP index; -1 for a CPU or a described device.
        versions: (name, version) of the libraries in use, not part of the identity. Plain strings,
            since unpickling torch's version object would import torch.
        emulated: whether this process's CPU emulates the device, in tests over fakes.
    """

    gfx: str = attrs.field(validator=attrs.validators.matches_re(r"[a-z0-9_.-]+"))
    cu_num: int = attrs.field(validator=attrs.validators.ge(0))
    name: str = ""
    index: int = attrs.field(default=-1, eq=False)
    versions: tuple[tuple[str, str], ...] = attrs.field(default=(), eq=False)
    emulated: bool = attrs.field(default=False, eq=False)

    @property
    def kind(self) -> str:
        """Return ``amd``, ``nvidia`` or ``cpu``."""
        return "amd" if self.gfx.startswith("gfx") else "nvidia" if self.gfx.startswith("sm_") else "cpu"

    @property
    def torch_device(self) -> torch.device:
        """Return the torch device; only for a present device."""
        import torch

        return torch.device("cpu") if self.kind == "cpu" or self.emulated else torch.device("cuda", max(self.index, 0))

    @property
    def is_present(self) -> bool:
        """Check whether kernels can run on the device in this process."""
        return self.index >= 0 or self.emulated or self.kind == "cpu"

    def limiting(self, host: Device | None) -> Device:
        """Return the device whose limits apply: *host* if this CPU emulates it."""
        if host is None or self.kind != "cpu":
            return self
        return attrs.evolve(host, index=self.index, versions=self.versions, emulated=True)

    def __str__(self) -> str:
        unit = {"amd": "CUs", "nvidia": "SMs", "cpu": "threads"}[self.kind]
        unit = unit.removesuffix("s") if self.cu_num == 1 else unit
        return f"{self.gfx}, {self.cu_num} {unit}" + (f" ({self.name})" if self.name else "")


def device_of_text(text: str) -> Device:
    """Parse a device from GFX:CU, such as ``gfx942:304``, or GFX:CU:NAME.

    NAME is the product's name, such as ``NVIDIA H200``, or its slug.

    Raises:
        UserError: the text has another form.
    """
    gfx, _, rest = text.partition(":")
    units, _, name = rest.partition(":")
    try:
        return Device(gfx, int(units), slug(name))
    except ValueError:
        raise UserError(f"a device must be GFX:CU, such as gfx942:304 (got {text!r})") from None


def device_of(index: int) -> Device:
    """Return the present device with this CUDA or HIP index; -1 is the CPU."""
    import torch

    return _cpu(torch.get_num_threads()) if index < 0 else _gpu(index)


def current_device() -> Device:
    """Return the default device: torch's current GPU, else the CPU."""
    import torch

    return device_of(torch.cuda.current_device() if torch.cuda.is_available() else -1)


def as_present(device: Device) -> Device:
    """Return this process's default device if *device* describes it, else *device*."""
    if device.index >= 0:
        return device
    here = current_device()
    return here if device == attrs.evolve(here, name=device.name) and device.name in ("", here.name) else device


def drivers() -> dict[str, str]:
    """Return the versions of this machine's GPU drivers by vendor."""
    versions: dict[str, str] = {}
    for maker, file in DRIVERS.items():
        try:
            found = _RELEASE.search(file.read_text())
        except (OSError, ValueError):
            continue
        versions |= {maker: found[0]} if found else {}
    return versions


def compute_units(gfx: str, properties: Any) -> int:
    """Return the CUs of an AMD GPU from torch's properties.

    AITER's tables have CUs, as rocminfo counts them (ROCm/aiter#4322). In its WGP mode, HIP counts
    WGPs, which are pairs of CUs (ROCm/hip#3767), where wavefronts have 32 lanes. So the kernel
    driver's count decides there, and HIP's mode only without it, as on Windows.
    """
    processors, facts = int(properties.multi_processor_count), ARCHITECTURES.get(gfx)
    if facts is not None and facts.warp_size == _CDNA_LANES:
        return processors
    place = (getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    units = facts.units if facts is not None and os.environ.get(_WGP_MODE) != _CU_MODE else 1
    return driver_units(*place) or processors * units


def driver_units(domain: int, bus: int, slot: int) -> int:
    """Return the CUs that the kernel driver lists for a PCI address; 0 where it lists none, or
    several GPUs that differ.

    ROCm's runtime divides the same two numbers for ``HSA_AMD_AGENT_INFO_COMPUTE_UNIT_COUNT``.
    """
    counts = set()
    for file in TOPOLOGY.glob("*/properties"):
        try:
            facts = {name: int(value) for name, value in map(str.split, file.read_text().splitlines())}
        except (OSError, ValueError):
            continue
        if (facts.get("domain", 0), facts.get("location_id", 0) >> 3) == (domain, bus << 5 | slot):
            counts.add(facts.get("simd_count", 0) // max(facts.get("simd_per_cu", 0), 1))
    return counts.pop() if len(counts) == 1 else 0


@functools.lru_cache
def _gpu(index: int) -> Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    units = properties.multi_processor_count
    if torch.version.hip:
        gfx, library = properties.gcnArchName.split(":")[0], ("hip", str(torch.version.hip))
        units = compute_units(gfx, properties)
    else:
        gfx, library = f"sm_{properties.major}{properties.minor}", ("cuda", str(torch.version.cuda))
    return Device(gfx, units, slug(properties.name), index, (("torch", str(torch.__version__)), library))


@functools.lru_cache
def _cpu(threads: int) -> Device:
    import torch

    flags, name = _cpuinfo()
    best = next((short for flag, short in _CPU_FLAGS if flag in flags), "generic")
    return Device(f"cpu-{best}", threads, slug(name), -1, (("torch", str(torch.__version__)),))


def _cpuinfo() -> tuple[frozenset[str], str]:
    """Return instruction-set flags and the model name from /proc/cpuinfo, if it exists."""
    import platform

    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    except OSError:
        return frozenset(), platform.processor() or platform.machine()
    flags = fields.get("flags", fields.get("features", ""))
    return frozenset(flags.split()), fields.get("model name", platform.machine())

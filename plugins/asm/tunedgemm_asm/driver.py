"""The drivers that load and launch code objects: HIP's and CUDA's."""

from __future__ import annotations

from tunedgemm.tools.launching import driver_interface

HIP = driver_interface("asm", "amd")
CUDA = driver_interface("asm", "nvidia", "set", "describe")
INTERFACES = {interface.kind: interface for interface in (HIP, CUDA)}

"""Map solution names to DeepGEMM's settings and back.

``native`` is the library's own choice. ``n128_s120_pdl_mnk`` restricts it: block N a multiple of
128, 120 SMs, programmatic dependent launch, and M compiled into the kernel in addition to N and K.
A part that is absent keeps the library's default.
"""

from __future__ import annotations

import functools
import re

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution

#: Name of the library's own choice.
NATIVE = "native"
#: Largest block N of the library, and its step.
BLOCK_N, STEP = 256, 16
#: Blocks N of more than 128 that the library has with block scales.
_SCALED_WIDE = (144, 160, 192)

_PATTERN = re.compile(r"(n(?P<block_n>[1-9]\d*))?_?(s(?P<sms>[1-9]\d*))?_?(?P<pdl>pdl)?_?(?P<mnk>mnk)?")


@attrs.frozen(cache_hash=True)
class Kernel:
    """Settings of a solution.

    Attributes:
        block_n: block N is a multiple of it; 0 for the library's choice.
        sms: multiprocessors that the kernel uses; 0 for all.
        pdl: whether the launch may overlap the end of the previous kernel.
        mnk: whether M is a constant of the kernel.
    """

    block_n: int = 0
    sms: int = 0
    pdl: bool = False
    mnk: bool = False

    @property
    def name(self) -> str:
        """Return the solution name, ``kernelName`` in a table."""
        parts = (f"n{self.block_n}" * bool(self.block_n), f"s{self.sms}" * bool(self.sms), "pdl" * self.pdl, "mnk" * self.mnk)
        return "_".join(filter(None, parts)) or NATIVE


@functools.lru_cache(maxsize=4096)
def parse_name(name: str) -> Kernel:
    """Parse a solution name; the inverse of `Kernel.name`. An empty name is `NATIVE`.

    Raises:
        PluginError: no kernel has that name.
    """
    match = _PATTERN.fullmatch("" if name == NATIVE else name)
    kernel = match and Kernel(int(match["block_n"] or 0), int(match["sms"] or 0), bool(match["pdl"]), bool(match["mnk"]))
    if kernel is None or name not in ("", kernel.name):
        raise PluginError(f"deepgemm has no kernel {name!r}; names look like {NATIVE}, {Kernel(128, 120, True, True).name}")
    return kernel


def resolve(solution: Solution, shape: Shape, device: Device) -> Kernel:
    """Return the kernel of a solution.

    Raises:
        PluginError: no kernel has that name, or it cannot serve the shape on the device.
    """
    kernel = parse_name(solution.kernel_name)
    if solution.split_k > 1:
        raise PluginError(f"deepgemm {kernel.name}: splitK must be at most 1 (got {solution.split_k})")
    if reason := unfit(kernel, shape, device):
        raise PluginError(f"deepgemm {kernel.name}: {reason}")
    return kernel


def unfit(kernel: Kernel, shape: Shape, device: Device) -> str:
    """Return why the library cannot launch a kernel for the shape on the device, or an empty text."""
    if kernel.sms > device.cu_num:
        return f"SMs must be at most {device.cu_num} (got {kernel.sms})"
    if kernel.block_n and (kernel.block_n % STEP or kernel.block_n > BLOCK_N):
        return f"block N must be a multiple of {STEP} up to {BLOCK_N} (got {kernel.block_n})"
    if shape.scale == "block" and kernel.block_n > 128 and kernel.block_n not in _SCALED_WIDE:
        return f"block N with block scales must be at most 128, or one of {', '.join(map(str, _SCALED_WIDE))} (got {kernel.block_n})"
    return ""

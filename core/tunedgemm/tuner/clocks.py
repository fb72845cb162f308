"""Read a device's clock and why its driver throttles it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from tunedgemm.device import Device
from tunedgemm.tuner.trial import POWER_CAP

#: NVML's throttling reasons (nvml.h, nvmlClocksEventReason*), without idle and user clocks.
_THROTTLE = {
    0x4: POWER_CAP, 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake",
}  # fmt: skip


def clocks(device: Device) -> tuple[int, str]:
    """Return the SM clock in MHz and the throttling reason; 0 and "" if unknown.

    This needs the optional Python bindings of NVML (``nvidia-ml-py``) or AMD SMI.
    """
    with contextlib.suppress(Exception):  # bindings and drivers may be missing, old or restricted
        if device.kind == "nvidia":
            return _nvidia_clocks(device.torch_device.index)
    with contextlib.suppress(Exception):
        if device.kind != "cpu":
            return int(torch.cuda.clock_rate(device.torch_device)), ""
    return 0, ""


@functools.lru_cache
def _nvml(index: int) -> tuple[Any, Any]:
    """Return NVML's bindings and its handle of a CUDA device.

    `CUDA_VISIBLE_DEVICES` may have renumbered the device.
    """
    import pynvml  # type: ignore[import-not-found, unused-ignore]

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def _nvidia_clocks(index: int) -> tuple[int, str]:
    nvml, handle = _nvml(index)
    mhz, throttling = int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), ""
    with contextlib.suppress(Exception):  # not every GPU reports it
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        throttling = ", ".join(word for bit, word in _THROTTLE.items() if reasons & bit)
    return mhz, throttling

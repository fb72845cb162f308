"""Read a device's clock and why its driver throttles it."""

from __future__ import annotations

import pytest
import torch
from tunedgemm.device import Device, device_of
from tunedgemm.tuner import clocks as module
from tunedgemm.tuner.clocks import clocks


def test_throttle_reasons_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's bits become words for the throttle reasons.

    Idling and clocks that users set are no such thing.
    """

    class Nvml:
        NVML_CLOCK_SM = 1
        reasons = 0

        def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
            assert (handle, kind) == ("H200", 1)
            return 1755

        def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
            return self.reasons

    nvml = Nvml()
    monkeypatch.setattr(module, "_nvml", lambda index: (nvml, "H200"))
    told = []
    for nvml.reasons in (0x1, 0x2, 0x4, 0x40 | 0x8):
        told.append(clocks(Device("sm_90", 132, "nvidia-h200", 0)))

    assert told == [(1755, ""), (1755, ""), (1755, "power cap"), (1755, "hardware slowdown, heat (hardware)")]


def test_unknown_clocks_are_zero() -> None:
    """On a CPU, and without NVML or a driver, the clock is 0 and the reason empty."""
    assert clocks(device_of(-1)) == (0, "")
    if not torch.cuda.is_available():
        assert clocks(Device("sm_90", 132, "nvidia-h200", 0)) == (0, "")

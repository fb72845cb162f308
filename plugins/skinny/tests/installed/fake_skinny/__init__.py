"""The plugin's own backend over the fake GPUs, as a distribution that the tuner's processes find.

``FAKE_SKINNY_FOLDER`` holds them.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import attrs
from tunedgemm.plugin import Backend, Device
from tunedgemm.testing.stand_in import bind_driver
from tunedgemm.tools.launching import Driver, DriverInterface
from tunedgemm_skinny import Skinny, rtc, skinny

_RTC, _DRIVER = {"nvidia": "nvrtc", "amd": "hiprtc"}, {"nvidia": "cuda", "amd": "hip"}


def _file(name: str) -> str:
    return str(Path(os.environ["FAKE_SKINNY_FOLDER"], f"libfake_{name}.so"))


@functools.cache
def _compiler(interface: rtc.Interface) -> rtc.Compiler:
    return rtc.bind_functions(interface, _file(_RTC[interface.kind]))


@functools.cache
def _driver(interface: DriverInterface) -> Driver:
    return bind_driver(interface, _file(_DRIVER[interface.kind]))


def _over(libtype: str, host: Device) -> Backend:
    return attrs.evolve(skinny, libtype=libtype, hooks=Skinny(libtype, _compiler, _driver), host=host)


cuda = _over("skinnycuda", Device("sm_90", 132, "nvidia-h200"))
hip = _over("skinnyhip", Device("gfx942", 304, "amd-instinct-mi300x"))

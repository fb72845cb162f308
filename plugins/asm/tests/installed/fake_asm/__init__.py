"""The plugin's own backend over the fake HIP runtime, as a distribution that the tuner's processes find; ``FAKE_ASM_LIBRARY`` names it.

Its kernels are those of ``TUNEDGEMM_ASM_PACKS``.
"""

from __future__ import annotations

import functools
import os

from tunedgemm.plugin import Device
from tunedgemm.tools import Driver, DriverInterface, bind_driver
from tunedgemm_asm import Asm


@functools.cache
def _driver(interface: DriverInterface) -> Driver:
    return bind_driver(interface, os.environ["FAKE_ASM_LIBRARY"])


mi300x = Asm("fakeasm", driver=_driver, host=Device("gfx942", 304, "amd-instinct-mi300x"))
mi355x = Asm("fakeasm950", driver=_driver, host=Device("gfx950", 256, "amd-instinct-mi355x"))

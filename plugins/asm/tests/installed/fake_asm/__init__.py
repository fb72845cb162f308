"""Register the backend over the fake HIP runtime for child processes. ``FAKE_ASM_LIBRARY`` names
the library, ``TUNEDGEMM_ASM_PACKS`` the packs.
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

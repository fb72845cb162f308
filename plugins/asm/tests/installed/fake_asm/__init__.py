"""Register the backend over the fake HIP runtime for child processes. ``FAKE_ASM_LIBRARY`` names
the library, ``TUNEDGEMM_ASM_PACKS`` the packs.
"""

from __future__ import annotations

import functools
import os

import attrs
from tunedgemm.plugin import Backend, Device
from tunedgemm.testing.stand_in import bind_driver
from tunedgemm.tools.launching import Driver, DriverInterface
from tunedgemm_asm import Asm, asm


@functools.cache
def _driver(interface: DriverInterface) -> Driver:
    return bind_driver(interface, os.environ["FAKE_ASM_LIBRARY"])


def _over(libtype: str, host: Device) -> Backend:
    return attrs.evolve(asm, libtype=libtype, hooks=Asm(libtype, driver=_driver), host=host)


mi300x = _over("fakeasm", Device("gfx942", 304, "amd-instinct-mi300x"))
mi355x = _over("fakeasm950", Device("gfx950", 256, "amd-instinct-mi355x"))

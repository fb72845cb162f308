"""The plugin's backends over fake compilers; the CPU emulates an H200 and an MI300X.

The objects compute in host memory.
"""

from __future__ import annotations

import attrs
import tunedgemm_ck
from tunedgemm.plugin import Backend, Device
from tunedgemm_ck import backend_of

H200, MI300X = Device("sm_90", 132, "nvidia-h200"), Device("gfx942", 304, "amd-instinct-mi300x")


def _over(real: Backend, host: Device) -> Backend:
    return backend_of(attrs.evolve(real.hooks.family, libtype=f"fake{real.libtype}"), real.hooks.finder, host)


cutlass = _over(tunedgemm_ck.cutlass, H200)
ck = _over(tunedgemm_ck.ck, MI300X)
cktile = _over(tunedgemm_ck.cktile, MI300X)

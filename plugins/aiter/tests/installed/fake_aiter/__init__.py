"""The plugin's backends over the stand-in for AITER; the CPU emulates an MI355X."""

from __future__ import annotations

import attrs
import tunedgemm_aiter
from tunedgemm.plugin import Device
from tunedgemm_aiter import Aiter

MI355X = Device("gfx950", 256, "amd-instinct-mi355x")


def _over(real: Aiter) -> Aiter:
    return attrs.evolve(real, libtype=f"fake{real.libtype}", host=MI355X)


flydsl = _over(tunedgemm_aiter.flydsl)
opus = _over(tunedgemm_aiter.opus)
gluon = _over(tunedgemm_aiter.gluon)
aiter = _over(tunedgemm_aiter.aiter)

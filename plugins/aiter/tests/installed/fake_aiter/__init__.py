"""The plugin's backends over the stand-in for AITER; the CPU emulates an MI355X."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device
from tunedgemm_aiter import backend_of

MI355X = Device("gfx950", 256, "amd-instinct-mi355x")


flydsl, opus, gluon, aiter = (
    attrs.evolve(backend_of(family, f"fake{family}"), host=MI355X) for family in ("flydsl", "opus", "gluon", "aiter")
)

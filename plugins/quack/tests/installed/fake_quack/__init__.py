"""The plugin's backend over a QuACK that computes on the host, for processes that tests start."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device
from tunedgemm_quack import Quack, quack
from tunedgemm_quack.library import Installation, Library, functions_of

VERSION = "quack 0.6.5 cutlass-dsl 4.8.1"


def load() -> Library:
    """Return the functions of the fake."""
    from fake_quack import gemm

    return functions_of(gemm, VERSION)


hooks = Quack("fakequack", lambda: Installation(VERSION), str, load)
fakequack = attrs.evolve(quack, libtype="fakequack", hooks=hooks, host=Device("sm_90", 132, "nvidia-h200"))

"""The plugin's backend over a QuACK that computes on the host, for processes that tests start."""

from __future__ import annotations

from tunedgemm.plugin import Device
from tunedgemm_quack import Quack
from tunedgemm_quack.library import Installation, Library, functions_of

VERSION = "quack 0.6.5 cutlass-dsl 4.8.1"


def load() -> Library:
    """Return the functions of the fake."""
    from fake_quack import gemm

    return functions_of(gemm, VERSION)


fakequack = Quack("fakequack", lambda: Installation(VERSION), str, load, host=Device("sm_90", 132, "nvidia-h200"))

"""Activations of experts."""

from __future__ import annotations

from enum import Enum


class MoEActivation(Enum):
    """Those that tests ask for, all gated."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"

"""Activations of experts."""

from __future__ import annotations

from enum import Enum

from vllm import FORM


class MoEActivation(Enum):
    """Those that tests ask for, all gated."""

    SILU = "silu"
    GELU = "gelu"
    if FORM >= (0, 25):
        GELU_TANH = "gelu_tanh"

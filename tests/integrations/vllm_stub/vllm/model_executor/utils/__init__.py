"""How vLLM replaces a layer's parameter."""

from __future__ import annotations

import torch


def replace_parameter(layer: torch.nn.Module, name: str, data: torch.Tensor) -> None:
    """Put a new parameter in the place of one."""
    setattr(layer, name, torch.nn.Parameter(data, requires_grad=False))

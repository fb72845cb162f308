"""What follows the loading of a model's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def device_loading_context(module: torch.nn.Module, target_device: torch.device) -> Iterator[torch.nn.Module]:
    """A block in which the parameters are on a device."""
    module.loaded_on = target_device
    yield module


def process_weights_after_loading(model: torch.nn.Module, model_config: Any, target_device: Any) -> None:
    """Have each layer's method do it."""
    del model_config, target_device
    for module in model.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)

"""What follows the loading of a model's weights."""

from __future__ import annotations

from typing import Any

import torch


def process_weights_after_loading(model: torch.nn.Module, model_config: Any, target_device: Any) -> None:
    """Have each layer's method do it."""
    del model_config, target_device
    for module in model.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)

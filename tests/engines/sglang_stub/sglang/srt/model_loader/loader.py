"""What surrounds the repacking of a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def device_loading_context(module: torch.nn.Module, target_device: torch.device) -> Iterator[torch.nn.Module]:
    """Hold the parameters on a device."""
    module.loaded_on = target_device
    yield module

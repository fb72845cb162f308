"""Launcher: the bound function that runs one solution on one shape; what dispatch caches. And the device that it launches on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen
class Launcher:
    """A solution bound to one shape on one device, ready to run.

    Attributes:
        call: takes the op's operands by position, trailing absent ones left out, with any leading
            dimensions, and returns a new output tensor [..., N]. Operands are contiguous and
            16-byte aligned. A launcher that a plugin's `bind` returns gets a shuffled weight as a
            plain tensor of its bytes. Output and workspace come from ``torch.empty``. Safe to call
            from several threads and streams.
        graph_safe: whether `call` may be captured in a CUDA or HIP graph.
        workspace_bytes: scratch memory that one call takes beside its output.
    """

    call: Callable[..., Any] = attrs.field(validator=attrs.validators.is_callable())
    graph_safe: bool = True
    workspace_bytes: int = 0


def on_device(call: Callable[..., Any], index: int) -> Callable[..., Any]:
    """A call for operands on the device with this CUDA or HIP index, which is made the current one where it is not.

    Without several devices, and for the CPU (-1), this is the call itself.
    """
    if index < 0 or _devices() < 2:
        return call
    import torch

    current, device = torch._C._cuda_getDevice, torch.cuda.device

    def guarded(*operands: Any) -> Any:
        if current() == index:
            return call(*operands)
        with device(index):
            return call(*operands)

    return guarded


@functools.cache
def _devices() -> int:
    import torch

    return torch.cuda.device_count()

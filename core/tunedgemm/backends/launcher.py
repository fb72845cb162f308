"""Launcher: the bound function that runs one solution on one shape, which dispatch caches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

from tunedgemm.errors import PluginError


class WeightRefused(PluginError):
    """Why a launcher that keeps copies of weights does not serve a call; the next kernel does."""


@attrs.frozen
class Launcher:
    """A solution bound to one shape on one device, ready to run.

    Attributes:
        call: takes the op's operands by position, without trailing absent ones, with any leading
            dimensions, contiguous and 16-byte aligned; returns a new output tensor [..., N]. A
            plugin's launcher gets a shuffled weight as a plain tensor of its bytes. Output and
            workspace must come from ``torch.empty``. The dtypes are the shape's, also under
            autocast. It must be safe in several threads and streams.
        graph_safe: whether `call` may be captured in a CUDA or HIP graph.
        workspace_bytes: workspace of one call in bytes, without its output.
        keeps_weights: whether it keeps copies of weights by `tunedgemm.backends.kept_weights`, and
            may raise `WeightRefused`. For the core alone.
        is_nested: whether it calls another op by its tables, which its bits follow. For the core
            alone.
    """

    call: Callable[..., Any] = attrs.field(validator=attrs.validators.is_callable())
    graph_safe: bool = True
    workspace_bytes: int = 0
    keeps_weights: bool = False
    is_nested: bool = False


def on_device(call: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Wrap a call in a device guard for this CUDA or HIP index.

    With a single device, and for the CPU (-1), it is returned unchanged.
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

"""Count the writes to weights that have copies in another order.

torch counts writes to a tensor in its version, but not the steps of optimisers with fused kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


@attrs.frozen(eq=False)
class Source:
    """The state of a weight when a copy was made of it.

    Attributes:
        address, version: those of the weight.
        count: an empty tensor with the weight's count of writes; None once another tensor's count
            took its place.
    """

    address: int
    version: int
    count: torch.Tensor | None

    def as_of(self, weight: torch.Tensor) -> Source | None:
        """Return the source for a weight at its address with another version; None if it was written to.

        Where the source has not changed, the weight is another tensor, which counts apart: that of
        which `data` is the source, or one at the address of a tensor that was freed. Its writes
        count from now on.
        """
        if self.count is None or self.count._version != self.version:
            return None
        return Source(self.address, weight._version, None)


def watched_source(weight: torch.Tensor) -> Source | None:
    """Return the present state of a weight; from now on its version counts optimiser steps.

    None stands for a tensor whose writes torch does not count.
    """
    try:
        count = torch.Tensor.detach(weight)
        source = Source(weight.data_ptr(), weight._version, count)
        storage: Any = torch.Tensor.untyped_storage(weight)
        torch.Tensor.data.__set__(count, count.new_empty(0))  # type: ignore[attr-defined]  # keeps the count, not the memory
    except RuntimeError:  # no memory, or made in inference mode
        return None
    storage._tunedgemm_watched = True  # with the memory: an optimiser may have another tensor of it
    _watch_steps()
    return source


@functools.cache
def _watch_steps() -> None:
    """Register the hook, once and not before a weight has a copy."""
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    """Count a step as a write to each watched weight among its parameters; 0.1 us for any other."""
    del arguments, named
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            try:
                watched = getattr(torch.Tensor.untyped_storage(parameter), "_tunedgemm_watched", False)
            except (RuntimeError, TypeError, ValueError):  # no memory, no tensor, or a lazy parameter
                continue
            if watched and not parameter.is_inference():
                torch.autograd.graph.increment_version(parameter)

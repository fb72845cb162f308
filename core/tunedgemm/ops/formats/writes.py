"""Detect writes to weights that have shuffled copies.

torch counts in-place writes in a tensor's version, except those of fused optimisers.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


@attrs.frozen(eq=False)
class Source:
    """State of a weight when it was shuffled.

    Attributes:
        address, version: address and version of the weight.
        count: an empty tensor that shares the weight's version counter; None after another tensor
            took its place.
    """

    address: int
    version: int
    count: torch.Tensor | None

    def as_of(self, weight: torch.Tensor) -> Source | None:
        """Return the source of a weight at the same address; None if the source was written to.

        If the version differs although the source is unchanged, the weight is another tensor with
        its own counter: the owner of the source's `data`, or one at a freed tensor's address. Its
        writes count from now on.
        """
        if self.count is None or self.count._version != self.version:
            return None
        return Source(self.address, weight._version, None)


def watched_source(weight: torch.Tensor) -> Source | None:
    """Return the state of a weight, and count optimiser steps in its version from now on.

    Returns None for a tensor whose writes torch does not count.
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
    """Register the optimiser hook once, when the first weight gets a copy."""
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
    """Count a step as a write to each watched parameter; 0.1 us for any other parameter."""
    del arguments, named
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            try:
                watched = getattr(torch.Tensor.untyped_storage(parameter), "_tunedgemm_watched", False)
            except (RuntimeError, TypeError, ValueError):  # no memory, no tensor, or a lazy parameter
                continue
            if watched and not parameter.is_inference():
                torch.autograd.graph.increment_version(parameter)

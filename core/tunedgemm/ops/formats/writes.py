"""Count the writes to weights that have copies in another order.

torch counts writes to a tensor in its version, but not the steps of optimisers with fused kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def watched_state(weight: torch.Tensor) -> tuple[int, int] | None:
    """Return the address and the version of a weight; from now on its version counts optimiser steps.

    None stands for a tensor whose writes torch does not count.
    """
    try:
        state = weight.data_ptr(), weight._version
        storage: Any = torch.Tensor.untyped_storage(weight)
    except RuntimeError:  # no memory, or made in inference mode
        return None
    storage._tunedgemm_watched = True  # with the memory: an optimiser may have another tensor of it
    _watch_steps()
    return state


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
            except (RuntimeError, TypeError):  # no memory
                continue
            if watched and not parameter.is_inference():
                torch.autograd.graph.increment_version(parameter)

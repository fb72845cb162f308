"""Tensors with a tangent (forward-mode derivatives): plain by their type, with memory, and no launcher but torch's keeps the tangent.

Nothing of a dual tensor that is quick to read tells it from another, so while a level of forward mode is open no launcher is
cached: each call is resolved anew, which looks for tangents. Outside of levels that costs nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

#: The levels of forward mode that are open, of any thread: torch has one stack for all.
levels: list[int] = []

#: Whose caches are emptied when a level opens, and how.
_watched: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def watch(owner: Any, forget: Callable[[Any], None]) -> None:
    """Have a cache emptied whenever a level opens; whoever fills it asks `levels` before, under the lock that *forget* takes.

    Args:
        owner: who has the cache; not kept alive.
        forget: called with the owner.
    """
    _watched[owner] = forget
    _watch_levels()


def dual(operand: torch.Tensor | None) -> bool:
    """Whether a tensor has a tangent of a level that is open."""
    return bool(levels) and operand is not None and forward_ad.unpack_dual(operand).tangent is not None


@functools.cache
def _watch_levels() -> None:
    """Have torch tell when a level opens and when one closes."""
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level

    @functools.wraps(enter)
    def enter_dual_level() -> int:
        level: int = enter()
        levels.append(level)
        for owner, forget in list(_watched.items()):
            forget(owner)
        return level

    @functools.wraps(leave)
    def exit_dual_level(*, level: int | None = None) -> None:
        leave(level=level)
        if levels:
            levels.pop()

    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter_dual_level, exit_dual_level
    levels.extend(range(forward_ad._current_level + 1))

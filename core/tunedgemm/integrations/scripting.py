"""Teach TorchScript which of torch's operators to call in place of our functions.

A script runs without Python, so it gets torch's own operator, routed or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.jit import _builtins

Module = TypeVar("Module", bound=torch.nn.Module)


def script_as(operator: str, *functions: Callable[..., Any]) -> None:
    """Have a script call *operator* wherever its source calls one of these functions.

    torch makes its table at the first script, from the functions that its modules have then. A
    routed function has taken the place of torch's own, so both are given.
    """
    for function in functions:
        if _builtins._builtin_table is None:
            _builtins._builtin_ops.append((function, operator))
        else:
            _builtins._register_builtin(function, operator)


def with_class(module: torch.nn.Module, kind: type[Module]) -> Module:
    """Return a module of another class with the same parameters, buffers and attributes."""
    other = kind.__new__(kind)
    other.__dict__ = dict(module.__dict__)
    return other

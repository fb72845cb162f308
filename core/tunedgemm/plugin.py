"""All that a plugin imports: the hook marker, the values, and the services of the core.

Re-exports only. `CONTRACT` is the version of this menu and of the hooks behind it: a plugin may state the
``CONTRACT`` it was written for, and the core loads that of its own and the one before.
"""

from __future__ import annotations

from typing import Any

from tunedgemm.artifact import artifact, cache_folder
from tunedgemm.command import Command
from tunedgemm.device import Device, device_of
from tunedgemm.dtype import dtype_bits, parse_dtype, short_dtype, torch_dtype
from tunedgemm.errors import LaunchError, OutOfResources, PluginError, UserError
from tunedgemm.hookspecs import CONTRACT, hookimpl
from tunedgemm.launcher import Launcher, on_device
from tunedgemm.ops import ops
from tunedgemm.ops.op import Columns, Op, Tolerance
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.workspace import semaphores, workspace

__all__ = [
    "CONTRACT",
    "Columns",
    "Command",
    "Device",
    "LaunchError",
    "Launcher",
    "Op",
    "OutOfResources",
    "PluginError",
    "Shape",
    "Solution",
    "Tolerance",
    "Unsupported",
    "UserError",
    "artifact",
    "cache_folder",
    "device_of",
    "dtype_bits",
    "home_folder",  # noqa: F822 - by __getattr__, like those below
    "hookimpl",
    "on_device",
    "ops",
    "parse_dtype",
    "plain_weight",  # noqa: F822
    "semaphores",
    "short_dtype",
    "shuffle_weight",  # noqa: F822
    "torch_dtype",
    "tune",  # noqa: F822
    "unshuffle_weight",  # noqa: F822
    "workspace",
]

#: Lazily: the tuner and the folders of tables stand above the contract, and weights load torch.
_LATE = {
    "tune": "tunedgemm.tuner",
    "home_folder": "tunedgemm.folders",
    **dict.fromkeys(("plain_weight", "shuffle_weight", "unshuffle_weight"), "tunedgemm.weights"),
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        import importlib

        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

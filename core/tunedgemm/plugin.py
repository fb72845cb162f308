"""The contract of a plugin: the hook marker, and the values that hooks take and return.

`CONTRACT` is the version of the hooks and of these names. A plugin may state the ``CONTRACT`` it
was written for. The core loads plugins of this version and of the previous one.
`tunedgemm.tools` has the rest.
"""

from __future__ import annotations

from typing import Any

from tunedgemm.backends.command import Command
from tunedgemm.backends.hookspecs import CONTRACT, hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.option import Option
from tunedgemm.backends.platforms import Platform
from tunedgemm.device import Device, device_of
from tunedgemm.errors import LaunchError, OutOfResources, PluginError, TunedGemmError, UserError
from tunedgemm.ops.op import Columns, Op, Tolerance
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

__all__ = [
    "CONTRACT",
    "Columns",
    "Command",
    "Device",
    "LaunchError",
    "Launcher",
    "Op",
    "Option",
    "OutOfResources",
    "Platform",
    "PluginError",
    "Shape",
    "Solution",
    "Tolerance",
    "TunedGemmError",
    "Unsupported",
    "UserError",
    "device_of",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    """Return a name of `tunedgemm.tools`; contract 1 exported them all here."""
    from tunedgemm import tools

    if name.startswith("_") or name not in tools.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(tools, name)

"""The contract of a plugin: its record, the hook marker, and the values that hooks take and return.

`CONTRACT` is the version of the hooks and of these names. `tunedgemm.tools` has the rest.
"""

from __future__ import annotations

from tunedgemm.backends.backend import Backend
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
    "Backend",
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

"""All that a plugin imports: the hook marker, the values, and the services of the core.

Re-exports only. `CONTRACT` is the version of this menu and of the hooks behind it: a plugin may state the
``CONTRACT`` it was written for, and the core loads that of its own and the one before.
"""

from __future__ import annotations

from typing import Any

from tunedgemm.backends.artifact import artifact, cache_folder
from tunedgemm.backends.command import Command
from tunedgemm.backends.driver import Driver, DriverInterface, bind_driver, device_context, first_usable, loaded_driver, mapped_files
from tunedgemm.backends.hookspecs import CONTRACT, hookimpl
from tunedgemm.backends.launcher import Launcher, on_device
from tunedgemm.backends.option import Option
from tunedgemm.backends.workspace import scratch, semaphores, workspace
from tunedgemm.device import Device, device_of
from tunedgemm.dtype import dtype_bits, parse_dtype, short_dtype, torch_dtype
from tunedgemm.errors import LaunchError, OutOfResources, PluginError, TunedGemmError, UserError
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.op import Columns, Op, Tolerance
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

__all__ = [
    "CONTRACT",
    "Columns",
    "Command",
    "Device",
    "Driver",
    "DriverInterface",
    "LaunchError",
    "Launcher",
    "Op",
    "Option",
    "Options",  # noqa: F822
    "OutOfResources",
    "Outcome",  # noqa: F822
    "Planned",  # noqa: F822
    "PluginError",
    "Progress",  # noqa: F822
    "Row",  # noqa: F822
    "Shape",
    "Solution",
    "Table",  # noqa: F822
    "Tolerance",
    "TunedGemmError",
    "Unsupported",
    "UserError",
    "artifact",
    "bind_driver",
    "cache_folder",
    "console",  # noqa: F822
    "device_context",
    "device_of",
    "dtype_bits",
    "first_usable",
    "home_folder",  # noqa: F822 - by __getattr__, like those below
    "hookimpl",
    "loaded_driver",
    "mapped_files",
    "named_file",  # noqa: F822
    "on_device",
    "op_of_file",  # noqa: F822
    "op_named",
    "ops",
    "parse_dtype",
    "plain_weight",  # noqa: F822
    "read_log",  # noqa: F822
    "read_rows",  # noqa: F822
    "scratch",
    "semaphores",
    "shape_of_texts",  # noqa: F822
    "short_dtype",
    "shuffle_weight",  # noqa: F822
    "summary",  # noqa: F822
    "torch_dtype",
    "torch_launcher",  # noqa: F822
    "tune",  # noqa: F822
    "unshuffle_weight",  # noqa: F822
    "upsert",  # noqa: F822
    "workspace",
]

#: Lazily: the tuner, its report, tables and torch's backend stand above the contract, and weights load torch.
_LATE = {
    **dict.fromkeys(("Options", "tune"), "tunedgemm.tuner"),
    **dict.fromkeys(("Outcome", "Planned"), "tunedgemm.tuner.trial"),
    **dict.fromkeys(("Progress", "console", "summary"), "tunedgemm.tuner.report"),
    **dict.fromkeys(("Row", "read_rows", "upsert"), "tunedgemm.table.csvfile"),
    **dict.fromkeys(("home_folder", "named_file"), "tunedgemm.table.folders"),
    "Table": "tunedgemm.table.lookup",
    "op_of_file": "tunedgemm.workload.lists",
    "read_log": "tunedgemm.tuner.log",
    "shape_of_texts": "tunedgemm.workload.lists",
    "torch_launcher": "tunedgemm.backends.builtin",
    **dict.fromkeys(("plain_weight", "shuffle_weight", "unshuffle_weight"), "tunedgemm.ops.shuffle"),
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        import importlib

        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Services of the core for plugins: loading and launching kernels, tables, and the tuner.

The tuner and its reports load on first use, so that a plugin that only launches imports quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.backends.artifact import artifact, cache_folder, private_folder
from tunedgemm.backends.driver import (
    Driver,
    DriverInterface,
    KernelFunction,
    bind_driver,
    device_context,
    driver_interface,
    first_usable,
    load_function,
    loaded_driver,
    mapped_files,
)
from tunedgemm.backends.launcher import on_device
from tunedgemm.backends.loadable import load_fault
from tunedgemm.backends.native import CallPlan, Launch, LaunchPlan, call_of, launch_of
from tunedgemm.backends.private import UntrustedError, make_private, read_trusted
from tunedgemm.backends.signature import SignatureError, check_signature, signature_required
from tunedgemm.backends.tensormap import MapDescription, TensorMap
from tunedgemm.backends.untuned import may_guess
from tunedgemm.backends.workspace import scratch, semaphores, workspace
from tunedgemm.dtype import dtype_bits, parse_dtype, short_dtype, torch_dtype
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.moe_words import unusual_experts
from tunedgemm.ops.scale_order import scale_order, scale_strides
from tunedgemm.process.files import JSON_MIB, open_regular, read_regular, replace_file
from tunedgemm.process.forksafe import ForkSafeLock
from tunedgemm.process.packages import folder_of_entry, is_folder, package_folders
from tunedgemm.process.paths import expanded
from tunedgemm.process.switches import environment_with
from tunedgemm.process.variables import switched_on
from tunedgemm.table.csvfile import read_rows, upsert
from tunedgemm.table.folders import home_folder, named_file
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row
from tunedgemm.text.printable import warn_once
from tunedgemm.workload.lists import op_of_file, shape_of_texts

if TYPE_CHECKING:
    from tunedgemm.backends.builtin import torch_launcher
    from tunedgemm.ops.formats.shuffle import plain_weight, shuffle_weight, unshuffle_weight
    from tunedgemm.text.console import console
    from tunedgemm.tuner import Options, tune
    from tunedgemm.tuner.log import read_log
    from tunedgemm.tuner.progress import Progress
    from tunedgemm.tuner.report import summary
    from tunedgemm.tuner.trial import Outcome, Planned

_LATE = {
    **dict.fromkeys(("Options", "tune"), "tunedgemm.tuner"),
    **dict.fromkeys(("Outcome", "Planned"), "tunedgemm.tuner.trial"),
    "Progress": "tunedgemm.tuner.progress",
    "console": "tunedgemm.text.console",
    "summary": "tunedgemm.tuner.report",
    "read_log": "tunedgemm.tuner.log",
    "torch_launcher": "tunedgemm.backends.builtin",
    **dict.fromkeys(("plain_weight", "shuffle_weight", "unshuffle_weight"), "tunedgemm.ops.formats.shuffle"),
}

__all__ = [
    "ARCHITECTURES",
    "JSON_MIB",
    "CallPlan",
    "Driver",
    "DriverInterface",
    "ForkSafeLock",
    "KernelFunction",
    "Launch",
    "LaunchPlan",
    "MapDescription",
    "Options",
    "Outcome",
    "Planned",
    "Progress",
    "Row",
    "SignatureError",
    "Table",
    "TensorMap",
    "UntrustedError",
    "artifact",
    "bind_driver",
    "cache_folder",
    "call_of",
    "check_signature",
    "console",
    "device_context",
    "driver_interface",
    "dtype_bits",
    "environment_with",
    "expanded",
    "first_usable",
    "folder_of_entry",
    "home_folder",
    "is_folder",
    "launch_of",
    "load_fault",
    "load_function",
    "loaded_driver",
    "make_private",
    "mapped_files",
    "may_guess",
    "named_file",
    "on_device",
    "op_named",
    "op_of_file",
    "open_regular",
    "ops",
    "package_folders",
    "parse_dtype",
    "plain_weight",
    "private_folder",
    "read_log",
    "read_regular",
    "read_rows",
    "read_trusted",
    "replace_file",
    "scale_order",
    "scale_strides",
    "scratch",
    "semaphores",
    "shape_of_texts",
    "short_dtype",
    "shuffle_weight",
    "signature_required",
    "summary",
    "switched_on",
    "torch_dtype",
    "torch_launcher",
    "tune",
    "unshuffle_weight",
    "unusual_experts",
    "upsert",
    "warn_once",
    "workspace",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Loading and launching kernels: device properties, drivers, native calls, workspaces, dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.backends.driver import (
    Driver,
    DriverInterface,
    KernelFunction,
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
from tunedgemm.backends.rates import Rates, Work, predict_us, read_rates
from tunedgemm.backends.sum_order import PRODUCT, X_THEN_W, sum_order
from tunedgemm.backends.tensormap import MapDescription, TensorMap
from tunedgemm.backends.untuned import may_guess, stand_ins
from tunedgemm.backends.workspace import scratch, semaphores, workspace
from tunedgemm.dtype import dtype_bits, parse_dtype, short_dtype, torch_dtype
from tunedgemm.ops.moe_words import unusual_experts
from tunedgemm.ops.repacked import kind_of
from tunedgemm.ops.scale_order import scale_order, scale_strides
from tunedgemm.ops.weight_formats import FORMATS, WeightFormat, format_of
from tunedgemm.process.forksafe import ForkSafeLock
from tunedgemm.process.process_state import environment_with
from tunedgemm.process.variables import switched_on
from tunedgemm.products import unit_peak_over
from tunedgemm.text.printable import warn_once

if TYPE_CHECKING:
    from tunedgemm.backends.builtin import torch_launcher

__all__ = [
    "ARCHITECTURES",
    "CallPlan",
    "Driver",
    "DriverInterface",
    "FORMATS",
    "ForkSafeLock",
    "KernelFunction",
    "Launch",
    "LaunchPlan",
    "MapDescription",
    "PRODUCT",
    "Rates",
    "TensorMap",
    "WeightFormat",
    "Work",
    "X_THEN_W",
    "call_of",
    "device_context",
    "driver_interface",
    "dtype_bits",
    "environment_with",
    "first_usable",
    "format_of",
    "kind_of",
    "launch_of",
    "load_fault",
    "load_function",
    "loaded_driver",
    "mapped_files",
    "may_guess",
    "on_device",
    "parse_dtype",
    "predict_us",
    "read_rates",
    "scale_order",
    "scale_strides",
    "scratch",
    "semaphores",
    "short_dtype",
    "stand_ins",
    "sum_order",
    "switched_on",
    "torch_dtype",
    "torch_launcher",
    "unit_peak_over",
    "unusual_experts",
    "warn_once",
    "workspace",
]


def __getattr__(name: str) -> Any:
    """Return `torch_launcher`, whose module loads on first use."""
    if name != "torch_launcher":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tunedgemm.backends.builtin import torch_launcher

    return torch_launcher

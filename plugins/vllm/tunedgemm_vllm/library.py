"""Find the operators of an installed vLLM, and load them without importing vLLM, which takes seconds."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.launching import load_fault

#: The operator of single products, which every library must have, and that of groups of products.
PRODUCT, GROUPED = "cutlass_scaled_mm", "cutlass_moe_mm"
#: Arguments of Marlin before and after those of an index, which vLLM dropped with act-order.
_MARLIN = "a c_or_none b_q_weight b_bias_or_none b_scales a_scales global_scale b_zeros_or_none{} workspace b_type_id size_m size_n size_k"
_REDUCED = " use_atomic_add use_fp32_reduce is_zp_float"
#: Operators and their arguments from vLLM 0.20 to 0.33, the newest first.
ARGUMENTS = {
    PRODUCT: ("out a b a_scales b_scales bias",),
    GROUPED: (
        "out_tensors a_tensors b_tensors a_scales b_scales expert_offsets problem_sizes a_strides b_strides c_strides "
        "per_act_token per_out_ch",
    ),
    "get_cutlass_moe_mm_data": (
        "topk_ids expert_offsets problem_sizes1 problem_sizes2 input_permutation output_permutation num_experts n k "
        "blockscale_offsets is_gated",
    ),
    "dynamic_per_token_scaled_fp8_quant": ("result input scale scale_ub",),
    "silu_and_mul": ("result input",),
    "marlin_gemm": (_MARLIN.format("") + _REDUCED, _MARLIN.format(" g_idx_or_none perm_or_none") + " is_k_full" + _REDUCED),
    "machete_mm": ("A B b_type out_type group_scales group_zeros group_size channel_scales token_scales schedule",),
    "machete_supported_schedules": (
        "a_type b_type maybe_group_scales_type maybe_group_zeros_type maybe_channel_scales_type maybe_token_scales_type maybe_out_type",
    ),
}
#: Loads the library in ``sys.argv[1]``, which must register the operator.
_LOAD = "import sys, torch; torch.ops.load_library(sys.argv[1]); torch.ops.{}.{}"
#: Stems of the files that may have it, best first; the first is built for torch's stable ABI.
_STEMS = ("_C_stable_libtorch", "_C")
#: The first version whose operators are known here.
_OLDEST = (0, 20)
#: Makes vLLM's fp8 products choose a kernel without regard to M.
_INVARIANT = "VLLM_BATCH_INVARIANT"


@attrs.frozen
class Vendor:
    """Names of an installed vLLM.

    Attributes:
        package: of its package and its distribution.
        namespace: of its operators in ``torch.ops``.
    """

    package: str = "vllm"
    namespace: str = "_C"


VLLM = Vendor()


@functools.cache
def version_of(package: str) -> str:
    """Return the version in a distribution's metadata, "" where it has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def release_of(package: str) -> tuple[int, int] | None:
    """Return the first two numbers of the version, None where it has none."""
    match = re.match(r"(\d+)\.(\d+)", version_of(package))
    return (int(match[1]), int(match[2])) if match else None


def describe(package: str) -> str:
    """Return the text of ``libver``: the version, and whether its products are batch invariant."""
    if not (version := version_of(package)):
        return ""
    on = os.environ.get(_INVARIANT, "").strip()
    return f"{package} {version}" + (" batch_invariant" if on.isdecimal() and int(on) else "")


@functools.cache
def folder_of(package: str) -> Path | None:
    """Return the folder of a package without importing it; None where it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module of that name was made by hand
        return None
    # A folder of that name on the search path is a namespace package, which has no origin.
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def files_of(package: str) -> list[Path]:
    """Return the libraries that may have an operator, first the one with the product."""
    folder = folder_of(package)
    return [] if folder is None else [file for stem in _STEMS for file in sorted(folder.glob(f"{stem}.*so"))]


def file_of(package: str) -> Path | None:
    """Return the library with the product, None where there is none."""
    return next(iter(files_of(package)), None)


def fault(vendor: Vendor) -> str:
    """Return why the product cannot be called in this process, or "" where it can.

    The first question about a file loads it in a child process.
    """
    name = vendor.package
    if is_registered(vendor):  # by a running vLLM, or by `operators`
        return ""
    if folder_of(name) is None:
        return f"{name}: not installed; pip install {name}"
    if (release := release_of(name)) is not None and release < _OLDEST:
        return f"{name}: must be {'.'.join(map(str, _OLDEST))} or later (got {version_of(name)}); pip install -U {name}"
    if (file := file_of(name)) is None:
        return f"{name}: no {' or '.join(_STEMS)} in {folder_of(name)}; install its wheel for CUDA"
    reason = load_fault(_LOAD.format(vendor.namespace, PRODUCT), file)
    return f"{name}: {file.name} does not load: {reason}" if reason else ""


def is_registered(vendor: Vendor) -> bool:
    """Tell whether this process has the product, whoever loaded it."""
    import torch

    return hasattr(getattr(torch.ops, vendor.namespace), PRODUCT)


@functools.cache
def operators(vendor: Vendor) -> Any:
    """Return the operators, after loading their library where this process does not have it.

    Raises:
        PluginError: `fault` has a reason.
    """
    import torch

    if reason := fault(vendor):
        raise PluginError(reason)
    if not is_registered(vendor):
        torch.ops.load_library(str(file_of(vendor.package)))
    return getattr(torch.ops, vendor.namespace)


@functools.cache
def operator(vendor: Vendor, name: str) -> Any:
    """Return one operator of `ARGUMENTS`.

    Raises:
        PluginError: the library does not load or has no such operator, or it takes other arguments.
    """
    found = operators(vendor)
    if not hasattr(found, name):
        _load_others(vendor, name)
    if (packet := getattr(found, name, None)) is None:
        raise PluginError(f"{vendor.package}: its library has no {name} (version {version_of(vendor.package) or 'unknown'})")
    schema = packet.default._schema
    if " ".join(argument.name for argument in schema.arguments) not in (wanted := ARGUMENTS[name]):
        words = ", ".join(wanted[0].split())
        raise PluginError(f"{vendor.package}: {name} must take {words} (got {schema}); install vLLM 0.20 to 0.33")
    return packet.default


def _load_others(vendor: Vendor, name: str) -> None:
    """Load a further library of the package that has the operator, as those of older versions do."""
    import torch

    for file in files_of(vendor.package)[1:]:
        if not load_fault(_LOAD.format(vendor.namespace, name), file):
            torch.ops.load_library(str(file))
            return

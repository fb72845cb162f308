"""Compile and launch one configuration of QuACK's kernel for one shape."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedgemm.plugin import Launcher, LaunchError, PluginError, Shape, Solution
from tunedgemm.tools.files import artifact
from tunedgemm.tools.launching import device_context, switched_on, torch_dtype

from tunedgemm_quack.library import Library, compiling_for_hopper, kernel_folder
from tunedgemm_quack.limits import STEP_K, unsupported_splits
from tunedgemm_quack.names import KernelConfig, parse_name

if TYPE_CHECKING:
    import torch

#: Variable that lets `bind` compile a kernel that was not prepared.
COMPILE = "TUNEDGEMM_QUACK_COMPILE"
#: Rows and columns of the products that plans are made from.
_SMALL = 16


def resolve(solution: Solution, shape: Shape) -> tuple[KernelConfig, int]:
    """Return the configuration and the splits of a solution; 1 when K is whole.

    Raises:
        PluginError: no kernel has that name, or it cannot serve the shape.
    """
    kernel = parse_name(solution.kernel_name)
    if reason := unsupported_splits(solution.split_k, shape):
        raise PluginError(reason)
    return kernel, max(solution.split_k, 1)


def uncompiled(solution: Solution, shape: Shape, version: str) -> str:
    """Return why `bind` refuses a valid solution that was not prepared here; "" where it does not."""
    if switched_on(COMPILE):
        return ""
    kernel, splits = resolve(solution, shape)

    def missing() -> bytes:
        raise LookupError

    try:
        artifact(_record(kernel, splits, shape, version), missing)
    except LookupError:
        return f"quack {kernel.name}: not compiled for {version}; tune the shape on this machine, or set {COMPILE}=1 to compile here"
    return ""


def _record(kernel: KernelConfig, splits: int, shape: Shape, version: str) -> str:
    """Return the key of the note that a kernel is in QuACK's cache."""
    operands = f"{shape.dtype} {shape.outdtype} {shape.bias_dtype or 'none'}"
    return f"{version} python {sys.version_info[:2]} {kernel_folder()} {kernel.name} {splits} {operands}"


def prepare(load: Callable[[], Library], solution: Solution, shape: Shape, version: str) -> None:
    """Compile into QuACK's cache in our folder, without a device, and note that.

    QuACK compiles before it looks for the device, which operands without memory do not have.

    Raises:
        LaunchError: the kernel does not compile.
        PluginError: QuACK does not load, or the cache cannot be written.
    """
    import torch

    try:
        kernel, splits = resolve(solution, shape)
    except PluginError:  # bind reports it
        return
    library = load()
    with compiling_for_hopper():
        before = library.compiled()
        try:
            _make_plan(library, kernel, splits, shape, torch.device("meta"))
        except Exception as error:
            hits, _, _, size = library.compiled()
            if (hits, size) == (before[0], before[3]):
                raise LaunchError(f"quack {kernel.name}: does not compile for {shape}: {_plain(error)}") from error
    artifact(_record(kernel, splits, shape, version), lambda: b"compiled", on_disk=True)


def bind(load: Callable[[], Library], solution: Solution, shape: Shape, where: torch.device) -> Launcher:
    """Return the launcher of a solution, after the launch of a small product with the same kernel.

    That loads the kernel before any capture, and compiles it where `prepare` did not.

    Raises:
        LaunchError: the kernel does not compile or run.
        PluginError: QuACK does not load, or has no such kernel for the shape.
    """
    kernel, splits = resolve(solution, shape)
    library = load()
    try:
        with device_context(-1 if where.index is None else where.index):
            plan = _make_plan(library, kernel, splits, shape, where)
    except Exception as error:
        raise LaunchError(f"quack {kernel.name}: fails for {shape}: {_plain(error)}") from error
    return Launcher(_launcher(library, plan, kernel, splits, shape), workspace_bytes=_workspace_bytes(kernel, splits, shape))


def _plain(error: Exception) -> str:
    """Return a message on one line, without CuTe DSL's colours."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())


def _make_plan(library: Library, kernel: KernelConfig, splits: int, shape: Shape, where: torch.device) -> Any:
    """Launch a small product; its plan depends on dtypes, orders and the configuration only."""
    import torch

    m, n, k, dtype = _SMALL, _SMALL, STEP_K * splits, torch_dtype(shape.dtype)
    x, weight = torch.empty(m, k, dtype=dtype, device=where), torch.empty(n, k, dtype=dtype, device=where)
    out = torch.empty(m, n, dtype=torch_dtype(shape.outdtype), device=where)
    bias = torch.empty(1, n, dtype=torch_dtype(shape.bias_dtype), device=where) if shape.bias else None
    return library.gemm(
        *_ordered(kernel, splits, x, weight, out),
        None,
        None,
        kernel.tile_m,
        kernel.tile_n,
        kernel.cluster_m,
        kernel.cluster_n,
        pingpong=kernel.pingpong,
        split_k=splits,
        **{_bias_argument(kernel): bias},
    )


def _bias_argument(kernel: KernelConfig) -> str:
    return "colvec_bias" if kernel.swapped else "rowvec_bias"


def _ordered(kernel: KernelConfig, splits: int, x: Any, weight: Any, out: Any) -> tuple[Any, Any, Any]:
    """Return A, B and D of the kernel; split products have a leading dimension."""
    a, b, d = (weight, x, out.mT) if kernel.swapped else (x, weight, out)
    return (a, b, d) if splits == 1 else (a.unsqueeze(0), b.unsqueeze(0), d.unsqueeze(0))


def _launcher(library: Library, plan: Any, kernel: KernelConfig, splits: int, shape: Shape) -> Callable[..., Any]:
    """Make the call. A view costs a microsecond of the host, so each kind has only those that it needs."""
    import torch

    empty, run, dtype = torch.empty, library.run, torch_dtype(shape.outdtype)
    m, n, k, swapped = shape.m, shape.n, shape.k, kernel.swapped

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        rows = x
        # One row may have any stride; the kernel takes multiples of 16 bytes.
        if x.dim() != 2 or x.stride(0) != k:
            rows = x.reshape(m * k).view(m, k)
        out = empty(m, n, dtype=dtype, device=x.device)
        if splits > 1:
            a, b, d = _ordered(kernel, splits, rows, weight, out)
        elif swapped:
            a, b, d = weight, rows, out.mT
        else:
            a, b, d = rows, weight, out
        if bias is None:
            run(plan, a, b, d, None)
        elif swapped:
            run(plan, a, b, d, None, colvec_bias=bias.view(1, n))
        else:
            run(plan, a, b, d, None, rowvec_bias=bias.view(1, n))
        return out if x.dim() == 2 else out.view(*x.shape[:-1], n)

    return call


def _workspace_bytes(kernel: KernelConfig, splits: int, shape: Shape) -> int:
    """Return the size of QuACK's float32 partials and counters, which are whole clusters of tiles."""
    if splits == 1:
        return 0
    m, n = (shape.n, shape.m) if kernel.swapped else (shape.m, shape.n)
    rows = -(-m // (kernel.tile_m * kernel.cluster_m)) * kernel.cluster_m
    columns = -(-n // (kernel.tile_n * kernel.cluster_n)) * kernel.cluster_n
    return 4 * rows * columns * (kernel.tile_m * kernel.tile_n + 1)

"""Turn a kernel and a shape into a launcher with everything but addresses fixed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from tunedgemm.plugin import Device, Launcher, LaunchError, PluginError, Shape, Solution
from tunedgemm.tools.launching import (
    Driver,
    DriverInterface,
    KernelFunction,
    Launch,
    LaunchPlan,
    launch_of,
    on_device,
    semaphores,
    torch_dtype,
    workspace,
)

from tunedgemm_skinny import rtc
from tunedgemm_skinny.build import ENTRY, build_of, code
from tunedgemm_skinny.driver import INTERFACES, load_kernel
from tunedgemm_skinny.limits import FORMATTED, depth_of, x_pieces
from tunedgemm_skinny.names import KernelConfig, parse_name
from tunedgemm_skinny.resources import grid_of, partial_bytes, per_split, shared_bytes, threads_of, unfit
from tunedgemm_skinny.space import enumerate_kernels

#: Kernel names of AITER's rows. They only ask for a kernel for few rows, so the first solution
#: serves.
ALIASES = ("", "auto", "sol0", "sol1", "sol2")

#: ``Args`` of ``kernels/portable.h``: eight pointers, of which the last two are the scales, then n,
#: k, m, splits, per_split.
_POINTERS, _SCALES, _SIZES = 8, 2, struct.Struct("=qqiiq")

#: Handles a status other than 0: returns where a second launch may succeed, else raises.
OnFailure = Callable[[int], None]


def resolve(solution: Solution, shape: Shape, device: Device) -> tuple[KernelConfig, int]:
    """Return the kernel and the splits of a solution; of an alias, those of the first solution.

    Raises:
        PluginError: no kernel has that name, or it cannot serve the shape on the device.
    """
    if solution.kernel_name in ALIASES:
        first = next(enumerate_kernels(shape, device), None)
        if first is None:
            raise PluginError(f"skinny lists no kernel for {shape} on {device}")
        return first
    kernel, splits = parse_name(solution.kernel_name), solution.split_k or 1
    if reason := unfit(kernel, splits, shape, device.gfx):
        raise PluginError(reason)
    return kernel, splits


def prepare(compiler: Callable[[rtc.Interface], rtc.Compiler], solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache, without a device.

    Raises:
        LaunchError: the kernel does not compile.
        PluginError: no compiler was found.
    """
    try:
        kernel, splits = resolve(solution, shape, device)
    except PluginError:  # bind reports it
        return
    code(build_of(kernel, splits, shape, device.gfx), compiler(rtc.INTERFACES[device.kind]))


def bind(
    compiler: Callable[[rtc.Interface], rtc.Compiler],
    drivers: Callable[[DriverInterface], Driver],
    solution: Solution,
    shape: Shape,
    device: Device,
) -> Launcher:
    """Return the launcher of a solution for exactly this shape.

    Args:
        compiler, drivers: load the libraries for the device's kind.
        solution: kernel name and splits.
        shape: shape of every call.
        device: device whose limits apply; its index is -1 where host memory emulates it.

    Raises:
        PluginError: the solution does not serve the shape, or a library was not found.
        OutOfResources: the kernel needs more threads or shared memory than the device has.
        LaunchError: the kernel does not compile or load.
    """
    kernel, splits = resolve(solution, shape, device)
    compiled = code(build_of(kernel, splits, shape, device.gfx), compiler(rtc.INTERFACES[device.kind]))
    driver = drivers(INTERFACES[device.kind])
    plan = _plan(kernel, splits, shape, device.gfx)
    try:
        loaded = load_kernel(driver, compiled, ENTRY, device.index)
        loaded.allow(plan.threads, plan.shared)
    except LaunchError as error:  # or OutOfResources
        raise type(error)(f"skinny {kernel.name} on {device.gfx}: {error}") from error
    nbytes, launch, on_failure = (
        partial_bytes(kernel, splits, shape),
        launch_of(loaded.function, plan),
        _on_failure(loaded.function, kernel.name),
    )
    call = _call(launch, on_failure, shape, device, plan.grid[0] * plan.grid[2], nbytes)
    return Launcher(on_device(call, device.index), workspace_bytes=nbytes)


def _plan(kernel: KernelConfig, splits: int, shape: Shape, gfx: str) -> LaunchPlan:
    """Return the launch plan; it takes addresses of scales where the shape has them, else the kernel
    gets zeros.
    """
    sizes = _SIZES.pack(shape.n, depth_of(shape), shape.m, splits, per_split(kernel, splits, shape, gfx))
    pointers = _POINTERS - _SCALES * (shape.scale == "none")
    return LaunchPlan(
        grid=grid_of(kernel, splits, shape),
        threads=threads_of(kernel, gfx),
        arguments=bytes(8 * _POINTERS) + sizes,
        slots=tuple(range(0, 8 * pointers, 8)),
        shared=shared_bytes(kernel, splits, shape, gfx),
    )


def _on_failure(function: KernelFunction, name: str) -> OnFailure:
    def on_failure(status: int) -> None:
        try:
            function.mend(status)
        except LaunchError as error:
            raise LaunchError(f"skinny {name}: {error}") from None

    return on_failure


def _call(launch: Launch, on_failure: OnFailure, shape: Shape, device: Device, count: int, nbytes: int) -> Callable[..., Any]:
    """Make a call of scaled operands, of splits that meet in global memory through partials and
    counters, or of neither, which allocates its output only.
    """
    import torch

    empty, dtype, n, plain = torch.empty, torch_dtype(shape.outdtype), shape.n, (shape.m, shape.n)
    index, where = device.index, device.torch_device
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if index >= 0 else lambda _: 0

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        out = empty(plain if x.dim() == 2 else (*x.shape[:-1], n), dtype=dtype, device=where)
        added = 0 if bias is None else bias.data_ptr()
        while status := launch(stream(index), x.data_ptr(), weight.data_ptr(), added, out.data_ptr(), 0, 0):
            on_failure(status)
        return out

    def split(x: Any, weight: Any, bias: Any = None) -> Any:
        out = empty(plain if x.dim() == 2 else (*x.shape[:-1], n), dtype=dtype, device=where)
        # Both names must live until the launch: a graph's allocator could give one the other's
        # memory.
        scratch, zeros = workspace(nbytes, where), semaphores(count, where)
        partial, counters = scratch.data_ptr(), zeros.data_ptr()
        added = 0 if bias is None else bias.data_ptr()
        while status := launch(stream(index), x.data_ptr(), weight.data_ptr(), added, out.data_ptr(), partial, counters):
            on_failure(status)
        return out

    def scaled(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        out = empty(plain if x.dim() == 2 else (*x.shape[:-1], n), dtype=dtype, device=where)
        added = 0 if bias is None else bias.data_ptr()
        operands, scales = (x.data_ptr(), weight.data_ptr(), added, out.data_ptr()), (x_scale.data_ptr(), w_scale.data_ptr())
        # As in `split`, these names must live until the launch.
        scratch, zeros = (workspace(nbytes, where), semaphores(count, where)) if nbytes else (None, None)
        sums = (0, 0) if scratch is None or zeros is None else (scratch.data_ptr(), zeros.data_ptr())
        while status := launch(stream(index), *operands, *sums, *scales):
            on_failure(status)
        return out

    def wide(x: Any, weight: Any, w_scale: Any, bias: Any = None) -> Any:
        return scaled(x, weight, w_scale, w_scale, bias)  # x has no scales; the kernel reads none

    def formatted(x: Any, weight: Any, w_scale: Any, *others: Any) -> Any:
        w_zeros, _, w_global_scale, bias = (*others, None, None, None, None)[:4]
        other = w_global_scale if w_zeros is None else w_zeros  # no format has both; the kernel takes it for scales of x
        return scaled(x, weight, w_scale if other is None else other, w_scale, bias)

    if shape.scale == "none":
        return split if nbytes else call
    return formatted if shape.op == FORMATTED else wide if x_pieces(shape) > 1 else scaled

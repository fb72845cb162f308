"""Launch: a solution bound to a shape becomes one call of the driver with everything but addresses fixed before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedgemm.plugin import Device, Launcher, LaunchError, OutOfResources, PluginError, Shape, Solution, Unsupported
from tunedgemm.tools import Driver, DriverInterface, on_device, semaphores, torch_dtype, workspace

from tunedgemm_skinny import driver, rtc
from tunedgemm_skinny.build import ENTRY, build_of, code
from tunedgemm_skinny.fit import grid_of, partial_bytes, per_split, refusal, shared_bytes, threads_of
from tunedgemm_skinny.limits import ARCHITECTURES, depth_of, supports, x_pieces
from tunedgemm_skinny.names import Kernel, kernel_of
from tunedgemm_skinny.native import Launch, Plan, launch_of
from tunedgemm_skinny.solutions import choices

if TYPE_CHECKING:
    import torch

#: Names of AITER's rows, which say no more than that a kernel for few rows is meant; they stand for the first guess.
ALIASES = ("", "auto", "sol0", "sol1", "sol2")


def resolve(solution: Solution, shape: Shape, device: Device) -> tuple[Kernel, int]:
    """The kernel of a solution and the number of splits; of an alias, those of the first guess.

    Raises:
        PluginError: no kernel has that name, or it cannot serve the shape on the device.
    """
    if solution.kernel_name in ALIASES:
        first = next(choices(shape, device), None)
        if first is None:
            raise PluginError(f"skinny lists no kernel for {shape} on {device}")
        return first
    kernel, splits = kernel_of(solution.kernel_name), solution.split_k or 1
    if refused := refusal(kernel, splits, shape, device.gfx):
        raise PluginError(refused)
    return kernel, splits


def prepare(compiler: Callable[[rtc.Interface], rtc.Compiler], solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache; needs no device.

    Raises:
        LaunchError: it does not compile. PluginError: there is no compiler.
    """
    if not supports(shape, device):
        return
    try:
        kernel, splits = resolve(solution, shape, device)
    except PluginError:  # bind says why
        return
    code(build_of(kernel, splits, shape, device.gfx), compiler(rtc.INTERFACES[device.kind]))


def bind(
    compiler: Callable[[rtc.Interface], rtc.Compiler],
    drivers: Callable[[DriverInterface], Driver],
    solution: Solution,
    shape: Shape,
    device: Device,
    where: torch.device,
) -> Launcher | Unsupported:
    """The launcher of a solution for exactly this shape.

    Args:
        compiler, drivers: give the libraries for the device's kind.
        device: whose limits count; its index is -1 where host memory stands for it.
        where: the operands' device.

    Raises:
        OutOfResources: it needs more threads or shared memory than the device gives it. LaunchError: it does not compile or load.
    """
    try:
        kernel, splits = resolve(solution, shape, device)
        compiled = code(build_of(kernel, splits, shape, device.gfx), compiler(rtc.INTERFACES[device.kind]))
        loaded = drivers(driver.INTERFACES[device.kind])
    except PluginError as error:
        return Unsupported(str(error))
    plan = Plan(
        grid=grid_of(kernel, splits, shape),
        threads=threads_of(kernel, device.gfx),
        shared=shared_bytes(kernel, splits, shape, device.gfx),
        n=shape.n,
        k=depth_of(shape),
        m=shape.m,
        splits=splits,
        per_split=per_split(kernel, splits, shape, device.gfx),
        overlaps=ARCHITECTURES[device.gfx].overlaps,
    )
    try:
        function = driver.function_of(loaded, compiled, ENTRY, device.index)
        function.allow(plan.threads, plan.shared)
    except OutOfResources as error:
        raise OutOfResources(f"skinny {kernel.name} on {device.gfx} needs {error}") from error
    except LaunchError as error:
        raise LaunchError(f"skinny {kernel.name} on {device.gfx}: {error}") from error
    nbytes, launch, failed = partial_bytes(kernel, splits, shape), launch_of(function, plan), _failing(function, kernel.name)
    count = plan.grid[0] * plan.grid[2]
    make = functools.partial(_split, count=count, nbytes=nbytes) if nbytes else _plain
    if shape.scale != "none":
        make = functools.partial(_scaled, count=count, nbytes=nbytes)
    return Launcher(on_device(make(launch, failed, shape, device.index, where), device.index), workspace_bytes=nbytes)


#: What is done about a status; it returns where the launch is worth a second try, else it raises.
Failed = Callable[[int], None]


def _failing(function: driver.Function, name: str) -> Failed:
    def failed(status: int) -> None:
        try:
            function.driver.mend("launch", status, function.index)
        except LaunchError as error:
            raise LaunchError(f"skinny {name}: {error}") from None

    return failed


def _stream(index: int) -> Callable[[int], int]:
    import torch

    return torch._C._cuda_getCurrentRawStream if index >= 0 else lambda _: 0


def _plain(launch: Launch, failed: Failed, shape: Shape, index: int, where: torch.device) -> Callable[..., Any]:
    """One launch, nothing but the output allocated."""
    import torch

    empty, stream, dtype, n, plain = torch.empty, _stream(index), torch_dtype(shape.outdtype), shape.n, (shape.m, shape.n)

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        out = empty(plain if x.dim() == 2 else (*x.shape[:-1], n), dtype=dtype, device=where)
        added = 0 if bias is None else bias.data_ptr()
        while status := launch(stream(index), x.data_ptr(), weight.data_ptr(), added, out.data_ptr(), 0, 0):
            failed(status)
        return out

    return call


def _split(launch: Launch, failed: Failed, shape: Shape, index: int, where: torch.device, *, count: int, nbytes: int) -> Callable[..., Any]:
    """One launch whose blocks share columns of the output through partial sums and counters."""
    import torch

    empty, stream, dtype, n, plain = torch.empty, _stream(index), torch_dtype(shape.outdtype), shape.n, (shape.m, shape.n)

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        out = empty(plain if x.dim() == 2 else (*x.shape[:-1], n), dtype=dtype, device=where)
        # In a graph nothing but these names holds them: let go too early, one could lie where the other is.
        scratch, zeros = workspace(nbytes, where), semaphores(count, where)
        partial, counters = scratch.data_ptr(), zeros.data_ptr()
        added = 0 if bias is None else bias.data_ptr()
        while status := launch(stream(index), x.data_ptr(), weight.data_ptr(), added, out.data_ptr(), partial, counters):
            failed(status)
        return out

    return call


def _scaled(
    launch: Launch, failed: Failed, shape: Shape, index: int, where: torch.device, *, count: int, nbytes: int
) -> Callable[..., Any]:
    """One launch of scaled operands, whose blocks share columns of the output where there are partial sums."""
    import torch

    empty, stream, dtype, n, plain = torch.empty, _stream(index), torch_dtype(shape.outdtype), shape.n, (shape.m, shape.n)

    def call(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        out = empty(plain if x.dim() == 2 else (*x.shape[:-1], n), dtype=dtype, device=where)
        added = 0 if bias is None else bias.data_ptr()
        operands, scales = (x.data_ptr(), weight.data_ptr(), added, out.data_ptr()), (x_scale.data_ptr(), w_scale.data_ptr())
        # As above these names must last until the launch is captured.
        scratch, zeros = (workspace(nbytes, where), semaphores(count, where)) if nbytes else (None, None)
        sums = (0, 0) if scratch is None or zeros is None else (scratch.data_ptr(), zeros.data_ptr())
        while status := launch(stream(index), *operands, *sums, *scales):
            failed(status)
        return out

    def wide(x: Any, weight: Any, w_scale: Any, bias: Any = None) -> Any:
        return call(x, weight, w_scale, w_scale, bias)  # x has no scales, and none are read

    return wide if x_pieces(shape) > 1 else call

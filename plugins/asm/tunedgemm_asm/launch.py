"""Launch: a solution bound to a shape becomes one call of the driver with everything but addresses fixed before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedgemm.plugin import Device, Launcher, LaunchError, PluginError, Shape, Solution, Unsupported
from tunedgemm.tools import Driver, DriverInterface, on_device, semaphores, torch_dtype, workspace

from tunedgemm_asm import driver
from tunedgemm_asm.native import Launch, Plan, launch_of
from tunedgemm_asm.problem import Problem, problem_of
from tunedgemm_asm.solutions import resolve

if TYPE_CHECKING:
    import torch

    from tunedgemm_asm.packs import Found


def bind(
    drivers: Callable[[DriverInterface], Driver],
    found: Found,
    solution: Solution,
    shape: Shape,
    device: Device,
    where: torch.device,
) -> Launcher | Unsupported:
    """The launcher of a solution for exactly this shape.

    Args:
        drivers: gives the library for the device's kind.
        found: the packs for the device's architecture.
        device: whose limits count; its index is -1 where host memory stands for it.
        where: the operands' device.

    Raises:
        LaunchError: the driver does not load it.
    """
    try:
        kernel, splits = resolve(solution, shape, device, found)
        code = found.kernels[kernel.name].code()
        library = drivers(driver.INTERFACES[device.kind])
    except PluginError as error:
        return Unsupported(str(error))
    try:
        function = driver.function_of(library, code, kernel.name, device.index)
    except LaunchError as error:
        raise LaunchError(f"asm {kernel.name} on {device.gfx}: {error}") from error
    abi, problem = found.kernels[kernel.name].abi, problem_of(kernel, splits, shape)
    slots = tuple(abi.field(name).offset for name in problem.addresses)
    launch = launch_of(function, Plan(problem.grid, abi.threads, abi.pack(problem.values), slots))
    call = _call(launch, _failing(function, kernel.name), problem, shape, device.index, where)
    return Launcher(on_device(call, device.index), workspace_bytes=problem.workspace)


def _failing(function: driver.Function, name: str) -> Callable[[int], None]:
    """What raises the error of a status."""

    def failed(status: int) -> None:
        called = function.driver.interface.functions["launch"][0]
        raise LaunchError(f"asm {name}: {called}: {function.driver.text(status)}")

    return failed


def _call(
    launch: Launch, failed: Callable[[int], None], problem: Problem, shape: Shape, index: int, where: torch.device
) -> Callable[..., Any]:
    """The call of operands; the plain product, of which nothing but the output is allocated, without anything in between."""
    import torch

    empty, dtype, n, plain = torch.empty, torch_dtype(shape.outdtype), shape.n, (shape.m, shape.n)
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if index >= 0 else lambda _: 0

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        out = empty(plain if x.dim() == 2 else (*x.shape[:-1], n), dtype=dtype, device=where)
        if bias is None:
            status = launch(stream(index), out.data_ptr(), x.data_ptr(), weight.data_ptr())
        else:
            status = launch(stream(index), out.data_ptr(), x.data_ptr(), weight.data_ptr(), bias.data_ptr())
        if status:
            failed(status)
        return out

    rows, scratch, counters, zeroed = problem.rows, problem.workspace, problem.counters, problem.zeroed
    zeros = _zeros(n, where) if problem.absent_bias else None

    def prepared(x: Any, weight: Any, *others: Any) -> Any:
        memory = empty((rows, n), dtype=dtype, device=where)
        if zeroed:
            memory.zero_()  # in the order of the stream, also in a graph
        out = memory if rows == shape.m else memory[: shape.m]
        addresses = [memory.data_ptr(), x.data_ptr(), weight.data_ptr(), *(each.data_ptr() for each in others)]
        if zeros is not None:
            addresses.append(zeros.data_ptr())
        # In a graph nothing but these names holds them: let go too early, one could lie where the other is.
        held = [workspace(scratch, where)] if scratch else []
        held += [semaphores(counters, where)] if counters else []
        if status := launch(stream(index), *addresses, *(each.data_ptr() for each in held)):
            failed(status)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], n)

    return call if problem.addresses in (_PLAIN, _BIASED) else prepared


_PLAIN = ("out", "a", "b")
_BIASED = (*_PLAIN, "bias")


@functools.cache
def _zeros(n: int, where: torch.device) -> torch.Tensor:
    """Float32 zeros [N] for kernels that always add a bias, for all streams; kept for ever, because a captured graph may read them."""
    import torch

    zeros = torch.zeros(n, dtype=torch.float32, device=where)
    if where.type == "cuda":
        torch.cuda.current_stream(where).synchronize()  # other streams do not wait for the fill
    return zeros

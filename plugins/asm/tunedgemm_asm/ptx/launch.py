"""Launch on Hopper: a solution bound to a shape becomes one call of the driver, all but addresses and descriptors fixed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedgemm.plugin import (
    Device,
    Driver,
    DriverInterface,
    Launcher,
    LaunchError,
    PluginError,
    Shape,
    Solution,
    Unsupported,
    device_context,
    on_device,
    semaphores,
    torch_dtype,
    workspace,
)

from tunedgemm_asm import driver
from tunedgemm_asm.native import Launch, Plan, launch_of
from tunedgemm_asm.ptx import assembler
from tunedgemm_asm.ptx.arguments import MAP_OUT, MAPS, SCALES, abi_of
from tunedgemm_asm.ptx.kernel import ENTRY
from tunedgemm_asm.ptx.plan import REVISION, SIDE
from tunedgemm_asm.ptx.problem import Problem, problem_of
from tunedgemm_asm.ptx.solutions import resolve, supports
from tunedgemm_asm.ptx.tensormap import Operand, Pool

if TYPE_CHECKING:
    import torch


def details() -> list[str]:
    """What assembles here."""
    found = assembler.ptxas()
    by = f"ptxas {found[1]} ({found[0]})" if found else "the driver, when it loads them: there is no ptxas"
    return [f"generated PTX of revision {REVISION}, assembled by {by}"]


def prepare(solution: Solution, shape: Shape, device: Device) -> None:
    """Assemble into the artifact cache; needs no device.

    Raises:
        LaunchError: it does not assemble.
    """
    if not supports(shape, device):
        return
    try:
        problem = _problem(solution, shape, device)
    except PluginError:  # bind says why
        return
    assembler.code(problem.variant)


def bind(
    drivers: Callable[[DriverInterface], Driver], solution: Solution, shape: Shape, device: Device, where: torch.device
) -> Launcher | Unsupported:
    """The launcher of a solution for exactly this shape.

    Args:
        drivers: gives the library for the device's kind.
        device: whose limits count; its index is -1 where host memory stands for it.
        where: the operands' device.

    Raises:
        LaunchError: it does not assemble or load.
    """
    try:
        problem = _problem(solution, shape, device)
        library = drivers(driver.INTERFACES[device.kind])
    except PluginError as error:
        return Unsupported(str(error))
    plan = problem.variant.plan
    try:
        function = driver.function_of(library, assembler.code(problem.variant), ENTRY, device.index)
        with device_context(device.index):
            library.call("set", function.address, driver.DYNAMIC_SHARED, plan.shared_bytes, index=device.index)
    except LaunchError as error:
        raise LaunchError(f"asm {plan.name} on {device.gfx}: {error}") from error
    names, abi = ["out", *["bias"] * shape.bias], abi_of(shape.scale, plan.panels > 0)
    names += ["workspace", "counters"] if problem.variant.split else []
    names += SCALES if shape.scale != "none" else []
    slots = (*(abi.field(name).offset for name in names), *MAPS.values(), *[MAP_OUT] * (plan.panels > 0))
    launch = launch_of(function, Plan((problem.grid, 1, 1), plan.threads, abi.pack(problem.values), slots, plan.shared_bytes))
    pools = _pools(library, problem, shape, device.index)
    call = _call(launch, _failing(function, plan.name, device.index), pools, problem, shape, device.index, where)
    return Launcher(on_device(call, device.index), workspace_bytes=problem.workspace)


def _problem(solution: Solution, shape: Shape, device: Device) -> Problem:
    plan, splits = resolve(solution, shape)
    return problem_of(plan, splits, shape, max(1, device.cu_num))


def _pools(library: Driver, problem: Problem, shape: Shape, index: int) -> tuple[Pool, ...]:
    """The descriptors of x and of the weight, and of an output that the copy engine stores."""
    plan = problem.variant.plan
    boxes = (plan.box_b, plan.tile_a) if plan.swapped else (plan.tile_a, plan.box_b)
    x = Operand(shape.dtype, shape.m, shape.k, boxes[0])
    weight = Operand(shape.dtype, shape.n, shape.k, boxes[1], columns=problem.variant.columns)
    out = [Operand(shape.outdtype, shape.m, shape.n, SIDE, 2 * plan.panel_columns)] if plan.panels else []
    return tuple(Pool(library, operand, index) for operand in (x, weight, *out))


def _failing(function: driver.Function, name: str, index: int) -> Callable[[int], None]:
    """What is done about a status: it returns where the launch is worth a second try, else it raises."""

    def failed(status: int) -> None:
        try:
            function.driver.mend("launch", status, index)
        except LaunchError as error:
            raise LaunchError(f"asm {name}: {error}") from None

    return failed


def _call(
    launch: Launch,
    failed: Callable[[int], None],
    pools: tuple[Pool, ...],
    problem: Problem,
    shape: Shape,
    index: int,
    where: torch.device,
) -> Callable[..., Any]:
    """The call of operands: with scales or without."""
    import torch

    empty, dtype, n, plain = torch.empty, torch_dtype(shape.outdtype), shape.n, (shape.m, shape.n)
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if index >= 0 else lambda _: 0
    (xs, weights, *outs), swapped = pools, problem.variant.plan.swapped
    scratch, counters = problem.workspace, problem.counters

    def call(x: Any, weight: Any, bias: Any = None, scales: tuple[int, ...] = ()) -> Any:
        out = empty(plain if x.dim() == 2 else (*x.shape[:-1], n), dtype=dtype, device=where)
        maps = (xs[x.data_ptr()], weights[weight.data_ptr()])
        addresses = [out.data_ptr()] if bias is None else [out.data_ptr(), bias.data_ptr()]
        # In a graph nothing but this name holds them: let go too early, one could lie where the other is.
        held = (workspace(scratch, where), semaphores(counters, where)) if scratch else ()
        addresses += [each.data_ptr() for each in held]
        told = (*addresses, *scales, *(maps[::-1] if swapped else maps), *(each[addresses[0]] for each in outs))
        while status := launch(stream(index), *told):
            failed(status)
        return out

    def scaled(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        return call(x, weight, bias, (x_scale.data_ptr(), w_scale.data_ptr()))

    return call if shape.scale == "none" else scaled

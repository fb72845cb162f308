"""Launch on Hopper: a solution bound to a shape becomes one call of the driver, all but addresses and descriptors fixed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedgemm.plugin import Device, Launcher, LaunchError, PluginError, Shape, Solution, Unsupported
from tunedgemm.tools import Driver, DriverInterface, device_context, on_device, scratch, torch_dtype

from tunedgemm_asm import driver
from tunedgemm_asm.native import Launch, Map, Plan, launch_of
from tunedgemm_asm.ptx import assembler
from tunedgemm_asm.ptx.arguments import MAP_OUT, MAPS, SCALES, abi_of
from tunedgemm_asm.ptx.kernel import ENTRY
from tunedgemm_asm.ptx.plan import REVISION, SIDE
from tunedgemm_asm.ptx.problem import Problem, problem_of
from tunedgemm_asm.ptx.solutions import resolve, supports
from tunedgemm_asm.ptx.tensormap import Operand

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
    launch = launch_of(function, _launched(problem, shape, device.index))
    call = _call(launch, _failing(function, plan.name, device.index), problem, shape, device.index, where)
    return Launcher(on_device(call, device.index), workspace_bytes=problem.workspace)


def _problem(solution: Solution, shape: Shape, device: Device) -> Problem:
    plan, splits = resolve(solution, shape)
    return problem_of(plan, splits, shape, max(1, device.cu_num))


def _launched(problem: Problem, shape: Shape, index: int) -> Plan:
    """How the kernel is launched: it gets the addresses of the output, scales, bias, workspace and counters, those that there are, then of
    x and of the weight, which descriptors alone have.
    """
    plan, abi = problem.variant.plan, abi_of(shape.scale, problem.variant.plan.panels > 0)
    names = ["out", *(SCALES if shape.scale != "none" else ()), *["bias"] * shape.bias]
    names += ["workspace", "counters"] if problem.variant.split else []
    places = list(MAPS.values())[:: -1 if plan.swapped else 1]
    told = zip((*places, MAP_OUT), (len(names), len(names) + 1, 0), _operands(problem, shape), strict=False)
    slots, maps = tuple(abi.field(name).offset for name in names), tuple(Map(*each) for each in told)
    return Plan((problem.grid, 1, 1), plan.threads, abi.pack(problem.values), slots, plan.shared_bytes, maps, index)


def _operands(problem: Problem, shape: Shape) -> tuple[Operand, ...]:
    """What descriptors are of: x and the weight, and an output that the copy engine stores."""
    plan = problem.variant.plan
    boxes = (plan.box_b, plan.tile_a) if plan.swapped else (plan.tile_a, plan.box_b)
    x = Operand(shape.dtype, shape.m, shape.k, boxes[0])
    weight = Operand(shape.dtype, shape.n, shape.k, boxes[1], columns=problem.variant.columns)
    out = [Operand(shape.outdtype, shape.m, shape.n, SIDE, 2 * plan.panel_columns)] if plan.panels else []
    return x, weight, *out


def _failing(function: driver.Function, name: str, index: int) -> Callable[[int], None]:
    """What is done about a status, of a descriptor where it is negative: it returns where a second try is worthwhile, else it raises."""

    def failed(status: int) -> None:
        try:
            function.driver.mend("launch" if status > 0 else "describe", abs(status), index)
        except LaunchError as error:
            raise LaunchError(f"asm {name}: {error}") from None

    return failed


def _call(
    launch: Launch, failed: Callable[[int], None], problem: Problem, shape: Shape, index: int, where: torch.device
) -> Callable[..., Any]:
    """The call of operands; the plain product, of which nothing but the output is allocated, without anything in between."""
    import torch

    empty, dtype, m, n = torch.empty, torch_dtype(shape.outdtype), shape.m, shape.n
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if index >= 0 else lambda _: 0

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        # Sizes one by one: torch takes half as long again to read them from a tuple.
        out = empty(m, n, dtype=dtype, device=where) if x.dim() == 2 else empty(*x.shape[:-1], n, dtype=dtype, device=where)
        if bias is None:
            while status := launch(stream(index), out.data_ptr(), x.data_ptr(), weight.data_ptr()):
                failed(status)
        else:
            while status := launch(stream(index), out.data_ptr(), bias.data_ptr(), x.data_ptr(), weight.data_ptr()):
                failed(status)
        return out

    def scaled(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        if bias is not None:
            return prepared(x, weight, x_scale, w_scale, bias)
        out = empty(m, n, dtype=dtype, device=where) if x.dim() == 2 else empty(*x.shape[:-1], n, dtype=dtype, device=where)
        scales = x_scale.data_ptr(), w_scale.data_ptr()
        while status := launch(stream(index), out.data_ptr(), *scales, x.data_ptr(), weight.data_ptr()):
            failed(status)
        return out

    nbytes, counters = problem.workspace, problem.counters

    def prepared(x: Any, weight: Any, *others: Any) -> Any:
        out = empty(m, n, dtype=dtype, device=where) if x.dim() == 2 else empty(*x.shape[:-1], n, dtype=dtype, device=where)
        # In a graph nothing but this name holds them: let go too early, one could lie where the other is.
        held = scratch(nbytes, counters, where) if nbytes else ()
        addresses = [each.data_ptr() for each in (*others, *held) if each is not None]
        while status := launch(stream(index), out.data_ptr(), *addresses, x.data_ptr(), weight.data_ptr()):
            failed(status)
        return out

    if nbytes:
        return prepared
    return call if shape.scale == "none" else scaled

"""Launch of plans: compiled and loaded, every launch's arguments fixed but for the addresses.

A call allocates the output and one workspace, and launches the plan's steps on the current stream: nothing waits for the device, so
it may be captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
from tunedgemm.plugin import Device, Launcher, PluginError, Shape, Solution, Unsupported
from tunedgemm.tools import on_device, ops, torch_dtype

from tunedgemm_triton.counters import counters_of
from tunedgemm_triton.heuristic import resolve
from tunedgemm_triton.launch import Loaded, loaded_of
from tunedgemm_triton.plan import Plan, Program, Step
from tunedgemm_triton.planned import Planned

#: Where the addresses of a call are found: a zero, to which numbers are added, the output, the workspace, the counters, the operands.
_NUMBER, _OUT, _WORKSPACE, _COUNTERS, _OPERANDS = range(5)


@attrs.frozen(eq=False)
class _Launch:
    """A step on one device.

    Attributes:
        loaded: the program.
        grid: as the step's.
        arguments: (which address of the call, what is added to it) of each.
        given: the place of the operand that decides whether it is run, -1 for always.
        present: whether it is run where that operand is there.
    """

    loaded: Loaded
    grid: tuple[int, int, int]
    arguments: tuple[tuple[int, int], ...]
    given: int
    present: bool


def prepare(family: Planned, solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache; needs no device.

    Args:
        family: the op's kernels.

    Raises:
        LaunchError: it does not compile. PluginError: no such kernel.
    """
    kernel, split_k = _resolved(family, solution, shape, device)
    # What bind refuses with a reason needs no compile.
    if family.supports(shape, device) and not family.refusal(kernel, split_k, shape, device):
        for program in dict.fromkeys(step.program for step in family.plan_of(kernel, split_k, shape).steps):
            program.compiled(device.gfx)


def bind(family: Planned, solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """The launcher of a solution for exactly this shape; *family* as for `prepare`.

    Raises:
        OutOfResources: it needs more shared memory or threads than the device has. LaunchError: it does not compile.
    """
    answer = family.supports(shape, device)
    if isinstance(answer, Unsupported):
        return answer
    if device.index < 0:
        return Unsupported(f"{device} is described, not present")
    try:
        kernel, split_k = _resolved(family, solution, shape, device)
    except PluginError as error:
        return Unsupported(str(error))
    if refused := family.refusal(kernel, split_k, shape, device):
        return Unsupported(refused)
    plan = family.plan_of(kernel, split_k, shape)
    operands = [name.removesuffix("?") for name in ops()[shape.op].operands]
    launches = tuple(_launch(step, plan, operands, device) for step in plan.steps)
    return Launcher(on_device(_call(launches, plan, shape, device), device.index), workspace_bytes=plan.nbytes)


def _resolved(family: Planned, solution: Solution, shape: Shape, device: Device) -> tuple[Any, int]:
    """The kernel of a solution and its parts of K, 1 for none."""
    found = resolve(solution, shape, device)
    return family.kernel_of(found.kernel_name), max(found.split_k, 1)


@functools.lru_cache(maxsize=1024)
def _load(program: Program, gfx: str, index: int) -> Loaded:
    return loaded_of(program.compiled(gfx), program.function, gfx, index)


def _launch(step: Step, plan: Plan, operands: list[str], device: Device) -> _Launch:
    """A step with its program loaded and its arguments by place."""

    def place(value: int | str) -> tuple[int, int]:
        if isinstance(value, int):
            return _NUMBER, value
        name, _, behind = value.partition("+")
        if name == "counters":
            return _COUNTERS, 4 * int(behind)
        if name in plan.buffers:
            return _WORKSPACE, plan.buffers[name][0]
        return (_OUT, 0) if name == "out" else (_OPERANDS + operands.index(name), 0)

    arguments = tuple(place(value) for _, value in step.values)
    given = _OPERANDS + operands.index(step.given) if step.given else -1
    return _Launch(_load(step.program, device.gfx, device.index), step.grid, arguments, given, step.present)


def _call(launches: tuple[_Launch, ...], plan: Plan, shape: Shape, device: Device) -> Callable[..., Any]:
    """A call: addresses, then the launches."""
    import torch

    empty, stream, index, byte = torch.empty, torch._C._cuda_getCurrentRawStream, device.index, torch.uint8
    out_dtype, where, n, nbytes = torch_dtype(shape.outdtype), device.torch_device, shape.n, plan.nbytes
    count, most = counters_of(where) if plan.counters else None, len(ops()[shape.op].operands)
    steps = [(one.loaded.launch, one.loaded.head, one.loaded.rest, *attrs.astuple(one, recurse=False)[1:]) for one in launches]

    def call(*operands: Any) -> Any:
        out = empty((*operands[0].shape[:-1], n), dtype=out_dtype, device=where)
        addresses = [0, out.data_ptr(), 0, 0, *[0 if operand is None else operand.data_ptr() for operand in operands]]
        addresses += [0] * (most - len(operands))
        if nbytes:
            workspace = empty(nbytes, dtype=byte, device=where)
            addresses[_WORKSPACE] = workspace.data_ptr()
        if count is not None:
            counters = count(addresses[_WORKSPACE])
            addresses[_COUNTERS] = counters.data_ptr()
        current = stream(index)
        for launch, head, rest, grid, arguments, given, present in steps:
            if given < 0 or bool(addresses[given]) is present:
                launch(*grid, current, *head, *[addresses[which] + more for which, more in arguments], *rest)
        return out

    return call

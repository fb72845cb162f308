"""Launch of the fused mixture of experts: its plan compiled and loaded, every launch's arguments fixed but for the addresses.

A call allocates the output and one workspace, and launches the plan's steps on the current stream: nothing waits for the device, so
it may be captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
from tunedgemm.plugin import Device, Launcher, PluginError, Shape, Solution, Unsupported, on_device, ops, torch_dtype

from tunedgemm_triton.counters import counters_of
from tunedgemm_triton.launch import Loaded, loaded_of
from tunedgemm_triton.moe import OP, Moe, counters_of_stages, enumerate_solutions, moe_of, refusal, supports
from tunedgemm_triton.moe_plan import Plan, Program, Step, plan_of

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


def prepare(solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache; needs no device.

    Raises:
        LaunchError: it does not compile. PluginError: no such kernel.
    """
    kernel, split_k = _resolved(solution, shape, device)
    if supports(shape, device) and not refusal(kernel, split_k, shape, device):
        for program in dict.fromkeys(step.program for step in plan_of(kernel, split_k, shape).steps):
            program.compiled(device.gfx)


def bind(solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """The launcher of a solution for exactly this shape.

    Raises:
        OutOfResources: it needs more shared memory or threads than the device has. LaunchError: it does not compile.
    """
    answer = supports(shape, device)
    if isinstance(answer, Unsupported):
        return answer
    if device.index < 0:
        return Unsupported(f"{device} is described, not present")
    try:
        kernel, split_k = _resolved(solution, shape, device)
    except PluginError as error:
        return Unsupported(str(error))
    if refused := refusal(kernel, split_k, shape, device):
        return Unsupported(refused)
    plan = plan_of(kernel, split_k, shape)
    launches = tuple(_launch(step, plan, device) for step in plan.steps)
    counted = any(counters_of_stages(kernel, split_k, shape))
    call = _call(launches, plan.nbytes, shape, device, counted=counted)
    return Launcher(on_device(call, device.index), workspace_bytes=plan.nbytes)


def _resolved(solution: Solution, shape: Shape, device: Device) -> tuple[Moe, int]:
    """The kernel of a solution and its parts of K; the first enumerated one's for the alias ``auto`` (or no name)."""
    if solution.kernel_name in ("auto", ""):
        first = next(enumerate_solutions(shape, device), None)
        if first is None:
            raise PluginError(f"triton lists no kernel for {shape} on {device}")
        solution = first
    return moe_of(solution.kernel_name), max(solution.split_k, 1)


@functools.lru_cache(maxsize=1024)
def _load(program: Program, gfx: str, index: int) -> Loaded:
    return loaded_of(program.compiled(gfx), program.function, gfx, index)


def _launch(step: Step, plan: Plan, device: Device) -> _Launch:
    """A step with its program loaded and its arguments by place."""
    operands = [name.removesuffix("?") for name in ops()[OP].operands]

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


def _call(launches: tuple[_Launch, ...], nbytes: int, shape: Shape, device: Device, *, counted: bool) -> Callable[..., Any]:
    """A call: addresses, then the launches."""
    import torch

    empty, stream, index, byte = torch.empty, torch._C._cuda_getCurrentRawStream, device.index, torch.uint8
    out_dtype, where, most = torch_dtype(shape.outdtype), device.torch_device, len(ops()[OP].operands)
    count = counters_of(where) if counted else None
    steps = [(one.loaded.launch, one.loaded.head, one.loaded.rest, *attrs.astuple(one, recurse=False)[1:]) for one in launches]

    def call(*operands: Any) -> Any:
        out = empty(operands[0].shape, dtype=out_dtype, device=where)
        workspace = empty(nbytes, dtype=byte, device=where)
        at = workspace.data_ptr()
        counters = None if count is None else count(at)
        addresses = [0, out.data_ptr(), at, 0 if counters is None else counters.data_ptr()]
        addresses += [0 if operand is None else operand.data_ptr() for operand in operands]
        addresses += [0] * (most - len(operands))
        current = stream(index)
        for launch, head, rest, grid, arguments, given, present in steps:
            if given < 0 or bool(addresses[given]) is present:
                launch(*grid, current, *head, *[addresses[which] + more for which, more in arguments], *rest)
        return out

    return call

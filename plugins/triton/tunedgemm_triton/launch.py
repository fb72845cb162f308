"""Turn a solution and a shape into a launcher with everything but addresses fixed.

A call allocates the output and one workspace, reads the stream and the operands' addresses, and
launches. It does not compile, look up types, wrap tensors or wait for the device, so it may be
captured. Triton's launch hooks, which its profiler uses, are not called.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import attrs
from tunedgemm.plugin import Device, Launcher, PluginError, Shape, Solution, Unsupported
from tunedgemm.tools.launching import on_device, torch_dtype
from tunedgemm.tools.tables import ops

from tunedgemm_triton.counters import counters_of
from tunedgemm_triton.families import OpFamily, family_of
from tunedgemm_triton.heuristic import resolve
from tunedgemm_triton.limits import batches_of
from tunedgemm_triton.loading import Described, KernelFunction, load
from tunedgemm_triton.plan import LaunchPlan, Step

#: Descriptors that one launcher keeps for each operand; allocators and weights repeat their
#: addresses.
_MAX_DESCRIPTORS = 256
#: Slots of a call's addresses: a zero, to which numbers are added, the output, the workspace, the
#: counters, the operands.
_NUMBER, _OUT, _WORKSPACE, _COUNTERS, _OPERANDS = range(5)
#: Parameters of a function that `_direct` can launch, before its sizes.
_DIRECT = ("x", "weight", "x_scale", "w_scale", "bias", "out", "partial", "counters")


def prepare(solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache; needs no device.

    Raises:
        LaunchError: the kernel does not compile.
        PluginError: the kernel name is unknown.
    """
    family = family_of(shape.op)
    kernel, split_k = parse_solution(family, solution, shape, device)
    # `bind` refuses it with a reason, so it needs no compile.
    if family.unfit(kernel, split_k, shape, device):
        return
    for program in dict.fromkeys(step.program for step in family.plan_of(kernel, split_k, shape, device).steps):
        program.compile(device.gfx)


def bind(solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """Return the launcher of a solution for exactly this shape.

    Raises:
        OutOfResources: the kernel needs more shared memory or threads than the device has.
        LaunchError: the kernel does not compile.
    """
    family = family_of(shape.op)
    if reason := unfit(solution, shape, device):
        return Unsupported(reason)
    kernel, split_k = parse_solution(family, solution, shape, device)
    plan = family.plan_of(kernel, split_k, shape, device)
    functions = [load(step.program, device.gfx, device.index) for step in plan.steps]
    scratch = sum(function.scratch * math.prod(step.grid) for step, function in zip(plan.steps, functions, strict=True))
    return Launcher(on_device(call_of(plan, functions, shape, device), device.index), workspace_bytes=plan.nbytes + scratch)


def unfit(solution: Solution, shape: Shape, device: Device) -> str:
    """Return why no kernel has the solution's name, or why it does not fit; "" for one that fits."""
    family = family_of(shape.op)
    try:
        kernel, split_k = parse_solution(family, solution, shape, device)
    except PluginError as error:
        return str(error)
    return family.unfit(kernel, split_k, shape, device) or ""


def parse_solution(family: OpFamily, solution: Solution, shape: Shape, device: Device) -> tuple[Any, int]:
    """Return the kernel of a solution and its parts of K, 1 for none.

    Raises:
        PluginError: the kernel name is unknown.
    """
    resolved = resolve(solution, shape, device)
    return family.parse_name(resolved.kernel_name), max(resolved.split_k, 1)


def call_of(plan: LaunchPlan, functions: list[KernelFunction], shape: Shape, device: Device) -> Callable[..., Any]:
    """Return the function of one call, the quickest kind that the plan allows."""
    operands = [name.removesuffix("?") for name in ops()[shape.op].operands]
    names = tuple(name for name, _ in plan.steps[0].values)
    scales = [name for name in operands if name in ("x_scale", "w_scale")]
    if len(plan.steps) > 1 or names[: len(_DIRECT)] != _DIRECT or len(scales) == 1:
        return _sequence(plan, functions, shape, device)
    return _direct(plan.steps[0], functions[0], plan.nbytes, shape, device)


def _direct(step: Step, function: KernelFunction, nbytes: int, shape: Shape, device: Device) -> Callable[..., Any]:
    """Return one launch, which allocates only the output unless it has scales, partial sums and
    counters, or tensor descriptors of x and the weight.
    """
    import torch

    empty, stream, index, byte = torch.empty, torch._C._cuda_getCurrentRawStream, device.index, torch.uint8
    launch, head, (gx, gy, gz) = function.launch, function.head, step.grid
    out_dtype, where, n = torch_dtype(shape.outdtype), device.torch_device, shape.n
    tail, count = (*_sizes(step), *function.rest), counters_of(where) if nbytes else None
    described = _described_operands(function, shape) if function.described else None

    def plain(x: Any, weight: Any, bias: Any = None) -> Any:
        out = empty((*x.shape[:-1], n), dtype=out_dtype, device=where)
        bias_address = 0 if bias is None else bias.data_ptr()
        launch(gx, gy, gz, stream(index), *head, x.data_ptr(), weight.data_ptr(), 0, 0, bias_address, out.data_ptr(), 0, 0, *tail)
        return out

    def call(x: Any, weight: Any, bias: Any = None, scales: tuple[int, int] = (0, 0)) -> Any:
        out = empty((*x.shape[:-1], n), dtype=out_dtype, device=where)
        sums = 0, 0
        if count is not None:
            partial = empty(nbytes, dtype=byte, device=where)
            address = partial.data_ptr()
            counters = count(address)
            sums = address, counters.data_ptr()
        operands = (x.data_ptr(), weight.data_ptr()) if described is None else described(x.data_ptr(), weight.data_ptr())
        bias_address = 0 if bias is None else bias.data_ptr()
        launch(gx, gy, gz, stream(index), *head, *operands, *scales, bias_address, out.data_ptr(), *sums, *tail)
        return out

    def scaled(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        return call(x, weight, bias, (x_scale.data_ptr(), w_scale.data_ptr()))

    if shape.scale != "none":
        return scaled
    return call if nbytes or function.described else plain


def _sizes(step: Step) -> list[int]:
    """Return the numbers that follow the addresses: M, N, K and, where the function has it, B."""
    return [value for _, value in step.values[len(_DIRECT) :] if isinstance(value, int)]


def _described_operands(function: KernelFunction, shape: Shape) -> Callable[[int, int], tuple[Any, ...]]:
    """Return a function from the addresses of x and the weight to their launch arguments."""
    batches = (batches_of(shape),) if batches_of(shape) > 1 else ()
    extents = {"x": (*batches, shape.m, shape.k), "weight": (*batches, shape.n, shape.k)}
    of_x, of_weight = (
        _descriptor(function.described[name], extent, shape) if name in function.described else lambda address: (address,)
        for name, extent in extents.items()
    )
    return lambda x, weight: (*of_x(x), *of_weight(weight))


@attrs.frozen
class _Operand:
    """What Triton reads of a descriptor's tensor."""

    address: int
    dtype: Any

    def data_ptr(self) -> int:
        return self.address


def _descriptor(described: Described, extent: tuple[int, ...], shape: Shape) -> Callable[[int], tuple[Any, ...]]:
    """Return a function from the address of a contiguous tensor to the arguments of its descriptor.

    These depend on nothing but the address, so a bounded cache of them is safe.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    dtype, expand = torch_dtype(shape.dtype), described.expand
    strides = [math.prod(extent[axis + 1 :]) for axis in range(len(extent))]
    blank = TensorDescriptor(_Operand(0, dtype), list(extent), strides, list(described.box))
    cache: dict[int, tuple[Any, ...]] = {}

    def describe(address: int) -> tuple[Any, ...]:
        arguments = cache.get(address)
        if arguments is None:
            if len(cache) >= _MAX_DESCRIPTORS:
                cache.clear()
            descriptor = copy.copy(blank)
            descriptor.base = _Operand(address, dtype)
            arguments = cache[address] = expand(descriptor)
        return arguments

    return describe


def _sequence(plan: LaunchPlan, functions: list[KernelFunction], shape: Shape, device: Device) -> Callable[..., Any]:
    """Return a call of several launches on the current stream, or of one whose operands `_direct`
    does not take.
    """
    import torch

    empty, stream, index, byte = torch.empty, torch._C._cuda_getCurrentRawStream, device.index, torch.uint8
    out_dtype, where, n, nbytes = torch_dtype(shape.outdtype), device.torch_device, shape.n, plan.nbytes
    operand_names = [name.removesuffix("?") for name in ops()[shape.op].operands]
    count, slots = counters_of(where) if plan.counters else None, len(operand_names)
    launches = [
        (function.launch, function.head, function.rest, step.grid, *_arguments(step, plan, operand_names))
        for step, function in zip(plan.steps, functions, strict=True)
    ]

    def call(*operands: Any) -> Any:
        out = empty((*operands[0].shape[:-1], n), dtype=out_dtype, device=where)
        addresses = [0, out.data_ptr(), 0, 0, *[0 if operand is None else operand.data_ptr() for operand in operands]]
        addresses += [0] * (slots - len(operands))
        if nbytes:
            workspace = empty(nbytes, dtype=byte, device=where)
            addresses[_WORKSPACE] = workspace.data_ptr()
        if count is not None:
            counters = count(addresses[_WORKSPACE])
            addresses[_COUNTERS] = counters.data_ptr()
        current = stream(index)
        for launch, head, rest, grid, arguments, given, present in launches:
            if given < 0 or bool(addresses[given]) is present:
                launch(*grid, current, *head, *[addresses[slot] + offset for slot, offset in arguments], *rest)
        return out

    return call


def _arguments(step: Step, plan: LaunchPlan, operands: list[str]) -> tuple[tuple[tuple[int, int], ...], int, bool]:
    """Return a step's arguments as (slot of the call's addresses, offset), the slot that decides
    whether it runs, and how.
    """

    def slot(value: int | str) -> tuple[int, int]:
        if isinstance(value, int):
            return _NUMBER, value
        name, _, offset = value.partition("+")
        if name == "counters":
            return _COUNTERS, 4 * int(offset)
        if name in plan.buffers:
            return _WORKSPACE, plan.buffers[name][0]
        return (_OUT, 0) if name == "out" else (_OPERANDS + operands.index(name), 0)

    given = _OPERANDS + operands.index(step.given) if step.given else -1
    return tuple(slot(value) for _, value in step.values), given, step.present

"""Turn a solution and a shape into a launcher with everything but addresses fixed.

A call allocates the output and one workspace, reads the stream and the operands' addresses, and
launches. It does not compile, look up types, wrap tensors or wait for the device, so it may be
captured. Triton's launch hooks, which its profiler uses, are not called.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import attrs
from tunedgemm.plugin import Device, Launcher, LaunchError, OutOfResources, PluginError, Shape, Solution, Unsupported
from tunedgemm.tools import on_device, ops, torch_dtype

from tunedgemm_triton.build import Program, triton_cache
from tunedgemm_triton.counters import counters_of
from tunedgemm_triton.families import OpFamily, family_of, unsupported
from tunedgemm_triton.heuristic import resolve
from tunedgemm_triton.limits import ARCHITECTURES, batches_of
from tunedgemm_triton.plan import LaunchPlan, Step

#: Descriptors that one launcher keeps for each operand; allocators and weights repeat their
#: addresses.
_MAX_DESCRIPTORS = 256
#: Slots of a call's addresses: a zero, to which numbers are added, the output, the workspace, the
#: counters, the operands.
_NUMBER, _OUT, _WORKSPACE, _COUNTERS, _OPERANDS = range(5)
#: Parameters of a function that `_direct` can launch, before its sizes.
_DIRECT = ("x", "weight", "x_scale", "w_scale", "bias", "out", "partial", "counters")


@attrs.frozen(eq=False)
class KernelFunction:
    """A program loaded on one device.

    Attributes:
        launch: Triton's C function, or Triton's wrapper of it where its arguments are not known.
        head: arguments between the stream and the kernel's parameters.
        rest: placeholders of the constexpr parameters.
        descriptors: metadata of the tensor descriptors among the parameters; empty without any.
    """

    launch: Callable[..., None]
    head: tuple[Any, ...]
    rest: tuple[None, ...]
    descriptors: tuple[dict[str, Any], ...]


def prepare(solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache; needs no device.

    Raises:
        LaunchError: the kernel does not compile.
        PluginError: the kernel name is unknown.
    """
    family = family_of(shape.op)
    kernel, split_k = parse_solution(family, solution, shape, device)
    # `bind` refuses these with a reason, so they need no compile.
    if unsupported(shape, device) or family.unfit(kernel, split_k, shape, device):
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
    if reason := unsupported(shape, device):
        return Unsupported(reason)
    if device.index < 0:
        return Unsupported(f"device: not present (got {device})")
    if reason := unfit(solution, shape, device):
        return Unsupported(reason)
    kernel, split_k = parse_solution(family, solution, shape, device)
    plan = family.plan_of(kernel, split_k, shape, device)
    functions = [load(step.program, device.gfx, device.index) for step in plan.steps]
    return Launcher(on_device(call_of(plan, functions, shape, device), device.index), workspace_bytes=plan.nbytes)


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


@functools.lru_cache(maxsize=4096)
def load(program: Program, gfx: str, index: int) -> KernelFunction:
    """Load a program on the device with this index; compile it where `prepare` has not.

    Raises:
        OutOfResources, LaunchError: see `bind`.
    """
    import torch
    from triton import __version__
    from triton.runtime.errors import OutOfResources as Exceeded

    kernel, name, limit = program.compile(gfx), program.name, ARCHITECTURES[gfx].shared_bytes
    if kernel.metadata.shared > limit:
        raise OutOfResources(f"triton {name}: {kernel.metadata.shared} bytes of shared memory needed ({gfx} has {limit})")
    try:
        with torch.cuda.device(index), triton_cache():
            run = kernel.run
    except Exceeded as error:
        raise OutOfResources(f"triton {name} on {gfx}: {error}") from error
    descriptors = _descriptor_metadata(kernel)
    rest = (None,) * sum(text == "constexpr" for text in kernel.src.signature.values())
    tail = (kernel.packed_metadata, None, None, None)
    is_known = __version__.startswith("3.6.") and hasattr(run, "launch_pdl") and not run.global_scratch_size
    if not is_known:
        if descriptors:
            raise LaunchError(f"triton {name}: unknown launcher (got Triton {__version__}); install Triton 3.6")
        return KernelFunction(run, (kernel.function, *tail), rest, descriptors)
    launch = inspect.getclosurevars(run.launch).nonlocals["launcher"] if descriptors else run.launch
    head = (kernel.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *tail)
    return KernelFunction(launch, head, rest, descriptors)


def _descriptor_metadata(kernel: Any) -> tuple[dict[str, Any], ...]:
    """Return the metadata of a compiled kernel's tensor descriptors, with the boxes that its loads
    fill.

    With specialised warps Triton 3.6 gives each consumer half the rows and loads them separately,
    but the metadata keeps the whole tile. A box of that size would overrun the buffer, and its
    barrier would never complete.
    """
    metas = getattr(kernel.metadata, "tensordesc_meta", None) or ()
    text = kernel.asm["ttgir"] if metas else ""
    boxes = []
    for name, meta in zip(("x", "weight"), metas, strict=False):
        loads = re.findall(rf"async_tma_copy_global_to_local %{name}\[.*?-> !ttg\.memdesc<(?:1x)?(\d+)x\d+x", text)
        rows = {int(number) for number in loads}
        if len(rows) != 1:
            raise LaunchError(f"triton {kernel.name}: loads of {name!r} must fill boxes of one size (got {sorted(rows)} rows)")
        *batch, _, step = meta["block_size"]
        boxes.append({**meta, "block_size": [*batch, rows.pop(), step]})
    return tuple(boxes)


def call_of(plan: LaunchPlan, functions: list[KernelFunction], shape: Shape, device: Device) -> Callable[..., Any]:
    """Return the function of one call, the quickest kind that the plan allows."""
    operands = [name.removesuffix("?") for name in ops()[shape.op].operands]
    names = tuple(name for name, _ in plan.steps[0].values)
    scales = [name for name in operands if name in ("x_scale", "w_scale")]
    if len(plan.steps) > 1 or names[: len(_DIRECT)] != _DIRECT or len(scales) == 1:
        return _sequence(plan, functions, shape, device)
    [step], [function] = plan.steps, functions
    if plan.nbytes or scales or function.descriptors:
        return _direct(step, function, plan.nbytes, shape, device)
    return _plain(step, function, shape, device)


def _plain(step: Step, function: KernelFunction, shape: Shape, device: Device) -> Callable[..., Any]:
    """Return one launch that allocates only the output."""
    import torch

    empty, stream, index = torch.empty, torch._C._cuda_getCurrentRawStream, device.index
    launch, head, (gx, gy, gz) = function.launch, function.head, step.grid
    out_dtype, where, n = torch_dtype(shape.outdtype), device.torch_device, shape.n
    tail = (0, 0, *_sizes(step), *function.rest)

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        out = empty((*x.shape[:-1], n), dtype=out_dtype, device=where)
        bias_address = 0 if bias is None else bias.data_ptr()
        launch(gx, gy, gz, stream(index), *head, x.data_ptr(), weight.data_ptr(), 0, 0, bias_address, out.data_ptr(), *tail)
        return out

    return call


def _direct(step: Step, function: KernelFunction, nbytes: int, shape: Shape, device: Device) -> Callable[..., Any]:
    """Return one launch with scales, with partial sums and counters, or with tensor descriptors of
    x and the weight.
    """
    import torch

    empty, stream, index, byte = torch.empty, torch._C._cuda_getCurrentRawStream, device.index, torch.uint8
    launch, head, (gx, gy, gz) = function.launch, function.head, step.grid
    out_dtype, where, n = torch_dtype(shape.outdtype), device.torch_device, shape.n
    tail, count = (*_sizes(step), *function.rest), counters_of(where) if nbytes else None
    described = _described_operands(function, shape) if function.descriptors else None

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

    return call if shape.scale == "none" else scaled


def _sizes(step: Step) -> list[int]:
    """Return the numbers that follow the addresses: M, N, K and, where the function has it, B."""
    return [value for _, value in step.values[len(_DIRECT) :] if isinstance(value, int)]


def _described_operands(function: KernelFunction, shape: Shape) -> Callable[[int, int], tuple[Any, ...]]:
    """Return a function from the addresses of x and the weight to their launch arguments:
    descriptors, sizes and strides.
    """
    batches = (batches_of(shape),) if batches_of(shape) > 1 else ()
    extents = [(*batches, rows, shape.k) for rows in (shape.m, shape.n)]
    of_x, of_weight = (_descriptor(meta, extent) for meta, extent in zip(function.descriptors, extents, strict=True))
    sizes_x, sizes_weight = ((*extent, *_strides(extent)) for extent in extents)
    return lambda x, weight: (of_x(x), *sizes_x, of_weight(weight), *sizes_weight)


def _strides(extent: tuple[int, ...]) -> list[int]:
    """Return the strides of a contiguous tensor, in elements."""
    return [math.prod(extent[axis + 1 :]) for axis in range(len(extent))]


def _descriptor(meta: dict[str, Any], extent: tuple[int, ...]) -> Callable[[int], Any]:
    """Return a function from the address of a contiguous tensor to its descriptor.

    A descriptor depends on nothing but the address, so a bounded cache of it is safe.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    fill = driver.active.utils.fill_tma_descriptor
    swizzle, size, block = meta["swizzle"], meta["elem_size"], meta["block_size"]
    kind, sizes, strides = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], list(extent), _strides(extent)
    cache: dict[int, Any] = {}

    def describe(address: int) -> Any:
        descriptor = cache.get(address)
        if descriptor is None:
            if len(cache) >= _MAX_DESCRIPTORS:
                cache.clear()
            descriptor = cache[address] = fill(address, swizzle, size, kind, block, sizes, strides, 0)
        return descriptor

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

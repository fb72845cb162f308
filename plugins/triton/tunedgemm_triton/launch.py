"""Launch: a solution bound to a shape becomes one call of Triton's C launcher with everything else fixed before.

A call allocates the output, reads the stream and the operands' addresses, and launches: no compile, no look-up of
types, no tensor wrapper. Triton's launch hooks (its profiler's) are not called.
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
from tunedgemm.tools import on_device, torch_dtype

from tunedgemm_triton.compile import Build, build_of, compiled, our_cache
from tunedgemm_triton.counters import counters_of
from tunedgemm_triton.fit import grid_of, partial_bytes, refusal
from tunedgemm_triton.heuristic import resolve
from tunedgemm_triton.limits import ARCHITECTURES, batches_of, supports
from tunedgemm_triton.names import kernel_of

#: Descriptors that one launcher keeps for each operand: addresses repeat, since allocators and weights do.
_MAX_MAPS = 256


@attrs.frozen(eq=False)
class Loaded:
    """A build on one device: Triton's launcher and what each call passes to it after the grid and the stream.

    Attributes:
        launch: the C function, or Triton's wrapper of it where this version's is not known.
        head: arguments between the stream and the kernel's own.
        rest: placeholders of the constexpr parameters.
        maps: what describes the tensor descriptors of the parameters; empty without any.
    """

    launch: Callable[..., None]
    head: tuple[Any, ...]
    rest: tuple[None, ...]
    maps: tuple[dict[str, Any], ...]


def prepare(solution: Solution, shape: Shape, device: Device) -> None:
    """Compile into the artifact cache; needs no device.

    Raises:
        LaunchError: it does not compile. PluginError: no such kernel.
    """
    chosen = resolve(solution, shape, device)
    kernel = kernel_of(chosen.kernel_name)
    # What bind refuses with a reason needs no compile.
    if supports(shape, device) and not refusal(kernel, max(chosen.split_k, 1), shape, device):
        compiled(build_of(kernel, max(chosen.split_k, 1), shape, device))


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
        chosen = resolve(solution, shape, device)
        kernel = kernel_of(chosen.kernel_name)
    except PluginError as error:
        return Unsupported(str(error))
    split_k = max(chosen.split_k, 1)
    if refused := refusal(kernel, split_k, shape, device):
        return Unsupported(refused)
    loaded = load(build_of(kernel, split_k, shape, device), device.index)
    grid, nbytes = grid_of(kernel, split_k, shape, device), partial_bytes(kernel, split_k, shape, device)
    if loaded.maps:
        call = _with_descriptors(loaded, grid, nbytes, shape, device)
    elif shape.scale != "none":
        call = _scaled(loaded, grid, nbytes, shape, device)
    else:
        call = _split(loaded, grid, nbytes, shape, device) if nbytes else _plain(loaded, grid, shape, device)
    return Launcher(on_device(call, device.index), workspace_bytes=nbytes)


@functools.lru_cache(maxsize=4096)
def load(build: Build, index: int) -> Loaded:
    """Load a build on the device with this index, compiling it where `prepare` has not.

    Raises:
        OutOfResources, LaunchError: see `bind`.
    """
    return loaded_of(compiled(build), build.kernel.name, build.gfx, index)


def loaded_of(kernel: Any, name: str, gfx: str, index: int) -> Loaded:
    """Load Triton's CompiledKernel on the device with this index.

    Raises:
        OutOfResources, LaunchError: see `bind`.
    """
    import torch
    from triton import __version__
    from triton.runtime.errors import OutOfResources as Exceeded

    limit = ARCHITECTURES[gfx].shared_bytes
    if kernel.metadata.shared > limit:
        raise OutOfResources(f"triton {name} needs {kernel.metadata.shared} bytes of shared memory; {gfx} has {limit}")
    try:
        with torch.cuda.device(index), our_cache():
            run = kernel.run
    except Exceeded as error:
        raise OutOfResources(f"triton {name} on {gfx}: {error}") from error
    maps = _boxes(kernel)
    rest = (None,) * sum(text == "constexpr" for text in kernel.src.signature.values())
    tail = (kernel.packed_metadata, None, None, None)
    known = __version__.startswith("3.6.") and hasattr(run, "launch_pdl") and not run.global_scratch_size
    if not known:
        if maps:
            raise LaunchError(f"triton {name}: the launcher of Triton {__version__} is not known; 3.6 is")
        return Loaded(run, (kernel.function, *tail), rest, maps)
    launch = inspect.getclosurevars(run.launch).nonlocals["launcher"] if maps else run.launch
    return Loaded(launch, (kernel.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *tail), rest, maps)


def _boxes(kernel: Any) -> tuple[dict[str, Any], ...]:
    """The tensor descriptors of a compiled kernel, with the boxes that its loads really fill.

    Where warps are specialised Triton 3.6 gives half the rows to each consumer and loads them apart, but its metadata
    keeps the whole tile: a box of that size would overrun the buffer and its barrier would wait for ever.
    """
    metas = getattr(kernel.metadata, "tensordesc_meta", None) or ()
    text = kernel.asm["ttgir"] if metas else ""
    boxes = []
    for name, meta in zip(("x", "weight"), metas, strict=False):
        rows = {int(found) for found in re.findall(rf"async_tma_copy_global_to_local %{name}\[.*?-> !ttg\.memdesc<(?:1x)?(\d+)x\d+x", text)}
        if len(rows) != 1:
            raise LaunchError(f"triton {kernel.name}: loads of {name!r} fill boxes of {sorted(rows)} rows; one size is needed")
        *batch, _, step = meta["block_size"]
        boxes.append({**meta, "block_size": [*batch, rows.pop(), step]})
    return tuple(boxes)


def _plain(loaded: Loaded, grid: tuple[int, int, int], shape: Shape, device: Device) -> Callable[..., Any]:
    """One launch, nothing but the output allocated."""
    import torch

    empty, stream, index = torch.empty, torch._C._cuda_getCurrentRawStream, device.index
    launch, head, (gx, gy, gz) = loaded.launch, loaded.head, grid
    out_dtype, where, n = torch_dtype(shape.outdtype), device.torch_device, shape.n
    tail = (0, 0, *_sizes(shape), *loaded.rest)

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        out = empty((*x.shape[:-1], n), dtype=out_dtype, device=where)
        added = 0 if bias is None else bias.data_ptr()
        launch(gx, gy, gz, stream(index), *head, x.data_ptr(), weight.data_ptr(), 0, 0, added, out.data_ptr(), *tail)
        return out

    return call


def _split(loaded: Loaded, grid: tuple[int, int, int], nbytes: int, shape: Shape, device: Device) -> Callable[..., Any]:
    """One launch whose programs share tiles through partial sums and counters."""
    import torch

    empty, stream, index = torch.empty, torch._C._cuda_getCurrentRawStream, device.index
    launch, head, (gx, gy, gz) = loaded.launch, loaded.head, grid
    out_dtype, where, n = torch_dtype(shape.outdtype), device.torch_device, shape.n
    tail, count, byte = (*_sizes(shape), *loaded.rest), counters_of(device.torch_device), torch.uint8

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        out = empty((*x.shape[:-1], n), dtype=out_dtype, device=where)
        partial = empty(nbytes, dtype=byte, device=where)
        place = partial.data_ptr()
        counters = count(place)
        sums = place, counters.data_ptr()
        added = 0 if bias is None else bias.data_ptr()
        launch(gx, gy, gz, stream(index), *head, x.data_ptr(), weight.data_ptr(), 0, 0, added, out.data_ptr(), *sums, *tail)
        return out

    return call


def _scaled(loaded: Loaded, grid: tuple[int, int, int], nbytes: int, shape: Shape, device: Device) -> Callable[..., Any]:
    """One launch of scaled operands, whose programs share tiles where there are partial sums."""
    import torch

    empty, stream, index, byte = torch.empty, torch._C._cuda_getCurrentRawStream, device.index, torch.uint8
    launch, head, (gx, gy, gz) = loaded.launch, loaded.head, grid
    out_dtype, where, n = torch_dtype(shape.outdtype), device.torch_device, shape.n
    tail, count = (*_sizes(shape), *loaded.rest), counters_of(device.torch_device) if nbytes else None

    def call(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        out = empty((*x.shape[:-1], n), dtype=out_dtype, device=where)
        sums = 0, 0
        if count is not None:
            partial = empty(nbytes, dtype=byte, device=where)
            place = partial.data_ptr()
            counters = count(place)
            sums = place, counters.data_ptr()
        operands = x.data_ptr(), weight.data_ptr(), x_scale.data_ptr(), w_scale.data_ptr(), 0 if bias is None else bias.data_ptr()
        launch(gx, gy, gz, stream(index), *head, *operands, out.data_ptr(), *sums, *tail)
        return out

    return call


def _with_descriptors(loaded: Loaded, grid: tuple[int, int, int], nbytes: int, shape: Shape, device: Device) -> Callable[..., Any]:
    """One launch with the tensor descriptors of x and weight by value, kept by address."""
    import torch

    empty, stream, index, byte = torch.empty, torch._C._cuda_getCurrentRawStream, device.index, torch.uint8
    launch, head, gx = loaded.launch, loaded.head, grid[0]
    out_dtype, where, n = torch_dtype(shape.outdtype), device.torch_device, shape.n
    batches = (batches_of(shape),) if batches_of(shape) > 1 else ()
    extents = [(*batches, rows, shape.k) for rows in (shape.m, shape.n)]
    map_x, map_weight = (_descriptor(meta, extent) for meta, extent in zip(loaded.maps, extents, strict=True))
    sizes_x, sizes_weight = ((*extent, *_strides(extent)) for extent in extents)
    tail, count = (*_sizes(shape), *loaded.rest), counters_of(where) if nbytes else None

    def scaled(x: Any, weight: Any, x_scale: Any, w_scale: Any, bias: Any = None) -> Any:
        return launched(x, weight, bias, (x_scale.data_ptr(), w_scale.data_ptr()))

    def launched(x: Any, weight: Any, bias: Any = None, scales: tuple[int, int] = (0, 0)) -> Any:
        out = empty((*x.shape[:-1], n), dtype=out_dtype, device=where)
        sums = 0, 0
        if count is not None:
            partial = empty(nbytes, dtype=byte, device=where)
            place = partial.data_ptr()
            counters = count(place)
            sums = place, counters.data_ptr()
        described = (map_x(x.data_ptr()), *sizes_x, map_weight(weight.data_ptr()), *sizes_weight)
        added = 0 if bias is None else bias.data_ptr()
        launch(gx, 1, 1, stream(index), *head, *described, *scales, added, out.data_ptr(), *sums, *tail)
        return out

    return launched if shape.scale == "none" else scaled


def _sizes(shape: Shape) -> tuple[int, int, int, int]:
    """The kernels' arguments M, N, K, B."""
    return shape.m, shape.n, shape.k, batches_of(shape)


def _strides(extent: tuple[int, ...]) -> list[int]:
    """Of a contiguous tensor, in elements."""
    return [math.prod(extent[place + 1 :]) for place in range(len(extent))]


def _descriptor(meta: dict[str, Any], extent: tuple[int, ...]) -> Callable[[int], Any]:
    """Address of a contiguous tensor -> its descriptor: a pure function of the address, so a bounded memory of it is safe."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    fill = driver.active.utils.fill_tma_descriptor
    swizzle, size, block = meta["swizzle"], meta["elem_size"], meta["block_size"]
    kind, known, sizes, strides = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], {}, list(extent), _strides(extent)

    def describe(address: int) -> Any:
        found = known.get(address)
        if found is None:
            if len(known) >= _MAX_MAPS:
                known.clear()
            found = known[address] = fill(address, swizzle, size, kind, block, sizes, strides, 0)
        return found

    return describe

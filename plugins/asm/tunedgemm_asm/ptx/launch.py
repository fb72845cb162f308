"""Turn a kernel and a shape into a launcher on Hopper with all but addresses and tensor maps fixed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from tunedgemm.plugin import Device, Launcher, LaunchError, PluginError, Shape, Solution
from tunedgemm.tools.launching import (
    Driver,
    DriverInterface,
    KernelFunction,
    Launch,
    LaunchPlan,
    TensorMap,
    launch_of,
    load_function,
    on_device,
    scale_order,
    scratch,
    torch_dtype,
)

from tunedgemm_asm.driver import INTERFACES
from tunedgemm_asm.ptx import build
from tunedgemm_asm.ptx.abi import MAP_OUT, MAPS, SCALES, abi_of
from tunedgemm_asm.ptx.kernel import ENTRY
from tunedgemm_asm.ptx.limits import (
    TRANSPOSED,
    boxes_of,
    last_rows,
    part_of,
    rows_of,
    shared_by,
    shared_evenly,
    slots_of,
    steps_of,
    units_of,
)
from tunedgemm_asm.ptx.names import COLUMNS, REVISION, SIDE, STEP_BYTES, KernelConfig, Variant
from tunedgemm_asm.ptx.space import resolve
from tunedgemm_asm.ptx.splitk import slot_bytes
from tunedgemm_asm.ptx.staging import PADDED
from tunedgemm_asm.ptx.tensormap import Operand

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def details() -> list[str]:
    """Return the generator's revision and the assembler."""
    assembler = build.ptxas()
    by = f"ptxas {assembler[1]} ({assembler[0]})" if assembler else "the driver, when it loads them: ptxas not found"
    return [f"generated PTX of revision {REVISION}, assembled by {by}"]


def prepare(solution: Solution, shape: Shape, device: Device) -> None:
    """Assemble a kernel into the artifact cache without a device.

    Raises:
        LaunchError: ptxas rejects the text.
    """
    try:
        arguments = _arguments(solution, shape, device)
    except PluginError:  # bind reports the reason
        return
    build.code(arguments.variant)


def bind(drivers: Callable[[DriverInterface], Driver], solution: Solution, shape: Shape, device: Device) -> Launcher:
    """Return the launcher of a solution for exactly this shape.

    Args:
        drivers: returns the library for the device's kind.
        device: device whose limits apply; index -1 means host memory.

    Raises:
        PluginError: no such kernel serves the shape, or the driver was not found.
        LaunchError: the kernel does not assemble or load.
    """
    arguments = _arguments(solution, shape, device)
    library = drivers(INTERFACES[device.kind])
    config = arguments.variant.config
    try:
        function = load_function(library, _code(arguments.variant, build.ptxas()), ENTRY, device.index)
        function.grant(config.shared_bytes)
    except LaunchError as error:
        raise LaunchError(f"asm {config.name} on {device.gfx}: {error}") from error
    launch = launch_of(function, _plan(arguments, shape))
    call = _call(launch, _failing(function, config.name), arguments, shape, device.index, device.torch_device)
    return Launcher(on_device(call, device.index), workspace_bytes=arguments.workspace)


@functools.lru_cache(maxsize=4096)
def _code(variant: Variant, assembler: tuple[Path, str] | None) -> bytes:
    """Return the code of a kernel; cached, since each M binds, and its text takes over a millisecond."""
    del assembler  # part of the cache key
    return build.code(variant)


def _arguments(solution: Solution, shape: Shape, device: Device) -> LaunchArguments:
    config, splits = resolve(solution, shape)
    return arguments_of(config, splits, shape, max(1, device.cu_num))


def _plan(arguments: LaunchArguments, shape: Shape) -> LaunchPlan:
    """Return the launch plan of a kernel.

    It takes the addresses of output, scales, bias, workspace and counters, where they exist. Those
    of x and of the weight follow, which only tensor maps use.
    """
    config, abi = arguments.variant.config, abi_of(shape.scale, arguments.variant.config.panels > 0)
    names = ["out", *(SCALES if shape.scale != "none" else ()), *["bias"] * shape.bias]
    names += ["workspace", "counters"] if arguments.variant.split else []
    offsets = list(MAPS.values())[:: -1 if config.swapped else 1]
    map_fields = zip((*offsets, MAP_OUT), (len(names), len(names) + 1, 0), _operands(arguments, shape), strict=False)
    slots = tuple(abi.field(name).offset for name in names)
    maps = tuple(TensorMap(offset, source, operand.description) for offset, source, operand in map_fields)
    return LaunchPlan((arguments.grid, 1, 1), config.threads, abi.pack(arguments.values), slots, config.shared_bytes, maps)


def _operands(arguments: LaunchArguments, shape: Shape) -> tuple[Operand, ...]:
    """Return the operands of tensor maps: x, the weight, and an output that TMA stores."""
    config = arguments.variant.config
    of_x, of_weight = boxes_of(config, shape)[:: -1 if config.swapped else 1]
    x = Operand(shape.dtype, shape.m, shape.k, of_x)
    weight = Operand(shape.dtype, shape.n, shape.k, of_weight, columns=arguments.variant.columns)
    out = [Operand(shape.outdtype, shape.m, shape.n, SIDE, 2 * config.panel_columns)] if config.panels else []
    return x, weight, *out


def _failing(function: KernelFunction, name: str) -> Callable[[int], None]:
    """Return the handler of a driver status, negative for a tensor map; it returns to retry, else
    raises.
    """

    def failed(status: int) -> None:
        try:
            function.mend(status)
        except LaunchError as error:
            raise LaunchError(f"asm {name}: {error}") from None

    return failed


def _call(
    launch: Launch, failed: Callable[[int], None], arguments: LaunchArguments, shape: Shape, index: int, where: torch.device
) -> Callable[..., Any]:
    """Return the callable of a launcher; the plain product allocates only its output."""
    import torch

    empty, dtype, m, n = torch.empty, torch_dtype(shape.outdtype), shape.m, shape.n
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if index >= 0 else lambda _: 0

    def call(x: Any, weight: Any, bias: Any = None) -> Any:
        # Separate sizes: torch takes half as long again to read a tuple.
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

    nbytes, counters = arguments.workspace, arguments.counters

    def prepared(x: Any, weight: Any, *others: Any) -> Any:
        out = empty(m, n, dtype=dtype, device=where) if x.dim() == 2 else empty(*x.shape[:-1], n, dtype=dtype, device=where)
        # Only this name holds both buffers during capture: freed early, one could overlap the
        # other.
        held = scratch(nbytes, counters, where) if nbytes else ()
        addresses = [tensor.data_ptr() for tensor in (*others, *held) if tensor is not None]
        while status := launch(stream(index), out.data_ptr(), *addresses, x.data_ptr(), weight.data_ptr()):
            failed(status)
        return out

    if nbytes:
        return prepared
    return call if shape.scale == "none" else scaled


@attrs.frozen
class LaunchArguments:
    """Arguments of one launch but for addresses, its grid and its scratch memory.

    Attributes:
        variant: the kernel.
        values: numeric arguments.
        grid: number of CTAs.
        workspace: bytes of scratch memory for partials.
        counters: number of counters, zero before and after.
    """

    variant: Variant
    values: Mapping[str, int] = attrs.field(hash=False)
    grid: int
    workspace: int = 0
    counters: int = 0


def _variant(config: KernelConfig, split: bool, shape: Shape) -> Variant:
    """Return the variant of a configuration for a shape's dtypes, scales and layout."""
    together = next(count for count in (8, 2, 1) if shape.n % count == 0)
    order = "m_major" if shape.op in TRANSPOSED else scale_order(shape)
    if order == "m_major" and shape.m % PADDED == 0:  # the same strides: one kernel serves every M
        order = "m_major_padded"
    return Variant(
        config, shape.dtype, shape.outdtype, shape.bias_dtype if shape.bias else "", split, together, shape.scale,
        columns=shape.layout == COLUMNS, transposed=order != "row", padded=order == "m_major_padded",
    )  # fmt: skip


def arguments_of(config: KernelConfig, splits: int, shape: Shape, multiprocessors: int) -> LaunchArguments:
    """Return the arguments of a kernel for a shape that it supports, on this many multiprocessors."""
    (rows_a, rows_b), (units_a, tiles_b) = rows_of(config, shape), units_of(config, shape)
    tiles, steps = units_a * tiles_b, steps_of(shape)
    (box_a, box_b), (last_a, last_b) = boxes_of(config, shape), last_rows(config, shape)
    values = {"rows_a": rows_a, "rows_b": rows_b, "stride": shape.n, "units_a": units_a, "tiles_b": tiles_b, "tiles": tiles}
    values |= {"last_a": last_a, "last_b": last_b, "loaded": (box_a + box_b * config.cluster) * STEP_BYTES}
    if config.stream:
        shares = shared_evenly(config, shape, multiprocessors)
        clusters, slots, parts = shares.clusters, shares.tiles * config.cluster * config.sharing, shares.parts
        values |= {"items": shares.tiles, "steps": steps, "part": shares.length, "splits": parts}
    else:
        sharing = shared_by(config, splits)
        clusters = max(1, min(tiles * sharing, multiprocessors * config.resident // config.cluster))
        slots, parts = slots_of(config, shape) if sharing > 1 else 0, splits
        values |= {"items": tiles * sharing, "steps": steps, "part": part_of(splits, shape), "splits": splits}
    return LaunchArguments(
        variant=_variant(config, config.stream or shared_by(config, splits) > 1, shape),
        values=values,
        grid=clusters * config.cluster,
        workspace=slots * parts * slot_bytes(config.accumulators),
        counters=slots,
    )

"""Turn an AMD kernel and a shape into a launcher with everything but addresses fixed.

`LaunchArguments` has strides in the unit of each argument layout (``abi.py``) and the grid of
AITER's launchers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from tunedgemm.plugin import Device, Launcher, LaunchError, Shape, Solution
from tunedgemm.tools.launching import (
    Driver,
    DriverInterface,
    KernelFunction,
    Launch,
    LaunchPlan,
    dtype_bits,
    launch_of,
    load_function,
    on_device,
    semaphores,
    torch_dtype,
    workspace,
)

from tunedgemm_asm.driver import INTERFACES
from tunedgemm_asm.limits import COUNTERS, ceil_div, part_of
from tunedgemm_asm.manifest import KernelConfig
from tunedgemm_asm.names import resolve

if TYPE_CHECKING:
    import torch

    from tunedgemm_asm.packs import Catalog


def bind(
    drivers: Callable[[DriverInterface], Driver],
    catalog: Catalog,
    solution: Solution,
    shape: Shape,
    device: Device,
) -> Launcher:
    """Return the launcher of a solution for exactly this shape.

    Args:
        drivers: returns the library for the device's kind.
        catalog: kernels for the device's architecture.
        device: device whose limits apply; index -1 means host memory.

    Raises:
        PluginError: no such kernel serves the shape, or the driver was not found.
        LaunchError: the driver does not load the code.
    """
    kernel, splits = resolve(solution, shape, device, catalog)
    code = catalog.kernels[kernel.name].checked().content
    library = drivers(INTERFACES[device.kind])
    try:
        function = load_function(library, code, kernel.name, device.index)
    except LaunchError as error:
        raise LaunchError(f"asm {kernel.name} on {device.gfx}: {error}") from error
    abi, arguments = catalog.kernels[kernel.name].abi, arguments_of(kernel, splits, shape)
    slots = tuple(abi.field(name).offset for name in arguments.addresses)
    launch = launch_of(function, LaunchPlan(arguments.grid, abi.threads, abi.pack(arguments.values), slots, buffer=True))
    call = _call(launch, _failing(function, kernel.name), arguments, shape, device.index, device.torch_device)
    return Launcher(on_device(call, device.index), workspace_bytes=arguments.workspace)


def _failing(function: KernelFunction, name: str) -> Callable[[int], None]:
    """Return a function that raises the error of a driver status."""

    def failed(status: int) -> None:
        called = function.driver.interface.functions["launch"][0]
        raise LaunchError(f"asm {name}: {called}: {function.driver.text(status)}")

    return failed


def _call(
    launch: Launch, failed: Callable[[int], None], arguments: LaunchArguments, shape: Shape, index: int, where: torch.device
) -> Callable[..., Any]:
    """Return the callable of a launcher; the plain product allocates only its output."""
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

    rows, scratch, counters, zeroed = arguments.rows, arguments.workspace, arguments.counters, arguments.zeroed
    zeros = _zeros(n, where) if arguments.absent_bias else None

    def prepared(x: Any, weight: Any, *others: Any) -> Any:
        memory = empty((rows, n), dtype=dtype, device=where)
        if zeroed:
            memory.zero_()  # ordered by the stream, also in a graph
        out = memory if rows == shape.m else memory[: shape.m]
        addresses = [memory.data_ptr(), x.data_ptr(), weight.data_ptr(), *(tensor.data_ptr() for tensor in others)]
        if zeros is not None:
            addresses.append(zeros.data_ptr())
        # Only these names hold both buffers during capture: freed early, one could overlap the
        # other.
        held = [workspace(scratch, where)] if scratch else []
        held += [semaphores(counters, where)] if counters else []
        if status := launch(stream(index), *addresses, *(tensor.data_ptr() for tensor in held)):
            failed(status)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], n)

    return call if arguments.addresses in (_PLAIN, _BIASED) else prepared


_PLAIN = ("out", "a", "b")
_BIASED = (*_PLAIN, "bias")


@functools.cache
def _zeros(n: int, where: torch.device) -> torch.Tensor:
    """Return fp32 zeros [N] for kernels that always add a bias; kept, because captured graphs may
    read them.
    """
    import torch

    zeros = torch.zeros(n, dtype=torch.float32, device=where)
    if where.type == "cuda":
        torch.cuda.current_stream(where).synchronize()  # other streams do not wait for the fill
    return zeros


#: Names of address fields, in the order in which a launch takes them.
ADDRESSES = ("out", "a", "b", "a_scale", "b_scale", "bias", "workspace", "semaphore")

#: Elements of x along K, and rows of the weight, that share a block scale.
_BLOCK = 128

#: Elements of K that share an mxfp4 scale; a row of shuffled scales is padded to a multiple of
#: _GROUPS.
_GROUP, _GROUPS = 32, 8

#: AITER's fp4 kernels write a multiple of this many rows.
_ROWS = 32


@attrs.frozen
class LaunchArguments:
    """Arguments of one launch but for addresses, its grid and its scratch memory.

    Attributes:
        values: non-address arguments by field.
        addresses: names of `ADDRESSES` that the launch takes.
        grid: workgroups along the three axes.
        rows: rows of the output's memory; rows from M on are padding.
        zeroed: whether splits are added to an output that must be zero before.
        absent_bias: whether fp32 zeros [N] replace a missing bias.
        workspace: bytes of scratch memory.
        counters: number of counters, zero before and after.
    """

    values: Mapping[str, int | float]
    addresses: tuple[str, ...]
    grid: tuple[int, int, int]
    rows: int
    zeroed: bool = False
    absent_bias: bool = False
    workspace: int = 0
    counters: int = 0


def arguments_of(kernel: KernelConfig, splits: int, shape: Shape) -> LaunchArguments:
    """Return the arguments of a kernel for a shape that `limits.unfit_config` accepts."""
    return _MAKERS[kernel.abi](kernel, splits, shape)


def _tiles(kernel: KernelConfig, shape: Shape) -> tuple[int, int]:
    """Return the number of output tiles along N and M."""
    return ceil_div(shape.n, kernel.tile_n), ceil_div(shape.m, kernel.tile_m)


def _bytes(dtype: str) -> int:
    return dtype_bits(dtype) // 8


def _given(*names: str) -> tuple[str, ...]:
    return tuple(name for name in ADDRESSES if name in names)


def _sizes(shape: Shape) -> dict[str, int | float]:
    return {"m": shape.m, "n": shape.n, "k": shape.k}


def _bf16(kernel: KernelConfig, splits: int, shape: Shape) -> LaunchArguments:
    """Follow ``asm_gemm_a16w16.cu``: strides in bytes; a semaphore with split-K."""
    tiles_n, tiles_m = _tiles(kernel, shape)
    out, row, split = shape.n * _bytes(shape.outdtype), shape.k * _bytes(shape.dtype), splits > 1
    values = {"alpha": 1.0, "beta": 0.0, "stride_out0": out, "stride_c0": out, "stride_a0": row, "stride_b0": row, **_sizes(shape)}
    values |= {"splits": splits, "out_is_bf16": int(shape.outdtype == "bf16"), "add_bias": int(shape.bias)}
    names = _given("out", "a", "b", *["bias"] * shape.bias, *["semaphore"] * split)
    return LaunchArguments(values, names, (tiles_n, tiles_m, splits), shape.m, counters=COUNTERS if split else 0)


def _scaled(kernel: KernelConfig, splits: int, shape: Shape) -> LaunchArguments:
    """Follow ``asm_gemm_a8w8.cu``: strides of operands in elements, of the output in bytes; splits
    along grid x.
    """
    tiles_n, tiles_m = _tiles(kernel, shape)
    strides = {"stride_a": shape.k, "stride_b": shape.k, "stride_out": shape.n * _bytes(shape.outdtype)}
    names = _given("out", "a", "b", "a_scale", "b_scale", "bias")
    grid = (tiles_n * splits, tiles_m, 1)
    values = {**_sizes(shape), **strides, "splits": splits}
    return LaunchArguments(values, names, grid, shape.m, zeroed=splits > 1, absent_bias=not shape.bias)


def _blocks(kernel: KernelConfig, splits: int, shape: Shape) -> LaunchArguments:
    """Follow ``asm_a8w8_blockscale_bpreshuffle.cu``: int8's arguments and scale sizes; scales of x
    transposed.
    """
    arguments = _scaled(kernel, splits, shape)
    scales = {"scale_m": shape.m, "scale_n": ceil_div(shape.n, _BLOCK), "scale_k": ceil_div(shape.k, _BLOCK)}
    return attrs.evolve(arguments, values={**arguments.values, **scales})


def _fp4(kernel: KernelConfig, splits: int, shape: Shape) -> LaunchArguments:
    """Follow ``asm_gemm_a4w4.cu``: strides of operands in values, of the output in elements, of
    scales in bytes.
    """
    tiles_n, tiles_m = _tiles(kernel, shape)
    groups = ceil_div(ceil_div(shape.k, _GROUP), _GROUPS) * _GROUPS
    values = {"alpha": 1.0, "beta": 0.0, "stride_c0": shape.n, "stride_a0": shape.k, "stride_b0": shape.k, **_sizes(shape)}
    values |= {"stride_a_scale0": groups, "stride_b_scale0": groups, "log2_splits": splits.bit_length() - 1}
    grid = (tiles_n, tiles_m, ceil_div(shape.k, part_of(kernel, splits, shape)))
    names = _given("out", "a", "b", "a_scale", "b_scale")
    return LaunchArguments(values, names, grid, ceil_div(shape.m, _ROWS) * _ROWS, zeroed=splits > 1)


def _own(kernel: KernelConfig, splits: int, shape: Shape) -> LaunchArguments:
    """Arrange arguments for ``gcn``: strides in bytes, tiles along grid x; splits meet in the
    workspace.
    """
    tiles_n, tiles_m = _tiles(kernel, shape)
    row, tiles, split = shape.k * _bytes(shape.dtype), tiles_m * tiles_n, splits > 1
    values = {"stride_out": shape.n * _bytes(shape.outdtype), "stride_a": row, "stride_b": row, **_sizes(shape)}
    values |= {"tiles_m": tiles_m, "tiles_n": tiles_n, "splits": splits, "k_part": part_of(kernel, splits, shape)}
    values |= {"out_is_bf16": int(shape.outdtype == "bf16"), "add_bias": int(shape.bias)}
    names = _given("out", "a", "b", *["bias"] * shape.bias, *["workspace", "semaphore"] * split)
    workspace = 4 * splits * tiles * kernel.tile_m * kernel.tile_n if split else 0
    return LaunchArguments(values, names, (tiles, 1, splits), shape.m, workspace=workspace, counters=COUNTERS if split else 0)


_MAKERS: dict[str, Callable[[KernelConfig, int, Shape], LaunchArguments]] = {
    "aiter-bf16gemm": _bf16,
    "aiter-i8gemm": _scaled,
    "aiter-fp8gemm-blockscale": _blocks,
    "aiter-f4gemm": _fp4,
    "tunedgemm-bf16": _own,
}

"""Launch: a solution bound to a shape becomes one call of the driver with everything but addresses fixed before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
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
    dtype_bits,
    on_device,
    semaphores,
    torch_dtype,
    workspace,
)

from tunedgemm_asm import driver
from tunedgemm_asm.limits import COUNTERS, ceil_div, part_of
from tunedgemm_asm.manifest import KernelConfig
from tunedgemm_asm.names import resolve
from tunedgemm_asm.native import Launch, LaunchPlan, launch_of

if TYPE_CHECKING:
    import torch

    from tunedgemm_asm.packs import Catalog


def bind(
    drivers: Callable[[DriverInterface], Driver],
    catalog: Catalog,
    solution: Solution,
    shape: Shape,
    device: Device,
    where: torch.device,
) -> Launcher | Unsupported:
    """The launcher of a solution for exactly this shape.

    Args:
        drivers: gives the library for the device's kind.
        catalog: the packs for the device's architecture.
        device: whose limits count; its index is -1 where host memory stands for it.
        where: the operands' device.

    Raises:
        LaunchError: the driver does not load it.
    """
    try:
        kernel, splits = resolve(solution, shape, device, catalog)
        code = catalog.kernels[kernel.name].code()
        library = drivers(driver.INTERFACES[device.kind])
    except PluginError as error:
        return Unsupported(str(error))
    try:
        function = driver.function_of(library, code, kernel.name, device.index)
    except LaunchError as error:
        raise LaunchError(f"asm {kernel.name} on {device.gfx}: {error}") from error
    abi, arguments = catalog.kernels[kernel.name].abi, arguments_of(kernel, splits, shape)
    slots = tuple(abi.field(name).offset for name in arguments.addresses)
    launch = launch_of(function, LaunchPlan(arguments.grid, abi.threads, abi.pack(arguments.values), slots))
    call = _call(launch, _failing(function, kernel.name), arguments, shape, device.index, where)
    return Launcher(on_device(call, device.index), workspace_bytes=arguments.workspace)


def _failing(function: driver.KernelFunction, name: str) -> Callable[[int], None]:
    """What raises the error of a status."""

    def failed(status: int) -> None:
        called = function.driver.interface.functions["launch"][0]
        raise LaunchError(f"asm {name}: {called}: {function.driver.text(status)}")

    return failed


def _call(
    launch: Launch, failed: Callable[[int], None], arguments: LaunchArguments, shape: Shape, index: int, where: torch.device
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

    rows, scratch, counters, zeroed = arguments.rows, arguments.workspace, arguments.counters, arguments.zeroed
    zeros = _zeros(n, where) if arguments.absent_bias else None

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

    return call if arguments.addresses in (_PLAIN, _BIASED) else prepared


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


#: Addresses in the order in which a launch gets them, by the names of their fields.
ADDRESSES = ("out", "a", "b", "a_scale", "b_scale", "bias", "workspace", "semaphore")

#: Elements of x, and rows of the weight, that share a scale of a block.
_BLOCK = 128

#: Elements of K that share a scale of mxfp4, and of how many such groups a row of shuffled scales has a multiple.
_GROUP, _GROUPS = 32, 8

#: Rows of which AITER's fp4 kernels write a multiple.
_ROWS = 32


@attrs.frozen
class LaunchArguments:
    """A shape as a kernel is told it.

    Attributes:
        values: the arguments that are no addresses, by field.
        addresses: of `ADDRESSES` those that a launch gets.
        grid: workgroups along the three axes.
        rows: of the output's memory; what lies beyond M is nobody's.
        zeroed: whether parts of K are added to the output, which is zero before.
        absent_bias: whether float32 zeros [N] stand for a bias.
        workspace: bytes of scratch memory.
        counters: counters that are zero before and after.
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
    """What a kernel is told of a shape that it takes with so many parts of K; see `limits.unsupported_config`."""
    return _MAKERS[kernel.abi](kernel, splits, shape)


def _tiles(kernel: KernelConfig, shape: Shape) -> tuple[int, int]:
    """Tiles of the output along N and M."""
    return ceil_div(shape.n, kernel.tile_n), ceil_div(shape.m, kernel.tile_m)


def _bytes(dtype: str) -> int:
    return dtype_bits(dtype) // 8


def _given(*names: str) -> tuple[str, ...]:
    return tuple(name for name in ADDRESSES if name in names)


def _sizes(shape: Shape) -> dict[str, int | float]:
    return {"m": shape.m, "n": shape.n, "k": shape.k}


def _bf16(kernel: KernelConfig, splits: int, shape: Shape) -> LaunchArguments:
    """``asm_gemm_a16w16.cu``: strides in bytes; a semaphore where K is split."""
    tiles_n, tiles_m = _tiles(kernel, shape)
    out, row, split = shape.n * _bytes(shape.outdtype), shape.k * _bytes(shape.dtype), splits > 1
    values = {"alpha": 1.0, "beta": 0.0, "stride_out0": out, "stride_c0": out, "stride_a0": row, "stride_b0": row, **_sizes(shape)}
    values |= {"splits": splits, "out_is_bf16": int(shape.outdtype == "bf16"), "add_bias": int(shape.bias)}
    names = _given("out", "a", "b", *["bias"] * shape.bias, *["semaphore"] * split)
    return LaunchArguments(values, names, (tiles_n, tiles_m, splits), shape.m, counters=COUNTERS if split else 0)


def _scaled(kernel: KernelConfig, splits: int, shape: Shape) -> LaunchArguments:
    """``asm_gemm_a8w8.cu``: strides of operands in elements, of the output in bytes; parts of K lie along the first axis of the grid."""
    tiles_n, tiles_m = _tiles(kernel, shape)
    strides = {"stride_a": shape.k, "stride_b": shape.k, "stride_out": shape.n * _bytes(shape.outdtype)}
    names = _given("out", "a", "b", "a_scale", "b_scale", "bias")
    grid = (tiles_n * splits, tiles_m, 1)
    values = {**_sizes(shape), **strides, "splits": splits}
    return LaunchArguments(values, names, grid, shape.m, zeroed=splits > 1, absent_bias=not shape.bias)


def _blocks(kernel: KernelConfig, splits: int, shape: Shape) -> LaunchArguments:
    """``asm_a8w8_blockscale_bpreshuffle.cu``: as of int8, and the sizes of the scales, those of x lying transposed."""
    arguments = _scaled(kernel, splits, shape)
    scales = {"scale_m": shape.m, "scale_n": ceil_div(shape.n, _BLOCK), "scale_k": ceil_div(shape.k, _BLOCK)}
    return attrs.evolve(arguments, values={**arguments.values, **scales})


def _fp4(kernel: KernelConfig, splits: int, shape: Shape) -> LaunchArguments:
    """``asm_gemm_a4w4.cu``: strides of operands in values, of the output in elements, of scales in bytes; rows of the output in wholes."""
    tiles_n, tiles_m = _tiles(kernel, shape)
    groups = ceil_div(ceil_div(shape.k, _GROUP), _GROUPS) * _GROUPS
    values = {"alpha": 1.0, "beta": 0.0, "stride_c0": shape.n, "stride_a0": shape.k, "stride_b0": shape.k, **_sizes(shape)}
    values |= {"stride_a_scale0": groups, "stride_b_scale0": groups, "log2_splits": splits.bit_length() - 1}
    grid = (tiles_n, tiles_m, ceil_div(shape.k, part_of(kernel, splits, shape)))
    names = _given("out", "a", "b", "a_scale", "b_scale")
    return LaunchArguments(values, names, grid, ceil_div(shape.m, _ROWS) * _ROWS, zeroed=splits > 1)


def _own(kernel: KernelConfig, splits: int, shape: Shape) -> LaunchArguments:
    """Kernels of ``gcn``: strides in bytes, tiles along one axis; parts of K meet in scratch memory."""
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

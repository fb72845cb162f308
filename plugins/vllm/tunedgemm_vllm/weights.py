"""Bind Marlin and Machete, products of 16-bit activations by weights that are repacked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tunedgemm.plugin import Device, Launcher, PluginError, Shape
from tunedgemm.tools.launching import format_of, kind_of, semaphores, torch_dtype

from tunedgemm_vllm.library import Vendor, operator

#: Operators of the products by layout of the weight.
PRODUCTS = {"marlin": "marlin_gemm", "machete": "machete_mm"}
MARLIN, MACHETE = PRODUCTS
#: Ends the name of the solution that adds the parts of split sums by atomic operations.
_ATOMIC = "_atomic"
#: Most elements of an output, rows rounded up, that Marlin adds so.
_ROWS, _ATOMIC_OUTPUT = 64, 2048
#: Machete's schedules in vLLM 0.20 to 0.33: tile of N and M, cluster.
SCHEDULES = tuple(
    f"{tile}_{cluster}_TmaMI__TmaCoop_streamK"
    for cluster, tiles in (
        ("1x1x1", ("128x16", "256x16")),
        ("2x1x1", ("128x32", "128x64", "128x128", "128x256", "256x32", "256x64", "256x128")),
    )
    for tile in tiles
)
#: Bits of the fields of vLLM's ids of types: exponent, mantissa, sign, bias, whether all values are
#: finite, and the kind of NaN.
_FIELDS = (8, 8, 1, 32, 1, 8)
#: Locks of Marlin for each multiprocessor.
_LOCKS = 4


def type_id(exponent: int, mantissa: int, sign: int, bias: int = 0, finite: int = 0, nan: int = 1) -> int:
    """Return vLLM's id of a type; integers have no exponent."""
    number, shift = 0, 0
    for value, bits in zip((exponent, mantissa, sign, bias, finite, nan), _FIELDS, strict=True):
        number, shift = number | value << shift, shift + bits
    return number


TYPES = {
    "uint4": type_id(0, 4, 0),
    "uint4b8": type_id(0, 4, 0, 8),
    "uint8b128": type_id(0, 8, 0, 128),
    "float8_e4m3fn": type_id(4, 3, 1, finite=1, nan=2),
    "float4_e2m1f": type_id(2, 1, 1, finite=1, nan=0),
}


def kernels_of(shape: Shape) -> Iterator[tuple[str, bool]]:
    """Yield the names of the kernels of a shape, and whether repeated runs give equal bits."""
    product = PRODUCTS[shape.layout]
    yield product, True  # chooses among its kernels itself
    if shape.layout == MACHETE:
        yield from ((f"{product}_{schedule}", True) for schedule in SCHEDULES)
    elif -(-shape.m // _ROWS) * shape.n <= _ATOMIC_OUTPUT:
        yield product + _ATOMIC, False


def bind(vendor: Vendor, kernel: str, shape: Shape, device: Device) -> Launcher:
    """Return the launcher of a kernel for exactly this shape.

    Raises:
        PluginError: the library lacks the operator or schedule, or the operator takes other
            arguments.
    """
    product = operator(vendor, PRODUCTS[shape.layout])
    if shape.layout == MACHETE:
        call = _machete(product, _schedule(vendor, kernel, shape), shape)
    else:
        call = _marlin(product, kernel.endswith(_ATOMIC), shape, device)
    width = torch_dtype(shape.dtype).itemsize
    return Launcher(call, workspace_bytes=shape.m * shape.k * width if format_of(shape).has_index else 0)


def _schedule(vendor: Vendor, kernel: str, shape: Shape) -> str | None:
    """Return the schedule in a kernel's name; None for the operator's own choice."""
    name, dtype, form = kernel.removeprefix(PRODUCTS[MACHETE]).removeprefix("_"), torch_dtype(shape.dtype), format_of(shape)
    if not name:
        return None
    zeros = dtype if form.zeros is not None else None
    listed = operator(vendor, "machete_supported_schedules")(dtype, TYPES[kind_of(form)], dtype, zeros, None, None, None)
    if name not in listed:
        raise PluginError(f"{vendor.package}: its Machete has no schedule {name} for {shape.dtype} by {kind_of(form)}; tune again")
    return name


def _machete(product: Callable[..., Any], schedule: str | None, shape: Shape) -> Callable[..., Any]:
    import torch

    form, m, n, k, int32 = format_of(shape), shape.m, shape.n, shape.k, torch.int32
    kind, group, sizes = TYPES[kind_of(form)], int(shape["w_group"]) or -1, (k * form.bits // 32, n)

    def call(x: Any, weight: Any, w_scale: Any, w_zeros: Any = None, w_index: Any = None) -> Any:
        rows = x.view(m, k) if w_index is None else x.view(m, k).index_select(1, w_index)
        packed = weight.view(-1).view(int32).view(sizes)
        out = product(rows, packed, kind, None, w_scale, w_zeros, group, None, None, schedule)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], n)

    return call


def _marlin(product: Callable[..., Any], atomic: bool, shape: Shape, device: Device) -> Callable[..., Any]:
    """Make Marlin's launcher; older operators take an index, which is None as x is permuted here."""
    import torch

    form, m, n, k, int32 = format_of(shape), shape.m, shape.n, shape.k, torch.int32
    kind, sizes, locks = TYPES[kind_of(form)], (k // 16, n * form.bits // 2), _LOCKS * device.cu_num
    scale_dtype = {"e8m0": torch.float8_e8m0fnu}.get((*form.scale, "")[0])
    takes_index = "perm_or_none" in [argument.name for argument in product._schema.arguments]  # type: ignore[attr-defined]
    index, whole = ((None, None), (True,)) if takes_index else ((), ())

    def call(x: Any, weight: Any, w_scale: Any, w_zeros: Any = None, w_index: Any = None, w_global_scale: Any = None) -> Any:
        rows = x.view(m, k) if w_index is None else x.view(m, k).index_select(1, w_index)
        packed = weight.view(-1).view(int32).view(sizes)
        scale = w_scale if scale_dtype is None else w_scale.view(scale_dtype)
        factor = None if w_global_scale is None else w_global_scale.view(1)
        workspace = semaphores(locks, x.device)
        out = product(rows, None, packed, None, scale, None, factor, w_zeros, *index, workspace, kind, m, n, k, *whole, atomic, True, False)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], n)

    return call

"""Predict an instance's time on a shape, in microseconds, to order solutions.

Tiles run on the device in waves. Each step along K takes the longer of its multiplications and its
loads from L2. An epilogue follows each tile; ping-pong and tensor memory hide it behind the next
tile. The whole takes at least the time to move its bytes from memory. With K split, partials travel
through L2 one after the other.
"""

from __future__ import annotations

import functools

import attrs
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import dtype_bits

from tunedgemm_ck.cutlass.names import TENSOR_MEMORY, CutlassInstance
from tunedgemm_ck.problem import batches_of


@attrs.frozen
class Rates:
    """The work of an architecture per microsecond.

    Attributes:
        units: multiprocessors of its largest product, for devices described without a count.
        products: multiply-adds of 16-bit operands of a multiprocessor; twice as many of 8-bit ones.
        cached: bytes that a multiprocessor loads from L2.
        memory: bytes from memory, of all multiprocessors.
    """

    units: int
    products: float
    cached: float
    memory: float


#: H200: the best fit to its instances' times (2026-11-23, 38 shapes of bf16, fp8 and fp8 with block
#: scales). A100, A10, L40S, B200, B300, Thor, RTX PRO 6000 and GB10: three quarters of NVIDIA's
#: data sheets (dense tensor rates over the multiprocessors; memory), and an estimate of L2's rate.
_RATES = {
    "sm_90": Rates(132, 2.7e6, 110e3, 4.75e6),
    "sm_80": Rates(108, 1.1e6, 24e3, 1.5e6),
    "sm_86": Rates(72, 0.65e6, 12e3, 0.45e6),
    "sm_89": Rates(142, 0.95e6, 16e3, 0.65e6),
    "sm_100": Rates(148, 5.7e6, 130e3, 6.0e6),
    "sm_103": Rates(148, 5.7e6, 130e3, 6.0e6),
    "sm_110": Rates(20, 4.8e6, 60e3, 0.2e6),
    "sm_120": Rates(188, 1.0e6, 18e3, 1.35e6),
    "sm_121": Rates(48, 1.0e6, 18e3, 0.2e6),
}
#: Microseconds, fitted to the same times: a tile's first loads and last stores, a launch,
#: stream-K's memset, a part of K waiting for the previous one.
_TILE, _LAUNCH, _CLEAR, _MEET = 0.5, 4.0, 2.6, 2.1
#: Schedules that hide a tile's epilogue behind the next tile.
_HIDING = ("pingpong", *TENSOR_MEMORY)
#: Slowdown of multiplying, fitted likewise: fp8 sums promoted out of the tensor core; block scales
#: applied by ping-pong's one group of warps per tile (two groups hide it).
_MOVING, _SCALING = 1.4, 1.4
#: Fraction of min(compute, load) time not overlapped: of equal bytes, the instance with less work
#: comes first.
_BESIDE = 0.1


def ceil_div(total: int, part: int) -> int:
    """Return the number of parts in a total, counting a smaller last one."""
    return -(-total // part)


def units_of(device: Device) -> int:
    """Return the multiprocessors; those of the architecture's largest product where not given."""
    return device.cu_num or _RATES[device.gfx].units


@functools.lru_cache(maxsize=1 << 14)
def tiles_of(instance: CutlassInstance, shape: Shape, whole: bool = True) -> int:
    """Return the tiles of the output; in *whole* clusters, count those outside of it too."""
    rows, columns = (shape.n, shape.m) if instance.swap else (shape.m, shape.n)
    along_m, along_n = ceil_div(rows, instance.tile_m), ceil_div(columns, instance.tile_n)
    (cluster_m, cluster_n) = instance.cluster if whole else (1, 1)
    return ceil_div(along_m, cluster_m) * cluster_m * ceil_div(along_n, cluster_n) * cluster_n * batches_of(shape)


def cost_of(instance: CutlassInstance, split: int, shape: Shape, device: Device) -> float:
    """Return the predicted microseconds of a launch."""
    rates, units, width = _RATES[device.gfx], units_of(device), dtype_bits(shape.dtype) // 8
    tiles, steps = tiles_of(instance, shape), ceil_div(shape.k, instance.tile_k)
    step = _step_time(instance, rates, width, _slowdown(instance, shape, device))
    ends = _TILE + instance.tile_m * instance.tile_n * dtype_bits(shape.outdtype) / 8 / rates.cached
    extra = _LAUNCH + (_CLEAR if instance.scheduler == "streamk" else 0.0)
    if split > 1:
        part = ceil_div(steps, split) * step + ends
        taken = ceil_div(tiles * split, units) * part + split * _MEET + _partial_time(instance, rates)
    elif instance.scheduler == "streamk":
        taken = max(tiles / units, 8 / steps) * (steps * step + ends) + 2 * (_MEET + _partial_time(instance, rates))
    else:
        waves = ceil_div(tiles, units)
        hidden = (waves - 1) * ends if instance.schedule in _HIDING else 0.0
        taken = waves * (steps * step + ends) - hidden
    moved = batches_of(shape) * ((shape.m + shape.n) * shape.k * width + shape.m * shape.n * dtype_bits(shape.outdtype) // 8)
    loading = 2 * tiles_of(instance, shape, whole=False) * max(split, 1)
    busy = min(1.0, loading / units) if instance.scheduler != "streamk" or split > 1 else 1.0
    least, most = sorted((taken, moved / (rates.memory * busy)))
    return extra + most + _BESIDE * least


def _slowdown(instance: CutlassInstance, shape: Shape, device: Device) -> float:
    """Return the slowdown against multiplications whose sums stay in the tensor core."""
    if shape.scale == "block":
        return _SCALING if instance.schedule == "pingpong" else 1.0
    return _MOVING if device.gfx == "sm_90" and shape.dtype.startswith("fp8") and not instance.fast else 1.0


def _step_time(instance: CutlassInstance, rates: Rates, width: int, slower: float) -> float:
    """Return the microseconds of a step along K; blocks of a cluster load shared operands once."""
    cluster_m, cluster_n = instance.cluster
    loaded = (instance.tile_m / cluster_n + instance.tile_n / cluster_m) * instance.tile_k * width
    multiplied = instance.tile_m * instance.tile_n * instance.tile_k * width / 2 * slower
    least, most = sorted((multiplied / rates.products, loaded / rates.cached))
    return most + _BESIDE * least


def _partial_time(instance: CutlassInstance, rates: Rates) -> float:
    """Return the microseconds to move a tile of partials, 4 bytes each, to L2 and back."""
    return 2 * 4 * instance.tile_m * instance.tile_n / rates.cached

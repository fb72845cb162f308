"""Predict the cost of a kernel on a shape, to order solutions.

NVIDIA: the logarithm of a time over its floor is a weighted sum of `features`. These are made of
bytes, blocks and steps, so one sum serves 8-bit operands and other devices, too.
``fitted.json`` holds the weights, a set for each family. ``benchmarks/skinny_fit.py`` fits them
to times of one H200 (sm_90) and reports their quality.

The fit has 151 shapes of bf16 (M of 1 to 64), 57 of a8w8 and 42 of a8w8_blockscale in fp8. A shape
left out of the fit loses 1.4 % in the mean after 12 trials, 0.4 % after 24. Other NVIDIA
architectures and int8 take the same weights, unmeasured. For one row of x, almost only `rows` was
timed in bf16.

AMD: nothing was measured. The cost is an estimate in units of reading the weight once, which every
kernel does. Kernels differ in the share of the memory rate that their loads reach, in how evenly
blocks and steps divide, and in the final reduction.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from pathlib import Path

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES

from tunedgemm_skinny.limits import FORMATTED, batches_of, depth_of, weight_of, width_of, x_pieces
from tunedgemm_skinny.names import KernelConfig, Rows
from tunedgemm_skinny.resources import ceil_div, compiled_rows, grid_of, per_split, registers, shared_bytes, span_of, threads_of

#: Bytes in flight per multiprocessor that reach the full memory rate: its share of 5 TB/s for most
#: of a microsecond.
_IN_FLIGHT = 32 << 10
#: Bytes per microsecond that a multiprocessor reads from memory.
_PER_US = 32_000
#: Microseconds: blocks of a split meet; warps of a block add, per doubling; x is copied to shared
#: memory; a multiprocessor starts a block.
_MEETING, _ADDING, _COPYING, _STARTING = 1.0, 0.05, 0.4, 0.02
#: Most resident blocks of a multiprocessor, and bytes of shared memory that NVIDIA reserves per
#: block.
_BLOCKS, _KEPT = 32, 1 << 10
#: Fused multiply-adds and conversions of a multiprocessor while one weight element is read.
_OPERATIONS = 14
#: Range of the measured weights' read times in microseconds; others are clamped to it.
_MEASURED_US = (0.8, 224.0)
#: Bytes of an element of a weight of 4 bits.
_PACKED_BYTES = 0.5
#: Microseconds of a launch in a graph, with its ramp.
_RAMP_US = 1.5

#: Names of `features`, in order. Logarithms are to base 2.
FEATURES = (
    "one",
    "flight", "flight^2", "starved^2",  # bytes in flight per multiprocessor over `_IN_FLIGHT`, log
    "idle^2", "blocks", "blocks^2", "uneven", "ragged",  # blocks per multiprocessor, log; wave and step tails
    "split", "split/us", "splits/us", "cluster/us",  # splits in global memory, log; cluster, log; per us of weight
    "cluster2", "cluster3", "cluster4", "cluster5", "cluster6", "cluster7", "cluster8",
    "each", "warps_n", "warps_n/us", "threads^2", "unroll^2", "stages^2", "flight*stages", "resident", "us^2",
    "x", "log x", "x shared", "x shared*x", "x shared*ring",  # rows of x per weight row of a block
    "rows", "rows*each", "rows*unroll", "each*unroll", "8 bits", "block scale*unroll",
    "steps", "steps^2", "ring/steps", "left", "1/us",  # steps, log; free slots for the next launch, log
)  # fmt: skip
_CLUSTERS = tuple(tuple(float(size == splits) for size in range(2, 9)) for splits in range(9))


def cost_of(kernel: KernelConfig, splits: int, shape: Shape, device: Device) -> float:
    """Predict the cost: on NVIDIA the logarithm of the time over its floor, on AMD an estimate."""
    if device.gfx.startswith("gfx"):
        return _estimate(kernel, splits, shape, device)
    return sum(map(operator.mul, weights()[kernel.family], features(kernel, splits, shape, device)))


@functools.cache
def weights() -> dict[str, list[float]]:
    """Return the fitted weights of each family, in the order of `FEATURES`."""
    fitted = json.loads(Path(__file__).with_name("fitted.json").read_text("utf-8"))
    return {family: [named[feature] for feature in FEATURES] for family, named in fitted["weights"].items()}


def floor_of(shape: Shape, device: Device) -> float:
    """Return the microseconds of a launch that only reads both operands and writes the output."""
    outputs = 2 * shape.m * shape.n
    wider = width_of(shape.dtype) / _PACKED_BYTES if shape.op == FORMATTED else x_pieces(shape)  # x than a weight row
    moved = _width_of(shape) * shape.n * depth_of(shape) * (1 + wider * shape.m / shape.n) + outputs
    return _RAMP_US + batches_of(shape) * moved / (max(device.cu_num, 1) * _PER_US)


def _width_of(shape: Shape) -> float:
    """Return the bytes of an element of the weight."""
    return _PACKED_BYTES if shape.op == FORMATTED else width_of(weight_of(shape))


def features(kernel: KernelConfig, splits: int, shape: Shape, device: Device) -> tuple[float, ...]:
    """Return the features of a kernel's time, in the order of `FEATURES`."""
    log, gfx, width, units = math.log2, device.gfx, _width_of(shape), max(device.cu_num, 1)
    per_block, stages, cluster, shared = kernel.per_block, kernel.stages, kernel.cluster, float(kernel.x_shared)
    share, trip = per_split(kernel, splits, shape, gfx), span_of(kernel, shape, gfx) * kernel.warps_k
    batches = batches_of(shape)
    blocks = ceil_div(shape.n, per_block) * splits * batches
    room = units * _resident(kernel, splits, shape, gfx)
    flight = log(min(room, max(blocks, units)) / units * per_block * min(trip * max(stages - 1, 1), share) * width / _IN_FLIGHT)
    filled = log(blocks / units)
    us = min(max(width * batches * shape.n * depth_of(shape) / (units * _PER_US), _MEASURED_US[0]), _MEASURED_US[1])
    turns, waves = share / trip, ceil_div(blocks, room)
    apart = 0.0 if cluster or splits == 1 else 1.0  # splits meet in global memory
    x = x_pieces(shape) * compiled_rows(kernel, shape.m, gfx) / per_block
    each, warps_n, unroll, rows, logx = log(kernel.n_each), log(kernel.warps_n), log(kernel.unroll), log(_rows(kernel, shape)), log(x)
    ring, log_splits, steps = log(stages or 1), log(splits), log(turns)
    return (
        1.0,
        flight, flight * flight, min(flight, 0.0) ** 2,
        min(filled, 0.0) ** 2, filled, filled * filled, log(waves * room / blocks) if waves > 1 else 0.0, log(math.ceil(turns) / turns),
        apart, apart / us, apart * log_splits / us, (cluster and log_splits) / us,
        *_CLUSTERS[splits if cluster else 0],
        each, warps_n, warps_n / us, log(threads_of(kernel, gfx)) ** 2, unroll * unroll, ring * ring, flight * ring, log(room / units),
        log(us) ** 2,
        x, logx, shared, shared * x, shared * (stages > 0),
        rows, rows * each, rows * unroll, each * unroll, 2.0 - width, (shape.scale == "block") * unroll,
        steps, steps * steps, min(stages / turns, 1.0), max(log(room / blocks), 0.0), 1.0 / us,
    )  # fmt: skip


def _rows(kernel: KernelConfig, shape: Shape) -> float:
    """Return the rows of x.

    In `rows` those of bf16 with as much work per byte (int8: dot products of four; fp8: widened).
    """
    if not isinstance(kernel, Rows) or width_of(shape.dtype) > 1:
        return shape.m
    return shape.m / 2 if shape.dtype == "int8" else 2 * shape.m


def _estimate(kernel: KernelConfig, splits: int, shape: Shape, device: Device) -> float:
    """Estimate the cost on AMD, in units of reading the weight once."""
    units, share, width = max(device.cu_num, 1), per_split(kernel, splits, shape, device.gfx), width_of(weight_of(shape))
    blocks, trip = math.prod(grid_of(kernel, splits, shape)), span_of(kernel, shape, device.gfx) * kernel.warps_k
    resident = min(_resident(kernel, splits, shape, device.gfx), ceil_div(blocks, units))
    # Without a ring, registers are consumed before more is loaded, so fewer bytes are in flight.
    in_flight = resident * kernel.per_block * min(0.7 * trip, share) * width
    starved = max(1.0, _IN_FLIGHT / in_flight)
    uneven = ceil_div(blocks, units) * units / blocks
    ragged = ceil_div(share, trip) * trip / share if share > trip else 1.0
    duration = width * batches_of(shape) * shape.n * depth_of(shape) / (units * _PER_US)
    ends = _ADDING * math.log2(kernel.warps_k) + _STARTING * ceil_div(blocks, units) + _COPYING * kernel.x_shared
    ends += _MEETING + _ADDING * splits if splits > 1 else 0.0
    partial = 8 / width * splits * shape.m / depth_of(shape) if splits > 1 else 0.0
    return starved * math.sqrt(uneven) * math.sqrt(ragged) * _work(kernel, shape, device.gfx) + ends / duration + partial


def _resident(kernel: KernelConfig, splits: int, shape: Shape, gfx: str) -> int:
    """Return the resident blocks of a multiprocessor."""
    architecture, needed = ARCHITECTURES[gfx], shared_bytes(kernel, splits, shape, gfx) + (0 if gfx.startswith("gfx") else _KEPT)
    by_registers = (architecture.file_ki << 10) // (registers(kernel, shape, gfx) * threads_of(kernel, gfx))
    return max(1, min(_BLOCKS, architecture.warps // kernel.warps, by_registers, architecture.shared_bytes // max(needed, 1)))


def _work(kernel: KernelConfig, shape: Shape, gfx: str) -> float:
    """Return the slowdown by products and by reads of x, which every warp repeats."""
    m, each, rows = shape.m, kernel.rows_per_warp, x_pieces(shape) * compiled_rows(kernel, shape.m, gfx)
    reading = 1 + (0.01 * rows / each + 0.03 * rows / kernel.per_block if kernel.x_shared else 0.03 * rows / each)
    if isinstance(kernel, Rows):
        # int8 has dot products of four. Others take an instruction per product and per conversion;
        # fp8 bytes arrive twice as fast.
        each_element = m / 4 if shape.dtype == "int8" else m + 1 + m / each
        return reading * max(1.0, 2 * each_element / width_of(shape.dtype) / _OPERATIONS)
    return reading * (1.2 if m == 1 else 1.0)  # at M = 1 most of the matrix instruction is padding

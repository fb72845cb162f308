"""Cost: how long a kernel takes on a shape, by what was measured or by a guess; it orders what is worth timing.

On NVIDIA's architectures the logarithm of a time over its floor is a weighted sum of `features`, which are made of bytes, blocks and
steps, so that operands of 8 bits and other devices go through the same sum. The weights, a set for each family, are ``fitted.json``;
``benchmarks/skinny_fit.py`` makes them from times that were measured on one H200 (sm_90), and says how good they are: of 151 shapes
in bf16 (M of 1 to 64), 57 of a8w8 and 42 of a8w8_blockscale in fp8. A shape that was left out of the fit loses 1.4 % in the mean when 12
of what was timed for it are tried, 0.4 % when 24 are. Other architectures of NVIDIA's and int8 take the same weights unmeasured. With one
row of x next to nothing but vector units was timed in bf16.

On AMD's, where nothing was measured, the cost is guessed in units of reading the weight once. That happens whatever the kernel, so what
differs is how much of the memory's rate the loads in flight reach, how evenly blocks and steps lie, and what is added up at the end.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from pathlib import Path

from tunedgemm.plugin import Device, Shape

from tunedgemm_skinny.fit import ceil_div, compiled_rows, grid_of, per_split, registers, shared_bytes, span_of, threads_of
from tunedgemm_skinny.limits import ARCHITECTURES, batches_of, depth_of, weight_of, width_of, x_pieces
from tunedgemm_skinny.names import Kernel, Rows

#: Bytes that a multiprocessor must have in flight for the memory's whole rate: its share of 5 TB/s for most of a microsecond.
_IN_FLIGHT = 32 << 10
#: Bytes that a multiprocessor gets from memory in a microsecond.
_PER_US = 32_000
#: Microseconds that the blocks of a split take to meet, that warps of a block take for each doubling, that x takes to shared memory,
#: and that a multiprocessor takes to start a block.
_MEETING, _ADDING, _COPYING, _STARTING = 1.0, 0.05, 0.4, 0.02
#: Blocks that a multiprocessor has at a time, and bytes of shared memory that NVIDIA's keep for each beside its own.
_BLOCKS, _KEPT = 32, 1 << 10
#: Fused multiply-adds and conversions that a multiprocessor does while an element of the weight comes from memory.
_OPERATIONS = 14
#: Microseconds that the weights take which were measured; smaller and larger ones count as these.
_MEASURED_US = (0.8, 224.0)
#: Microseconds of a launch in a graph, its ramp included.
_RAMP_US = 1.5

#: What `features` gives, in its order; "log" is to the base 2.
FEATURES = (
    "one",
    "flight", "flight^2", "starved^2",  # log of the bytes in flight on a multiprocessor over those it needs
    "idle^2", "blocks", "blocks^2", "uneven", "ragged",  # log of the blocks for each multiprocessor; what waves and steps leave over
    "split", "split/us", "splits/us", "cluster/us",  # a split through global memory, its log; log of a cluster; over the time of the weight
    "cluster2", "cluster3", "cluster4", "cluster5", "cluster6", "cluster7", "cluster8",
    "each", "warps_n", "warps_n/us", "threads^2", "unroll^2", "stages^2", "flight*stages", "resident", "us^2",
    "x", "log x", "x shared", "x shared*x", "x shared*ring",  # rows of x over rows of the weight of a block
    "rows", "rows*each", "rows*unroll", "each*unroll", "8 bits", "block scale*unroll",
    "steps", "steps^2", "ring/steps", "left", "1/us",  # log of steps; of room over blocks: the next launch has it
)  # fmt: skip
_CLUSTERS = tuple(tuple(float(size == splits) for size in range(2, 9)) for splits in range(9))


def cost_of(kernel: Kernel, splits: int, shape: Shape, device: Device) -> float:
    """The lower the better: of NVIDIA's devices the logarithm of the time over its floor, of AMD's a guess."""
    if device.gfx.startswith("gfx"):
        return _guess(kernel, splits, shape, device)
    return sum(map(operator.mul, weights()[kernel.family], features(kernel, splits, shape, device)))


@functools.cache
def weights() -> dict[str, list[float]]:
    """Family -> the weight of each feature."""
    fitted = json.loads(Path(__file__).with_name("fitted.json").read_text("utf-8"))
    return {family: [named[feature] for feature in FEATURES] for family, named in fitted["weights"].items()}


def floor_of(shape: Shape, device: Device) -> float:
    """Microseconds of a launch and of reading both operands and writing the output."""
    outputs = 2 * shape.m * shape.n
    moved = width_of(weight_of(shape)) * (shape.n + x_pieces(shape) * shape.m) * depth_of(shape) + outputs
    return _RAMP_US + batches_of(shape) * moved / (max(device.cu_num, 1) * _PER_US)


def features(kernel: Kernel, splits: int, shape: Shape, device: Device) -> tuple[float, ...]:
    """What the time of a kernel is judged by, in the order of `FEATURES`."""
    log, gfx, width, units = math.log2, device.gfx, width_of(weight_of(shape)), max(device.cu_num, 1)
    per_block, stages, cluster, shared = kernel.per_block, kernel.stages, kernel.cluster, float(kernel.x_shared)
    share, trip = per_split(kernel, splits, shape, gfx), span_of(kernel, shape, gfx) * kernel.warps_k
    batches = batches_of(shape)
    blocks = ceil_div(shape.n, per_block) * splits * batches
    room = units * _resident(kernel, splits, shape, gfx)
    flight = log(min(room, max(blocks, units)) / units * per_block * min(trip * max(stages - 1, 1), share) * width / _IN_FLIGHT)
    filled = log(blocks / units)
    us = min(max(width * batches * shape.n * depth_of(shape) / (units * _PER_US), _MEASURED_US[0]), _MEASURED_US[1])
    turns, waves = share / trip, ceil_div(blocks, room)
    apart = 0.0 if cluster or splits == 1 else 1.0  # the splits meet in global memory
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


def _rows(kernel: Kernel, shape: Shape) -> float:
    """Rows of x; for vector units those of bf16 that are as much work for each byte: int8 is multiplied by fours, fp8 is widened."""
    if not isinstance(kernel, Rows) or width_of(shape.dtype) > 1:
        return shape.m
    return shape.m / 2 if shape.dtype == "int8" else 2 * shape.m


def _guess(kernel: Kernel, splits: int, shape: Shape, device: Device) -> float:
    """The guess for what was not measured."""
    units, share, width = max(device.cu_num, 1), per_split(kernel, splits, shape, device.gfx), width_of(weight_of(shape))
    blocks, trip = math.prod(grid_of(kernel, splits, shape)), span_of(kernel, shape, device.gfx) * kernel.warps_k
    resident = min(_resident(kernel, splits, shape, device.gfx), ceil_div(blocks, units))
    # What went to registers is used up before more is loaded.
    in_flight = resident * kernel.per_block * min(0.7 * trip, share) * width
    starved = max(1.0, _IN_FLIGHT / in_flight)
    uneven = ceil_div(blocks, units) * units / blocks
    ragged = ceil_div(share, trip) * trip / share if share > trip else 1.0
    duration = width * batches_of(shape) * shape.n * depth_of(shape) / (units * _PER_US)
    ends = _ADDING * math.log2(kernel.warps_k) + _STARTING * ceil_div(blocks, units) + _COPYING * kernel.x_shared
    ends += _MEETING + _ADDING * splits if splits > 1 else 0.0
    partial = 8 / width * splits * shape.m / depth_of(shape) if splits > 1 else 0.0
    return starved * math.sqrt(uneven) * math.sqrt(ragged) * _work(kernel, shape, device.gfx) + ends / duration + partial


def _resident(kernel: Kernel, splits: int, shape: Shape, gfx: str) -> int:
    """Blocks that a multiprocessor has at a time."""
    architecture, wanted = ARCHITECTURES[gfx], shared_bytes(kernel, splits, shape, gfx) + (0 if gfx.startswith("gfx") else _KEPT)
    by_registers = architecture.register_file // (registers(kernel, shape, gfx) * threads_of(kernel, gfx))
    return max(1, min(_BLOCKS, architecture.warps // kernel.warps, by_registers, architecture.shared_bytes // max(wanted, 1)))


def _work(kernel: Kernel, shape: Shape, gfx: str) -> float:
    """What multiplying and reading x add: x is read by every warp, for the rows of the weight that it has."""
    m, each, rows = shape.m, kernel.each, x_pieces(shape) * compiled_rows(kernel, shape.m, gfx)
    reading = 1 + (0.01 * rows / each + 0.03 * rows / kernel.per_block if kernel.x_shared else 0.03 * rows / each)
    if isinstance(kernel, Rows):
        # Of int8 four are multiplied at once; of the rest an instruction each, and one for each conversion, while fp8 comes twice as fast.
        each_element = m / 4 if shape.dtype == "int8" else m + 1 + m / each
        return reading * max(1.0, 2 * each_element / width_of(shape.dtype) / _OPERATIONS)
    return reading * (1.2 if m == 1 else 1.0)  # most of the matrix instruction multiplies nothing

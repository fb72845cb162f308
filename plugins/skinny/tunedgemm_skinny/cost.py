"""Cost: a guess of how long a kernel takes on a shape, in units of reading the weight once; it orders what is worth timing.

The weight is read once whatever the kernel, so what differs is how much of the memory's rate the loads in flight reach, how evenly
blocks and steps lie, and what is added up at the end.
"""

from __future__ import annotations

import math

from tunedgemm.plugin import Device, Shape

from tunedgemm_skinny.fit import ceil_div, compiled_rows, grid_of, per_split, registers, shared_bytes, span_of, threads_of
from tunedgemm_skinny.limits import ARCHITECTURES, batches_of, width_of
from tunedgemm_skinny.names import Kernel, Rows

#: Bytes that a multiprocessor must have in flight for the memory's whole rate: its share of 5 TB/s for most of a microsecond.
_IN_FLIGHT = 32 << 10
#: Bytes that a multiprocessor gets from memory in a microsecond.
_PER_US = 32_000
#: Microseconds that the blocks of a split take to meet, that warps of a block take for each doubling, that x takes to shared memory,
#: and that a multiprocessor takes to start a block.
_MEETING, _ADDING, _COPYING, _STARTING = 1.0, 0.05, 0.4, 0.02
#: Blocks that a multiprocessor has at a time.
_BLOCKS = 32
#: Fused multiply-adds and conversions that a multiprocessor does while an element of the weight comes from memory.
_OPERATIONS = 14


def cost_of(kernel: Kernel, splits: int, shape: Shape, device: Device) -> float:
    """The guess; the lower the better."""
    units, share, width = max(device.cu_num, 1), per_split(kernel, splits, shape, device.gfx), width_of(shape.dtype)
    blocks, trip = math.prod(grid_of(kernel, splits, shape)), span_of(kernel, shape.dtype, device.gfx) * kernel.warps_k
    resident = min(_resident(kernel, splits, shape, device.gfx), ceil_div(blocks, units))
    # While one slot of a ring is used, copies into the others are under way; what went to registers is used up before more is loaded.
    ahead = max(kernel.stages - 1, 1) if kernel.stages else 0.7
    in_flight = resident * kernel.per_block * min(trip * ahead, share) * width
    starved = max(1.0, _IN_FLIGHT / in_flight)
    uneven = ceil_div(blocks, units) * units / blocks
    ragged = ceil_div(share, trip) * trip / share if share > trip else 1.0
    duration = width * batches_of(shape) * shape.n * shape.k / (units * _PER_US)
    ends = _ADDING * math.log2(kernel.warps_k) + _STARTING * ceil_div(blocks, units) + _COPYING * kernel.x_shared
    ends += _MEETING + _ADDING * splits if splits > 1 else 0.0
    partial = 8 / width * splits * shape.m / shape.k if splits > 1 else 0.0
    return starved * math.sqrt(uneven) * math.sqrt(ragged) * _work(kernel, shape, device.gfx) + ends / duration + partial


def _resident(kernel: Kernel, splits: int, shape: Shape, gfx: str) -> int:
    """Blocks that a multiprocessor has at a time."""
    architecture, wanted = ARCHITECTURES[gfx], shared_bytes(kernel, splits, shape, gfx)
    by_registers = architecture.register_file // (registers(kernel, shape, gfx) * threads_of(kernel, gfx))
    return max(1, min(_BLOCKS, architecture.warps // kernel.warps, by_registers, architecture.shared_bytes // max(wanted, 1)))


def _work(kernel: Kernel, shape: Shape, gfx: str) -> float:
    """What multiplying and reading x add: x is read by every warp, for the rows of the weight that it has."""
    m, each, rows = shape.m, kernel.each, compiled_rows(kernel, shape.m, gfx)
    reading = 1 + (0.01 * rows / each + 0.03 * rows / kernel.per_block if kernel.x_shared else 0.03 * rows / each)
    if isinstance(kernel, Rows):
        # Of int8 four are multiplied at once; of the rest an instruction each, and one for each conversion, while fp8 comes twice as fast.
        each_element = m / 4 if shape.dtype == "int8" else m + 1 + m / each
        return reading * max(1.0, 2 * each_element / width_of(shape.dtype) / _OPERATIONS)
    return reading * (1.2 if m == 1 else 1.0)  # most of the matrix instruction multiplies nothing

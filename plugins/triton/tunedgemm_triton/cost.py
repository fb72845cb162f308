"""Predict the time of kernels, to order solutions."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES, format_of, unit_peak_over

from tunedgemm_triton.limits import batches_of, width_of
from tunedgemm_triton.names import Gemm, KernelConfig, Tma
from tunedgemm_triton.packed import resources as packed
from tunedgemm_triton.packed.names import Packed, Wnv
from tunedgemm_triton.resources import ceil_div, registers, resident, shared_bytes, tiles_of

# Rates of `hopper_us`, fitted to 13964 times of 195 products on an H100, M = 16 to 4096;
# ``benchmarks/cost_fit.py`` judges them. A wgmma multiplies 64 rows of one operand by 8 to 256 of
# the other, 32 bytes deep; the tensor cores of a multiprocessor do 4096 operations in a cycle.
_CYCLES_A_US, _OPERATIONS, _SHARED_BYTES = 1375.0, 4096, 112.0
_MEMORY, _L2, _MULTIPROCESSOR = 2.57e6, 12.3e6, 13.1e4  # bytes per microsecond
# Product whose rates these are.
_FITTED_ON = "nvidia-h100-80gb-hbm3"
#: Cycles over those of wgmma alone: operands from descriptors, from pointers, with specialised
#: warps; and time over that of four warps where eight share 64 rows.
_DESCRIBED, _POINTERS, _SPECIALISED, _EIGHT_WARPS = 0.884, 1.02, 1.03, 1.017
#: Microseconds of a load's latency, of a step of the loop, and of a launch.
_LATENCY, _STEP, _LAUNCH = 1.36, 0.0225, 2.78
#: Microseconds to store an output, to meet the other parts of K, and to add an element of them.
_STORED, _MEETING, _ADDED = 2.2e-4, 1.17, 3.5e-4
#: Registers of a multiprocessor; registers of a thread that `registers` does not count.
_REGISTERS, _OTHERS = 1 << 16, 80
#: Order of the norm that combines bounds which overlap in part.
_TOGETHER = 8.0
#: Operations of vector units in a cycle of a multiprocessor, and those that make a number of a code
#: in `wnv`, by sm_90's code; in `wn`, a guess.
_VECTOR, _DECODE, _DECODE_TILE = 128, {"native": 2.5, "integer": 3.5, "e2m1": 7.0}, 6.0
#: The same of an element that is scaled by itself, with its loads; of a load, a guess.
_SCALE_ELEMENT, _LOAD = 12.0, 8.0


def useful_splits(splits: Iterable[int], tiles: int, steps: int, least: int, device: Device) -> list[int]:
    """Return the split factors worth timing, first those that leave the fewest multiprocessors idle.

    Each part has at least *least* of the *steps* along K, and the parts make two waves at most.
    """

    def cost(split: int) -> float:
        waves = tiles * split / device.cu_num
        return math.ceil(waves) / waves + 0.1 * math.ceil(waves) + 0.01 * split

    return sorted((split for split in splits if split == 1 or (steps >= least * split and tiles * split <= 2 * device.cu_num)), key=cost)


def wave_occupancy(kernel: KernelConfig, shape: Shape, device: Device) -> float:
    """Return the part of the multiprocessors' waves that tiles fill."""
    tiles = tiles_of(kernel, shape)
    return tiles / (ceil_div(tiles, device.cu_num) * device.cu_num)


def mi300x_clocks(kernel: Gemm, split: int, shape: Shape, device: Device) -> float:
    """Estimate the clocks of a launch with block scales on an MI300X, to order tiles.

    A CU does 4096 fp8 operations or reads 32 bytes from L2 a clock (AMD CDNA 3 white paper). The
    latencies are rounded guesses: 100 clocks a step, and 2000 for the fixup of splits.
    """
    waves = ceil_div(tiles_of(kernel, shape) * split, device.cu_num)
    step = max(kernel.block_m * kernel.block_n / 16, 4 * (kernel.block_m + kernel.block_n)) + 100
    # Half of the warps hide half of the latency of the others.
    return waves * ceil_div(ceil_div(shape.k, 128), split) * (step + 200 / kernel.warps) + 2000 * (split > 1)


def hopper_us(kernel: Gemm | Tma, split: int, shape: Shape, device: Device) -> float:
    """Predict the microseconds of a kernel without block scales on Hopper, to order kernels."""
    width, tiles = width_of(shape.dtype), tiles_of(kernel, shape)
    a, b = (kernel.block_n, kernel.block_m) if kernel.swap else (kernel.block_m, kernel.block_n)
    tensor = unit_peak_over(device, _FITTED_ON)
    multiplied = max(2 * 64 * b * 16 / (_OPERATIONS * tensor), (64 + b) * 32 / _SHARED_BYTES)
    cycles = ceil_div(a, 64) * kernel.block_k * width / 32 * multiplied * _slowdown(kernel)
    held = min(_held(kernel, shape, device), ceil_div(tiles * split, device.cu_num))
    stage = (a + b) * kernel.block_k * width
    step = _bound(cycles / _CYCLES_A_US + _STEP, max(_LATENCY / (kernel.stages * held), stage / _MULTIPROCESSOR))
    steps = ceil_div(ceil_div(shape.k, kernel.block_k), split)
    rounds = ceil_div(tiles * split, device.cu_num * held) * held
    busy = rounds * (steps * step + a * b * _STORED) + _LAUNCH
    moved = batches_of(shape) * (width * shape.k * (shape.m + shape.n) + 2 * shape.m * shape.n)
    met = _MEETING + _ADDED * split * tiles * a * b / device.cu_num if split > 1 else 0.0
    bounds = _bound(busy, tiles * split * steps * stage / _L2, moved / _MEMORY)
    return bounds * (_EIGHT_WARPS if kernel.warps == 8 and a < 128 else 1.0) + met


def packed_us(kernel: Packed, split: int, shape: Shape, device: Device) -> float:
    """Predict the microseconds of a product of a weight-only format, to order kernels.

    Rates are Hopper's. A program decodes its part of the weight, and other rows of tiles repeat it.
    The loads in flight of all programs limit the rate of the memory.
    """
    form, tiles = format_of(shape), packed.tiles_of(kernel, shape)
    k = ceil_div(packed.steps_of(kernel, shape), split) * packed.step_of(kernel, shape)
    codes, indexed = kernel.block_n * k, _SCALE_ELEMENT * packed.has_index(shape)
    programs, threads = tiles * split, 32 * kernel.warps
    each = ceil_div(programs, device.cu_num)
    held = min(each, 2048 // threads, ARCHITECTURES[device.gfx].shared_bytes // packed.shared_bytes(kernel, shape, device))
    if isinstance(kernel, Wnv):
        operations = _DECODE[packed.kind_of(form)] + kernel.block_m + indexed + _LOAD / packed.codes_of(kernel, shape, device)
        busy = codes * operations / _VECTOR
        held = max(min(held, _REGISTERS // (threads * (packed.vector_registers(kernel, shape, device) + _OTHERS // 2))), 1)
    else:
        side = max(kernel.block_m, 16) * (1 + packed.has_index(shape))
        busy = _bound(codes * (_DECODE_TILE + indexed) / _VECTOR, 2 * codes * side / _OPERATIONS)
    flight = min(packed.flight_bytes(kernel, shape, device), codes * form.bits // 8)
    waves = each * device.cu_num / max(programs, device.cu_num)  # as the last wave is as long as others
    read = form.stored_bits(shape.n, shape.k, int(shape["w_group"])) / 8 * waves
    rate = min(_MEMORY, min(held * device.cu_num, programs) * flight / _LATENCY)
    moved = 2 * shape.m * (shape.k + shape.n) / _MEMORY + tiles * shape.k * kernel.block_m * 2 / _L2
    met = _MEETING + _ADDED * split * tiles * kernel.block_m * kernel.block_n / device.cu_num if split > 1 else 0.0
    return _bound(each * busy / _CYCLES_A_US, read / rate) + moved + met + ceil_div(each, held) * _LATENCY + _LAUNCH


def _bound(*times: float) -> float:
    """Return the time of concurrent work from the times of its parts."""
    return float(sum(time**_TOGETHER for time in times) ** (1 / _TOGETHER))


def _slowdown(kernel: Gemm | Tma) -> float:
    """Return the cycles of a step's products over those of wgmma alone."""
    if isinstance(kernel, Gemm):
        return _POINTERS
    return _DESCRIBED * (_SPECIALISED if kernel.specialize else 1.0)


def _held(kernel: Gemm | Tma, shape: Shape, device: Device) -> int:
    """Return the programs that a multiprocessor holds at a time."""
    if isinstance(kernel, Tma):
        return resident(kernel, shape, device)
    room = ARCHITECTURES[device.gfx].shared_bytes // max(shared_bytes(kernel, shape, device.gfx), 1)
    threads = 32 * kernel.warps
    return max(1, min(room, _REGISTERS // (threads * (registers(kernel, shape, device.gfx) + _OTHERS)), 2048 // threads))

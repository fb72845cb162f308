"""Solutions: which kernels are worth timing for a shape, by class of M, best guesses first, and their neighbours."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution, Unsupported

from tunedgemm_triton.fit import ceil_div, refusal, registers, shared_bytes, step_of, tiles_of
from tunedgemm_triton.limits import ARCHITECTURES, supports
from tunedgemm_triton.names import Gemm, Gemv, Kernel, Tma, kernel_of

LIBTYPE = "triton"

#: Rows of activations up to which multiply-and-sum beats a matrix instruction.
GEMV_ROWS = 4

#: Most solutions of one shape.
MOST = 60

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

#: gemv: rows of the weight a program, unrolled chunks, warps.
_GEMV = (
    (2, 2, 4), (1, 2, 4), (4, 1, 4), (2, 4, 2), (1, 4, 4), (2, 1, 8), (4, 2, 4), (1, 4, 8), (8, 1, 4), (4, 4, 1), (2, 4, 4),
    (1, 8, 4), (4, 2, 2), (8, 1, 2), (1, 2, 8), (1, 8, 2), (2, 8, 1), (4, 7, 2), (2, 7, 2), (8, 2, 1), (1, 7, 4), (16, 1, 2),
)  # fmt: skip

#: gemm for few rows, whose block_m is the least that covers M: block_n, block_k, warps, stages, swap.
_DECODE = (
    (64, 128, 4, 4, True), (32, 256, 4, 4, False), (64, 128, 4, 4, False), (128, 64, 4, 6, True), (16, 256, 4, 5, False),
    (32, 128, 4, 6, False), (64, 256, 4, 3, True), (64, 64, 4, 6, False), (128, 128, 4, 4, True), (128, 64, 8, 5, False),
)  # fmt: skip

#: gemm for many rows: block_m, block_n, block_k, warps, stages.
_TILES = (
    (128, 256, 64, 8, 4), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4), (64, 128, 64, 4, 5), (256, 128, 64, 8, 3), (64, 256, 64, 4, 4),
    (128, 64, 64, 4, 5), (64, 64, 128, 4, 4), (64, 64, 64, 4, 6), (128, 128, 128, 8, 3), (128, 256, 64, 8, 3), (32, 128, 128, 4, 4),
    (32, 64, 128, 4, 5), (64, 128, 128, 4, 3), (128, 64, 128, 4, 3),
)  # fmt: skip

#: tma: block_m, block_n, block_k, warps, stages, specialised.
_TMA = (
    (128, 256, 64, 8, 3, False), (128, 128, 64, 4, 4, True), (128, 256, 64, 4, 3, True), (128, 128, 64, 8, 4, False),
    (256, 128, 64, 8, 3, False), (64, 128, 64, 4, 5, False), (64, 256, 64, 4, 4, False), (128, 128, 128, 8, 3, False),
    (64, 128, 128, 4, 4, True), (128, 64, 64, 4, 5, True), (64, 64, 128, 4, 5, False), (128, 128, 64, 4, 5, False),
)  # fmt: skip

#: gemm on AMD: block_m, block_n, block_k, warps, stages, side of the matrix instruction, k-pack.
_MFMA = (
    (256, 256, 64, 8, 2, 16, 1), (128, 128, 64, 4, 2, 16, 1), (256, 128, 64, 8, 2, 16, 2), (128, 256, 64, 8, 2, 16, 2),
    (128, 128, 32, 4, 2, 32, 1), (128, 128, 64, 4, 2, 32, 2), (64, 128, 64, 4, 2, 16, 2), (128, 64, 64, 4, 2, 16, 2),
    (64, 64, 64, 4, 2, 16, 1), (64, 64, 128, 4, 2, 16, 2), (32, 64, 128, 4, 2, 16, 2), (32, 128, 64, 4, 2, 16, 1),
    (128, 128, 64, 4, 3, 16, 1), (64, 128, 128, 4, 2, 16, 1),
)  # fmt: skip

_LADDERS = {
    "rows": (1, 2, 3, 4),
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "block_k": (32, 64, 128, 256, 512, 1024, 2048, 4096),
    "unroll": (1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 16),
    "group_m": (1, 2, 4, 8, 16, 32),
    "warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4, 5, 6, 7, 8),
    "waves": (0, 1, 2, 3, 4),
    "nonkdim": (16, 32),
    "kpack": (1, 2),
}


def enumerate_solutions(shape: Shape, device: Device) -> Iterator[Solution]:
    """The solutions of a shape, each once, at most `MOST`, those that cannot fit left out."""
    if isinstance(supports(shape, device), Unsupported):
        return
    candidates: Iterable[tuple[Kernel, int]]
    if shape.m <= GEMV_ROWS:
        candidates = itertools.chain(_gemv(shape, device), itertools.islice(_decode(shape, device), 12))
    elif shape.m <= 64:
        candidates = itertools.chain(_decode(shape, device), _tiled(shape, device))
    else:
        candidates = _tiled(shape, device)
    usable = (_solution(kernel, split) for kernel, split in dict.fromkeys(candidates) if fits(kernel, split, shape, device))
    yield from itertools.islice(usable, MOST)


def refine(solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """The neighbours of a solution: one parameter, or splitK, moved one step of its ladder."""
    try:
        kernel = kernel_of(solution.kernel_name)
    except PluginError:
        return
    split = max(solution.split_k, 1)
    near: list[tuple[Kernel, int]] = [(kernel, other) for other in _beside(SPLITS, split)]
    for field in attrs.fields(type(kernel)):
        for value in _beside(_LADDERS.get(field.name, ()), getattr(kernel, field.name)):
            with contextlib.suppress(PluginError):  # a step out of the family's range
                near.append((attrs.evolve(kernel, **{field.name: value}), split))
    if isinstance(kernel, Gemm):
        near.append((attrs.evolve(kernel, swap=not kernel.swap), split))
    for changed, factor in near:
        if fits(changed, factor, shape, device):
            yield _solution(changed, factor)


def fits(kernel: Kernel, split: int, shape: Shape, device: Device) -> bool:
    """Whether a kernel is possible, fits the shared memory and the registers, and leaves no program without work."""
    architecture = ARCHITECTURES[device.gfx]
    if refusal(kernel, split, shape, device) or shared_bytes(kernel, device.gfx) > architecture.shared_bytes:
        return False
    if registers(kernel, device.gfx) > (200 if isinstance(kernel, Gemv) else 160):
        return False
    return (split - 1) * ceil_div(ceil_div(shape.k, step_of(kernel)), split) < ceil_div(shape.k, step_of(kernel))


def _solution(kernel: Kernel, split: int) -> Solution:
    return Solution(LIBTYPE, kernel.name, split if split > 1 else 0, batch_invariant=True)


def _beside(ladder: tuple[int, ...], value: int) -> list[int]:
    below, above = [step for step in ladder if step < value], [step for step in ladder if step > value]
    return below[-1:] + above[:1]


def _gemv(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Chunks of 16 bytes a thread, so that both operands lie alike in a warp and need no exchange."""
    lane = 8 * ARCHITECTURES[device.gfx].warp_size
    for split in (1, 2, 4):
        for block_n, unroll, warps in _GEMV:
            kernel = Gemv(shape.m, block_n, lane * warps, unroll, warps)
            step = step_of(kernel) * split
            enough = ceil_div(shape.n, block_n) * warps * split >= 4 * device.cu_num
            if enough and step < shape.k + lane * warps and (split == 1 or shape.n < 4096):
                yield kernel, split


def _decode(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Few rows: the weight is read once whatever the tile, so split K until every multiprocessor reads."""
    block_m = next(size for size in (16, 32, 64) if size >= shape.m or size == 64)
    amd = device.kind == "amd"
    for rank in range(3):
        for block_n, block_k, warps, stages, swap in _DECODE:
            kernel = Gemm(block_m, block_n, block_k, 1, warps, 2 if amd else stages, swap and not amd, 16 if amd else 0)
            splits = _splits(kernel, shape, device)
            if rank < len(splits):
                yield kernel, splits[rank]


def _splits(kernel: Kernel, shape: Shape, device: Device) -> list[int]:
    """Factors that fill one to four programs a multiprocessor, nearest to two first."""
    tiles, steps = tiles_of(kernel, shape), ceil_div(shape.k, step_of(kernel))
    useful = [split for split in SPLITS if split == 1 or (steps >= 2 * split and tiles * split <= 4 * device.cu_num)]
    return sorted(useful, key=lambda split: abs(tiles * split - 2 * device.cu_num))


def _tiled(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Many rows: large tiles, the persistent kernel where there is one, split where tiles are too few."""
    if device.kind == "amd":
        yield from _mfma(shape, device)
        return
    covered = max(64, 1 << (shape.m - 1).bit_length())
    for (block_m, block_n, block_k, warps, stages, specialize), group in itertools.product(_TMA, (8,)):
        if block_m <= covered:
            yield Tma(block_m, block_n, block_k, group, warps, stages, specialize), 1
    for block_m, block_n, block_k, warps, stages in _TILES:
        kernel = Gemm(block_m, block_n, block_k, 8, warps, stages)
        if block_m <= covered:
            yield from ((kernel, split) for split in _splits(kernel, shape, device)[:3])


def _mfma(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    wide = device.gfx in ("gfx90a", "gfx942")
    side = device.gfx in ("gfx90a", "gfx942", "gfx950")
    covered = max(32, 1 << (shape.m - 1).bit_length())
    for block_m, block_n, block_k, warps, stages, nonkdim, kpack in _MFMA:
        if block_m <= covered:
            kernel = Gemm(block_m, block_n, block_k, 8, warps, stages, nonkdim=nonkdim if side else 0, kpack=kpack if wide else 1)
            # The largest tile has no registers left for the addresses of partial sums.
            splits = [1] if block_m * block_n == 1 << 16 else _splits(kernel, shape, device)[:3]
            yield from ((kernel, split) for split in splits)

"""Solutions: which kernels are worth timing for a shape, by class of M, best guesses first, and their neighbours."""

from __future__ import annotations

import contextlib
import itertools
import math
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

#: gemv with one row of activations: rows of the weight a program, unrolled chunks, warps. Ordered by what won on an H200.
_ONE_ROW = (
    (1, 2, 4), (2, 1, 8), (2, 2, 1), (1, 2, 8), (2, 1, 4), (4, 4, 1), (1, 2, 16), (4, 2, 2), (2, 1, 2), (2, 4, 8), (1, 8, 1), (4, 1, 8),
    (2, 4, 1), (1, 8, 4), (4, 1, 32), (4, 1, 4), (1, 2, 2), (4, 1, 16), (4, 4, 8), (8, 2, 2), (2, 2, 16), (4, 2, 1), (1, 4, 4), (4, 8, 4),
)  # fmt: skip

#: The same with two to four rows of activations.
_FEW_ROWS = (
    (2, 1, 8), (2, 2, 8), (4, 2, 2), (2, 2, 1), (4, 2, 1), (4, 2, 4), (4, 1, 8), (4, 1, 2), (2, 8, 4), (4, 4, 1), (1, 8, 4), (2, 4, 4),
    (4, 2, 8), (4, 1, 4), (1, 4, 4), (8, 2, 2), (4, 1, 1), (2, 1, 4), (1, 8, 1), (8, 1, 2),
)  # fmt: skip

#: gemv for a K with an odd factor p, whose rows fill p or 2 p chunks: rows of the weight, warps.
_ODD = ((2, 1), (4, 2), (2, 4), (1, 2), (2, 2), (1, 1))

#: gemm for few rows by block_m: block_n, block_k, warps, stages, swap.
_DECODE = {
    16: (
        (64, 128, 4, 5, True), (64, 128, 4, 8, True), (64, 256, 4, 5, True), (64, 64, 4, 8, True), (64, 64, 8, 8, True),
        (64, 128, 8, 5, True), (64, 128, 4, 3, True), (128, 64, 4, 6, True), (32, 256, 2, 4, False), (32, 128, 2, 4, False),
        (32, 64, 2, 8, False), (32, 128, 4, 4, False), (64, 128, 4, 5, False), (32, 256, 4, 4, False),
    ),
    32: (
        (64, 64, 4, 8, True), (64, 256, 4, 4, True), (64, 128, 4, 4, True), (64, 128, 4, 8, True), (64, 64, 8, 8, True),
        (64, 256, 8, 4, True), (64, 128, 8, 8, True), (64, 256, 4, 4, False), (32, 128, 2, 6, False), (32, 64, 2, 7, False),
        (128, 64, 4, 5, True), (64, 128, 4, 3, True),
    ),
    64: (
        (64, 128, 4, 5, True), (64, 64, 4, 8, False), (32, 128, 4, 8, False), (64, 128, 4, 6, False), (64, 64, 4, 8, True),
        (32, 256, 4, 4, False), (64, 64, 8, 8, False), (64, 128, 4, 3, True), (32, 64, 4, 8, False),
    ),
}  # fmt: skip

#: tma for few rows: block_n, block_k, stages, with block_m 64 and 4 warps.
_DECODE_TMA = ((64, 128, 5), (64, 128, 6), (64, 128, 4), (32, 128, 6), (32, 128, 4), (64, 64, 8), (32, 128, 8))

#: tma for many rows: block_m, block_n, block_k, warps, stages, specialised.
_TMA = (
    (128, 256, 64, 8, 3, False), (128, 256, 64, 8, 4, False), (128, 128, 64, 4, 6, False), (64, 128, 64, 4, 8, False),
    (128, 64, 64, 4, 8, False), (64, 256, 64, 4, 5, False), (128, 128, 64, 4, 5, False), (64, 128, 128, 4, 4, False),
    (128, 64, 128, 4, 4, False), (256, 128, 64, 8, 4, False), (64, 128, 64, 4, 4, False), (64, 64, 128, 4, 5, False),
    (128, 64, 64, 4, 6, False), (128, 128, 64, 8, 5, False), (64, 128, 64, 4, 6, False), (128, 32, 128, 4, 5, False),
    (128, 128, 64, 4, 3, False), (128, 256, 64, 4, 3, True), (128, 128, 64, 4, 4, True), (64, 128, 128, 4, 3, True),
)  # fmt: skip

#: gemm for many rows: block_m, block_n, block_k, warps, stages.
_TILES = (
    (64, 128, 64, 4, 5), (64, 64, 64, 4, 6), (128, 128, 64, 4, 4), (128, 256, 64, 8, 4), (64, 128, 128, 4, 4), (128, 64, 64, 4, 5),
    (128, 128, 64, 8, 3), (64, 64, 128, 4, 4), (64, 256, 64, 4, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 32, 4, 4),
    (64, 64, 64, 4, 3), (64, 128, 64, 4, 3),
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
        candidates = itertools.chain(_gemv(shape, device), itertools.islice(_decode(shape, device), 16))
    elif shape.m <= 64:
        candidates = _decode(shape, device)
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
    if refusal(kernel, split, shape, device) or shared_bytes(kernel, shape, device.gfx) > architecture.shared_bytes:
        return False
    if registers(kernel, shape, device.gfx) > (200 if isinstance(kernel, Gemv) else 160):
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
    known = _ONE_ROW if shape.m == 1 else _FEW_ROWS
    odd = shape.k // lane
    while odd and odd % 2 == 0:
        odd //= 2
    whole = [(block_n, unroll, warps) for unroll in (odd, 2 * odd) for block_n, warps in _ODD] if 1 < odd <= 8 else []
    whole = [found for found in whole if shape.k % (lane * found[1] * found[2]) == 0]
    for split in (1, 2, 4):
        for block_n, unroll, warps in (*known[:6], *whole, *known[6:]):
            kernel = Gemv(shape.m, block_n, lane * warps, unroll, warps)
            enough = ceil_div(shape.n, block_n) * warps * split >= 4 * device.cu_num
            covered = kernel.block_k * unroll * split < shape.k + kernel.block_k
            if warps * lane <= 32 * 256 and enough and covered and (split == 1 or (block_n > 1 and shape.n < 4096)):
                yield kernel, split


def _decode(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Few rows: the weight is read once whatever the tile, so split K until every multiprocessor reads."""
    block_m = next(size for size in (16, 32, 64) if size >= shape.m)
    amd = device.kind == "amd"
    for rank in range(3):
        kernels: list[Kernel] = []
        for block_n, block_k, warps, stages, swap in _DECODE[block_m]:
            # AMD's matrix instruction has no long side to turn, and its loop keeps one tile in LDS.
            kernels.append(Gemm(block_m, block_n, block_k, 1, warps, 2 if amd else stages, swap and not amd, 16 if amd else 0))
        if block_m == 64 and ARCHITECTURES[device.gfx].tma:
            kernels[3:3] = [Tma(64, block_n, block_k, 1, 4, stages) for block_n, block_k, stages in _DECODE_TMA]
        for kernel in kernels:
            splits = _splits(kernel, shape, device)
            if rank < len(splits):
                yield kernel, splits[rank]


def _splits(kernel: Kernel, shape: Shape, device: Device) -> list[int]:
    """Factors worth a try, those first that leave the fewest multiprocessors idle in their last wave."""
    tiles, steps = tiles_of(kernel, shape), ceil_div(shape.k, step_of(kernel))

    def cost(split: int) -> float:
        waves = tiles * split / device.cu_num
        return math.ceil(waves) / waves + 0.1 * math.ceil(waves) + 0.01 * split

    useful = [split for split in SPLITS if split == 1 or (steps >= 4 * split and tiles * split <= 2 * device.cu_num)]
    return sorted(useful, key=cost)


def _tiled(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Many rows: the persistent kernel where there is one, plain tiles, split where tiles are too few."""
    if device.kind == "amd":
        yield from _mfma(shape, device)
        return
    covered = 1 << (shape.m - 1).bit_length()
    persistent = ARCHITECTURES[device.gfx].tma and shape.k % 8 == 0
    if persistent:
        sized: list[Kernel] = [Tma(m, n, k, 8, *others) for m, n, k, *others in _TMA if m <= covered]
        # The less there is to multiply, the smaller the tiles that come first.
        sized.sort(key=lambda kernel: shape.m < 512 and tiles_of(kernel, shape) < device.cu_num // 3)
        for rank in range(2):
            for kernel in sized:
                splits = _splits(kernel, shape, device) if not isinstance(kernel, Tma) or not kernel.specialize else [1]
                if rank < len(splits):
                    yield kernel, splits[rank]
        for group in (16, 4):
            yield from ((attrs.evolve(kernel, group_m=group), 1) for kernel in sized[:2] if isinstance(kernel, Tma))
    for block_m, block_n, block_k, warps, stages in _TILES[: 6 if persistent else None]:
        kernel = Gemm(block_m, block_n, block_k, 8, warps, stages)
        if block_m <= covered:
            yield from ((kernel, split) for split in _splits(kernel, shape, device)[: 1 if persistent else 3])


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

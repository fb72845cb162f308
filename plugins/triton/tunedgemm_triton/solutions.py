"""Solutions: which kernels are worth timing for a shape, by class of M, best guesses first, and their neighbours."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution, Unsupported

from tunedgemm_triton import spaces
from tunedgemm_triton.fit import ceil_div, packs, promotes, refusal, register_limit, registers, shared_bytes, step_of, tiles_of
from tunedgemm_triton.limits import ARCHITECTURES, batches_of, supports, width_of
from tunedgemm_triton.names import Gemm, Gemv, Kernel, Streamk, Tma, kernel_of

LIBTYPE = "triton"

#: Rows of activations up to which multiply-and-sum beats a matrix instruction.
GEMV_ROWS = 4

#: Most solutions of one shape.
MOST = 60


def enumerate_solutions(shape: Shape, device: Device) -> Iterator[Solution]:
    """The solutions of a shape, each once, at most `MOST`, those that cannot fit left out."""
    if isinstance(supports(shape, device), Unsupported):
        return
    amd = device.kind == "amd"
    candidates: Iterable[tuple[Kernel, int]] = _decode(shape, device)

    def usable(found: Iterable[tuple[Kernel, int]]) -> Iterator[tuple[Kernel, int]]:
        return (each for each in dict.fromkeys(found) if fits(*each, shape, device))

    if amd and shape.scale == "block":
        few = itertools.islice(usable(candidates), 8) if shape.m <= 16 else ()
        candidates = itertools.chain(few, _aiters_blockscale(shape, device))
    elif shape.m > 64:
        candidates = _on_amd(shape, device) if amd else _tiled(shape, device)
    if shape.m <= GEMV_ROWS and shape.layout == "row":
        vectors, tiles = _gemv(shape, device), itertools.islice(usable(candidates), 16)
        # Bytes are widened before they are multiplied, so that rows of activations soon cost more than the weight's way from memory.
        candidates = _in_turn(vectors, tiles) if width_of(shape.dtype) == 1 else itertools.chain(vectors, tiles)
    yield from (_solution(*each) for each in itertools.islice(usable(candidates), MOST))


def refine(solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """The neighbours of a solution: one parameter, or splitK, moved one step of its ladder."""
    try:
        kernel = kernel_of(solution.kernel_name)
    except PluginError:
        return
    split = max(solution.split_k, 1)
    near: list[tuple[Kernel, int]] = [(kernel, other) for other in spaces.beside(spaces.SPLITS, split)]
    for field in attrs.fields(type(kernel)):
        value = getattr(kernel, field.name)
        for other in [not value] if isinstance(value, bool) else spaces.beside(spaces.LADDERS.get(field.name, ()), value):
            with contextlib.suppress(PluginError):  # a step out of the family's range
                near.append((attrs.evolve(kernel, **{field.name: other}), split))
    for changed, factor in near:
        if fits(changed, factor, shape, device) and not _same_walk(changed, kernel, shape):
            yield _solution(changed, factor)


def _same_walk(kernel: Kernel, other: Kernel, shape: Shape) -> bool:
    """Whether two kernels differ in nothing but a group of more tiles along M than there are: they take the tiles in the same order."""
    if isinstance(kernel, Gemv) or isinstance(other, Gemv):
        return False
    rows = ceil_div(shape.m, kernel.block_m)
    same = kernel.group_m != other.group_m and attrs.evolve(kernel, group_m=other.group_m) == other
    return same and min(kernel.group_m, rows) == min(other.group_m, rows)


def fits(kernel: Kernel, split: int, shape: Shape, device: Device) -> bool:
    """Whether a kernel is possible, fits the shared memory and the registers, and leaves no program without work."""
    architecture = ARCHITECTURES[device.gfx]
    if refusal(kernel, split, shape, device) or shared_bytes(kernel, shape, device.gfx) > architecture.shared_bytes:
        return False
    if registers(kernel, shape, device.gfx) > register_limit(kernel, device.gfx):
        return False
    return (split - 1) * ceil_div(ceil_div(shape.k, step_of(kernel)), split) < ceil_div(shape.k, step_of(kernel))


def _solution(kernel: Kernel, split: int) -> Solution:
    # Where streamk cuts a tile depends on how many tiles there are.
    return Solution(LIBTYPE, kernel.name, split if split > 1 else 0, batch_invariant=not isinstance(kernel, Streamk))


def _in_turn(*lists: Iterable[tuple[Kernel, int]]) -> Iterator[tuple[Kernel, int]]:
    """The first of each list, then the second of each."""
    return (found for group in itertools.zip_longest(*lists) for found in group if found is not None)


def _gemv(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Chunks of 16 bytes a thread, so that both operands lie alike in a warp and need no exchange."""
    lane = 16 // width_of(shape.dtype) * ARCHITECTURES[device.gfx].warp_size
    known = spaces.ONE_ROW if shape.m == 1 else spaces.FEW_ROWS
    if shape.m == 1 and width_of(shape.dtype) == 1:
        known = tuple(dict.fromkeys((*spaces.ONE_ROW_OF_BYTES, *known)))
    odd = shape.k // lane
    while odd and odd % 2 == 0:
        odd //= 2
    whole = [(block_n, unroll, warps) for unroll in (odd, 2 * odd) for block_n, warps in spaces.ODD] if 1 < odd <= 8 else []
    whole = [found for found in whole if shape.k % (lane * found[1] * found[2]) == 0]
    for split in (1, 2, 4):
        for block_n, unroll, warps in (*known[:6], *whole, *known[6:]):
            if warps * lane > 32 * 256 * 2 // width_of(shape.dtype):
                continue
            kernel = Gemv(shape.m, block_n, lane * warps, unroll, warps)
            enough = batches_of(shape) * ceil_div(shape.n, block_n) * warps * split >= 4 * device.cu_num
            covered = kernel.block_k * unroll * split < shape.k + kernel.block_k and kernel.block_k <= max(lane, 2 * shape.k)
            if enough and covered and (split == 1 or (block_n > 1 and shape.n < 4096)):
                yield kernel, split


def _steps(shape: Shape, nbytes: int, stages: int) -> tuple[int, int]:
    """Elements of a step of so many bytes, and stages: where scales go by blocks a step is one block at most, so there are more stages."""
    elements = nbytes // width_of(shape.dtype)
    if shape.scale == "block" and elements > 128:
        return 128, min(stages * elements // 128, 6)  # shallow enough for two programs a multiprocessor: one adds up, one multiplies
    return elements, stages


def _tma(shape: Shape, block_m: int, block_n: int, nbytes: int, warps: int, stages: int, **others: bool) -> Tma:
    block_k, deep = _steps(shape, nbytes, stages)
    return Tma(block_m, block_n, min(block_k, 256), 8 if block_m > 64 or shape.m > 64 else 1, warps, deep, **others)


def _gemm(shape: Shape, device: Device, tile: tuple[int, ...], *, swap: bool = False, group_m: int = 8) -> Gemm:
    """A plain tile: block_m, block_n, bytes along K, warps, stages, and on AMD the side of the matrix instruction and k-pack."""
    block_m, block_n, nbytes, warps, stages, nonkdim, kpack = (*tile, *(16, 1)[len(tile) - 5 :])
    block_k, stages = _steps(shape, nbytes, stages)
    if device.kind != "amd":
        return Gemm(block_m, block_n, block_k, group_m, warps, stages, swap)
    # AMD's matrix instruction has no long side to turn, and its loop keeps one tile in LDS.
    chosen = nonkdim if ARCHITECTURES[device.gfx].matrix == "mfma" else 0
    return Gemm(block_m, block_n, block_k, group_m, warps, min(stages, 3), nonkdim=chosen, kpack=kpack if packs(device.gfx) else 1)


def _decode(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Few rows: the weight is read once whatever the tile, so split K until every multiprocessor reads."""
    block_m = next(size for size in (16, 32, 64) if size >= shape.m)
    amd, architecture = device.kind == "amd", ARCHITECTURES[device.gfx]
    kernels: list[Kernel] = [
        _gemm(shape, device, (block_m, block_n, nbytes, warps, 2 if amd else stages), swap=swap, group_m=1)
        for block_n, nbytes, warps, stages, swap in spaces.DECODE[block_m]
    ]
    kernels[:0] = [_gemm(shape, device, (block_m, *tile[1:]), group_m=1) for tile in _ragged(shape)]
    if architecture.tma and shape.layout == "row":
        if block_m == 64:
            kernels[3:3] = [_tma(shape, 64, block_n, nbytes, 4, stages) for block_n, nbytes, stages in spaces.DECODE_TMA]
        swapped = [_tma(shape, block_m, *tile, swap=True) for tile in spaces.DECODE_SWAPPED]
        place = len(kernels) if width_of(shape.dtype) > 1 else 6 if shape.scale == "block" and block_m == 64 else 3
        kernels[place:place] = swapped
    splits = [(kernel, _splits(kernel, shape, device)[:3]) for kernel in kernels]
    # The first kernels' second factors come before the last kernels' first ones.
    found = [(place + 8 * rank, kernel, split) for place, (kernel, factors) in enumerate(splits) for rank, split in enumerate(factors)]
    yield from ((kernel, split) for _, kernel, split in sorted(found, key=lambda each: each[0]))
    if amd:
        yield from _varied([kernel for kernel in kernels if isinstance(kernel, Gemm)][:6], shape, device)


def _splits(kernel: Kernel, shape: Shape, device: Device) -> list[int]:
    """Factors worth a try, those first that leave the fewest multiprocessors idle in their last wave."""
    tiles, steps = tiles_of(kernel, shape), ceil_div(shape.k, step_of(kernel))

    def cost(split: int) -> float:
        waves = tiles * split / device.cu_num
        return math.ceil(waves) / waves + 0.1 * math.ceil(waves) + 0.01 * split

    useful = [split for split in spaces.SPLITS if split == 1 or (steps >= 4 * split and tiles * split <= 2 * device.cu_num)]
    return sorted(useful, key=cost)


def _tiled(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Many rows: the persistent kernel where there is one, plain tiles, split where tiles are too few."""
    covered = 1 << (shape.m - 1).bit_length()
    persistent = ARCHITECTURES[device.gfx].tma and shape.layout == "row" and shape.k * width_of(shape.dtype) % 16 == 0
    if persistent:
        yield from _persistent(shape, device, covered)
    for tile in _tiles(shape)[: 6 if persistent else None]:
        kernel = _gemm(shape, device, tile)
        if kernel.block_m <= covered:
            yield from ((kernel, split) for split in _splits(kernel, shape, device)[: 1 if persistent else 3])


def _tiles(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Plain tiles for many rows."""
    blocks = tuple((m, n, 128, *others) for m, n, *others in spaces.BLOCKS)
    return (*_ragged(shape), *(blocks if shape.scale == "block" else ()), *spaces.TILES)


def _persistent(shape: Shape, device: Device, covered: int) -> Iterator[tuple[Kernel, int]]:
    sized = [_tma(shape, *tile, specialize=specialize) for *tile, specialize in spaces.TMA if tile[0] <= covered]
    if shape.scale == "block" or promotes(sized[0], shape, device.gfx):
        sized = [_tma(shape, m, n, 128, warps, stages) for m, n, warps, stages in spaces.BLOCKS if m <= covered]
        if shape.scale == "block":
            sized[:0] = [_tma(shape, m, n, 128, 4, stages, specialize=True) for m, n, stages in spaces.BLOCKS_SPECIALISED if m <= covered]
    # The less there is to multiply, the smaller the tiles that come first.
    sized.sort(key=lambda kernel: shape.m < 512 and tiles_of(kernel, shape) < device.cu_num // 3)
    splits = [(kernel, [1] if kernel.specialize else _splits(kernel, shape, device)) for kernel in sized]
    plain = [(kernel, found[rank]) for rank in range(2) for kernel, found in splits if rank < len(found)]
    shared = list(_streamk([_tma(shape, *tile) for tile in spaces.STREAMK if tile[0] <= covered], shape, device))
    uneven = [found for found in shared if _filled(found[0], shape, device) < 0.9]
    others = [(kernel, attrs.evolve(kernel, group_m=group)) for kernel in sized[:2] for group in (16, 4)]
    grouped = [(other, 1) for kernel, other in others if not _same_walk(kernel, other, shape)]
    yield from (*plain[:6], *uneven, *grouped, *plain[6:])
    yield from shared


def _filled(kernel: Kernel, shape: Shape, device: Device) -> float:
    """The part of the multiprocessors' rounds that the tiles take."""
    tiles = tiles_of(kernel, shape)
    return tiles / (ceil_div(tiles, device.cu_num) * device.cu_num)


def _streamk(tiles: Sequence[Kernel], shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Tiles whose last round would leave multiprocessors idle, shared."""
    found = [tile for tile in tiles if not isinstance(tile, Gemv | Streamk) and _filled(tile, shape, device) < 1]
    kernels = [Streamk(tile.block_m, tile.block_n, min(tile.block_k, 256), tile.group_m, tile.warps, min(tile.stages, 8)) for tile in found]
    yield from ((kernel, 1) for kernel in kernels)


def _on_amd(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """Many rows on AMD: tiles and splits, then the first tiles with other options of the compiler."""
    mfma, covered = ARCHITECTURES[device.gfx].matrix == "mfma", max(32, 1 << (shape.m - 1).bit_length())
    sized = [_gemm(shape, device, tile) for tile in (*_ragged(shape), *(spaces.MFMA if mfma else spaces.WMMA)) if tile[0] <= covered]
    for kernel in sized:
        yield from ((kernel, split) for split in _amd_splits(kernel, shape, device))
    yield from _streamk(sized[:6], shape, device)
    yield from _varied(sized[:6], shape, device)


def _ragged(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Small tiles for rows that are not aligned and are loaded by elements."""
    return spaces.RAGGED if shape.k * width_of(shape.dtype) % 4 else ()


def _varied(kernels: Sequence[Gemm], shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """The kernels with other options of AMD's compiler, one at a time."""
    for changes in spaces.VARIATIONS:
        for kernel in kernels:
            yield attrs.evolve(kernel, **changes), _amd_splits(kernel, shape, device)[0]


def _amd_splits(kernel: Gemm, shape: Shape, device: Device) -> list[int]:
    """As `_splits`; the largest tile has no registers left for the addresses of partial sums."""
    return [1] if kernel.block_m * kernel.block_n == 1 << 16 else _splits(kernel, shape, device)[:3]


def _aiters_blockscale(shape: Shape, device: Device) -> Iterator[tuple[Kernel, int]]:
    """AITER's space: tiles and splits by what they should cost, each with the other fields, those that are usual first."""
    mfma, covered = ARCHITECTURES[device.gfx].matrix == "mfma", max(32, 1 << (shape.m - 1).bit_length())
    space, plain = spaces.BLOCKSCALE_OF_AITER, Gemm(16, 16, 128, 8, 4, 2, nonkdim=16 if mfma else 0, kpack=2 if packs(device.gfx) else 1)
    tiles = [
        (attrs.evolve(plain, block_m=m, block_n=n, warps=warps), split)
        for m, n, warps, split in itertools.product(space["block_m"], space["block_n"], space["warps"], spaces.SPLITS_OF_AITER)
        if m <= covered
    ]
    tiles = [tile for tile in tiles if fits(*tile, shape, device)]
    tiles.sort(key=lambda tile: _clocks(*tile, shape, device))
    rest = itertools.product(space["group_m"], space["stages"], space["waves"], space["stream"])
    others = list(dict.fromkeys([*spaces.FIRST_OF_AITER, *rest]))
    for total in range(len(tiles) + len(others)):
        for place in range(max(total - len(others) + 1, 0), min(total + 1, len(tiles))):
            (kernel, split), (group_m, stages, waves, stream) = tiles[place], others[total - place]
            yield attrs.evolve(kernel, group_m=group_m, stages=stages, waves=waves, stream=stream), split


def _clocks(kernel: Gemm, split: int, shape: Shape, device: Device) -> float:
    """About how many clocks the launch takes on an MI300X, to put tiles in order: 4096 fp8 operations or 32 bytes from L2 a clock and CU,
    100 clocks of latency a step, 2000 for a meeting of splits (AMD CDNA 3 white paper; the latencies are rounded guesses)."""
    waves = ceil_div(tiles_of(kernel, shape) * split, device.cu_num)
    step = max(kernel.block_m * kernel.block_n / 16, 4 * (kernel.block_m + kernel.block_n)) + 100
    # Half of the warps' latency is hidden by the other half.
    return waves * ceil_div(ceil_div(shape.k, 128), split) * (step + 200 / kernel.warps) + 2000 * (split > 1)

"""List the kernels worth timing for a shape, best guesses first, and their neighbours."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import attrs
from tunedgemm.plugin import Device, PluginError, Shape
from tunedgemm.tools.launching import ARCHITECTURES

from tunedgemm_triton import tiles
from tunedgemm_triton.cost import hopper_us, mi300x_clocks, useful_splits, wave_occupancy
from tunedgemm_triton.limits import batches_of, width_of
from tunedgemm_triton.names import Gemm, Gemv, KernelConfig, Streamk, Tma
from tunedgemm_triton.resources import ceil_div, fits, is_aligned, packs, promotes, step_of, tiles_of

#: (kernel, parts of K).
Candidate = tuple[KernelConfig, int]

#: Most rows of activations for which multiply-and-sum beats a matrix instruction.
GEMV_ROWS = 4

#: Most solutions of one shape.
MOST = 60

#: Rows of activations beyond which `hopper_us` orders kernels; most of them; those before streamk.
#: The first 16 held one within 5 % of the best for 0.99 of 443 products (H100 and H200).
_RANKED_ROWS, _RANKED, _BEFORE_STREAMK = 16, 24, 6


def candidates(shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield the kernels worth timing for a shape."""
    amd = device.kind == "amd"
    listed: Iterable[Candidate] = _decode(shape, device)

    def usable(kernels: Iterable[Candidate]) -> Iterator[Candidate]:
        return (candidate for candidate in dict.fromkeys(kernels) if fits(*candidate, shape, device))

    if amd and shape.scale == "block":
        few = itertools.islice(usable(listed), 8) if shape.m <= 16 else ()
        listed = itertools.chain(few, _aiter_blockscale(shape, device))
    elif shape.m > 64:
        listed = _on_amd(shape, device) if amd else _tiled(shape, device)
    if _is_ranked(shape, device):
        listed = _ranked(usable(listed), shape, device)
    if shape.m <= GEMV_ROWS and shape.layout == "row":
        listed = _with_vectors(itertools.islice(usable(listed), 16), shape, device)
    yield from listed


def neighbours(kernel: KernelConfig, split: int, shape: Shape) -> Iterator[Candidate]:
    """Yield a kernel with one parameter, or splitK, moved one step."""
    yield from ((kernel, other) for other in tiles.neighbours(tiles.SPLITS, split))
    for field in attrs.fields(type(kernel)):
        value = getattr(kernel, field.name)
        for other in [not value] if isinstance(value, bool) else tiles.neighbours(tiles.LADDERS.get(field.name, ()), value):
            with contextlib.suppress(PluginError):  # a step out of the family's range
                changed = attrs.evolve(kernel, **{field.name: other})
                if not _has_same_order(changed, kernel, shape):
                    yield changed, split


def _has_same_order(kernel: KernelConfig, other: KernelConfig, shape: Shape) -> bool:
    """Return whether two kernels differ only in a group larger than the tiles along M, which leaves
    their order of tiles the same.
    """
    if isinstance(kernel, Gemv) or isinstance(other, Gemv):
        return False
    rows = ceil_div(shape.m, kernel.block_m)
    same = kernel.group_m != other.group_m and attrs.evolve(kernel, group_m=other.group_m) == other
    return same and min(kernel.group_m, rows) == min(other.group_m, rows)


def _is_ranked(shape: Shape, device: Device) -> bool:
    """Return whether `hopper_us` orders the shape's kernels."""
    return _has_wgmma(device) and is_aligned(shape) and shape.m > _RANKED_ROWS and shape.scale != "block"


def _has_wgmma(device: Device) -> bool:
    return ARCHITECTURES[device.gfx].matrix == "wgmma"


def _ranked(candidates: Iterable[Candidate], shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield the fastest kernels by `hopper_us`, and among them streamk where waves are uneven."""
    listed = list(candidates)
    plain = [(hopper_us(kernel, split, shape, device), kernel, split) for kernel, split in listed if isinstance(kernel, Gemm | Tma)]
    first = [(kernel, split) for _, kernel, split in sorted(plain, key=lambda ranked: ranked[0])[:_RANKED]]
    shared = [candidate for candidate in listed if isinstance(candidate[0], Streamk)]
    uneven = [candidate for candidate in shared if _is_uneven(candidate[0], shape, device)]
    return iter(dict.fromkeys((*first[:_BEFORE_STREAMK], *uneven, *first[_BEFORE_STREAMK:], *shared)))


def _with_vectors(matrices: Iterable[Candidate], shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield kernels with matrix instructions and without, the faster kind first."""
    vectors = _gemv(shape, device)
    if width_of(shape.dtype) == 1:
        # Bytes are widened before they are multiplied, so that rows of activations soon cost more
        # than reading the weight from memory.
        return _in_turn(vectors, matrices)
    # From three or four rows on wgmma is faster in 16 bits: 1.2 to 1.5 times with four.
    return _in_turn(matrices, vectors) if shape.m > 2 and _has_wgmma(device) else itertools.chain(vectors, matrices)


def _in_turn(*lists: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the first of each list, then the second of each."""
    return (candidate for group in itertools.zip_longest(*lists) for candidate in group if candidate is not None)


def _gemv(shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield chunks of 16 bytes a thread: a warp then holds both operands in the same layout and
    exchanges nothing.
    """
    lane = 16 // width_of(shape.dtype) * ARCHITECTURES[device.gfx].warp_size
    known, width = tiles.ONE_ROW if shape.m == 1 else tiles.FEW_ROWS, width_of(shape.dtype)
    first: Iterable[tuple[int, int, int]] = tiles.ONE_ROW_OF_BYTES if width == 1 and shape.m == 1 else ()
    if width == 2:
        first = itertools.islice((pattern for span, pattern in tiles.FIRST_OF_K.get(shape.m, ()) if shape.k in span), 1)
    odd = shape.k // lane
    while odd and odd % 2 == 0:
        odd //= 2
    whole = [(block_n, unroll, warps) for unroll in (odd, 2 * odd) for block_n, warps in tiles.ODD] if 1 < odd <= 8 else []
    whole = [(block_n, unroll, warps) for block_n, unroll, warps in whole if shape.k % (lane * unroll * warps) == 0]
    best = tiles.FIRST_OF_ODD.get((shape.m, width, odd))
    if best and shape.k % (lane * best[1] * best[2]) == 0:
        first = (best, *first)
    known = tuple(dict.fromkeys((*first, *known)))
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
    """Return the elements of a step of so many bytes, and stages; steps cut to a block of scales
    get more stages.
    """
    elements = nbytes // width_of(shape.dtype)
    if shape.scale == "block" and elements > 128:
        return 128, min(stages * elements // 128, 6)  # shallow enough for two programs a multiprocessor
    return elements, stages


def _tma(shape: Shape, block_m: int, block_n: int, nbytes: int, warps: int, stages: int, **others: bool) -> Tma:
    block_k, deep = _steps(shape, nbytes, stages)
    return Tma(block_m, block_n, min(block_k, 256), 8 if block_m > 64 or shape.m > 64 else 1, warps, deep, **others)


def _gemm(shape: Shape, device: Device, tile: tuple[int, ...], *, swap: bool = False, group_m: int = 8) -> Gemm:
    """Return a gemm of a tile: block_m, block_n, bytes along K, warps, stages, and on AMD
    instruction side and k-pack.
    """
    block_m, block_n, nbytes, warps, stages, nonkdim, kpack = (*tile, *(16, 1)[len(tile) - 5 :])
    block_k, stages = _steps(shape, nbytes, stages)
    if device.kind != "amd":
        return Gemm(block_m, block_n, block_k, group_m, warps, stages, swap)
    # AMD's matrix instruction has no long side to turn, and its loop keeps one tile in LDS.
    chosen = nonkdim if ARCHITECTURES[device.gfx].matrix == "mfma" else 0
    return Gemm(block_m, block_n, block_k, group_m, warps, min(stages, 3), nonkdim=chosen, kpack=kpack if packs(device.gfx) else 1)


def _decode(shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield kernels for few rows: any tile reads the weight once, so split K until every
    multiprocessor reads.
    """
    block_m = next(size for size in (16, 32, 64) if size >= shape.m)
    amd, architecture = device.kind == "amd", ARCHITECTURES[device.gfx]
    kernels: list[KernelConfig] = [
        _gemm(shape, device, (block_m, block_n, nbytes, warps, 2 if amd else stages), swap=swap, group_m=1)
        for block_n, nbytes, warps, stages, swap in tiles.DECODE[block_m]
    ]
    kernels[:0] = [_gemm(shape, device, (block_m, *tile[1:]), group_m=1) for tile in _ragged(shape)]
    if architecture.tma and shape.layout == "row":
        if block_m == 64:
            kernels[3:3] = [_tma(shape, 64, block_n, nbytes, 4, stages) for block_n, nbytes, stages in tiles.DECODE_TMA]
        swapped = [_tma(shape, block_m, *tile, swap=True) for tile in tiles.DECODE_SWAPPED]
        index = len(kernels) if width_of(shape.dtype) > 1 else 6 if shape.scale == "block" and block_m == 64 else 3
        kernels[index:index] = swapped
    splits = [(kernel, _splits(kernel, shape, device)[:3]) for kernel in kernels]
    # The first kernels' second factors come before the last kernels' first ones.
    ranked = [(index + 8 * rank, kernel, split) for index, (kernel, factors) in enumerate(splits) for rank, split in enumerate(factors)]
    yield from ((kernel, split) for _, kernel, split in sorted(ranked, key=lambda candidate: candidate[0]))
    if amd:
        yield from _varied([kernel for kernel in kernels if isinstance(kernel, Gemm)][:6], shape, device)


def _splits(kernel: KernelConfig, shape: Shape, device: Device) -> list[int]:
    """Return the factors worth timing, the best guess first."""
    return useful_splits(tiles.SPLITS, tiles_of(kernel, shape), ceil_div(shape.k, step_of(kernel)), 4, device)


def _tiled(shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield kernels for many rows: the persistent one where it serves, plain tiles, split where
    tiles are too few.
    """
    covered = 1 << (shape.m - 1).bit_length()
    persistent = ARCHITECTURES[device.gfx].tma and shape.layout == "row" and is_aligned(shape)
    if persistent:
        yield from _persistent(shape, device, covered)
    few = persistent and not _is_ranked(shape, device)
    for tile in _tiles(shape)[: 6 if few else None]:
        kernel = _gemm(shape, device, tile)
        if kernel.block_m <= covered:
            yield from ((kernel, split) for split in _splits(kernel, shape, device)[: 1 if few else 3])


def _tiles(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Return the plain tiles for many rows."""
    blocks = tuple((m, n, 128, *others) for m, n, *others in tiles.BLOCKS)
    return (*_ragged(shape), *(blocks if shape.scale == "block" else ()), *tiles.TILES)


def _persistent(shape: Shape, device: Device, covered: int) -> Iterator[Candidate]:
    sized = [_tma(shape, *tile, specialize=specialize) for *tile, specialize in tiles.TMA if tile[0] <= covered]
    if shape.scale == "block" or promotes(sized[0], shape, device.gfx):
        sized = [_tma(shape, m, n, 128, warps, stages) for m, n, warps, stages in tiles.BLOCKS if m <= covered]
        if shape.scale == "block":
            sized[:0] = [_tma(shape, m, n, 128, 4, stages, specialize=True) for m, n, stages in tiles.BLOCKS_SPECIALISED if m <= covered]
    shared = [_tma(shape, *tile) for tile in tiles.STREAMK if tile[0] <= covered]
    if ARCHITECTURES[device.gfx].matrix == "tcgen05":  # four warps have too few registers to store a large tile
        sized = [attrs.evolve(kernel, warps=8) if kernel.specialize else kernel for kernel in sized]
        sized.sort(key=lambda kernel: kernel.specialize)
        shared = [attrs.evolve(kernel, warps=8) if kernel.block_m * kernel.block_n >= 1 << 14 else kernel for kernel in shared]
    # The less there is to multiply, the smaller the tiles that come first.
    sized.sort(key=lambda kernel: shape.m < 512 and tiles_of(kernel, shape) < device.cu_num // 3)
    splits = [(kernel, [1] if kernel.specialize else _splits(kernel, shape, device)) for kernel in sized]
    plain = [(kernel, factors[rank]) for rank in range(2) for kernel, factors in splits if rank < len(factors)]
    streams = list(_streamk(shared, shape, device))
    uneven = [candidate for candidate in streams if _is_uneven(candidate[0], shape, device)]
    others = [(kernel, attrs.evolve(kernel, group_m=group)) for kernel in sized[:2] for group in (16, 4)]
    grouped = [(other, 1) for kernel, other in others if not _has_same_order(kernel, other, shape)]
    yield from (*plain[:6], *uneven, *grouped, *plain[6:])
    yield from streams


def _is_uneven(kernel: KernelConfig, shape: Shape, device: Device) -> bool:
    """Return whether a tenth of the multiprocessors' waves has no tile."""
    return wave_occupancy(kernel, shape, device) < 0.9


def _streamk(kernels: Sequence[Gemm | Tma], shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield streamk kernels of tiles whose last wave would leave multiprocessors idle."""
    uneven = [kernel for kernel in kernels if wave_occupancy(kernel, shape, device) < 1]
    for tile in uneven:
        yield Streamk(tile.block_m, tile.block_n, min(tile.block_k, 256), tile.group_m, tile.warps, min(tile.stages, 8)), 1


def _on_amd(shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield kernels for many rows on AMD: tiles and splits, then the first tiles with other options
    of the compiler.
    """
    mfma, covered = ARCHITECTURES[device.gfx].matrix == "mfma", max(32, 1 << (shape.m - 1).bit_length())
    sized = [_gemm(shape, device, tile) for tile in (*_ragged(shape), *(tiles.MFMA if mfma else tiles.WMMA)) if tile[0] <= covered]
    for kernel in sized:
        yield from ((kernel, split) for split in _amd_splits(kernel, shape, device))
    yield from _streamk(sized[:6], shape, device)
    yield from _varied(sized[:6], shape, device)


def _ragged(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Return small tiles for unaligned rows, which are loaded by elements."""
    return tiles.RAGGED if shape.k * width_of(shape.dtype) % 4 else ()


def _varied(kernels: Sequence[Gemm], shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield the kernels with other options of AMD's compiler, one at a time."""
    for changes in tiles.VARIATIONS:
        for kernel in kernels:
            yield attrs.evolve(kernel, **changes), _amd_splits(kernel, shape, device)[0]


def _amd_splits(kernel: Gemm, shape: Shape, device: Device) -> list[int]:
    """Return three of `_splits`; the largest tile has no registers left for the addresses of
    partial sums.
    """
    return [1] if kernel.block_m * kernel.block_n == 1 << 16 else _splits(kernel, shape, device)[:3]


def _aiter_blockscale(shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield AITER's space: tiles and splits by predicted cost, in turn with the other fields, the
    usual values first.
    """
    mfma, covered = ARCHITECTURES[device.gfx].matrix == "mfma", max(32, 1 << (shape.m - 1).bit_length())
    space, plain = tiles.BLOCKSCALE_OF_AITER, Gemm(16, 16, 128, 8, 4, 2, nonkdim=16 if mfma else 0, kpack=2 if packs(device.gfx) else 1)
    kernels = [
        (attrs.evolve(plain, block_m=m, block_n=n, warps=warps), split)
        for m, n, warps, split in itertools.product(space["block_m"], space["block_n"], space["warps"], tiles.SPLITS_OF_AITER)
        if m <= covered
    ]
    kernels = [candidate for candidate in kernels if fits(*candidate, shape, device)]
    kernels.sort(key=lambda candidate: mi300x_clocks(*candidate, shape, device))
    rest = itertools.product(space["group_m"], space["stages"], space["waves"], space["stream"])
    others = list(dict.fromkeys([*tiles.FIRST_OF_AITER, *rest]))
    for total in range(len(kernels) + len(others)):
        for index in range(max(total - len(others) + 1, 0), min(total + 1, len(kernels))):
            (kernel, split), (group_m, stages, waves, stream) = kernels[index], others[total - index]
            yield attrs.evolve(kernel, group_m=group_m, stages=stages, waves=waves, stream=stream), split

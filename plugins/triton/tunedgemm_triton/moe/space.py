"""List the kernels worth timing for the fused mixture of experts, and their neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES, dtype_bits

from tunedgemm_triton.moe.names import Moe, Tile
from tunedgemm_triton.moe.resources import pairs_of, rows_of, scale_of, tiles_of
from tunedgemm_triton.packed.resources import decodes
from tunedgemm_triton.resources import ceil_div
from tunedgemm_triton.tiles import neighbours as steps

#: Most solutions of one shape.
MOST = 48

#: Most pairs for which a block for each is tried: with more, tokens share experts, whose weights
#: would be read again.
MOST_ALONE = 32

SPLITS = (1, 2, 3, 4, 6, 8)

#: Few pairs: for both stages block_n, block_k (in bytes of the weight), warps and pipeline stages;
#: transposed, which on Hopper needs 64 rows of the weight for its warpgroup instructions.
_FEW = (
    ((64, 256, 8, 3), (128, 128, 8, 3), True), ((64, 128, 4, 5), (128, 128, 4, 3), True), ((128, 128, 8, 4), (64, 256, 4, 4), True),
    ((64, 128, 4, 4), (64, 256, 4, 3), True), ((64, 256, 4, 3), (64, 256, 4, 3), True), ((64, 128, 4, 4), (64, 128, 4, 4), True),
    ((64, 512, 4, 2), (64, 256, 4, 3), True), ((64, 128, 4, 3), (64, 128, 4, 3), True),
    ((32, 128, 2, 4), (64, 128, 4, 4), False), ((32, 256, 4, 4), (64, 256, 4, 3), False), ((64, 128, 4, 3), (64, 128, 4, 4), False),
    ((32, 256, 4, 3), (32, 256, 4, 3), False), ((16, 256, 2, 4), (32, 256, 2, 4), False),
)  # fmt: skip

#: Many pairs: block_m, then as above.
_MANY = (
    (128, (128, 128, 8, 4), (256, 128, 8, 3)), (64, (128, 128, 4, 4), (256, 128, 4, 4)), (64, (128, 128, 8, 4), (256, 128, 8, 4)),
    (32, (128, 256, 8, 3), (256, 128, 8, 3)), (32, (64, 256, 4, 3), (256, 128, 4, 4)), (32, (128, 128, 4, 4), (256, 128, 8, 3)),
    (128, (64, 128, 8, 4), (128, 128, 8, 3)), (64, (64, 128, 4, 4), (128, 128, 4, 4)), (64, (128, 128, 8, 4), (128, 128, 8, 4)),
    (128, (64, 128, 4, 3), (128, 128, 4, 3)), (64, (128, 128, 8, 4), (256, 64, 8, 4)), (32, (64, 128, 4, 4), (128, 128, 4, 4)),
    (16, (64, 256, 8, 3), (128, 128, 8, 3)), (16, (64, 256, 4, 3), (64, 256, 4, 3)),
)  # fmt: skip

_LADDERS = {
    "block_n": (16, 32, 64, 128, 256),
    "block_k": (32, 64, 128, 256, 512),
    "warps": (1, 2, 4, 8),
    "stages": (1, 2, 3, 4, 5, 6, 7, 8),
}


def neighbours(kernel: Moe, split: int, _: Shape) -> Iterator[tuple[Moe, int]]:
    """Yield a kernel with one parameter of a stage, the block, or splitK, moved one step."""
    yield from ((kernel, other) for other in steps(SPLITS, split))
    for stage in ("first", "second"):
        tile = getattr(kernel, stage)
        for field, ladder in _LADDERS.items():
            for value in steps(ladder, getattr(tile, field)):
                yield attrs.evolve(kernel, **{stage: attrs.evolve(tile, **{field: value})}), split
    yield from ((attrs.evolve(kernel, block_m=value), split) for value in steps((16, 32, 64, 128), kernel.block_m) if not kernel.alone)
    yield from ((attrs.evolve(kernel, group_m=value), split) for value in steps((1, 2, 4, 8, 16), kernel.group_m))
    yield attrs.evolve(kernel, swap=not kernel.swap), split


def candidates(shape: Shape, device: Device) -> Iterator[tuple[Moe, int]]:
    """Yield kernels: few pairs are bound by reading weights, hence small tiles and a split of K;
    many by the products.
    """
    pairs = pairs_of(shape)
    load = pairs / int(shape["expert"])  # pairs an expert
    for decode in decodes(device.gfx) if scale_of(shape) == "mx" else (False,):
        many = list(_many(load, shape, device, decode)) if load > 4 else []
        if load <= 16:
            block_m = 16 if load <= 8 else 32
            yield from many[:4] if load > 8 else ()
            if pairs <= MOST_ALONE:
                yield from _few(block_m, shape, device, decode=decode, alone=True)
            if shape.m > 1:
                yield from _few(block_m, shape, device, decode=decode, alone=False)
        yield from many


def _many(load: float, shape: Shape, device: Device, decode: bool) -> Iterator[tuple[Moe, int]]:
    """Yield blocks of about an expert's *load* first, since larger ones are padding; several blocks
    share its weights in L2.
    """
    rows = rows_of(shape, device.gfx, decode)
    order = sorted(_MANY, key=lambda tiles: max(0.0, tiles[0] - 2 * load))
    for group in (1, 8) if load <= 64 else (8, 1):
        for block_m, first, second in order:
            tiles = _tile(first, shape, device, rows), _tile(second, shape, device, rows)
            yield Moe(block_m, group, *tiles, rows > block_m, decode=decode), 1


def _few(block_m: int, shape: Shape, device: Device, *, decode: bool, alone: bool) -> Iterator[tuple[Moe, int]]:
    rows = rows_of(shape, device.gfx, decode)
    for rank in range(3):
        for first, second, swap in _FEW:
            # AMD's matrix instruction has no long side to turn.
            turned = (swap and device.kind != "amd") or rows > block_m
            kernel = Moe(block_m, 1, _tile(first, shape, device, rows), _tile(second, shape, device, rows), turned, alone, decode)
            splits = _splits(kernel, shape, device)
            if rank < len(splits):
                yield kernel, splits[rank]


def _splits(kernel: Moe, shape: Shape, device: Device) -> list[int]:
    """Return the factors worth timing: about a program for each multiprocessor first, then fewer
    and more.
    """
    tiles, steps = tiles_of(kernel, shape)[0], ceil_div(shape.n, kernel.first.block_k)
    useful = [split for split in SPLITS if split == 1 or (steps >= 4 * split and tiles * split <= 4 * device.cu_num)]
    # Measured on an H200: of 32 tiles 4 parts win, of 96 tiles 2.
    return sorted(useful, key=lambda split: abs(math.log(tiles * split / (1.15 * device.cu_num))))


def _tile(sizes: tuple[int, int, int, int], shape: Shape, device: Device, rows: int) -> Tile:
    """Return a stage's tile, of K in bytes, for the shape's dtype and the architecture; at least so
    many *rows* of the weight.
    """
    block_n, nbytes, warps, stages = sizes
    block_n = max(block_n, rows)
    bits = dtype_bits(str(shape["q_dtype_w"]))
    if ARCHITECTURES[device.gfx].matrix == "wmma":  # fewer registers
        block_n, nbytes = min(block_n, 128), min(nbytes, 128)
    block_k = max(nbytes * 8 // bits, 64 if bits == 4 else 32)
    if scale_of(shape) == "block" and block_k > 128:  # a step has one scale: shorter steps, more in flight
        block_k, stages = 128, min(stages * block_k // 128, 8)
    # AMD's loop keeps one tile in LDS for each stage but one.
    return Tile(block_n, min(block_k, 256), warps, min(stages, 2) if device.kind == "amd" else stages)

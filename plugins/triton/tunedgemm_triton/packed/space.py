"""List the kernels worth timing for products of packed weights, and their neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import attrs
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES, format_of

from tunedgemm_triton.cost import packed_us, useful_splits
from tunedgemm_triton.packed.names import OP, Mx, Packed, Wn, Wnv
from tunedgemm_triton.packed.resources import decodes, fits, scaled_of, scaled_rows, shares_registers, steps_of, tiles_of, unfit
from tunedgemm_triton.tiles import neighbours as steps

#: (kernel, parts of K).
Candidate = tuple[Packed, int]

#: Most solutions of one shape.
MOST = 48

#: Most rows of x that `wnv` is listed for.
_VECTOR_ROWS = 4

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)

#: Steps of `neighbours`: of tiles, and of `wnv`.
_LADDERS: tuple[dict[str, tuple[int, ...]], ...] = (
    {
        "block_m": (16, 32, 64, 128, 256), "block_n": (16, 32, 64, 128, 256), "block_k": (64, 128, 256, 512), "group_m": (1, 2, 4, 8, 16),
        "warps": (1, 2, 4, 8), "stages": tuple(range(1, 9)),
    },
    {
        "block_m": (1, 2, 4), "block_n": tuple(1 << each for each in range(11)), "block_k": tuple(1 << each for each in range(15)),
        "unroll": (1, 2, 4, 8, 16), "warps": (1, 2, 4, 8, 16),
    },
)  # fmt: skip

#: Few rows: block_n, block_k, warps, stages, transposed.
_FEW = (
    (64, 256, 4, 4, True), (64, 512, 4, 3, True), (64, 128, 4, 5, True), (128, 256, 4, 3, True), (64, 256, 8, 4, True),
    (128, 128, 4, 4, True),
    (32, 256, 4, 4, False), (32, 512, 4, 3, False), (64, 256, 4, 4, False), (32, 128, 2, 5, False), (128, 256, 8, 3, False),
)  # fmt: skip

#: Many rows: block_m, block_n, block_k, warps, stages.
_MANY = (
    (128, 128, 128, 8, 3), (128, 128, 128, 4, 3), (64, 128, 128, 4, 4), (64, 128, 256, 8, 3), (128, 256, 128, 8, 3), (128, 128, 256, 8, 3),
    (256, 128, 128, 8, 3), (64, 64, 256, 4, 4), (128, 64, 128, 4, 4), (64, 256, 128, 8, 3), (64, 64, 128, 4, 4), (128, 128, 64, 4, 4),
)  # fmt: skip

#: The first for many rows where mma's decoded operands leave few registers.
_DECODED = (64, 128, 128, 8, 3)
#: A tile for many rows that leaves registers for a decoded weight.
_WIDE = (128, 256, 64, 8, 4)
#: Stages of the largest step; of shorter ones, more are in flight.
_STAGES = 6


def neighbours(kernel: Packed, split: int, shape: Shape) -> Iterator[Candidate]:
    """Yield a kernel with one parameter, or splitK, moved one step."""
    yield from ((kernel, other) for other in steps(SPLITS, split))
    ladders = dict(_LADDERS[kernel.family == "wnv"])
    if shape.m <= kernel.block_m:  # a group larger than the tiles along M is the same kernel
        ladders.pop("group_m", None)
    for field, ladder in ladders.items():
        yield from ((attrs.evolve(kernel, **{field: value}), split) for value in steps(ladder, getattr(kernel, field)))
    for flag in ("swap", "decode"):
        if hasattr(kernel, flag):
            yield attrs.evolve(kernel, **{flag: not getattr(kernel, flag)}), split


def candidates(shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield the kernels worth timing for a shape, those first that leave few multiprocessors idle;
    on Hopper the fastest of weight-only formats by `packed_us`.
    """
    if shape.op != OP:
        yield from _split(_of_mxfp4(shape, device), shape, device)
        return
    vectors = _of_vectors(shape, device) if shape.m <= _VECTOR_ROWS else ()
    kinds = [list(_split(kernels, shape, device)) for kernels in (vectors, _of_format(shape, device))]
    if ARCHITECTURES[device.gfx].matrix == "wgmma":
        timed = [[(packed_us(*each, shape, device), each) for each in kind if fits(*each, shape, device)] for kind in kinds]
        ranked = sorted((sorted(kind, key=lambda pair: pair[0]) for kind in timed if kind), key=lambda kind: kind[0][0])
        kinds = [[each for _, each in kind] for kind in ranked]
    # A model of one kind says little of the other.
    yield from (each for pair in itertools.zip_longest(*kinds) for each in pair if each)


def _split(kernels: Iterable[Packed], shape: Shape, device: Device) -> Iterator[Candidate]:
    """Yield different kernels with their best split, then with the next ones."""
    different = list(dict.fromkeys(kernels))
    for rank in range(3):
        for kernel in different:
            least = 1 if isinstance(kernel, Wnv) else 2
            splits = useful_splits(SPLITS, tiles_of(kernel, shape), steps_of(kernel, shape), least, device)
            if rank < len(splits):
                yield kernel, splits[rank]


def _of_vectors(shape: Shape, device: Device) -> Iterator[Wnv]:
    """Yield kernels on the vector units.

    Threads read 4 to 16 bytes of a weight in the order of K, or one to four words of another.
    """
    form, rows, lanes = format_of(shape), min(1 << (shape.m - 1).bit_length(), 4), ARCHITECTURES[device.gfx].warp_size
    per_k = 1 if form.along == "n" else form.per
    if form.is_kn:
        sizes = [
            Wnv(rows, lanes * words * form.per // per_k, per_k * warps, unroll, warps)
            for words, warps, unroll in itertools.product((4, 1, 2), (4, 8, 2, 1), (4, 2, 8, 16))
        ]
    else:
        sizes = [
            Wnv(rows, block_n, lanes * warps * vector * 8 // form.bits, unroll, warps)
            for vector, block_n, unroll, warps in itertools.product((16, 8, 4), (4, 2, 8, 1), (1, 2, 4), (4, 2, 1, 8))
        ]
    yield from (kernel for kernel in sizes if not unfit(kernel, 1, shape, device))


def _covered(shape: Shape) -> int:
    """Return the rows of the smallest tile that has all of few rows."""
    return max(16, 1 << (shape.m - 1).bit_length())


def _of_mxfp4(shape: Shape, device: Device) -> Iterator[Mx]:
    """Yield the tiles for a class of M, transposed where they have fewer rows of x than the
    instruction takes.

    AMD's matrix instruction has no long side to turn, and its loop keeps one tile in LDS.
    """
    amd, covered = device.kind == "amd", _covered(shape)
    for decode in decodes(device.gfx, shape.dtype):
        rows = 1 if decode else scaled_rows(device.gfx)
        if shape.m <= 64:
            for block_n, block_k, warps, stages, swap in _FEW:
                turned = (swap and not amd) or rows > covered
                yield Mx(covered, max(block_n, rows), block_k, 1, warps, 2 if amd else stages, turned, decode)
            continue
        for block_m, block_n, block_k, warps, stages in (_DECODED, *_MANY) if shares_registers(device.gfx, decode) else _MANY:
            if block_m <= covered:
                yield Mx(block_m, block_n, block_k, 8, warps, 2 if amd else stages, rows > block_m, decode)


def _of_format(shape: Shape, device: Device) -> Iterator[Wn]:
    """Yield the tiles for a class of M; steps along K end with their group where its sums are
    scaled.
    """
    amd, covered = device.kind == "amd", _covered(shape)
    # Scales of single elements take as many registers as the weight.
    longest = {"sums": int(shape["w_group"]), "element": 64}.get(scaled_of(shape), 512)
    few, many = [(covered, *tile) for tile in _FEW], [(*tile, False) for tile in (*_MANY[:2], _WIDE, *_MANY[2:])]
    for block_m, block_n, block_k, warps, stages, swap in few if shape.m <= 64 else many:
        if block_m <= covered:
            step = min(block_k, longest)
            deep = 2 if amd else min(stages * block_k // step, max(stages, _STAGES))
            yield Wn(block_m, block_n, step, 1 if shape.m <= 64 else 8, warps, deep, swap and not amd)

"""List the parameters worth timing, as data, best guesses first; `space` makes kernels of them.

A step along K is in bytes of a row, since the bytes of the weight in flight decide: 128 bytes are
64 elements of bf16, 128 of fp8.
"""

from __future__ import annotations

#: Parts of K.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

#: gemv with one row of activations: rows of the weight a program, unrolled chunks, warps. Ordered
#: by what won on an H200.
ONE_ROW = (
    (1, 2, 4), (2, 1, 8), (2, 2, 1), (1, 2, 8), (2, 1, 4), (4, 4, 1), (1, 2, 16), (4, 2, 2), (2, 1, 2), (2, 4, 8), (1, 8, 1), (4, 1, 8),
    (2, 4, 1), (1, 8, 4), (4, 1, 32), (4, 1, 4), (1, 2, 2), (4, 1, 16), (4, 4, 8), (8, 2, 2), (2, 2, 16), (4, 2, 1), (1, 4, 4), (4, 8, 4),
)  # fmt: skip

#: Rows of activations -> what comes first for these K in 16 bits, by bf16 on an H100 and an H200.
#: With one row a program reads two chunks, which hold the row with little to spare; or two rows in
#: smaller chunks, where two chunks would have much to spare or the row is very long.
FIRST_OF_K = {
    1: (
        (range(2049, 3073), (2, 1, 4)), (range(3073, 4096), (1, 2, 8)), (range(4097, 4865), (2, 1, 2)), (range(4865, 6145), (2, 1, 8)),
        (range(6145, 7681), (2, 1, 4)), (range(7681, 8193), (1, 2, 16)), (range(20481, 1 << 31), (2, 1, 2)),
    ),
    2: ((range(4865, 6145), (8, 1, 2)), (range(1 << 31), (2, 2, 1))),
}  # fmt: skip

#: The same for operands of one byte, of which a load has twice as many: what comes before
#: `ONE_ROW`.
ONE_ROW_OF_BYTES = ((2, 2, 1), (4, 1, 8), (4, 2, 4), (8, 1, 4), (1, 8, 1), (2, 1, 8))

#: The same with two to four rows of activations.
FEW_ROWS = (
    (2, 1, 8), (2, 2, 8), (4, 2, 2), (2, 2, 1), (4, 2, 1), (4, 2, 4), (4, 1, 8), (4, 1, 2), (2, 8, 4), (4, 4, 1), (1, 8, 4), (2, 4, 4),
    (4, 2, 8), (4, 1, 4), (1, 4, 4), (8, 2, 2), (4, 1, 1), (2, 1, 4), (1, 8, 1), (8, 1, 2),
)  # fmt: skip

#: gemv for a K with an odd factor p, whose rows fill p or 2 p chunks: rows of the weight, warps.
ODD = ((2, 1), (4, 2), (2, 4), (1, 2), (2, 2), (1, 1))

#: Rows of activations, bytes of an element and p -> what comes first there. It was within 1.7, 2.4,
#: 0.8 and 2.3 % of the fastest, by 43 products in bf16 and fp8 on an H100 and an H200.
FIRST_OF_ODD = {(1, 2, 5): (2, 5, 4), (1, 1, 3): (4, 3, 4), (1, 1, 5): (1, 5, 1), (1, 1, 7): (2, 7, 2)}

#: gemm for few rows by block_m: block_n, bytes along K, warps, stages, swap.
DECODE = {
    16: (
        (64, 256, 4, 5, True), (64, 256, 4, 8, True), (64, 512, 4, 5, True), (64, 128, 4, 8, True), (64, 128, 8, 8, True),
        (64, 256, 8, 5, True), (64, 256, 4, 3, True), (128, 128, 4, 6, True), (32, 512, 2, 4, False), (32, 256, 2, 4, False),
        (32, 128, 2, 8, False), (32, 256, 4, 4, False), (64, 256, 4, 5, False), (32, 512, 4, 4, False),
    ),
    32: (
        (64, 128, 4, 8, True), (64, 512, 4, 4, True), (64, 256, 4, 4, True), (64, 256, 4, 8, True), (64, 128, 8, 8, True),
        (64, 512, 8, 4, True), (64, 256, 8, 8, True), (64, 512, 4, 4, False), (32, 256, 2, 6, False), (32, 128, 2, 7, False),
        (128, 128, 4, 5, True), (64, 256, 4, 3, True),
    ),
    64: (
        (64, 256, 4, 5, True), (64, 128, 4, 8, False), (32, 256, 4, 8, False), (64, 256, 4, 6, False), (64, 128, 4, 8, True),
        (32, 512, 4, 4, False), (64, 128, 8, 8, False), (64, 256, 4, 3, True), (32, 128, 4, 8, False),
    ),
}  # fmt: skip

#: tma for few rows: block_n, bytes along K, stages, with block_m 64 and 4 warps.
DECODE_TMA = ((64, 256, 5), (64, 256, 6), (64, 256, 4), (32, 256, 6), (32, 256, 4), (64, 128, 8), (32, 256, 8))

#: tma with the tile transposed, for few rows: block_n, bytes along K, warps, stages.
DECODE_SWAPPED = ((64, 256, 4, 6), (64, 128, 4, 8), (128, 128, 4, 6), (64, 512, 4, 4), (64, 256, 4, 4), (128, 256, 8, 4))

#: tma for many rows: block_m, block_n, bytes along K, warps, stages, specialised.
TMA = (
    (128, 256, 128, 8, 3, False), (128, 256, 128, 8, 4, False), (128, 128, 128, 4, 6, False), (64, 128, 128, 4, 8, False),
    (128, 64, 128, 4, 4, False), (64, 256, 128, 4, 5, False), (128, 128, 128, 4, 5, False), (64, 128, 256, 4, 4, False),
    (128, 64, 256, 4, 4, False), (256, 128, 128, 8, 4, False), (64, 128, 128, 4, 4, False), (64, 64, 256, 4, 6, False),
    (128, 64, 128, 4, 8, False), (128, 128, 128, 8, 5, False), (64, 128, 128, 4, 6, False), (128, 32, 256, 4, 5, False),
    (128, 128, 128, 4, 3, False), (128, 256, 128, 4, 3, True), (128, 128, 128, 4, 4, True), (64, 128, 256, 4, 3, True),
    (64, 64, 256, 4, 5, False),
)  # fmt: skip

#: streamk for many rows where it is fed by descriptors: block_m, block_n, bytes along K, warps,
#: stages. The first and the last have two programs a multiprocessor.
STREAMK = (
    (128, 128, 128, 4, 3), (128, 128, 128, 4, 6), (128, 256, 128, 8, 4), (256, 128, 128, 8, 4), (64, 256, 128, 4, 4),
    (128, 128, 128, 4, 5), (128, 256, 128, 8, 3), (64, 128, 128, 4, 4),
)  # fmt: skip

#: tma, and gemm where it cannot serve, for many rows of operands whose scales go by blocks: there
#: both a step's products and their sums take registers. block_m, block_n, warps, stages, with one
#: block of 128 along K.
BLOCKS = (
    (128, 128, 8, 4), (64, 128, 4, 3), (64, 128, 4, 6), (128, 128, 8, 5), (128, 64, 4, 6), (64, 128, 4, 4), (64, 64, 4, 8),
    (128, 64, 8, 6), (256, 64, 8, 4), (64, 256, 8, 4), (64, 64, 4, 5), (128, 128, 8, 3), (128, 64, 4, 4), (128, 32, 4, 8),
)  # fmt: skip

#: tma with specialised warps for such operands, where one consumer multiplies while the other adds
#: up: block_m, block_n, stages.
BLOCKS_SPECIALISED = ((128, 128, 4), (128, 64, 4), (128, 128, 3))

#: gemm for many rows: block_m, block_n, bytes along K, warps, stages.
TILES = (
    (64, 128, 128, 4, 5), (64, 64, 128, 4, 6), (128, 128, 128, 4, 4), (128, 256, 128, 8, 4), (64, 128, 256, 4, 4), (128, 64, 128, 4, 5),
    (128, 128, 128, 8, 3), (64, 64, 256, 4, 4), (64, 256, 128, 4, 4), (128, 256, 128, 8, 3), (256, 128, 128, 8, 3), (128, 128, 64, 4, 4),
    (64, 64, 128, 4, 3), (64, 128, 128, 4, 3),
)  # fmt: skip

#: gemm for rows of K that are not aligned and are loaded by elements, each a register: as TILES.
RAGGED = ((64, 64, 64, 4, 2), (32, 32, 64, 4, 2), (64, 32, 64, 4, 3), (16, 64, 64, 4, 2))

#: gemm on AMD's matrix cores: block_m, block_n, bytes along K, warps, stages, side of the matrix
#: instruction, k-pack.
MFMA = (
    (256, 256, 128, 8, 2, 16, 1), (128, 128, 128, 4, 2, 16, 1), (256, 128, 128, 8, 2, 16, 2), (128, 256, 128, 8, 2, 16, 2),
    (128, 128, 64, 4, 2, 32, 1), (128, 128, 128, 4, 2, 32, 2), (64, 128, 128, 4, 2, 16, 2), (128, 64, 128, 4, 2, 16, 2),
    (64, 64, 128, 4, 2, 16, 1), (64, 64, 256, 4, 2, 16, 2), (32, 64, 256, 4, 2, 16, 2), (32, 128, 128, 4, 2, 16, 1),
    (128, 128, 128, 4, 3, 16, 1), (64, 128, 256, 4, 2, 16, 1),
)  # fmt: skip

#: gemm on RDNA, which has half the registers a thread: as TILES.
WMMA = (
    (64, 64, 128, 4, 2), (128, 64, 128, 4, 2), (64, 128, 128, 4, 2), (128, 128, 128, 8, 2), (32, 64, 128, 4, 2), (64, 32, 128, 4, 2),
    (64, 64, 64, 4, 2), (128, 128, 64, 8, 2), (128, 64, 128, 8, 2), (64, 128, 128, 8, 2), (32, 32, 128, 2, 2), (64, 64, 128, 4, 1),
)  # fmt: skip

#: Options of AMD's compiler that are tried with the first tiles.
VARIATIONS: tuple[dict[str, int | bool], ...] = ({"stream": True}, {"waves": 2}, {"group_m": 16}, {"kpack": 2}, {"stages": 1})

#: gemm on AMD where scales go by blocks: the space of AITER's tuning of its Triton kernel for
#: a8w8_blockscale (guide to tuning Triton kernels: 5832 with splits), by field. The step along K is
#: one block; k-pack is 2 and the instruction's side 16 where there is a choice.
BLOCKSCALE_OF_AITER = {
    "stages": (2, 1, 3, 4),
    "block_m": (128, 64, 32),
    "block_n": (128, 64, 32),
    "group_m": (8, 1, 16),
    "warps": (4, 8, 2),
    "waves": (2, 4, 8),
    "stream": (False, True),
}
#: The same space's splits of K.
SPLITS_OF_AITER = (1, 2, 4)
#: What is tried of it first for each tile: group_m, stages, waves, stream.
FIRST_OF_AITER = (
    (8, 2, 2, False), (8, 2, 2, True), (1, 2, 2, False), (8, 3, 2, False), (8, 2, 4, False), (1, 2, 4, True), (16, 2, 2, False),
    (8, 1, 2, False), (8, 1, 4, False), (1, 3, 2, True), (8, 2, 8, False), (8, 4, 2, False), (16, 1, 4, True),
)  # fmt: skip

#: Steps of `refine`, by field.
LADDERS = {
    "rows": (1, 2, 3, 4),
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "block_k": (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "unroll": (1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 16),
    "group_m": (1, 2, 4, 8, 16, 32),
    "warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4, 5, 6, 7, 8),
    "waves": (0, 1, 2, 3, 4, 8),
    "nonkdim": (16, 32),
    "kpack": (1, 2),
}


def neighbours(ladder: tuple[int, ...], value: int) -> list[int]:
    """Return the steps of a ladder next below and next above a value."""
    below, above = [step for step in ladder if step < value], [step for step in ladder if step > value]
    return below[-1:] + above[:1]

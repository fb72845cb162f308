"""Check which stage names have a source, and compute how a block is cut among threads.

The conditions are CK's compile-time conditions.
"""

from __future__ import annotations

import functools

import attrs

from tunedgemm_ck.xdl.moe.names import BLOCK, MoeInstance

#: CK's numbers of the activations that it computes.
RENDERED_ACTIVATIONS = {"gelu": 0, "silu": 1}

#: Epilogues that names may have, by AITER's number of the kind of scales. The kernel has applied
#: all factors before, so all of a kind render alike. AITER's lists for gfx950 use the word of the
#: plain one.
RENDERED_EPILOGUES = {
    0: ("TypeCast", "TypeCastExpertWeight"),
    1: ("MulABScale", "MulABScaleExpertWeight", "TypeCast"),
    2: ("MulABScale", "MulABScaleExpertWeight", "TypeCast"),
    BLOCK: ("MulABScaleExpertWeightA8W8blkscale",),
}

#: Dtypes of both factors, in AITER's words, by the number of the kind of scales.
_FACTORS = {0: ("B16", "F16"), 1: ("F8", "I8"), 2: ("F8", "I8"), BLOCK: ("F8",)}


@attrs.frozen
class Cut:
    """How a block's work is cut among its threads; derived from the name, as in AITER's launchers.

    Attributes:
        k1: elements of K that a thread loads at a time; they are adjacent in shared memory and in
            the
            shuffled weight.
        per_wave: instructions of a wave along M and N.
        shuffle_m: those along M whose sums share a pass through shared memory; along N all do.
        store_m, store_n: threads that store, along M and along N.
        store: elements that each stores at a time.
    """

    k1: int
    per_wave: tuple[int, int]
    shuffle_m: int
    store_m: int
    store_n: int
    store: int


def cut_of(of: MoeInstance) -> Cut:
    """Return the cut of an instance; its numbers need not divide each other, see `unrenderable`."""
    along_m, along_n = max(of.m // (16 * of.waves[0]), 1), max(of.n // (16 * of.waves[1]), 1)
    if of.quant == BLOCK:
        wide = 16 if of.stage == 1 else 64
        return Cut(16 // of.bytes, (along_m, along_n), along_m, of.threads // wide, wide, 2)
    half = max(of.n // 2 // along_n, 1)
    if of.stage == 1:
        low, narrow = of.m == 16, of.pipeline == 3 and of.n == 64
        store_m, store = (16, 4) if low else (half, 8)
        store_n = of.threads // store_m
    else:
        narrow, store_n, store = of.threads == 256 and of.k == 64, half, 2
        store_m = of.threads // half
    k1 = 8 if narrow and of.bytes == 1 else 16 // of.bytes
    return Cut(k1, (along_m, along_n), min(along_m, 2), store_m, store_n, store)


@functools.lru_cache(maxsize=1024)
def unrenderable(of: MoeInstance) -> str:
    """Return why no source is rendered for an instance, for any shape, or ""."""
    if of.quant not in RENDERED_EPILOGUES:
        return f"not supported: Quant{of.quant}; supported: Quant{', Quant'.join(map(str, RENDERED_EPILOGUES))}"
    checks = (
        (of.dtypes[0] == of.dtypes[1] and of.dtypes[0] in _FACTORS[of.quant], f"{'_'.join(of.dtypes[:2])} with Quant{of.quant}"),
        (of.dtypes[2] in _FACTORS[0], f"results in {of.dtypes[2]}"),
        (of.quant or of.stage == 2 or of.dtypes[0] == of.dtypes[2], f"{'_'.join(of.dtypes)} without scales"),
        (of.stage == 2 or of.act in RENDERED_ACTIVATIONS, f"{of.act}; CK's headers of 2025 lack it"),
        (
            of.epilogue in RENDERED_EPILOGUES[of.quant],
            f"epilogue {of.epilogue} with Quant{of.quant}, which has {', '.join(RENDERED_EPILOGUES[of.quant])}",
        ),
        (not of.swizzle, "Nswizzle1, which needs a sort that counts the blocks of each expert"),
        (of.pipeline in (1, 3), f"pipeline v{of.pipeline}; supported: v1, v3"),
    )
    return next((f"not supported: {wrong}" for right, wrong in checks if not right), "") or _uncuttable(of)


def _uncuttable(of: MoeInstance) -> str:
    """Return why no block can be cut as an instance says, or "": CK's compile-time conditions."""
    cut, words = cut_of(of), of.tile
    if of.m % (16 * of.waves[0]) or of.n % (16 * of.waves[1]):
        return f"{words}: waves of 16x16 products do not divide the tile"
    if cut.k1 * of.bytes < 16:
        return f"{words}: it reads shuffled weights in pieces of {cut.k1} bytes, and layout aiter16x16 has pieces of 16"
    if of.k % cut.k1 or of.threads % max(of.k // cut.k1, 1) or of.m % max(of.threads // (of.k // cut.k1), 1):
        return f"{words}: the threads do not divide the rows that they load"
    stored = cut.shuffle_m * of.waves[0] * 16
    if cut.per_wave[0] % cut.shuffle_m or not cut.store_m or not cut.store_n or of.threads != cut.store_m * cut.store_n:
        return f"{words}: the threads do not divide what they store"
    if stored % cut.store_m or of.n % (cut.store_n * cut.store):
        return f"{words}: {cut.store_m}x{cut.store_n} threads do not divide {stored}x{of.n} sums, {cut.store} each"
    if of.quant == BLOCK and (of.n != 128 or of.k % 128 or (of.pipeline == 3 and (of.k != 128 or cut.per_wave[0] < 4))):
        return f"{words}: blocks of 128 need N 128, and pipeline v3 K 128 and 64 rows a wave"
    return ""


def lds(of: MoeInstance) -> int:
    """Return the bytes of LDS: the activations' tile or the stored sums, whichever is larger.

    Pipeline v3 has two of it. Weights go to registers.
    """
    sums = cut_of(of).shuffle_m * of.waves[0] * 16 * of.n * 4
    return max(of.m * of.k * of.bytes, sums) * (2 if of.pipeline == 3 else 1)

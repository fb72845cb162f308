"""Compute the LDS of CK Tile's kernels."""

from __future__ import annotations

from tunedgemm_ck.tile.names import TileInstance


def lds(instance: TileInstance) -> int:
    """Return the bytes of LDS of a kernel with block scales.

    Eight waves keep two tiles; a shuffled weight goes to registers directly.
    """
    m, n, k = instance.tile
    rows = m if instance.op == "a8w8_blockscale_bpreshuffle" and not instance.eight_waves else m + n
    return rows * k

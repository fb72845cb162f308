"""LDS of CK Tile's kernels."""

from __future__ import annotations

from tunedgemm_ck.tile.names import TileInstance


def lds(instance: TileInstance) -> int:
    """Bytes of LDS of the tiles of block scales: eight waves keep two, a shuffled weight goes to registers at once."""
    m, n, k = instance.tile
    rows = m if instance.op == "a8w8_blockscale_bpreshuffle" and not instance.eight_waves else m + n
    return rows * k

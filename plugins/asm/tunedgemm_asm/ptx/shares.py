"""Shares: how the steps along K of the tiles that would not fill a round are shared evenly by all clusters ("stream-K").

The steps of the tiles that are shared, one tile after the other in the order of tiles, are cut into ranges of one length, one for each
cluster: a range may end one tile and begin the next. The other tiles fill whole rounds.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.limits import ceil_div

#: Ranges of which a tile is made at most, if it begins with one; one more if it does not.
MOST_RANGES = 16


@attrs.frozen
class Shares:
    """Who computes what of tiles and their steps.

    Attributes:
        tiles: how many are shared: the first in the order of tiles.
        length: steps of each range but the last.
        clusters: of the grid; those beyond the last range have whole tiles alone.
        parts: of a tile at most.
        rounds: whole tiles of each cluster.
        saved: by how many steps fewer than with whole tiles alone the last cluster is done.
    """

    tiles: int
    length: int
    clusters: int
    parts: int
    rounds: int
    saved: int


def shares_of(tiles: int, steps: int, clusters: int) -> Shares:
    """Of so many tiles of *steps* each on so many clusters at a time.

    Ranges are at least half a tile long where there are as many tiles as clusters, so a tile has three parts at most: where the last
    round is less than half full, its tiles are shared together with those of the round before.
    """
    whole, left = divmod(tiles, clusters)
    shared = left + clusters * (2 * left < clusters) if whole else tiles
    length = max(ceil_div(shared * steps, clusters), ceil_div(steps, MOST_RANGES))
    rounds = (tiles - shared) // clusters
    return Shares(
        tiles=shared,
        length=length,
        clusters=clusters if rounds else ceil_div(shared * steps, length),
        parts=ceil_div(steps - 1, length) + 1,
        rounds=rounds,
        saved=(ceil_div(tiles, clusters) - rounds) * steps - length,
    )

"""Share the steps along K of tiles that would not fill a round evenly among all clusters
("stream-K").

The steps of the shared tiles, in the order of tiles, are cut into ranges of one length, one for
each cluster. A range may end one tile and begin the next. The other tiles fill whole rounds.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.limits import ceil_div

#: Most ranges of a tile that begins with one; other tiles may have one more.
MOST_RANGES = 16


@attrs.frozen
class Shares:
    """Division of tiles and their steps among clusters.

    Attributes:
        tiles: number of shared tiles, the first in the order of tiles.
        length: steps of each range but the last.
        clusters: clusters of the grid; those after the last range have only whole tiles.
        parts: most partials of a tile.
        rounds: whole tiles of each cluster.
        saved: steps saved at the last cluster, compared to whole tiles.
    """

    tiles: int
    length: int
    clusters: int
    parts: int
    rounds: int
    saved: int


def shares_of(tiles: int, steps: int, clusters: int) -> Shares:
    """Divide tiles of *steps* steps among the resident clusters.

    With at least as many tiles as clusters, ranges are at least half a tile, so a tile has at most
    three partials: if the last round is less than half full, the previous round is shared, too.
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

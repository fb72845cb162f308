"""Map solution names (column ``kernelName``) to configurations of QuACK's kernel and back.

``tile128x192_cluster2x1_pingpong_swap``: the tile and the cluster along the kernel's M and N,
then the options. The column splitK is the number of splits of K, 0 for none.
"""

from __future__ import annotations

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.tables import KernelName

_NAME = KernelName("tile{tile_m}x{tile_n}_cluster{cluster_m}x{cluster_n}[_pingpong?pingpong][_swap?swapped]")
#: Tiles along M -> the largest tile along N, and its step, of cooperative kernels.
_COOPERATIVE = {64: (256, 16), 128: (256, 16), 192: (256, 32), 256: (208, 16)}
_PINGPONG = {64: (256, 16), 128: (208, 16), 192: (128, 16)}
_CLUSTERS = ((1, 1), (1, 2), (2, 1))


@attrs.frozen(order=True)
class KernelConfig:
    """One configuration of QuACK's kernel for Hopper.

    Attributes:
        tile_m, tile_n: tile of the output that a block computes, in the kernel's order.
        cluster_m, cluster_n: blocks of a cluster, which share their loads.
        pingpong: whether two groups of warps work on separate tiles; otherwise they share one.
        swapped: whether the kernel's M is the weight's rows, so that few rows of x fill its N.
    """

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = False
    swapped: bool = False

    @property
    def name(self) -> str:
        """Return the name in a table."""
        return _NAME.write(self)

    @property
    def is_valid(self) -> bool:
        """Tell whether the kernel has this tile and cluster."""
        most, step = (_PINGPONG if self.pingpong else _COOPERATIVE).get(self.tile_m, (0, 1))
        return 0 < self.tile_n <= most and not self.tile_n % step and (self.cluster_m, self.cluster_n) in _CLUSTERS


def parse_name(name: str) -> KernelConfig:
    """Return the configuration of a name.

    Raises:
        PluginError: no kernel has that name.
    """
    fields = _NAME.parse(name)
    kernel = KernelConfig(**fields) if fields else None
    if kernel is None or not kernel.is_valid:
        raise PluginError(f"quack: no kernel of that name (got {name!r}); tune the shape again")
    return kernel

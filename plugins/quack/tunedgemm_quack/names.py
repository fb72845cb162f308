"""Map solution names (column ``kernelName``) to configurations of QuACK's kernel and back.

``tile128x192_cluster2x1_pingpong_swap``: the tile and the cluster along the kernel's M and N,
then the options. The column splitK is the number of splits of K, 0 for none.
"""

from __future__ import annotations

import re

import attrs
from tunedgemm.plugin import PluginError

_NAME = re.compile(r"tile([1-9]\d{0,2})x([1-9]\d{0,2})_cluster([1-9])x([1-9])(_pingpong)?(_swap)?")
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
        options = "_pingpong" * self.pingpong + "_swap" * self.swapped
        return f"tile{self.tile_m}x{self.tile_n}_cluster{self.cluster_m}x{self.cluster_n}{options}"

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
    found = _NAME.fullmatch(name)
    m, n, cluster_m, cluster_n, pingpong, swapped = found.groups() if found else (0,) * 6
    kernel = KernelConfig(int(m), int(n), int(cluster_m), int(cluster_n), bool(pingpong), bool(swapped))
    if not kernel.is_valid:
        raise PluginError(f"quack: no kernel of that name (got {name!r}); tune the shape again")
    return kernel

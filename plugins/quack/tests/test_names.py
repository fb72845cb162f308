"""Names of configurations, back and forth."""

from __future__ import annotations

import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_quack.names import parse_name


@pytest.mark.parametrize(
    "name",
    [
        "", "no-such-kernel", "tile128x192", "tile128x192_cluster2x1_", "tile128x192_cluster2x1_swap_pingpong", "tile128x0_cluster1x1",
        "tile100x128_cluster1x1", "tile128x120_cluster1x1", "tile128x272_cluster1x1", "tile256x128_cluster1x1_pingpong",
        "tile128x224_cluster1x1_pingpong", "tile192x144_cluster1x1", "tile128x128_cluster2x2", " tile128x128_cluster1x1",
    ],
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    """A name that this plugin did not write, or of a tile that the kernel lacks, is a miss with a reason."""
    with pytest.raises(PluginError, match="no kernel of that name"):
        parse_name(name)

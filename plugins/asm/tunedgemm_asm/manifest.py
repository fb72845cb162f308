"""Manifests: which kernels a pack has, from a CSV file, as values. A manifest is data: it is parsed, and checked, and never believed."""

from __future__ import annotations

import attrs


@attrs.frozen
class Kernel:
    """One kernel, as its manifest describes it.

    Attributes:
        name: its symbol in the code object, which is the kernelName of tables.
        file: the code object, relative to the manifest's folder.
        abi: name of the layout of its arguments.
        tile_m, tile_n: elements of the output that a workgroup computes.
        prefetch: tiles along K that it loads ahead, 0 where the manifest does not say.
        shuffled: whether it reads the weight in the ABI's layout; else plain [N, K].
        splits: whether it can split K over workgroups.
        sub_k: elements along K of which a split has a multiple.
        bias: whether it can add one.
        outputs: the dtypes that it can write.
    """

    name: str
    file: str
    abi: str
    tile_m: int
    tile_n: int
    prefetch: int = 0
    shuffled: bool = False
    splits: bool = False
    sub_k: int = 64
    bias: bool = False
    outputs: tuple[str, ...] = ()

"""Map solution names of products of weight-only formats to kernel parameters and back.

``wn_r1_m16n64k128_g1_w4s4_t``: revision, tile (m, n, k), tiles of M in a group, warps and stages;
``t`` for the transposed product.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
from tunedgemm.tools.tables import KernelName

from tunedgemm_triton.names import Kernel, parser_of, power, within

OP = "a16wn"


@attrs.frozen(cache_hash=True)
class Wn(Kernel):
    """Tile product of a weight decoded in registers; *swap* transposes it."""

    family: ClassVar[str] = "wn"
    form: ClassVar[KernelName] = KernelName(
        "wn_r{revision}_m{block_m}n{block_n}k{block_k}_g{group_m}_w{warps}s{stages}[_t?swap]", "revision"
    )
    block_m: int = power(16, 256)
    block_n: int = power(16, 256)
    block_k: int = power(32, 512)
    group_m: int = power(1, 64)
    warps: int = power(1, 16)
    stages: int = within(1, 8)
    swap: bool = False


parse_name = parser_of("product of weight-only formats", "wn_r1_m16n64k128_g1_w4s4_t", Wn)

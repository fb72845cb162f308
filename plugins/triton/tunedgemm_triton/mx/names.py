"""Map solution names of products of mxfp4 weights to kernel parameters and back.

``mx_r1_m64n128k128_g8_w4s3``: revision, tile (m, n, k), tiles of M in a group, warps and stages.
Flags: ``t`` transposed product, ``d`` decoded to bf16 in the kernel instead of in the compiler.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
from tunedgemm.tools.tables import KernelName

from tunedgemm_triton.names import Kernel, parser_of, power, within

#: Op -> the dtype of its activations.
OPS = {"a4w4_blockscale": "fp4x2", "a16w4_blockscale": "bf16"}


@attrs.frozen(cache_hash=True)
class Mx(Kernel):
    """Tile product of mxfp4; *decode* decodes it to bf16 in the kernel, *swap* transposes the
    product.
    """

    family: ClassVar[str] = "mx"
    form: ClassVar[KernelName] = KernelName(
        "mx_r{revision}_m{block_m}n{block_n}k{block_k}_g{group_m}_w{warps}s{stages}[_t?swap][_d?decode]", "revision"
    )
    block_m: int = power(16, 256)
    block_n: int = power(16, 256)
    block_k: int = power(64, 1024)
    group_m: int = power(1, 64)
    warps: int = power(1, 16)
    stages: int = within(1, 8)
    swap: bool = False
    decode: bool = False


parse_name = parser_of("product of mxfp4", "mx_r1_m64n128k128_g8_w4s3", Mx)

"""Map solution names of products of packed weights to kernel parameters and back.

``wn_r1_m16n64k128_g1_w4s4_t``: revision, tile (m, n, k), tiles of M in a group, warps and stages;
``t`` for the transposed product. ``mx_r1_…``: the same, and ``d`` for mxfp4 decoded to bf16 in the
kernel instead of in the compiler. ``wnv_r1_m1n4k1024u2_w1``: rows of x and of the weight, elements
of K that a program reads at a time, unrolled reads, and warps.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
from tunedgemm.tools.tables import KernelName

from tunedgemm_triton.names import TILE, Kernel, parser_of, power, within

#: Op of the core's weight-only formats.
OP = "a16wn"
#: Op of mxfp4 -> the dtype of its activations.
OPS = {"a4w4_blockscale": "fp4x2", "a16w4_blockscale": "bf16"}


@attrs.frozen(cache_hash=True)
class Wn(Kernel):
    """Tile product of a weight decoded in registers; *swap* transposes it."""

    family: ClassVar[str] = "wn"
    form: ClassVar[KernelName] = KernelName(f"wn{TILE}[_t?swap]", "revision")
    block_m: int = power(16, 256)
    block_n: int = power(16, 256)
    block_k: int = power(32, 1024)
    group_m: int = power(1, 64)
    warps: int = power(1, 16)
    stages: int = within(1, 8)
    swap: bool = False


@attrs.frozen(cache_hash=True)
class Wnv(Kernel):
    """Product of a few rows by a decoded weight on the vector units."""

    family: ClassVar[str] = "wnv"
    form: ClassVar[KernelName] = KernelName("wnv_r{revision}_m{block_m}n{block_n}k{block_k}u{unroll}_w{warps}", "revision")
    block_m: int = power(1, 4)
    block_n: int = power(1, 2048)
    block_k: int = power(1, 16384)
    unroll: int = power(1, 32)
    warps: int = power(1, 16)


@attrs.frozen(cache_hash=True)
class Mx(Wn):
    """Tile product of mxfp4; *decode* decodes it to bf16 in the kernel."""

    family: ClassVar[str] = "mx"
    form: ClassVar[KernelName] = KernelName(f"mx{TILE}[_t?swap][_d?decode]", "revision")
    decode: bool = False


#: The parameters that a solution name stands for.
Packed = Wn | Wnv

parse_mx = parser_of("product of mxfp4", "mx_r1_m64n128k128_g8_w4s3", Mx)
parse_name = parser_of("product of weight-only formats", "wn_r1_m16n64k128_g1_w4s4_t, wnv_r1_m1n4k1024u2_w1", Wn, Wnv)

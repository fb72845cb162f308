"""Map solution names of products of mxfp4 weights to kernel parameters and back.

``mx_r1_m64n128k128_g8_w4s3``: revision, tile (m, n, k), tiles of M in a group, warps and stages.
Flags: ``t`` transposed product, ``d`` decoded to bf16 in the kernel instead of in the compiler.
"""

from __future__ import annotations

import functools
import re
from typing import ClassVar

import attrs
from tunedgemm.plugin import PluginError

from tunedgemm_triton.names import check_revision, power, within

#: Raise it whenever a source of `kernels.mx` changes what a name means or its speed.
REVISION = 1

#: Op -> the dtype of its activations.
OPS = {"a4w4_blockscale": "fp4x2", "a16w4_blockscale": "bf16"}

_EXAMPLE = "mx_r1_m64n128k128_g8_w4s3"
_NAME = re.compile(r"mx_r(\d+)_m(\d+)n(\d+)k(\d+)_g(\d+)_w(\d+)s(\d+)((?:_t)?)((?:_d)?)")


@attrs.frozen(cache_hash=True)
class Mx:
    """Tile product of mxfp4; *decode* decodes it to bf16 in the kernel, *swap* transposes the
    product.
    """

    family: ClassVar[str] = "mx"
    block_m: int = power(16, 256)
    block_n: int = power(16, 256)
    block_k: int = power(64, 1024)
    group_m: int = power(1, 64)
    warps: int = power(1, 16)
    stages: int = within(1, 8)
    swap: bool = False
    decode: bool = False

    @property
    def name(self) -> str:
        """Return the text of ``kernelName``."""
        tile = f"m{self.block_m}n{self.block_n}k{self.block_k}_g{self.group_m}_w{self.warps}s{self.stages}"
        return f"mx_r{REVISION}_{tile}{'_t' * self.swap}{'_d' * self.decode}"


@functools.lru_cache(maxsize=4096)
def parse_name(name: str) -> Mx:
    """Return the parameters behind a kernel name.

    Raises:
        PluginError: no product of mxfp4 of this revision has that name.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise PluginError(f"unknown triton product of mxfp4 {name!r}; names look like {_EXAMPLE}")
    revision, *sizes = map(int, match.groups()[:-2])
    check_revision(name, revision, REVISION)
    return Mx(*sizes, *map(bool, match.groups()[-2:]))

"""Map solution names of products of mxfp4 weights to kernel parameters and back.

``mx_r1_m64n128k128_g8_w4s3``: revision, tile (m, n, k), tiles of M in a group, warps and stages.
Flags: ``t`` transposed product, ``d`` decoded to bf16 in the kernel instead of in the compiler.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.tables import KernelName

from tunedgemm_triton.names import check_revision, power, within

#: Raise it whenever a source of `kernels.mx` changes what a name means or its speed.
REVISION = 1

#: Op -> the dtype of its activations.
OPS = {"a4w4_blockscale": "fp4x2", "a16w4_blockscale": "bf16"}

_EXAMPLE = "mx_r1_m64n128k128_g8_w4s3"
_NAME = KernelName("mx_r{revision}_m{block_m}n{block_n}k{block_k}_g{group_m}_w{warps}s{stages}[_t?swap][_d?decode]", "revision")


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
        return _NAME.write(self, revision=REVISION)


@functools.lru_cache(maxsize=4096)
def parse_name(name: str) -> Mx:
    """Return the parameters behind a kernel name.

    Raises:
        PluginError: no product of mxfp4 of this revision has that name.
    """
    fields = _NAME.parse(name)
    if fields is None:
        raise PluginError(f"unknown triton product of mxfp4 {name!r}; names look like {_EXAMPLE}")
    check_revision(name, fields.pop("revision"), REVISION)
    return Mx(**fields)

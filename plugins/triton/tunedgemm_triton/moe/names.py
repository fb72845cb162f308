"""Map solution names of the fused mixture of experts to kernel parameters and back.

``moe_r1_m64g8_n128k64w8s4_n128k64w8s4``: revision, pairs of a block, blocks in a group, then both
stages. A stage has tile of N (of the gate and of its factor), tile of K, warps and pipeline stages.
Flags: ``t`` transposed products, ``a`` a block for each pair without sorting, ``d`` mxfp4
decoded to bf16 in the kernel. `Solution.split_k` is the parts of K in the first stage.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from tunedgemm.tools.tables import KernelName

from tunedgemm_triton.names import Kernel, parser_of, power, within

OP = "fmoe"

_STAGES = "".join(f"_n{{{of}.block_n}}k{{{of}.block_k}}w{{{of}.warps}}s{{{of}.stages}}" for of in ("first", "second"))


@attrs.frozen(cache_hash=True)
class Tile:
    """Tile of one stage: rows of the weight, elements of K, warps, depth of the pipeline."""

    family: ClassVar[str] = "moe"
    block_n: int = power(16, 256)
    block_k: int = power(32, 512)
    warps: int = power(1, 16)
    stages: int = within(1, 8)


@attrs.frozen(cache_hash=True)
class Moe(Kernel):
    """Parameters of a fused mixture of experts.

    Attributes:
        block_m: (token, expert) pairs of a block, all of one expert.
        group_m: blocks of a group, which share weights in L2.
        first, second: the tiles of gate and up, and of down.
        swap: transpose products, so that the long side of the matrix instruction is along the
            weight.
        alone: use a block for each pair; nothing is sorted, and the second stage does the final
            sum.
        decode: decode mxfp4 to bf16 in the kernel, instead of in the compiler.
    """

    family: ClassVar[str] = "moe"
    form: ClassVar[KernelName] = KernelName("moe_r{revision}_m{block_m}g{group_m}" + _STAGES + "[_t?swap][_a?alone][_d?decode]", "revision")
    block_m: int = power(16, 256)
    group_m: int = power(1, 64)
    first: Tile
    second: Tile
    swap: bool = False
    alone: bool = False
    decode: bool = False

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Moe:
        """Return the parameters of the fields of a name."""
        own = {field: value for field, value in fields.items() if "." not in field}
        first, second = (Tile(**{field.name: fields[f"{of}.{field.name}"] for field in attrs.fields(Tile)}) for of in ("first", "second"))
        return cls(first=first, second=second, **own)


parse_name = parser_of("mixture of experts", "moe_r1_m64g8_n128k64w8s4_n128k64w8s4", Moe)

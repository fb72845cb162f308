"""What the generator knows of the two architectures.

Sources: AMD's ISA guides of CDNA3 (MI300) and CDNA4 (MI350), their chapters on matrix instructions, on LDS and on wait states; for what LDS
reads in a cycle, 128 and 256 bytes, AMD's "FP8 GEMM Optimization on AMD CDNA 4 Architecture" (ROCm Blogs, March 2026), table 1.
"""

from __future__ import annotations

from types import MappingProxyType

import attrs
from tunedgemm.plugin import PluginError


@attrs.frozen
class Target:
    """One architecture.

    Attributes:
        gfx: its name.
        lds_bytes: of a compute unit, and of a workgroup at most.
        lds_granule: bytes in which LDS is given to workgroups.
        lds_banks: of four bytes, each read at most once in a cycle.
        product: the matrix instruction for bf16: 16 rows by 16 columns.
        depth: elements along K of one.
        cycles: for which one occupies the matrix unit of a SIMD.
        passes: after as many groups of four cycles is its result there; wait states are counted from it.
        newer: whether its wait states are those of gfx950.
        direct: whether 16 bytes of each lane may go from memory to LDS without a register.
        packs: whether two fp32 values become two of bf16 in one instruction, rounded to nearest.
    """

    gfx: str
    lds_bytes: int
    lds_granule: int
    lds_banks: int
    product: str
    depth: int
    cycles: int
    passes: int
    newer: bool
    direct: bool
    packs: bool


#: Registers of a lane in its SIMD, the number of which a wave gets a multiple; waves of a SIMD at most; lanes of a workgroup.
REGISTERS, REGISTER_GRANULE, WAVES, THREADS = 512, 8, 8, 256
TARGETS = MappingProxyType(
    {
        "gfx942": Target("gfx942", 64 << 10, 512, 32, "v_mfma_f32_16x16x16_bf16", 16, 16, 4, False, False, False),
        "gfx950": Target("gfx950", 160 << 10, 1280, 64, "v_mfma_f32_16x16x32_bf16", 32, 16, 4, True, True, True),
    }
)


def target_of(gfx: str) -> Target:
    """What is known of an architecture.

    Raises:
        PluginError: nothing is.
    """
    if gfx not in TARGETS:
        raise PluginError(f"kernels are generated for {', '.join(TARGETS)}, not for {gfx!r}")
    return TARGETS[gfx]

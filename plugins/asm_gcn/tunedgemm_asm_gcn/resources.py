"""List the hardware parameters of both architectures.

Sources: AMD's ISA guides of CDNA3 (MI300) and CDNA4 (MI350), chapters on matrix instructions, LDS
and wait states. LDS loads per cycle, 128 and 256 bytes: AMD's "FP8 GEMM Optimization on AMD CDNA 4
Architecture" (ROCm Blogs, March 2026), table 1.
"""

from __future__ import annotations

from types import MappingProxyType

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm_asm.resources import LDS


@attrs.frozen
class Target:
    """Hardware parameters of one architecture.

    Attributes:
        gfx: its name.
        lds_bytes: LDS of a compute unit, and most LDS of a workgroup.
        lds_banks: banks of four bytes, each read once in a cycle.
        product: MFMA for bf16 with 16 rows and 16 columns.
        depth: elements along K of an MFMA.
        passes: passes of four cycles until its result is available; wait states are based on it.
        newer: whether its wait states are those of gfx950.
        direct: whether loads of 16 bytes per lane can write LDS directly.
        packs: whether one instruction rounds two fp32 values to bf16, to nearest.
    """

    gfx: str
    lds_bytes: int
    lds_banks: int
    product: str
    depth: int
    passes: int
    newer: bool
    direct: bool
    packs: bool


#: Lanes of a workgroup.
THREADS = 256
TARGETS = MappingProxyType(
    {
        "gfx942": Target("gfx942", LDS["gfx942"], 32, "v_mfma_f32_16x16x16_bf16", 16, 4, False, False, False),
        "gfx950": Target("gfx950", LDS["gfx950"], 64, "v_mfma_f32_16x16x32_bf16", 32, 4, True, True, True),
    }
)


def target_of(gfx: str) -> Target:
    """Return the hardware parameters of an architecture.

    Raises:
        PluginError: the architecture is unknown.
    """
    if gfx not in TARGETS:
        raise PluginError(f"no generated kernels for {gfx!r}; supported: {', '.join(TARGETS)}")
    return TARGETS[gfx]

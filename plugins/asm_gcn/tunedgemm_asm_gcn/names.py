"""Map the configuration of a generated kernel to its name, and derive its geometry."""

from __future__ import annotations

import math

import attrs
from tunedgemm.plugin import PluginError

from tunedgemm_asm_gcn.resources import THREADS, Target, target_of

#: Rows and columns of an MFMA; bf16 elements of the widest load (16 bytes); elements along K of a
#: step (128 bytes: a cache line, and what 8 lanes load).
SIDE, PACK, STEP = 16, 8, 64
STEP_BYTES = 2 * STEP
#: Halves of a step, each 32 elements deep, 8 in each of 4 groups of 16 lanes. Rows that 256 lanes
#: load.
HALVES, ROWS = 2, THREADS * PACK // STEP
WAVES = THREADS // 64
#: Most rows of x with two LDS buffers, for a shuffled weight and loads through registers.
_DOUBLED = 128


@attrs.frozen
class KernelConfig:
    """One kernel: out[M, N] = x[M, K] @ weight[N, K].T, one tile for each workgroup of four waves.

    Attributes:
        gfx: architecture.
        tile_m: rows of a tile.
        tile_n: columns of a tile, which are rows of the weight.
        waves_m: waves along M; the rest of the four are along N.
        prefetch: steps along K that are loaded ahead.
        shuffled: whether the weight has AITER's layout (16 by 16) and bypasses LDS.
        split: whether several workgroups share the K of a tile.
    """

    gfx: str
    tile_m: int
    tile_n: int
    waves_m: int
    prefetch: int
    shuffled: bool = False
    split: bool = False

    def __attrs_post_init__(self) -> None:
        if self.waves_m not in (1, 2, 4) or self.tile_m % (SIDE * self.waves_m) or self.tile_n % (SIDE * self.waves_n):
            raise PluginError(f"{self.name}: four waves, {self.waves_m} along M, cannot share the tile in {SIDE}x{SIDE} blocks")
        if self.tile_m % ROWS or (self.tile_n % ROWS and not self.shuffled):
            raise PluginError(f"{self.name}: tile rows must be multiples of the {ROWS} rows that {THREADS} lanes load")
        if self.prefetch < 1:
            raise PluginError(f"{self.name}: prefetch must be at least 1 (got {self.prefetch})")
        if self.lds_bytes > self.target.lds_bytes:
            raise PluginError(f"{self.name}: {self.lds_bytes} bytes of LDS exceed the {self.target.lds_bytes} of {self.gfx}")

    @property
    def name(self) -> str:
        """Return the kernel's symbol, which is the kernelName of tables."""
        words = ("bshuffle_" if self.shuffled else "", f"pf{self.prefetch}", "_splitk" if self.split else "")
        return f"tunedgemm_bf16_{self.tile_m}x{self.tile_n}_{''.join(words)}"

    @property
    def target(self) -> Target:
        """Return the hardware parameters of its architecture."""
        return target_of(self.gfx)

    @property
    def waves_n(self) -> int:
        """Return the waves along N."""
        return WAVES // self.waves_m

    @property
    def blocks_m(self) -> int:
        """Return the MFMA blocks of a wave along M."""
        return self.tile_m // (SIDE * self.waves_m)

    @property
    def blocks_n(self) -> int:
        """Return the MFMA blocks of a wave along N."""
        return self.tile_n // (SIDE * self.waves_n)

    @property
    def blocks(self) -> int:
        """Return the MFMA blocks of a wave, each with four accumulators in a lane."""
        return self.blocks_m * self.blocks_n

    @property
    def loads_a(self) -> int:
        """Return the loads of x by each lane in a step."""
        return self.tile_m // ROWS

    @property
    def loads_b(self) -> int:
        """Return the loads of a plain weight by each lane in a step; 0 for a shuffled one."""
        return 0 if self.shuffled else self.tile_n // ROWS

    @property
    def buffers(self) -> int:
        """Return the steps that LDS holds.

        Loads that write LDS directly have a buffer for each step in flight. Other loads wait in
        registers; a second buffer then saves a barrier in each step, where LDS does not limit
        occupancy.
        """
        if self.target.direct:
            return self.prefetch + 1
        return 2 if self.shuffled and self.tile_m <= _DOUBLED else 1

    @property
    def buffer_bytes(self) -> int:
        """Return the LDS bytes of a step: rows of 128 bytes, those of x first."""
        return (self.tile_m + (0 if self.shuffled else self.tile_n)) * STEP_BYTES

    @property
    def lds_bytes(self) -> int:
        """Return the LDS bytes of a workgroup."""
        return self.buffers * self.buffer_bytes

    @property
    def sets(self) -> int:
        """Return the steps with registers for a shuffled weight; without direct loads, also for x."""
        return self.buffers if self.target.direct else self.prefetch

    @property
    def unrolled(self) -> int:
        """Return the steps of the unrolled loop, each with other registers and buffers."""
        return math.lcm(self.sets, self.buffers)

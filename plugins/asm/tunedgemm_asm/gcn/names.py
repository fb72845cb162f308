"""What one kernel is made of."""

from __future__ import annotations

import math

import attrs
from tunedgemm.plugin import PluginError

from tunedgemm_asm.gcn.resources import THREADS, Target, target_of

#: Rows and columns of a matrix instruction; elements of bf16 in 16 bytes, the widest load; elements along K of a step, 128 bytes: a line
#: of the caches, and what 8 lanes load.
SIDE, PACK, STEP = 16, 8, 64
STEP_BYTES = 2 * STEP
#: Halves of a step: each is 32 elements deep, what 4 groups of 16 lanes hold 8 of each. Rows that 256 lanes load at once.
HALVES, ROWS = 2, THREADS * PACK // STEP
WAVES = THREADS // 64
#: Rows of x at most of which LDS holds two steps, with a shuffled weight and loads that go through registers.
_DOUBLED = 128


@attrs.frozen
class KernelConfig:
    """One kernel: out[M, N] = x[M, K] @ weight[N, K].T, a tile of it for each workgroup of four waves.

    Attributes:
        gfx: its architecture.
        tile_m: rows of a tile.
        tile_n: its columns, which are rows of the weight.
        waves_m: waves along M; the others of the four stand along N.
        prefetch: steps along K whose loads are on their way while one is multiplied.
        shuffled: whether the weight lies as AITER shuffles it (16 by 16); then it goes to the registers without LDS.
        split: whether several workgroups share the K of one tile.
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
            raise PluginError(f"{self.name}: four waves, {self.waves_m} of them along M, do not share a tile of {SIDE} by {SIDE} products")
        if self.tile_m % ROWS or (self.tile_n % ROWS and not self.shuffled):
            raise PluginError(f"{self.name}: {THREADS} lanes load {ROWS} rows at once, the tile has other numbers of them")
        if self.prefetch < 1:
            raise PluginError(f"{self.name}: prefetch {self.prefetch}, at least one step is loaded ahead")
        if self.lds_bytes > self.target.lds_bytes:
            raise PluginError(f"{self.name}: {self.lds_bytes} bytes of LDS, {self.gfx} has {self.target.lds_bytes}")

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        words = ("bshuffle_" if self.shuffled else "", f"pf{self.prefetch}", "_splitk" if self.split else "")
        return f"tunedgemm_bf16_{self.tile_m}x{self.tile_n}_{''.join(words)}"

    @property
    def target(self) -> Target:
        """Its architecture."""
        return target_of(self.gfx)

    @property
    def waves_n(self) -> int:
        """Waves along N."""
        return WAVES // self.waves_m

    @property
    def blocks_m(self) -> int:
        """Products of a wave along M."""
        return self.tile_m // (SIDE * self.waves_m)

    @property
    def blocks_n(self) -> int:
        """Products of a wave along N."""
        return self.tile_n // (SIDE * self.waves_n)

    @property
    def blocks(self) -> int:
        """Products of a wave, each of four accumulators in a lane."""
        return self.blocks_m * self.blocks_n

    @property
    def loads_a(self) -> int:
        """Loads of x by each lane in a step."""
        return self.tile_m // ROWS

    @property
    def loads_b(self) -> int:
        """Loads of a plain weight by each lane in a step; 0 for a shuffled one."""
        return 0 if self.shuffled else self.tile_n // ROWS

    @property
    def buffers(self) -> int:
        """Steps that LDS holds.

        Where loads end in LDS, those on their way have buffers of their own. Else they wait in registers: then a second buffer, which saves
        a barrier in each step, is worth its room where LDS does not limit the workgroups of a compute unit.
        """
        if self.target.direct:
            return self.prefetch + 1
        return 2 if self.shuffled and self.tile_m <= _DOUBLED else 1

    @property
    def buffer_bytes(self) -> int:
        """LDS of a step: rows of 128 bytes, those of x first."""
        return (self.tile_m + (0 if self.shuffled else self.tile_n)) * STEP_BYTES

    @property
    def lds_bytes(self) -> int:
        """LDS of a workgroup."""
        return self.buffers * self.buffer_bytes

    @property
    def sets(self) -> int:
        """Steps whose part of a shuffled weight has registers; on the way to LDS through registers, steps of x too."""
        return self.buffers if self.target.direct else self.prefetch

    @property
    def unrolled(self) -> int:
        """Steps of the loop's text: each has its own registers and buffers."""
        return math.lcm(self.sets, self.buffers)

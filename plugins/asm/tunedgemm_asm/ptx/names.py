"""Map solution names to kernel configurations, and configurations to variants for a shape's dtypes."""

from __future__ import annotations

import functools
import math

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.tables import KernelName

from tunedgemm_asm.ptx.resources import (
    BARRIER_BYTES,
    BLOCK_SHARED,
    ENTRY_REGISTERS,
    FEW_ACCUMULATORS,
    FEW_REGISTERS,
    MOST_CONSUMERS,
    OTHER_REGISTERS,
    REGISTERS,
    SM_REGISTERS,
    SM_SHARED,
    SYSTEM_SHARED,
    WORD_BYTES,
)

#: 16-bit elements along K of a stage (128 bytes, TMA's widest swizzle) and of one wgmma.
STEP, STEP_K = 64, 16
STEP_BYTES = 2 * STEP
#: wgmma instructions along K of a stage; each takes 32 bytes of a row for any dtype.
DEEP = STEP // STEP_K
#: Above this many rows of b, a promoting consumer multiplies half of them at a time: a thread holds
#: the accumulators of the stage and of the tile.
MOST_PORTION = 192
#: Layout of a weight in columns of `STEP_BYTES`, each contiguous: [steps, N, 128 bytes].
COLUMNS = f"columns{STEP_BYTES}"
#: Bytes of an operand's element.
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8_e4m3fn": 1, "int8": 1}
#: Elements of K, and rows of the weight, that share a block scale; one stage of 8-bit operands.
SCALE_BLOCK = 128
SCALE_BYTES = 4
#: Rows of a of one wgmma, most rows of b, and their granularity.
SIDE, MOST_B, UNIT_B = 64, 256, 8
#: Threads of a warpgroup, all of which execute a wgmma.
GROUP_THREADS = 128
WARP_THREADS = 32
#: Most 16-bit elements stored at once: 16 bytes.
LINE = 8
#: Most columns of a panel (128 bytes, TMA's widest swizzle) and fewest (one `stmatrix` of a warp).
PANEL_COLUMNS, LEAST_COLUMNS = 64, 16
#: Increases when the text of a configuration changes its results or its speed.
REVISION = 1

_FLAGS = "[_swap?swapped][_p?promoted][_o?overlapped][_s?staged][_t?turns][_k?stream][_f?folded]"
_NAME = KernelName(
    f"ptx_{{tile_m}}x{{tile_n}}_s{{stages}}_c{{consumers}}_x{{cluster}}_g{{group}}{_FLAGS}[_b{{panels}}]_r{{revision}}", "revision"
)


@attrs.frozen(cache_hash=True)
class KernelConfig:
    """One kernel: out[M, N] = x[M, K] @ weight[N, K].T, one tile at a time in each CTA.

    A wgmma multiplies 64 rows of operand a by 8 to 256 rows of operand b. a is x and b is the
    weight; for few rows of x they are swapped. One warpgroup produces (loads) and the others
    consume (multiply). Consumers share the rows of a tile, or ping-pong: each takes every second
    tile, so that one multiplies while the other stores.

    Attributes:
        tile_m: rows of x in a tile.
        tile_n: rows of the weight in a tile.
        stages: stages of the ring in shared memory.
        consumers: warpgroups that multiply.
        cluster: CTAs along a that share b by multicast, each loading a part.
        group: tiles along a that are computed before the next along b, so that their loads stay in
            L2.
        swapped: whether a is the weight.
        promoted: whether each stage is added to fp32 accumulators: wgmma keeps about 14 bits of fp8
            sums.
        overlapped: whether a portion is promoted while the next is multiplied.
        staged: whether shared memory holds the block scales of each stage.
        turns: whether consumers ping-pong.
        panels: buffers in shared memory of each consumer for 64 output rows, from which TMA stores;
            with
            none the threads store.
        stream: whether the steps of tiles that would not fill a round are shared evenly (stream-K).
        folded: whether one CTA computes all parts of K of a tile in turn and adds them in
            registers: the bits of split-K without partials in memory.
    """

    tile_m: int
    tile_n: int
    stages: int
    consumers: int = 2
    cluster: int = 1
    group: int = 8
    swapped: bool = False
    promoted: bool = False
    overlapped: bool = False
    staged: bool = False
    turns: bool = False
    panels: int = 0
    stream: bool = False
    folded: bool = False

    def __attrs_post_init__(self) -> None:
        if self.consumers not in REGISTERS or self.cluster not in (1, 2) or self.group < 1 or self.stages < 2:
            raise PluginError(f"{self.name}: needs 1 or 2 consumers, a cluster of 1 or 2, a group of 1 or more, and 2 stages or more")
        if self.turns and (self.consumers != MOST_CONSUMERS or self.promoted):
            raise PluginError(f"{self.name}: ping-pong (_t) needs {MOST_CONSUMERS} consumers and no promotion (_p)")
        if self.tile_a % (SIDE * self.sharing) or not 0 < self.tile_a <= MOST_B:
            shared = "a consumer cannot take" if self.turns else f"{self.consumers} consumers cannot share"
            raise PluginError(f"{self.name}: {shared} {self.tile_a} rows in steps of {SIDE}, up to {MOST_B}")
        if self.tile_b % (UNIT_B * self.cluster) or not 0 < self.tile_b <= MOST_B:
            raise PluginError(f"{self.name}: cannot load {self.tile_b} rows; needs a multiple of {UNIT_B * self.cluster}, up to {MOST_B}")
        if self.portion % UNIT_B:
            raise PluginError(f"{self.name}: half of {self.tile_b} rows is not a multiple of {UNIT_B}")
        if self.panels and self.turns:
            raise PluginError(f"{self.name}: ping-pong consumers (_t) cannot have panels (_b)")
        if self.panels and (self.swapped or self.tile_b % LEAST_COLUMNS):
            raise PluginError(f"{self.name}: panels need rows of x as a, and a multiple of {LEAST_COLUMNS} rows of the weight")
        if not 0 <= self.panels <= self.all_panels:
            raise PluginError(f"{self.name}: {self.panels} panels exceed the {self.all_panels} of a consumer")
        promoted_only = "can overlap (_o)" if self.overlapped else "has scales in stages (_s)" if self.staged else ""
        if promoted_only and not self.promoted:
            raise PluginError(f"{self.name}: only a promotion (_p) {promoted_only}")
        if self.folded and (self.promoted or self.turns or self.stream):
            raise PluginError(f"{self.name}: parts of K in one CTA (_f) exclude promotion (_p), ping-pong (_t) and stream-K (_k)")
        held = self.accumulators + self.promoted * self.portion // (1 if self.overlapped else 2) + self.column_scales
        held += self.folded * self.accumulators
        if held + OTHER_REGISTERS > self.consumer_registers:
            others = f"{held} accumulators and {OTHER_REGISTERS} other registers"
            raise PluginError(f"{self.name}: {others} exceed the {self.consumer_registers} of a thread")
        if self.shared_bytes > BLOCK_SHARED:
            raise PluginError(f"{self.name}: {self.shared_bytes} bytes of shared memory exceed the {BLOCK_SHARED} of a block")

    @functools.cached_property
    def name(self) -> str:
        """Return the kernelName of tables."""
        return _NAME.write(self, revision=REVISION)

    @functools.cached_property
    def tile_a(self) -> int:
        """Return the rows of a in a tile."""
        return self.tile_n if self.swapped else self.tile_m

    @functools.cached_property
    def tile_b(self) -> int:
        """Return the rows of b in a tile."""
        return self.tile_m if self.swapped else self.tile_n

    @property
    def box_b(self) -> int:
        """Return the rows of b that one CTA loads."""
        return self.tile_b // self.cluster

    @functools.cached_property
    def sharing(self) -> int:
        """Return the consumers that share a tile and release each of its stages."""
        return 1 if self.turns else self.consumers

    @functools.cached_property
    def rows(self) -> int:
        """Return the rows of a of one consumer."""
        return self.tile_a // self.sharing

    @functools.cached_property
    def blocks(self) -> int:
        """Return the wgmma instructions of a consumer for each step of 16 along K."""
        return self.rows // SIDE

    @functools.cached_property
    def accumulators(self) -> int:
        """Return the accumulators of a thread."""
        return self.blocks * self.accumulators_per_block

    @functools.cached_property
    def accumulators_per_block(self) -> int:
        """Return the accumulators of a thread for one wgmma: 64 rows over 128 threads."""
        return self.tile_b // 2

    @functools.cached_property
    def column_scales(self) -> int:
        """Return the scales of a thread for columns, a quarter of the rows of b where these are of x;
        those of its few rows count among the other registers.
        """
        return self.staged * self.swapped * (self.tile_b // 4)

    @functools.cached_property
    def portion(self) -> int:
        """Return the rows of b of one wgmma."""
        if self.overlapped:
            free = self.consumer_registers - OTHER_REGISTERS - self.accumulators - self.column_scales
            return next((part for part in (self.tile_b, self.tile_b // 2) if part <= free), self.tile_b // 4)
        return self.tile_b // 2 if self.promoted and self.tile_b > MOST_PORTION else self.tile_b

    @functools.cached_property
    def portions(self) -> list[tuple[int, int]]:
        """Return the portions that a consumer multiplies before it promotes.

        Each is a block of 64 rows of a, and the first row of b.
        """
        return [(block, first) for block in range(self.blocks) for first in range(0, self.tile_b, self.portion)]

    @property
    def threads(self) -> int:
        """Return the threads of a CTA."""
        return GROUP_THREADS * (1 + self.consumers)

    @functools.cached_property
    def stage_bytes(self) -> int:
        """Return the bytes of a stage: rows of 128 bytes, a's first; rows outside an operand are
        zeros or left as they were.
        """
        return (self.tile_a + self.tile_b) * STEP_BYTES

    @property
    def span(self) -> int:
        """Return the rows of the weight that never span two scale blocks, wherever a tile begins."""
        return math.gcd(self.tile_n, SCALE_BLOCK)

    @functools.cached_property
    def spans(self) -> int:
        """Return the spans of the weight's rows in a tile."""
        return self.tile_n // self.span

    @functools.cached_property
    def scale_bytes(self) -> int:
        """Return the bytes of a stage's scales, for the rows of x and then for the weight's spans; a
        multiple of 8.
        """
        return self.staged * (self.tile_m + self.spans + self.spans % 2) * SCALE_BYTES

    @property
    def panel_columns(self) -> int:
        """Return the columns of a panel: the largest of 64, 32 or 16 that divides a tile."""
        return math.gcd(self.tile_b, PANEL_COLUMNS)

    @property
    def panel_bytes(self) -> int:
        """Return the bytes of a panel: 64 rows of 16-bit outputs, a multiple of 1024."""
        return SIDE * self.panel_columns * 2

    @functools.cached_property
    def all_panels(self) -> int:
        """Return the panels of a consumer's part of a tile."""
        return self.blocks * self.tile_b // self.panel_columns

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Return the shared memory of a CTA: stages and their barriers, panels, words, ping-pong
        barriers.
        """
        behind = MOST_CONSUMERS * (WORD_BYTES + self.turns * BARRIER_BYTES)
        panels = self.consumers * self.panels * self.panel_bytes
        return self.stages * (self.stage_bytes + self.scale_bytes + 2 * BARRIER_BYTES) + panels + behind

    @property
    def entry_registers(self) -> int:
        """Return the registers of a thread when the kernel starts."""
        return FEW_REGISTERS if self.consumers == 1 and self.accumulators <= FEW_ACCUMULATORS else ENTRY_REGISTERS

    @property
    def producer_registers(self) -> int:
        """Return the registers of a producer's thread."""
        return REGISTERS[self.consumers][0]

    @functools.cached_property
    def consumer_registers(self) -> int:
        """Return the registers of a consumer's thread."""
        return REGISTERS[self.consumers][1]

    @functools.cached_property
    def resident(self) -> int:
        """Return the CTAs that an SM holds at once."""
        return min(SM_SHARED // (self.shared_bytes + SYSTEM_SHARED), SM_REGISTERS // (self.entry_registers * self.threads))


def parse_name(name: str) -> KernelConfig:
    """Return the configuration of a name.

    Raises:
        PluginError: the name is not one of this revision.
    """
    fields = _NAME.parse(name)
    if fields is None:
        raise PluginError(f"{name!r} is not a kernel of this plugin for sm_90")
    if (revision := fields.pop("revision")) != REVISION:
        raise PluginError(f"{name}: revision {revision} is not {REVISION}; tune again")
    return KernelConfig(**fields)


@attrs.frozen
class Variant:
    """Configuration with the dtypes of a shape; each variant is one text.

    Attributes:
        config: configuration of the kernel.
        dtype: operand dtype, one of `ELEMENT_BYTES`.
        outdtype: output dtype, ``fp32`` included.
        bias: dtype of the bias; empty without one.
        split: whether several CTAs share the K of a tile.
        together: output elements that may be stored at once, 1, 2 or 8; they divide the size of a
            row.
        scale: kind of scales: ``none``, ``tensor``, ``row`` or ``block``.
        columns: whether the weight is in columns of 128 bytes along K, one for each step.
        transposed: whether the block scales of x are ordered by block of K, not by row.
        padded: whether each block of K has its transposed scales padded to a multiple of 16 bytes.
    """

    config: KernelConfig
    dtype: str = attrs.field(validator=attrs.validators.in_(ELEMENT_BYTES))
    outdtype: str = attrs.field(validator=attrs.validators.in_(("bf16", "fp16", "fp32")))
    bias: str = attrs.field(default="", validator=attrs.validators.in_(("", "bf16", "fp16", "fp32")))
    split: bool = False
    together: int = attrs.field(default=8, validator=attrs.validators.in_((1, 2, 8)))
    scale: str = attrs.field(default="none", validator=attrs.validators.in_(("none", "tensor", "row", "block")))
    columns: bool = False
    transposed: bool = False
    padded: bool = False

    @property
    def step(self) -> int:
        """Return the elements along K of a stage."""
        return step_of(self.dtype)

    @property
    def accumulator_kind(self) -> str:
        """Return the type of accumulator registers: int8 products have 32-bit integers."""
        return "b32" if self.dtype == "int8" else "f32"


def step_of(dtype: str) -> int:
    """Return the elements along K of a stage."""
    return STEP_BYTES // ELEMENT_BYTES[dtype]

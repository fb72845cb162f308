"""What one kernel is made of, and the variants of it that shapes need."""

from __future__ import annotations

import math
import re

import attrs
from tunedgemm.plugin import PluginError

from tunedgemm_asm.ptx.resources import (
    BARRIER_BYTES,
    ENTRY_REGISTERS,
    FEW_ACCUMULATORS,
    FEW_REGISTERS,
    MOST_CONSUMERS,
    REGISTERS,
    SM_REGISTERS,
    SM_SHARED,
    SYSTEM_SHARED,
    WORD_BYTES,
    unfit,
)

#: Elements of 16 bits along K of a stage: 128 bytes, the widest swizzle of the copy engine; and of one matrix instruction.
STEP, STEP_K = 64, 16
STEP_BYTES = 2 * STEP
#: Matrix instructions along K of a stage: each takes 32 bytes of a row, whatever its elements.
DEEP = STEP // STEP_K
#: Rows of b beyond which a consumer that adds up the accumulators of stages multiplies half of them at a time: a thread holds both kinds of accumulators.
MOST_PORTION = 192
#: The layout of a weight whose columns of `STEP_BYTES` are runs of memory: [steps, N, 128 bytes].
COLUMNS = f"columns{STEP_BYTES}"
#: Bytes of an element of the operands.
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8_e4m3fn": 1, "int8": 1}
#: Elements of K, and rows of the weight, that share a scale where scales go by block: with 8 bits one stage is one block.
SCALE_BLOCK = 128
#: Rows of x that one matrix instruction multiplies by up to so many rows of the weight, a multiple of 8.
SIDE, MOST_B, UNIT_B = 64, 256, 8
#: Threads of a warp group, which a matrix instruction needs whole.
GROUP_THREADS = 128
#: Elements of 16 bits that are stored at once at most: 16 bytes.
LINE = 8
#: Columns of a panel at most, in whose rows of 128 bytes the copy engine swizzles, and at least: what one `stmatrix` of a warp stores.
PANEL_COLUMNS, LEAST_COLUMNS = 64, 16
#: Goes up where the text for the same config changes what it computes or how quickly.
REVISION = 1

_NAME = re.compile(r"ptx_(\d+)x(\d+)_s(\d+)_c(\d+)_x(\d+)_g(\d+)(_swap)?(_p)?(_t)?(_k)?(?:_b(\d+))?_r(\d+)")


@attrs.frozen
class KernelConfig:
    """One kernel: out[M, N] = x[M, K] @ weight[N, K].T, a tile of it at a time by each thread block.

    A matrix instruction multiplies 64 rows of one operand, called a, by 8 to 256 of the other, b. a is x, b the weight; for few rows of
    x they are swapped. One warp group produces (loads), the others consume (multiply): each its share of a's rows of every tile, or
    in turns each all rows of every second tile, so that one multiplies while the other stores.

    Attributes:
        tile_m: rows of x of a tile.
        tile_n: rows of the weight.
        stages: of the ring in shared memory.
        consumers: warp groups that multiply.
        cluster: thread blocks side by side along a that share what is loaded of b, each loading a part for all of them.
        group: tiles along a that are computed before the next along b, so that what they load stays in L2.
        swapped: whether a is the weight.
        promoted: whether the accumulators of each stage are added to others in float32: `wgmma` keeps about 14 bits of accumulators of fp8 products.
        turns: whether consumers have a tile each, in turns.
        panels: places in shared memory for 64 rows of outputs that each consumer has, from which the copy engine stores; without one its
            threads store.
        stream: whether the steps along K of the tiles that would not fill a round are shared evenly by all clusters.
    """

    tile_m: int
    tile_n: int
    stages: int
    consumers: int = 2
    cluster: int = 1
    group: int = 8
    swapped: bool = False
    promoted: bool = False
    turns: bool = False
    panels: int = 0
    stream: bool = False

    def __attrs_post_init__(self) -> None:
        if self.consumers not in REGISTERS or self.cluster not in (1, 2) or self.group < 1 or self.stages < 2:
            raise PluginError(f"{self.name}: one or two consumers, a cluster of one or two, a group and two stages at least")
        if self.turns and (self.consumers != MOST_CONSUMERS or self.promoted):
            raise PluginError(f"{self.name}: {MOST_CONSUMERS} consumers take turns, and none with promotion, where they do stage by stage")
        if self.tile_a % (SIDE * self.sharing) or not 0 < self.tile_a <= MOST_B:
            shared = "a consumer does not take" if self.turns else f"{self.consumers} consumers do not share"
            raise PluginError(f"{self.name}: {shared} {self.tile_a} rows in steps of {SIDE}, {MOST_B} at most")
        if self.tile_b % (UNIT_B * self.cluster) or not 0 < self.tile_b <= MOST_B:
            raise PluginError(f"{self.name}: {self.tile_b} rows; a multiple of {UNIT_B * self.cluster}, {MOST_B} at most, can be loaded")
        if self.portion % UNIT_B:
            raise PluginError(f"{self.name}: half of {self.tile_b} rows is no multiple of {UNIT_B}")
        if self.panels and self.turns:
            raise PluginError(f"{self.name}: of consumers that take turns one stores while the other multiplies, without panels")
        if self.panels and (self.swapped or self.tile_b % LEAST_COLUMNS):
            raise PluginError(f"{self.name}: panels are of rows of x, and of a multiple of {LEAST_COLUMNS} rows of the weight")
        if not 0 <= self.panels <= self.all_panels:
            raise PluginError(f"{self.name}: {self.panels} panels, a consumer's share of a tile has {self.all_panels}")
        if reason := unfit(self):
            raise PluginError(f"{self.name}: {reason}")

    @property
    def name(self) -> str:
        """What tables call it."""
        flags = "_swap" * self.swapped + "_p" * self.promoted + "_t" * self.turns + "_k" * self.stream
        flags += f"_b{self.panels}" * (self.panels > 0)
        tile = f"{self.tile_m}x{self.tile_n}"
        return f"ptx_{tile}_s{self.stages}_c{self.consumers}_x{self.cluster}_g{self.group}{flags}_r{REVISION}"

    @property
    def tile_a(self) -> int:
        """Rows of a in a tile."""
        return self.tile_n if self.swapped else self.tile_m

    @property
    def tile_b(self) -> int:
        """Rows of b in a tile."""
        return self.tile_m if self.swapped else self.tile_n

    @property
    def box_b(self) -> int:
        """Rows of b that one thread block loads."""
        return self.tile_b // self.cluster

    @property
    def sharing(self) -> int:
        """Consumers that share a tile, and release each of its stages."""
        return 1 if self.turns else self.consumers

    @property
    def rows(self) -> int:
        """Rows of a of one consumer."""
        return self.tile_a // self.sharing

    @property
    def blocks(self) -> int:
        """Matrix instructions of a consumer for each step of 16 along K."""
        return self.rows // SIDE

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return self.blocks * self.accumulators_per_block

    @property
    def accumulators_per_block(self) -> int:
        """Accumulators of a thread for one matrix instruction: 64 rows over 128 threads."""
        return self.tile_b // 2

    @property
    def portion(self) -> int:
        """Rows of b of one matrix instruction."""
        return self.tile_b // 2 if self.promoted and self.tile_b > MOST_PORTION else self.tile_b

    @property
    def portions(self) -> list[tuple[int, int]]:
        """What a consumer multiplies of a stage before it adds the accumulators up: block of 64 rows of a, and first row of b."""
        return [(block, first) for block in range(self.blocks) for first in range(0, self.tile_b, self.portion)]

    @property
    def threads(self) -> int:
        """Of a thread block."""
        return GROUP_THREADS * (1 + self.consumers)

    @property
    def stage_bytes(self) -> int:
        """Of one stage: rows of 128 bytes, those of a first. Its barrier waits for all: rows beyond an operand come as zeros."""
        return (self.tile_a + self.tile_b) * STEP_BYTES

    @property
    def panel_columns(self) -> int:
        """Columns of a panel: 64, 32 or 16, the most of which a tile is made."""
        return math.gcd(self.tile_b, PANEL_COLUMNS)

    @property
    def panel_bytes(self) -> int:
        """Of one panel: 64 rows of outputs of 16 bits, a multiple of 1024."""
        return SIDE * self.panel_columns * 2

    @property
    def all_panels(self) -> int:
        """Panels of a consumer's share of a tile."""
        return self.blocks * self.tile_b // self.panel_columns

    @property
    def shared_bytes(self) -> int:
        """Of a thread block: stages, panels, two barriers for each stage, words, and barriers of turns."""
        behind = MOST_CONSUMERS * (WORD_BYTES + self.turns * BARRIER_BYTES)
        panels = self.consumers * self.panels * self.panel_bytes
        return self.stages * (self.stage_bytes + 2 * BARRIER_BYTES) + panels + behind

    @property
    def entry_registers(self) -> int:
        """Registers of a thread when the kernel starts."""
        return FEW_REGISTERS if self.consumers == 1 and self.accumulators <= FEW_ACCUMULATORS else ENTRY_REGISTERS

    @property
    def producer_registers(self) -> int:
        """Registers of a thread of the producer."""
        return REGISTERS[self.consumers][0]

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread of a consumer."""
        return REGISTERS[self.consumers][1]

    @property
    def resident(self) -> int:
        """Thread blocks that an SM holds at once."""
        return min(SM_SHARED // (self.shared_bytes + SYSTEM_SHARED), SM_REGISTERS // (self.entry_registers * self.threads))


def config_of(name: str) -> KernelConfig:
    """The config of a name.

    Raises:
        PluginError: it is none of this revision.
    """
    if not (match := _NAME.fullmatch(name)):
        raise PluginError(f"{name!r} names no kernel of this plugin's for sm_90")
    *sizes, swapped, promoted, turns, stream, panels, revision = match.groups()
    if int(revision) != REVISION:
        raise PluginError(f"{name} is of revision {revision}, this is {REVISION}: tune again")
    flags = {"swapped": bool(swapped), "promoted": bool(promoted), "turns": bool(turns), "stream": bool(stream)}
    config = KernelConfig(*map(int, sizes), **flags, panels=int(panels or 0))
    if config.name != name:
        raise PluginError(f"{name} is not how {config.name} is written")
    return config


@attrs.frozen
class Variant:
    """A config for the dtypes of a shape: one text.

    Attributes:
        config: of the kernel.
        dtype: of the operands, one of `ELEMENT_BYTES`.
        outdtype: of the output; ``fp32``, too.
        bias: dtype of the bias; empty without one.
        split: whether several thread blocks share the K of one tile.
        together: elements of a row of the output that may be stored at once, because its size is a multiple of them: 1, 2 or 8.
        scale: kind of the operands' scales: ``none``, ``tensor``, ``row`` or ``block``.
        columns: whether the weight lies in columns of 128 bytes along K, one for each step, all rows of each side by side.
        transposed: whether the scales of x by block lie block of K by block of K, not row by row.
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

    def __attrs_post_init__(self) -> None:
        if self.config.stream and not self.split:
            raise PluginError(f"{self.config.name}: thread blocks share the K of tiles")
        if self.config.panels and (self.outdtype == "fp32" or self.together != LINE):
            raise PluginError(f"{self.config.name}: the copy engine stores outputs of 16 bits, in rows of a multiple of {LINE}")

    @property
    def step(self) -> int:
        """Elements along K of a stage."""
        return step_of(self.dtype)

    @property
    def accumulator_kind(self) -> str:
        """Kind of the registers of accumulators: int8 products have accumulators of 32 bits."""
        return "b32" if self.dtype == "int8" else "f32"


def step_of(dtype: str) -> int:
    """Elements along K of a stage."""
    return STEP_BYTES // ELEMENT_BYTES[dtype]


def unknown(name: str) -> str:
    """Why no config has this name, or an empty text."""
    try:
        config_of(name)
    except PluginError as error:
        return str(error)
    return ""

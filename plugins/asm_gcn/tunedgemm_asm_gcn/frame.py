"""Allocate the registers of one kernel by purpose."""

from __future__ import annotations

import attrs
from tunedgemm_asm.abi import ABIS

from tunedgemm_asm_gcn.names import HALVES, KernelConfig
from tunedgemm_asm_gcn.registers import Reg, Registers

ABI = ABIS["tunedgemm-bf16"]


@attrs.define
class Frame:
    """Registers that the parts of a kernel have in common.

    Attributes:
        config: the kernel's configuration.
        given: allocator of other registers.
        kernarg, tile, part: initial scalars of a wave: address of the arguments, workgroup index
            along x,
            which becomes the tile's index, and along z, the index of the split.
        lane: index of the lane in its workgroup, later in its wave.
        arguments: kernel arguments as in memory.
        at_m, at_n: position of the tile along M and N.
        wave_m, wave_n: position of the wave along M and N.
        from_a, from_b: buffer descriptors of the next loads.
        steps: steps left to multiply.
        left_a, left_b: steps left to load; the same register for a plain weight.
        spare: scratch scalars; two of them are named before the loop (`wave`, `begin`).
        offset_a, offset_b: a lane's offset of each load from its descriptor.
        staged: loads on their way to LDS, by set; x first.
        blocks_a, blocks_b: MFMA operands by half of a step, or for a shuffled weight by set and
            half.
        write: LDS address that a lane writes, or a wave where loads write LDS directly.
        read_a, read_b: LDS addresses that a lane reads, by buffer and half.
        accumulators: accumulators, four for each block.
    """

    config: KernelConfig
    given: Registers
    kernarg: Reg
    tile: Reg
    part: Reg
    lane: Reg
    arguments: Reg
    at_m: Reg
    at_n: Reg
    wave_m: Reg
    wave_n: Reg
    from_a: Reg
    from_b: Reg
    steps: Reg
    left_a: Reg
    left_b: Reg
    spare: Reg
    offset_a: Reg
    offset_b: Reg
    staged: tuple[Reg, ...]
    blocks_a: tuple[Reg, ...]
    blocks_b: tuple[Reg, ...]
    write: Reg
    read_a: tuple[Reg, ...]
    read_b: tuple[Reg, ...]
    accumulators: Reg

    def argument(self, name: str) -> Reg:
        """Return the scalars of an argument."""
        field = ABI.field(name)
        return self.arguments[field.offset // 4 : (field.offset + field.bytes) // 4]

    @property
    def wave(self) -> Reg:
        """Return the index of the wave in its workgroup, valid until loads are placed."""
        return self.spare[4]

    @property
    def begin(self) -> Reg:
        """Return the first element along K, valid until operands are described."""
        return self.spare[5]

    @property
    def loose(self) -> Reg:
        """Return scratch vector registers for the code before the loop: those of the first
        operands.
        """
        return self.blocks_a[0]

    def accumulators_of(self, m: int, n: int) -> Reg:
        """Return the accumulators of a block."""
        first = 4 * (m * self.config.blocks_n + n)
        return self.accumulators[first : first + 4]

    def lds(self, step: int) -> Reg:
        """Return the part of LDS that holds a step."""
        return Reg("lds", step % self.config.buffers)


def frame_of(config: KernelConfig) -> Frame:
    """Allocate the registers of a kernel.

    Raises:
        PluginError: the kernel needs more registers than exist.
    """
    given = Registers()
    direct = config.target.direct
    sets_b = config.sets * HALVES if config.shuffled else HALVES
    kernarg, tile, part = given("s", 2), given("s"), given("s")
    left = given("s")
    return Frame(
        config=config, given=given, kernarg=kernarg, tile=tile, part=part,
        lane=given("v"),
        arguments=given("s", ABI.size // 4, align=8),
        at_m=given("s"), at_n=given("s"), wave_m=given("s"), wave_n=given("s"),
        from_a=given("s", 4), from_b=given("s", 4),
        steps=given("s"), left_a=left, left_b=given("s") if config.shuffled else left,
        spare=given("s", 8),
        offset_a=given("v", config.loads_a, align=1),
        offset_b=given("v", config.blocks_n if config.shuffled else config.loads_b, align=1),
        staged=() if direct else tuple(given("v", 4 * (config.loads_a + config.loads_b)) for _ in range(config.prefetch)),
        blocks_a=tuple(given("v", 4 * config.blocks_m) for _ in range(HALVES)),
        blocks_b=tuple(given("v", 4 * config.blocks_n) for _ in range(sets_b)),
        write=given("s" if direct else "v"),
        read_a=tuple(given("v", HALVES, align=1) for _ in range(config.buffers)),
        read_b=() if config.shuffled else tuple(given("v", HALVES, align=1) for _ in range(config.buffers)),
        accumulators=given("a", 4 * config.blocks),
    )  # fmt: skip

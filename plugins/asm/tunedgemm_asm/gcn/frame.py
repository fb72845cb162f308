"""The registers of one kernel, by what they are for."""

from __future__ import annotations

import attrs

from tunedgemm_asm.abi import ABIS
from tunedgemm_asm.gcn.names import HALVES, KernelConfig
from tunedgemm_asm.gcn.registers import Reg, Registers

ABI = ABIS["tunedgemm-bf16"]


@attrs.define
class Frame:
    """What the parts of a kernel share.

    Attributes:
        config: what the kernel is.
        given: gives out registers that no part has.
        kernarg, tile, part: what the hardware starts a wave with: address of the arguments; number of the workgroup along x, which
            becomes the tile's; and along z, which is the part of K.
        lane: number of the lane in its workgroup, later in its wave.
        arguments: as they lie in memory.
        at_m, at_n: which tile along M and along N.
        wave_m, wave_n: which wave along them.
        from_a, from_b: buffer descriptors of what is loaded next.
        steps: left to multiply.
        left_a, left_b: left to load; both are one for a plain weight.
        spare: scalars for a part's own use; two of them have names of their own before the loop (`wave`, `begin`).
        offset_a, offset_b: of each load from its descriptor, of a lane.
        staged: loads on their way to LDS, by set; x first.
        blocks_a, blocks_b: operands of the products, by half of a step, or for a shuffled weight by set and half.
        write: address in LDS to which a lane writes; or of a wave, where loads end there.
        read_a, read_b: addresses in LDS from which a lane reads, by buffer and half.
        accumulators: accumulators, four of each product.
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
        """The scalars that hold an argument."""
        field = ABI.field(name)
        return self.arguments[field.offset // 4 : (field.offset + field.bytes) // 4]

    @property
    def wave(self) -> Reg:
        """Number of the wave in its workgroup, until loads are placed."""
        return self.spare[4]

    @property
    def begin(self) -> Reg:
        """First element along K, until operands are described."""
        return self.spare[5]

    @property
    def loose(self) -> Reg:
        """Vector registers for what is done before the loop: those of the first operands."""
        return self.blocks_a[0]

    def accumulators_of(self, m: int, n: int) -> Reg:
        """The accumulators of a product."""
        first = 4 * (m * self.config.blocks_n + n)
        return self.accumulators[first : first + 4]

    def lds(self, step: int) -> Reg:
        """The part of LDS that holds a step."""
        return Reg("lds", step % self.config.buffers)


def frame_of(config: KernelConfig) -> Frame:
    """Registers for a kernel.

    Raises:
        PluginError: it would need more than there are.
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

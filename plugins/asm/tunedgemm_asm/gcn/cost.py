"""What a kernel takes, and what that predicts; counted from its instructions, never timed."""

from __future__ import annotations

from collections import Counter

import attrs

from tunedgemm_asm.gcn.kernel import stream_of, vectors
from tunedgemm_asm.gcn.loop import LOOP
from tunedgemm_asm.gcn.names import STEP_BYTES, KernelConfig
from tunedgemm_asm.gcn.resources import REGISTER_GRANULE, REGISTERS, WAVES
from tunedgemm_asm.gcn.stream import Label, Op

#: Cycles in which a wave's next instruction can be issued.
_ISSUE = 4
#: Bytes that LDS takes in a cycle, by assumption on both architectures; it gives four for each of its banks.
_LDS_WRITES = 128


@attrs.frozen
class Cost:
    """Of one kernel.

    Attributes:
        plan: the kernel.
        vectors, sums, scalars: registers of a lane in front of the accumulators, accumulators, scalars of a wave.
        step: instructions of a wave in a step along K, by unit.
    """

    plan: KernelConfig
    vectors: int
    sums: int
    scalars: int
    step: dict[str, float]

    @property
    def waves(self) -> int:
        """Waves of a SIMD at once: four waves of a workgroup are one on each SIMD."""
        registers = -(-(self.vectors + self.sums) // REGISTER_GRANULE) * REGISTER_GRANULE
        granule = self.plan.target.lds_granule
        return min(WAVES, REGISTERS // registers, self.plan.target.lds_bytes // (-(-self.plan.lds_bytes // granule) * granule))

    @property
    def product_cycles(self) -> int:
        """Cycles of a SIMD's matrix unit for a step: nothing can be quicker."""
        return round(self.step["mfma"]) * self.plan.target.cycles

    @property
    def issue_cycles(self) -> int:
        """Cycles in which one wave's instructions of a step can be issued; below `product_cycles` the matrix unit is the bound."""
        return round(sum(self.step.values()) * _ISSUE)

    @property
    def lds_cycles(self) -> int:
        """Cycles of LDS for a step of the workgroup: what is read by its waves, and what is written."""
        config = self.plan
        rows = config.tile_m * config.waves_n + (0 if config.shuffled else config.tile_n * config.waves_m)
        return rows * STEP_BYTES // (4 * config.target.lds_banks) + config.buffer_bytes // _LDS_WRITES


def cost(config: KernelConfig) -> Cost:
    """What a kernel takes."""
    stream, f = stream_of(config)
    first = next(at for at, item in enumerate(stream) if item == LOOP)
    last = next(at for at, item in enumerate(stream) if isinstance(item, Op) and item.name == "s_branch" and at > first)
    counted = Counter(item.unit for item in stream[first : last + 1] if not isinstance(item, Label))
    return Cost(
        config, vectors(f), f.accumulators.count, f.given.taken["s"], {unit: count / config.unrolled for unit, count in counted.items()}
    )

"""Predict a kernel's time and occupancy from its instructions; nothing is timed."""

from __future__ import annotations

from collections import Counter

import attrs
from tunedgemm_asm.resources import REGISTERS

from tunedgemm_asm_gcn.kernel import stream_of, vectors
from tunedgemm_asm_gcn.loop import LOOP
from tunedgemm_asm_gcn.names import STEP_BYTES, KernelConfig
from tunedgemm_asm_gcn.resources import REGISTER_GRANULE, WAVES
from tunedgemm_asm_gcn.stream import Label, Op

#: Cycles between two instructions of a wave.
_ISSUE = 4
#: Bytes that LDS stores in a cycle, assumed for both architectures; it loads four from each bank.
_LDS_WRITES = 128


@attrs.frozen
class Cost:
    """Resources and predicted cycles of one kernel.

    Attributes:
        plan: the kernel's configuration.
        vectors, sums, scalars: vector registers of a lane below the accumulators, accumulators,
            scalars of a
            wave.
        step: instructions of a wave in a step along K, by unit.
    """

    plan: KernelConfig
    vectors: int
    sums: int
    scalars: int
    step: dict[str, float]

    @property
    def waves(self) -> int:
        """Return the resident waves of a SIMD; the four waves of a workgroup are one on each SIMD."""
        registers = -(-(self.vectors + self.sums) // REGISTER_GRANULE) * REGISTER_GRANULE
        granule = self.plan.target.lds_granule
        return min(WAVES, REGISTERS // registers, self.plan.target.lds_bytes // (-(-self.plan.lds_bytes // granule) * granule))

    @property
    def product_cycles(self) -> int:
        """Return the MFMA cycles of a SIMD in a step, the lower bound of its time."""
        return round(self.step["mfma"]) * self.plan.target.cycles

    @property
    def issue_cycles(self) -> int:
        """Return the issue cycles of a wave in a step; below `product_cycles` MFMA is the bound."""
        return round(sum(self.step.values()) * _ISSUE)

    @property
    def lds_cycles(self) -> int:
        """Return the LDS cycles of the workgroup in a step: loads and stores of all waves."""
        config = self.plan
        rows = config.tile_m * config.waves_n + (0 if config.shuffled else config.tile_n * config.waves_m)
        return rows * STEP_BYTES // (4 * config.target.lds_banks) + config.buffer_bytes // _LDS_WRITES


def cost_of(config: KernelConfig) -> Cost:
    """Count the resources and instructions of a kernel."""
    stream, f = stream_of(config)
    first = next(at for at, item in enumerate(stream) if item == LOOP)
    last = next(at for at, item in enumerate(stream) if isinstance(item, Op) and item.name == "s_branch" and at > first)
    counted = Counter(item.unit for item in stream[first : last + 1] if not isinstance(item, Label))
    return Cost(
        config, vectors(f), f.accumulators.count, f.given.taken["s"], {unit: count / config.unrolled for unit, count in counted.items()}
    )

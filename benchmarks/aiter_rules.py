"""AITER's choices for shapes without a row, restated as data: rivals of a fitted order."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs
from tunedgemm.shape import Shape


@attrs.frozen
class Rule:
    """A choice and the sizes that it is for; the first rule that holds counts.

    Attributes:
        begin, end: of the kernel's name, behind its prefix.
        k: from and below which K.
        k_step, n_step: divisors of K and N.
        m, n: below which M and N.
        outputs: at most so many elements of the output.
    """

    begin: str
    end: str = "v1"
    k: tuple[float, float] = (0, math.inf)
    k_step: int = 1
    n_step: int = 1
    m: float = math.inf
    n: float = math.inf
    outputs: float = math.inf

    def holds(self, shape: Shape) -> bool:
        """Check the sizes of a shape."""
        below = shape.m < self.m and shape.n < self.n and shape.m * shape.n <= self.outputs
        return below and self.k[0] <= shape.k < self.k[1] and shape.k % self.k_step == shape.n % self.n_step == 0


#: Op -> AITER's rules (``csrc/ck_gemm_*/gemm_*.cu``, 22 August 2026).
DEFAULTS = {
    "a8w8_blockscale": (Rule("1x128x128_256x16x128x256"),),
    "a8w8_blockscale_bpreshuffle": (Rule("1x128x128_256x64x64x128"),),
    "a8w8_bpreshuffle": (
        Rule("128x16x32x512", k=(1536, math.inf), k_step=512, m=256, n=1536),
        Rule("256x16x64x512", k=(1536, math.inf), k_step=512, m=256),
        Rule("256x128x64x128", "2x1_intrawave_v3", k=(1536, math.inf), n=1536),
        Rule("256x128x128x128", "2x1_intrawave_v3", k=(1536, math.inf), n_step=128),
        Rule("256x128x64x128", "2x1_intrawave_v3", k=(1536, math.inf)),
        Rule("128x16x32x128", k=(512, 1536), m=64),
        Rule("256x128x64x128", "2x1_intrawave_v3", k=(512, 1536), m=257),
        Rule("256x128x128x64", "2x1_intrawave_v3", k=(512, 1536)),
        Rule("128x16x256x64", k=(192, 512), k_step=64, m=128),
        Rule("256x32x256x64", k=(192, 512), k_step=64, m=257),
        Rule("256x128x128x64", "2x1_intrawave_v3", k=(192, 512), k_step=64),
    ),
    "a8w8": (
        Rule("256x256x128x64", k=(0, 512)),
        Rule("64x16x16x128", "interwave_v2", m=64, n=2048, k=(512, 2048)),
        Rule("128x16x32x128", "intrawave_v2", m=64, k=(512, 2048)),
        Rule("128x32x16x128", "interwave_v2", m=64, n=2048),
        Rule("64x16x16x256", m=64, k=(2049, math.inf)),
        Rule("64x16x16x128", "interwave_v2", m=64),
        Rule("256x128x128x128", "interwave_v1", k=(512, 1024)),
        Rule("256x128x128x128", "intrawave_v3", m=1024),
        Rule("256x224x256x128", "v3", n=1024),
        Rule("256x256x128x64"),
    ),
}
#: The rules of AITER's pull request 3316 for a8w8_blockscale on gfx942 (head of 27 May 2026).
PR_3316 = (
    Rule("1x128x128_256x16x64x128", k=(128, 129), outputs=307_200),
    Rule("1x128x128_256x32x64x128", k=(128, 129), outputs=2_000_000),
    Rule("1x128x128_256x64x64x128", k=(128, 129)),
    Rule("1x128x128_256x16x64x256", outputs=307_200),
    Rule("1x128x128_256x64x64x256", outputs=1_050_000),
    Rule("1x128x128_256x64x64x256", k=(0, 384)),
    Rule("1x128x128_256x64x128x128", "v3", outputs=2_500_000),
    Rule("1x128x128_256x128x128x128", "v3"),
)


def choice_of(rules: Iterable[Rule], names: Iterable[str], prefix: str, shape: Shape) -> tuple[str, int]:
    """Return the listed kernel, without splits, that the rules name for a shape; ("", 0) for none."""
    rule = next((rule for rule in rules if rule.holds(shape)), None)
    found = [name for name in names if rule and name.startswith(f"{prefix}_{rule.begin}_") and name.endswith(rule.end)]
    return (found[0] if found else "", 0)

"""Solutions of untuned calls."""

from __future__ import annotations

from typing import Any

import attrs
from tunedgemm.plugin import Backend, Shape, Solution
from tunedgemm_hipblaslt.limits import SHUFFLED_LAYOUT

PLAIN = Shape("a16w16", 5, 48, 512)
SHUFFLED = attrs.evolve(PLAIN, layout=SHUFFLED_LAYOUT)


def test_untuned_calls(backends: dict[str, Backend], harness: Any) -> None:
    """Only shuffled weights of a16w16 on an MI300 get hipBLASLt's first answer."""
    first = Solution("hipblaslt", "heuristic")
    answers = [
        backends[libtype].heuristic_fallback(shape, device)
        for libtype in ("hipblaslt", "cublaslt")
        for shape, device in ((SHUFFLED, harness.CPU), (PLAIN, harness.CPU), (SHUFFLED, harness.MI350))
    ]
    assert answers == [first, None, None, None, None, None]
    fp8 = attrs.evolve(SHUFFLED, op="a8w8_bpreshuffle", dtype="fp8_e4m3fnuz", scale="row")
    assert backends["hipblaslt"].heuristic_fallback(fp8, harness.CPU) is None

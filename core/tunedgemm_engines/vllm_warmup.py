"""Leave out of vLLM's warm-up of DeepGEMM what our kernels serve.

DeepGEMM compiles for tens of seconds at the first start. A call that returns to it after an error
of ours compiles one kernel then, in 2 to 5 s.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tunedgemm_engines.routes import EVERY_M, routes

#: vLLM's module of the warm-up, its functions for a layer's operands and for the M of a weight, and
#: its switch. With ``full`` all is warmed, and our kernels are timed against DeepGEMM.
_MODULE = "vllm.model_executor.warmup.deep_gemm_warmup"
_OPERANDS, _ROWS = "_deep_gemm_linear_data", "_get_fp8_gemm_nt_m_values"
SWITCH, ALL = "VLLM_DEEP_GEMM_WARMUP", "full"

#: (N, K) of weights that a layer without a route has, too.
_needed: set[tuple[int, ...]] = set()


def skips() -> bool:
    """Check whether this vLLM's warm-up can be shortened, and the user does not ask for all of it."""
    module = sys.modules.get(_MODULE)
    known = module is not None and hasattr(module, _OPERANDS) and hasattr(module, _ROWS)
    return known and os.environ.get(SWITCH, "").strip().lower() != ALL


def skip_served(model: Any) -> None:
    """Shorten the warm-up of a loaded model's layers, those with routes that need no check."""
    module: Any = sys.modules.get(_MODULE)
    if not skips() or not any(route.trusted_to for route in routes.values()):
        return
    routed = {id(ref()) for route in routes.values() if route.trusted_to for ref in route.layers.values()}
    for layer in model.modules():
        if id(layer) not in routed and (operands := getattr(module, _OPERANDS)(layer)) is not None:
            _needed.add(tuple(operands[0].shape))
    theirs = getattr(module, _ROWS)
    if hasattr(theirs, "__wrapped__"):  # for an earlier model
        return

    def m_values(w: Any, max_tokens: int) -> list[int]:
        served = served_to(tuple(w.shape))
        return [m for m in theirs(w, max_tokens) if m > served]

    m_values.__wrapped__ = theirs  # type: ignore[attr-defined]
    setattr(module, _ROWS, m_values)


def served_to(sizes: tuple[int, ...]) -> int:
    """Return the largest M up to which our kernels serve all layers with a weight [N, K]; 0 for none."""
    ours = [route.trusted_to for route in routes.values() if (route.shape.n, route.shape.k) == sizes and route.shape.scale == "block"]
    return min(ours, default=0) if sizes not in _needed else 0


def left_out() -> list[str]:
    """Return a line about what the warm-up left out, if anything."""
    short = [route for route in routes.values() if route.trusted_to and served_to((route.shape.n, route.shape.k))]
    if not short or not skips():
        return []
    layers: dict[int, int] = {}
    for route in short:
        layers[route.trusted_to] = layers.get(route.trusted_to, 0) + len(route.layers)
    if every := layers.pop(EVERY_M, 0):
        return [f"tunedgemm: DeepGEMM is not warmed up for {every} layers, which our kernels serve; {SWITCH}={ALL} warms it up"]
    kept = " and ".join(f"to M={most} for {count} layers" for most, count in sorted(layers.items()))
    return [f"tunedgemm: DeepGEMM is not warmed up {kept}, which our kernels serve untimed; {SWITCH}={ALL} times them"]

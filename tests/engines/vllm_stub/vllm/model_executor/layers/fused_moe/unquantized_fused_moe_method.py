"""The method of vLLM's experts of 16 bits, which has the function that chooses by its name."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend


class UnquantizedFusedMoEMethod:
    """Asks for the experts when it is made."""

    def __init__(self, moe: Any) -> None:
        self.unquantized_backend, self.experts_cls = select_unquantized_moe_backend(moe_config=moe)

"""SGLang's logits."""

from __future__ import annotations

from typing import Any

import torch

#: M of each product that SGLang multiplied itself.
multiplied: list[int] = []


class LogitsProcessor:
    """Computes logits by the weights of the LM head."""

    use_fp32_lm_head = False

    def _compute_lm_head(self, hidden_states: torch.Tensor, lm_head: Any, embedding_bias: torch.Tensor | None = None) -> torch.Tensor:
        multiplied.append(len(hidden_states))
        return torch.matmul(hidden_states.to(lm_head.weight.dtype), lm_head.weight.T)

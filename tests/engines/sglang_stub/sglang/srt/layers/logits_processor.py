"""SGLang's logits."""

from __future__ import annotations

from typing import Any

import torch

#: M of each product that SGLang multiplied itself.
multiplied: list[int] = []


class LogitsProcessor:
    """Computes logits by the weights of the LM head."""

    use_fp32_lm_head = False
    use_fp32_lm_head_output = False
    rl_on_policy_target: str | None = None

    def get_logits(self, hidden_states: torch.Tensor, lm_head: Any, embedding_bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits; 0.5.23 always names `out`, a buffer of float32 or None."""
        return self._compute_lm_head(hidden_states, lm_head, embedding_bias, out=None)

    def _compute_lm_head(
        self, hidden_states: torch.Tensor, lm_head: Any, embedding_bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        multiplied.append(len(hidden_states))
        return torch.matmul(hidden_states.to(lm_head.weight.dtype), lm_head.weight.T)

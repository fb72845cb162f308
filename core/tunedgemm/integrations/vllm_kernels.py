"""Parts that our linear kernels for vLLM share.

For each quantised layer vLLM asks its kernels, in order of preference, whether they run on the
platform and implement the layer (``vllm.model_executor.kernels.linear``, vLLM 0.20 and newer). Ours
come first and take a layer that `left` does not leave to vLLM: `vllm_fp8` and `vllm_int8`, which
`tunedgemm.integrations.vllm` loads.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.platforms import current_platform

#: A kernel's answer to whether it can: vLLM's form.
Answer = tuple[bool, str | None]


def prefer(kernel: type, known: dict[Any, list[Any]]) -> None:
    """Put a kernel of ours before all others of the platform."""
    known.setdefault(current_platform._enum, []).insert(0, kernel)


def chosen_by_vllm(kernels: list[Any], config: Any) -> Any:
    """Return the class of vLLM's own kernel for a layer; None where it has none."""
    able = (one for one in kernels if not one.__name__.startswith("TunedGemm"))
    return next((one for one in able if linear.is_supported_and_can_implement_kernel(one, config, None)[0]), None)


def put(layer: Any, name: str, value: torch.Tensor) -> None:
    """Put a parameter of torch's own class in the place of one of vLLM's, which know how to be loaded: tables serve no subclasses."""
    setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))


def answer(reason: str) -> Answer:
    """Answer vLLM: a kernel can where there is no reason against it."""
    return not reason, reason or None


def of_rows(scale: torch.Tensor, rows: int, single: bool) -> torch.Tensor:
    """Reshape scales of x to [rows, 1]."""
    return scale.reshape(1, 1).expand(rows, 1).contiguous() if single else scale.reshape(rows, 1)


class Everywhere:
    """Runs on every platform: what runs on one is the tables' matter."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Answer yes."""
        del compute_capability
        return True, None

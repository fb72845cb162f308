"""Shared parts of our linear kernels for vLLM.

For each quantised layer vLLM asks its kernels, in order of preference, whether they implement it on
the platform (``vllm.model_executor.kernels.linear``, vLLM 0.20 and newer). Ours come first and take
the layers for which `unserved_reason` gives no reason. They are in `vllm_fp8` and
`vllm_int8`, which `tunedgemm_engines.vllm` loads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.platforms import current_platform

from tunedgemm_engines.rows import record_unrouted
from tunedgemm_engines.start import described

#: vLLM's form of a kernel's answer whether it can run.
Answer = tuple[bool, str | None]


def prefer(kernel: type, kernels_by_platform: dict[Any, list[Any]]) -> None:
    """Put our kernel before all others of the platform."""
    kernels_by_platform.setdefault(current_platform._enum, []).insert(0, kernel)


def chosen_by_vllm(kernels: list[Any], config: Any) -> Any:
    """Return the class of vLLM's own kernel for a layer, or None."""
    theirs = (kernel for kernel in kernels if not kernel.__name__.startswith("TunedGemm"))
    return next((kernel for kernel in theirs if linear.is_supported_and_can_implement_kernel(kernel, config, None)[0]), None)


def replace_parameter(layer: Any, name: str, value: torch.Tensor) -> None:
    """Replace a parameter of a vLLM class by a torch one, since tables serve no subclasses."""
    setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))


def answering(reason_of: Callable[[Any, Any], str]) -> Any:
    """Make ``can_implement`` from a function that returns why not, or "".

    An error counts as a reason, so that vLLM chooses its own kernel.
    """

    @functools.wraps(reason_of)
    def can_implement(kernel: Any, config: Any) -> Answer:
        try:
            reason = reason_of(kernel, config)
        except Exception as error:  # a plugin, or a vLLM of another form, may raise anything
            reason = f"asking the tables failed ({described(error)})"
            record_unrouted(reason, "")
        return not reason, reason or None

    return classmethod(can_implement)


class Everywhere:
    """Mix-in of kernels for every platform, since the tables decide."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Return True, since the tables decide."""
        del compute_capability
        return True, None

"""vLLM's parameters, which know how a checkpoint's tensors are laid out and loaded."""

from __future__ import annotations

from typing import Any

import torch


class BasevLLMParameter(torch.nn.Parameter):
    """A parameter with a loader."""

    def __new__(cls, data: torch.Tensor, **_: Any) -> Any:
        """Make one without a gradient."""
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor, **dims: int) -> None:
        del data
        self.dims = dims


class PackedvLLMParameter(BasevLLMParameter):
    """One with several codes in each element."""

    @property
    def input_dim(self) -> int:
        """The dimension of K."""
        return self.dims["input_dim"]

    @property
    def output_dim(self) -> int:
        """The dimension of N."""
        return self.dims["output_dim"]

    @property
    def packed_dim(self) -> int:
        """The packed one."""
        return self.dims["packed_dim"]

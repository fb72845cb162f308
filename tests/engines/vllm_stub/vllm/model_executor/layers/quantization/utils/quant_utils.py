"""How vLLM says what is quantised by which scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class GroupShape(NamedTuple):
    """Rows and columns that share a scale; -1 is all of them."""

    row: int
    col: int

    def is_per_tensor(self) -> bool:
        """One scale in all."""
        return tuple(self) == (-1, -1)

    def is_per_token(self) -> bool:
        """One a row."""
        return tuple(self) == (1, -1)

    def is_per_channel(self) -> bool:
        """One a column of the transposed weight."""
        return tuple(self) == (-1, 1)

    def is_per_group(self) -> bool:
        """One for some elements of a row."""
        return self.row == 1 and self.col >= 1


@dataclass(frozen=True)
class ScaleDesc:
    """Scales: their dtype, whether they are known ahead, and what shares one."""

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True)
class QuantKey:
    """A quantised dtype and its scales."""

    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True

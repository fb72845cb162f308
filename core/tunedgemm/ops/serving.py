"""Serving: the part of a dispatcher that an op's public functions use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from tunedgemm.ops.op import Op

#: A launcher, or a function that takes its place.
Call = Callable[..., "torch.Tensor"]

#: Operands in the op's order, the dtype of the output or None, and the op's fields: the arguments of `Serving.call`.
Arguments = tuple[tuple["torch.Tensor | None", ...], "torch.dtype | None", dict[str, Any]]

#: From the arguments of a hot function to those of `Serving.call`; Python that a compiler can trace.
Place = Callable[..., Arguments]


class Serving(Protocol):
    """Launchers of one op by cache key, and the ways to one that is not cached yet.

    `tunedgemm.dispatch.dispatcher.Dispatcher` implements and documents it.
    """

    op: Op
    launchers: dict[tuple[Any, ...], Call]

    def call(self, *operands: torch.Tensor | None, otype: torch.dtype | None = None, **fields: Any) -> torch.Tensor:
        """Serve a call of any operands."""

    def resolve(
        self, key: tuple[Any, ...] | None, operands: tuple[Any, ...], otype: torch.dtype | None = None, **fields: Any
    ) -> torch.Tensor:
        """Serve a call whose key is new."""

    def demote(
        self, error: Exception, key: tuple[Any, ...] | None, operands: tuple[Any, ...], otype: torch.dtype | None = None, **fields: Any
    ) -> torch.Tensor:
        """Serve a call whose launcher raised."""

    def preferred(self, x: Any, weight: Any, shuffled_weight: Any, *rest: Any, otype: torch.dtype | None = None) -> Any:
        """Choose between a plain weight and its shuffled copy."""

    def hot(self, inner: Call, place: Place) -> Call:
        """Register a function that reads addresses; returns it."""

"""What the files below dispatch see of a dispatcher."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tunedgemm.device import Device
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    from tunedgemm.dispatch.calls import Call
    from tunedgemm.dispatch.choice import Explanation
    from tunedgemm.ops.op import Op


class Serving(Protocol):
    """The tables, backends and bound launchers of one op; `dispatcher.Dispatcher` documents them."""

    op: Op
    above: tuple[Path, ...]
    preferences: dict[tuple[Any, ...], bool]

    def torchs(self, shape: Shape, device: Device) -> Call:
        """Torch's own call."""

    def knows(self, shape: Shape, device: Device) -> bool:
        """Whether a shape is bound."""

    def bound(self, shape: Shape, device: Device) -> Explanation:
        """Bind a shape, and say what serves it."""

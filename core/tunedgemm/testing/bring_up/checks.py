"""The checks of the bring-up kit, as data, in the order of their value."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from tunedgemm.testing.bring_up.backend_checks import graphs, kernels, outputs, served, streams
from tunedgemm.testing.bring_up.bench import Bench, Verdict
from tunedgemm.testing.bring_up.device_checks import clocks, dispatch, formats, shuffles
from tunedgemm.testing.bring_up.tuning_check import tune


@attrs.frozen
class Check:
    """One check of the kit.

    Attributes:
        name: its name in reports and in docs/verified.md.
        per: ``device``; ``shape`` of a backend; ``format``, the most awkward shape of each op and
            format; ``list``, the most regular one; ``tuned``, shapes of real models.
        turn: turn of its first item; all items of a turn come before those of the next.
        run: the check.
    """

    name: str
    per: str
    turn: float
    run: Callable[[Bench], Verdict]

    @property
    def needs_gpu(self) -> bool:
        """Tell whether a CPU cannot run it."""
        return self.run in (graphs, clocks)


CHECKS: tuple[Check, ...] = (
    Check("formats", "device", 0, formats),
    Check("shuffles", "device", 0, shuffles),
    Check("dispatch", "device", 0, dispatch),
    Check("clocks", "device", 0, clocks),
    Check("outputs", "shape", 0, outputs),
    Check("graphs", "format", 0.5, graphs),
    Check("streams", "format", 0.5, streams),
    Check("kernels", "list", 0.5, kernels),
    Check("tune", "tuned", 0, tune),
    Check("served", "format", 1.5, served),
)  # fmt: skip

"""Timing: what became of one solution on one shape; one line of the trial log."""

from __future__ import annotations

import json
from typing import Any

import attrs

from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

#: Version of the trial log's lines. Older versions stay readable.
SCHEMA = 2

#: status word -> what it says
STATUSES = {
    "ok": "measured and right",
    "screened": "dropped after a rough timing: others were faster",
    "wrong": "its output differs from the reference",
    "unsupported": "the backend refused it for this shape, with a reason",
    "failed": "it raised an exception",
    "out_of_resources": "it needs more shared memory or registers than the device has",
    "out_of_memory": "the device's memory did not suffice",
    "compile_failed": "its kernel did not compile",
    "compile_timeout": "compiling or binding it took longer than --timeout",
    "hung": "its calls took longer than --kernel_timeout; its process was killed",
    "crashed": "its process died",
    "fault": "the device faulted (illegal address or the like), which ended its process",
    "leaks": "every call leaves memory behind",
    "nondeterministic": "repeated runs gave other bits, and --deterministic was asked for",
    "batch_variant": "a row's bits depend on M, and --batch-invariant was asked for",
}


@attrs.frozen
class Timing:
    """What became of one solution on one shape.

    Attributes:
        shape, solution: what was run.
        status: a word of `STATUSES`.
        us: median device time of one call in microseconds, weights cold; 0 where it was not
            measured.
        noise: half width of the median's 95 % interval, relative to it.
        samples: how many rounds the median is over.
        err_ratio: share of elements outside AITER's tolerance of the reference.
        row_error: norm of the worst row's error, relative to the norm of that row of the reference.
        clock_mhz: SM clock beside the measurement, 0 where the driver does not answer.
        throttled: why the driver held the clock back then, "" where it did not or does not answer.
        deterministic: whether repeated runs gave the same bits; None where that was not tested.
        batch_invariant: whether a row's bits were the same for several M; None where that was not
            tested.
        detail: the reason of a status that is not ``ok``.
    """

    shape: Shape
    solution: Solution
    status: str = attrs.field(validator=attrs.validators.in_(STATUSES))
    us: float = 0.0
    noise: float = 0.0
    samples: int = 0
    err_ratio: float = 0.0
    row_error: float = 0.0
    clock_mhz: int = 0
    throttled: str = ""
    deterministic: bool | None = None
    batch_invariant: bool | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether this solution may be selected."""
        return self.status == "ok" and 0.0 < self.us < float("inf")

    def to_json(self) -> str:
        """One line of the trial log."""
        fields: dict[str, Any] = {a.name: getattr(self, a.name) for a in attrs.fields(type(self))}
        return json.dumps({"schema": SCHEMA, **fields, "shape": self.shape.to_dict(), "solution": self.solution.to_dict()})

    @classmethod
    def from_json(cls, line: str) -> Timing:
        """Read one line of the trial log.

        Raises:
            ValueError: the line is no JSON object of a known schema.
        """
        fields = json.loads(line)
        if not isinstance(fields, dict) or fields.pop("schema", None) not in range(1, SCHEMA + 1):
            raise ValueError(f"not a trial of schema 1 to {SCHEMA}: {line[:80]!r}")
        known = {a.name for a in attrs.fields(cls)}
        fields = {name: value for name, value in fields.items() if name in known}
        fields["shape"] = Shape.from_dict(fields["shape"])
        fields["solution"] = Solution.from_dict(fields["solution"])
        return cls(**fields)

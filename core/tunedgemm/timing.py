"""Timing: the result of one solution on one shape, as a line of the trial log."""

from __future__ import annotations

import json
from typing import Any

import attrs

from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

#: Schema version of the trial log; older versions stay readable.
SCHEMA = 2

#: Status -> its meaning.
STATUSES = {
    "ok": "measured and correct",
    "screened": "dropped after a rough timing: others were faster",
    "wrong": "its output differs from the reference",
    "unsupported": "the backend refused it for this shape, with a reason",
    "failed": "it raised an exception",
    "out_of_resources": "it needs more shared memory or registers than the device has",
    "out_of_memory": "the device ran out of memory",
    "compile_failed": "its kernel did not compile",
    "compile_timeout": "compiling or binding it took longer than --timeout",
    "hung": "its calls took longer than --kernel_timeout; its process was killed",
    "crashed": "its process died",
    "fault": "the device faulted (illegal address or the like), which ended its process",
    "leaks": "every call leaks memory",
    "nondeterministic": "repeated runs gave other bits, under --deterministic",
    "batch_variant": "a row's bits depend on M or its place, under --batch-invariant",
}
#: Begins the detail of a kernel that refuses some M, and whose bits were not measured further.
OTHER_BITS = "no kernel that serves every M has its bits"


def _status(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or value not in STATUSES:
        raise ValueError(f"{attribute.name!r} must be one of {', '.join(STATUSES)} (got {str(value)[:40]!r})")


def _typed(what: str, *types: type) -> Any:
    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{attribute.name!r} must be {what} (got {str(value)[:40]!r})")

    return check


_NUMBER, _COUNT, _TEXT = _typed("a number", int, float), _typed("a whole number", int), _typed("text", str)
_FLAG = _typed("true, false or null", bool, type(None))


@attrs.frozen
class Timing:
    """The result of one solution on one shape.

    Attributes:
        shape, solution: the shape and the solution.
        status: a key of `STATUSES`.
        us: median device time of one call with cold weights, in microseconds; 0 if not measured.
        noise: relative half width of the median's 95 % confidence interval.
        samples: number of rounds behind the median.
        err_ratio: fraction of elements outside AITER's tolerance.
        row_error: error norm of the worst row, relative to the norm of its reference.
        clock_mhz: SM clock during the measurement; 0 if unknown.
        throttled: throttling reason; "" if none or unknown.
        deterministic: whether repeated runs were bitwise equal; None if not tested.
        batch_invariant: whether rows were bitwise equal for several M; None if not tested.
        bits: label of the bit class, in trials of M = 0; see `tunedgemm.tuner.bits`.
        detail: the reason of a status other than ``ok``; in trials of M = 0, also the M refused.
    """

    shape: Shape
    solution: Solution
    status: str = attrs.field(validator=_status)
    us: float = attrs.field(default=0.0, validator=_NUMBER)
    noise: float = attrs.field(default=0.0, validator=_NUMBER)
    samples: int = attrs.field(default=0, validator=_COUNT)
    err_ratio: float = attrs.field(default=0.0, validator=_NUMBER)
    row_error: float = attrs.field(default=0.0, validator=_NUMBER)
    clock_mhz: int = attrs.field(default=0, validator=_COUNT)
    throttled: str = attrs.field(default="", validator=_TEXT)
    deterministic: bool | None = attrs.field(default=None, validator=_FLAG)
    batch_invariant: bool | None = attrs.field(default=None, validator=_FLAG)
    bits: str = attrs.field(default="", validator=_TEXT)
    detail: str = attrs.field(default="", validator=_TEXT)

    @property
    def ok(self) -> bool:
        """Check whether the solution passed and has a time."""
        return self.status == "ok" and 0.0 < self.us < float("inf")

    def to_json(self) -> str:
        """Return one line of the trial log."""
        fields: dict[str, Any] = {a.name: getattr(self, a.name) for a in attrs.fields(type(self))}
        return json.dumps({"schema": SCHEMA, **fields, "shape": self.shape.to_dict(), "solution": self.solution.to_dict()})

    @classmethod
    def from_json(cls, line: str) -> Timing:
        """Parse one line of the trial log.

        Raises:
            ValueError: the line is not a JSON object of a known schema.
        """
        fields = json.loads(line)
        if not isinstance(fields, dict) or fields.pop("schema", None) not in range(1, SCHEMA + 1):
            raise ValueError(f"a trial must be a JSON object of schema 1 to {SCHEMA} (got {line[:80]!r})")
        names = {a.name for a in attrs.fields(cls)}
        fields = {name: value for name, value in fields.items() if name in names}
        if missing := [name for name in ("shape", "solution", "status") if name not in fields]:
            raise ValueError(f"lacks {missing[0]!r}")
        fields["shape"] = Shape.from_dict(fields["shape"])
        fields["solution"] = Solution.from_dict(fields["solution"])
        return cls(**fields)

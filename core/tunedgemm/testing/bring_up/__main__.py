"""Child of the bring-up kit: ``python -m tunedgemm.testing.bring_up``.

The process reads one JSON object per line from standard input: ``{"plan": libtypes}`` or an item of
the plan. It answers each with lines ``{"at": [step, kernel, seconds]}``, and one ``{"answer": …}``.
It ends when the device's context is lost; its parent starts another.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import IO, Any

import attrs

from tunedgemm.backends.backend import Backend
from tunedgemm.backends.registry import Registry
from tunedgemm.device import current_device
from tunedgemm.errors import TunedGemmError
from tunedgemm.process.plugin_guard import attempt
from tunedgemm.shape import Shape
from tunedgemm.testing.bring_up.bench import Bench, Verdict
from tunedgemm.testing.bring_up.checks import CHECKS
from tunedgemm.testing.bring_up.plan import LOAD_S, plan


class Child:
    """Answers the requests of the parent.

    Args:
        sink: where answers are written.
    """

    def __init__(self, sink: IO[str]) -> None:
        self._sink, self._libtypes = sink, "all"
        self._registry, self._device = Registry(), current_device()

    def answer(self, request: dict[str, Any]) -> None:
        """Answer one request; raise SystemExit when the device's context is lost."""
        self._announce("load", request.get("libtype", ""), LOAD_S)
        if "plan" in request:
            self._write({"answer": plan(self._registry, self._device, request["plan"], self._announce)})
            return
        verdict, raised = attempt(self._run, request)
        verdict = Verdict("failed", raised) if raised else verdict
        lost = attempt(_synchronize)[1] if self._device.kind != "cpu" else ""
        if lost and verdict.status in ("ok", "refused"):
            verdict = attrs.evolve(verdict, status="fault", detail=lost)
        self._write({"answer": attrs.asdict(verdict)})
        if lost:
            raise SystemExit(1)

    def _run(self, item: dict[str, Any]) -> Verdict:
        (check,) = [check for check in CHECKS if check.name == item["check"]]
        backend = self._registry.get(item["libtype"]) if item["libtype"] else None
        if item["libtype"] and not isinstance(backend, Backend):
            raise TunedGemmError(str(backend))
        shape = Shape.from_dict(item["shape"]) if item["shape"] else None
        return check.run(Bench(self._device, self._announce, backend, shape, item.get("libtypes", "all")))  # type: ignore[arg-type]

    def _announce(self, step: str, kernel: str, seconds: float) -> None:
        self._write({"at": [step, kernel, seconds]})

    def _write(self, line: dict[str, Any]) -> None:
        self._sink.write(json.dumps(line, default=str) + "\n")
        self._sink.flush()


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def main() -> None:
    """Answer until the parent closes standard input; what plugins print goes to standard error."""
    with os.fdopen(os.dup(1), "w") as sink:
        os.dup2(2, 1)
        child = Child(sink)
        for line in iter(functools.partial(sys.stdin.readline), ""):
            child.answer(json.loads(line))


if __name__ == "__main__":
    main()

"""Measure the gains of rows over the engine's kernels, once per set of tables."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import attrs
import torch
from tunedgemm import dispatcher
from tunedgemm.integrations import current_device, read
from tunedgemm.plugin import Device, device_of
from tunedgemm.tools.files import artifact

from tunedgemm_engines import ahead
from tunedgemm_engines.phases import phase
from tunedgemm_engines.routes import Route, routes, rows_of
from tunedgemm_engines.rows import PREFILL_M, UNTUNED_M, routing, untuned_sizes
from tunedgemm_engines.scales import at_m, explain_row
from tunedgemm_engines.start import spared
from tunedgemm_engines.timing import Arms, difference_of, faster

#: Version of the measurement method; stored gains of other versions are not used.
_MEASURE = "3"
#: M of prefill at which outputs are checked: few, since each check takes start-up time.
_CHECKED = (256, 1024, 4096)


def compare_remembered(log: logging.Logger, engine: str, variable: str, digest: str) -> None:
    """Time the rows of all routes against the engine's kernels, unless an earlier start did.

    Args:
        log: the engine's logger.
        engine: the engine's name and version.
        variable: the environment variable with the time limit in seconds.
        digest: `fingerprint` of the tables.
    """

    seconds = float(read(variable))
    with phase("waiting for compilers"):
        ahead.finish()
    key = f"gains {_MEASURE} {engine} {torch.__version__} {current_device()} {digest}"
    gains: dict[str, float] = {}
    with spared(log, "reading the gains of earlier starts"):
        gains |= json.loads(artifact(key, lambda: b"{}"))
    before = len(gains)
    with phase("timing"), spared(log, "timing the rows against the engine's kernels"):
        compare(seconds, gains)
    if len(gains) > before:
        with spared(log, "keeping the gains for the next start"):
            artifact(key, json.dumps(gains).encode, fresh=True)


def compare(seconds: float, gains: dict[str, float]) -> None:
    """Time every row of every route against the engine's kernel on the model's weights.

    Rows come before untuned kernels, smaller M first. The engine's kernel serves an M that is not
    reached until the next start.

    Args:
        seconds: time limit in seconds; with 0 nothing is timed, and every row serves.
        gains: gains of earlier starts by route and M; successful new ones are added.
    """
    sides: list[tuple[bool, int, Route]] = []
    for route in routes.values():
        route.calls.clear()
        route.failures.clear()
        route.waiting = None
        route.compared = seconds > 0 and route.theirs is not None and route.device.type == "cuda"
        route.untuned, route.trusted_to = frozenset(), 0
        if route.compared:
            with phase("guesses"), routing(f"a layer with {route.shape}"):
                device = device_of(route.device.index or 0)
                rows, route.untuned = rows_of(route.shape, device), frozenset(untuned_sizes(route.shape, device))
                route.trusted_to = _trusted_to(route, device, rows, gains)
                timed = [(False, m, route) for m in rows] + [(True, m, route) for m in route.untuned]
                sides += [side for side in timed if side[1] > route.trusted_to]
    arms: Arms | None = None
    for is_untuned, m, route in sorted(sides, key=lambda side: side[:2]):
        name = f"{route.name} M={m}" + " untuned" * is_untuned
        gain = gains.get(name)
        if gain is None:
            arms = arms or Arms(seconds)
            if arms.spent:
                continue
            gain = _measured(arms, route, m)
            if gain is not None and gain > 0:  # other outputs may be those of one start alone
                gains[name] = gain
        if gain is not None:
            route.verdicts[m] = gain


def _trusted_to(route: Route, device: Device, rows: list[int], gains: dict[str, float]) -> int:
    """Return the largest M up to which ours needs no timing, after a check of its outputs; 0 for none.

    To time an engine's kernel that compiles at its first call takes longer than all else.
    """
    name, layers = f"{route.name} trusted", _alive(route)
    if route.reference is None or not layers:
        return 0
    if name in gains:
        return int(gains[name])
    sizes = sorted({*UNTUNED_M, *PREFILL_M, *(m for m in rows if m < PREFILL_M[-1])})
    most = max(itertools.takewhile(lambda m: _has_kernel(route, m, device), sizes), default=0)
    least: int = UNTUNED_M[-1]
    if most < least or not all(_is_right(route, m, layers[0]) for m in UNTUNED_M):
        return 0
    if not all(_is_right(route, m, layers[0]) for m in _CHECKED if m <= most):
        return least  # the next start checks again
    gains[name] = most
    return most


def _has_kernel(route: Route, m: int, device: Device) -> bool:
    """Check whether a backend serves M; a row may name torch, the best without the engine's kernel alone."""
    described = attrs.evolve(device, index=-1)  # binds nothing
    return bool(explain_row(dispatcher(route.shape.op), at_m(route.shape, m), described).libtype != "torch")


def _is_right(route: Route, m: int, layer: Any) -> bool:
    """Check the outputs of M rows against the reference."""
    if route.reference is None:
        return False
    try:
        with torch.inference_mode():
            operands = route.operands(route.inputs(m), layer)
            return difference_of(route.ours, route.reference, operands, "checks") <= route.tolerance
    except Exception:  # a kernel may raise anything; timing reports it
        return False


def _alive(route: Route) -> list[Any]:
    """Return the layers of a route that still exist."""
    return [layer for layer in (ref() for ref in route.layers.values()) if layer is not None]


def _measured(arms: Arms, route: Route, m: int) -> float | None:
    """Return a route's gain at M; None if no layer is left or a kernel failed."""
    layers = _alive(route)
    if not layers or route.theirs is None:
        return None
    try:
        inputs = route.inputs(m)
        return faster(arms, route.ours, route.theirs, [route.operands(inputs, layer) for layer in layers], route.tolerance)
    except Exception as error:  # a kernel may raise anything, the engine's too
        route.fail(m, error)
        return None

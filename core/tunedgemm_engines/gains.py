"""Measure the gains of rows over the engine's kernels, once per set of tables."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
from tunedgemm import dispatcher
from tunedgemm.integrations import current_device, read
from tunedgemm.plugin import Device, device_of
from tunedgemm.tools.files import artifact

from tunedgemm_engines import ahead
from tunedgemm_engines.phases import phase
from tunedgemm_engines.routes import Route, routes
from tunedgemm_engines.rows import PREFILL_M, UNTUNED_M, routing, rows_of, untuned_sizes
from tunedgemm_engines.scales import at_m, explain_row
from tunedgemm_engines.start import spared
from tunedgemm_engines.timing import Arms, difference_of, faster, needed

#: Version of the measurement method; stored gains of other versions are not used.
_MEASURE = "3"
#: Whether an M is served untuned, the M, and the route.
Side = tuple[bool, int, Route]
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
    sides: list[Side] = []
    arms_of = functools.cache(functools.partial(Arms, seconds))  # without a side no stream is made
    for route in list(routes.values()):
        route.calls.clear()
        route.failures.clear()
        route.waiting = None
        route.compared = seconds > 0 and route.theirs is not None and route.device.type == "cuda"
        route.untuned, route.trusted_to = frozenset(), 0
        own: list[Side] = []
        if route.compared:
            with phase("guesses"), routing(f"a layer with {route.shape}"):
                device = device_of(route.device.index or 0)
                rows, route.untuned = rows_of(route.shape, device), frozenset(untuned_sizes(route.shape, device))
                route.trusted_to = _trusted_to(route, device, rows, gains)
                own = [(False, m, route) for m in rows] + [(True, m, route) for m in route.untuned]
        if route.settle is None:
            sides += [side for side in own if side[1] > route.trusted_to]
        else:  # one at a time, since its layers are repacked for it
            _settle(route, own, arms_of, gains)
    _time(sides, arms_of, gains)


def _time(sides: list[Side], arms_of: Callable[[], Arms], gains: dict[str, float]) -> None:
    """Time sides that no earlier start has timed, rows first, smaller M first, until the budget is spent."""
    for is_untuned, m, route in sorted(sides, key=lambda side: side[:2]):
        name = f"{route.name} M={m}" + " untuned" * is_untuned
        gain = gains.get(name)
        if gain is None:
            arms = arms_of()
            if arms.spent:
                continue
            gain = _measured(arms, route, m)
            if gain is not None and gain > 0:  # other outputs may be those of one start alone
                gains[name] = gain
        if gain is not None:
            route.verdicts[m] = gain


def _settle(route: Route, sides: list[Side], arms_of: Callable[[], Arms], gains: dict[str, float]) -> None:
    """Give all layers of a route to the side that is faster in the mean of the M of its rows.

    Larger M of prefill count, too, since the side has every M. Each M has the same weight.
    """
    if route.settle is None:
        return
    most, reason = max((m for _, m, _ in sides), default=0), ""
    if route.compared and not dispatcher(route.shape.op).settings.needs_calls(route.shape.op):
        sides = [side for side in sides if not (side[0] and any(not other[0] for other in sides))]
        sides = [*sides, *((True, m, route) for m in _CHECKED if m > most)]
        _time(sides, arms_of, gains)
        reason = _slower(route, sorted(m for _, m, _ in sides))
    elif not route.outcome:
        route.outcome = "not timed"
    route.settle(reason)


def _slower(route: Route, sizes: list[int]) -> str:
    """Return why the engine's kernel keeps the layers of a timed route; else note our gain in the route."""
    gains = [route.verdicts[m] for m in sizes if m in route.verdicts]
    if route.failures:
        m, error = next(iter(route.failures.items()))
        return f"a kernel failed at M={m} ({error})"
    worst = min(gains, default=1.0)
    if worst < 0:
        return f"our outputs are not those of {route.engine}'s kernel (relative difference {-worst:.2g})"
    if len(gains) < len(sizes):
        return f"{len(sizes) - len(gains)} of {len(sizes)} M were not timed against {route.engine}'s kernel yet; the next start times them"
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    told = f"{mean:.2f} times as fast as {route.engine}'s kernel in the mean of M={', '.join(map(str, sizes))}, {worst:.2f} at worst"
    route.outcome = told
    return "" if mean > 1 else f"ours would be {told}"


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
        first = route.operands(inputs, layers[0])
        calls = [first, *(route.operands(inputs, layer) for layer in layers[1 : needed(first)])]
        return faster(arms, route.ours, route.theirs, calls, route.tolerance)
    except Exception as error:  # a kernel may raise anything, the engine's too
        route.fail(m, error)
        return None

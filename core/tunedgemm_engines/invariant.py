"""Batch-invariant mode of an engine's routes: check and compare classes at start-up, and log them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from tunedgemm import dispatcher
from tunedgemm.integrations import current_device
from tunedgemm.plugin import Device, device_of

from tunedgemm_engines import ahead
from tunedgemm_engines.bit_classes import PROBES, require_class
from tunedgemm_engines.phases import phase
from tunedgemm_engines.ranks import disagreement
from tunedgemm_engines.routes import EVERY_M, STALE, Product, Route, leave_class, routes
from tunedgemm_engines.scales import at_m, explain_row
from tunedgemm_engines.start import described, spared
from tunedgemm_engines.timing import difference_of

#: M of the products whose rows are compared, and the larger M that they are compared with. Four
#: divides all but one, so that slices of M-major scales are in the engine's order.
_PARTS, _WHOLE = (1, 8, 32, 256), 512

_checked: set[str] = set()
_reasons: dict[str, str] = {}
_agreed: list[str] = []


def check_classes(log: logging.Logger) -> None:
    """Check the classes of new routes on the model's weights; one that fails leaves all M to the engine.

    A route is checked once: when an engine loads weights again, graphs may hold its kernels.
    """
    with phase("waiting for compilers"):
        ahead.finish()
    for route in [route for name, route in routes.items() if name not in _checked]:
        _checked.add(route.name)
        if not route.bit_class or route.theirs is None:
            continue
        with phase("checks"), spared(log, "checking a bit class"):
            try:
                reason = _fault(route)
            except Exception as error:  # a kernel may raise anything
                reason = described(error)
            if reason:
                _switch_off(route, reason)
            else:
                route.trusted_to = EVERY_M
                if route.settle is not None:
                    route.settle("")


def agree(log: logging.Logger, digest: str) -> None:
    """Leave all routes to the engine if ranks differ in classes; once, before graphs are captured.

    Args:
        log: the engine's logger.
        digest: `fingerprint` of the tables.
    """
    if _agreed:
        return
    classes = {f"{route.shape}": route.bit_class for route in routes.values()}
    with phase("comparing ranks"):
        _agreed.append(reason := disagreement(classes, digest))
    if reason:
        log.error("tunedgemm: batch-invariant: all layers keep the engine's kernels: %s; give all ranks the same", reason)
        for route in list(routes.values()):
            _switch_off(route, reason)


def _switch_off(route: Route, reason: str) -> None:
    """Leave all M of a route's shape to the engine's kernel, if it has one."""
    _reasons.setdefault(f"{route.shape}", reason)
    leave_class(route.shape)


def _fault(route: Route) -> str:
    """Return why a class does not hold on a loaded layer: its kernels' bits, or their results.

    Raises:
        ClassMissing: a kernel is of another class, or cannot run.
    """
    layer = next((layer for layer in (ref() for ref in route.layers.values()) if layer is not None), None)
    device = _device(route)
    if layer is None or route.theirs is None:
        require_class(route.bit_class, route.shape, device, PROBES)
        return ""
    reason = _difference(route, layer, route.reference or route.theirs)
    # The M of the calls are among these, and bound by now. After an error torch would serve.
    require_class(route.bit_class, route.shape, device, PROBES)
    return reason


def _difference(route: Route, layer: Any, reference: Product) -> str:
    """Return which rows have other bits in a larger product, or how far the results are from the engine's."""
    with torch.inference_mode():
        x, *scales = route.inputs(_WHOLE)
        whole = _bits(route.ours(*route.operands((x, *scales), layer)))
        for m in _PARTS:
            part = route.operands((x[:m], *(_first_rows(scale, m) for scale in scales)), layer)
            if not torch.equal(_bits(route.ours(*part)), whole[:m]):
                return f"rows of M={m} and M={_WHOLE} have different bits on this model's weights"
        difference = difference_of(route.ours, reference, part, "checks")
    if not difference <= route.tolerance:
        return f"its outputs are not those of {route.engine}'s kernel (relative difference {difference:.2g})"
    return ""


def _device(route: Route) -> Device:
    return device_of(route.device.index or 0) if route.device.type == "cuda" else current_device()


def _bits(out: torch.Tensor) -> torch.Tensor:
    """Return the bits of a product, a copy, since a kernel may return a workspace."""
    return out.contiguous().view(torch.uint8).clone()


def _first_rows(scale: Any, m: int) -> Any:
    """Return the scales of the first rows of x in the order of their tensor."""
    if not isinstance(scale, torch.Tensor) or scale.numel() == 1:
        return scale
    return scale[:m].contiguous() if scale.is_contiguous() else scale[:m].t().contiguous().t()


def summary(sizes: Sequence[int], engine: str, own_mode: str, stale: str = STALE) -> list[str]:
    """Sum up the classes for the engine's log: weights, layers, backends, and what may depend on M.

    Args:
        sizes: the token counts of the engine's CUDA graphs.
        engine: the engine's name.
        own_mode: the engine's switch of its mode if that is off; else "".
        stale: why a route was never called; "" if that is normal.
    """
    ours = [route for route in routes.values() if route.bit_class]
    names, layers = {route.bit_class for route in ours}, sum(len(route.layers) for route in ours)
    lines = [f"tunedgemm: batch-invariant: {len(ours)} weights in {len(names)} bit classes, {layers} layers"]
    for route in routes.values():
        what = f"tunedgemm: batch-invariant: {len(route.layers)} layers with {route.shape}"
        if route.bit_class:
            lines.append(f"{what}: class {route.bit_class} ({', '.join(_libtypes(route, sizes))})")
            if not route.calls and stale and route.settle is None:
                lines.append(f"{what} never reached the tables: {stale}")
        elif route.theirs is None:
            lines.append(f"{what} have no class, and {engine} has no kernel for them: their bits may depend on M")
        else:
            reason = _reasons.get(f"{route.shape}") or next(iter(route.failures.values()), "no class")
            lines.append(f"{what} keep {engine}'s invariant kernels: {reason}")
        if route.failures:
            failed = ", ".join(map(str, sorted(route.failures)))
            lines.append(f"{what}: a kernel failed at M={failed}; bits of these layers may depend on M")
    if own_mode:
        lines.append(f"tunedgemm: batch-invariant: {own_mode} is off: attention, norms and all other layers may depend on the batch")
    return lines


def _libtypes(route: Route, sizes: Sequence[int]) -> list[str]:
    """List the backends that serve a route's class at the sizes of graphs and in prefill."""
    op_dispatcher, device = dispatcher(route.shape.op), _device(route)
    return sorted({explain_row(op_dispatcher, at_m(route.shape, m), device).libtype for m in (*sizes, PROBES[-1])})

"""Hooks of the built-in backend.

One file per op family defines that family's routes; see `route.Route`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from tunedgemm.backends.builtin import a8w8, a16w16, batched, blockscale, both_sides, decoding, fmoe, microscaled
from tunedgemm.backends.builtin.route import Family, Route
from tunedgemm.backends.hookspecs import hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import PluginError
from tunedgemm.libtypes import BUILTIN
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution

NATIVE = "native"
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "a16w16": a16w16.family,
        "a8w8": a8w8.family,
        "a8w8_bpreshuffle": a8w8.family,
        "a8w8_blockscale": blockscale.family,
        "a8w8_blockscale_bpreshuffle": blockscale.family,
        "a4w4_blockscale": decoding.both,
        "a16w4_blockscale": decoding.weight_alone,
        "a16wn": both_sides.family,
        "a8w8_mxfp8": microscaled.family,
        "a4w4_nvfp4": microscaled.family,
        "batched_bf16": batched.floats,
        "batched_a8w8": batched.bytes_,
        "fmoe": fmoe.family,
    }
)


@hookimpl
def library_version(device: Device) -> str:
    """Return the torch version: the vendor libraries behind its routes change with it."""
    return dict(device.versions).get("torch", "")


@hookimpl
def lacks(solution: Solution, shape: Shape, device: Device) -> str:
    """Return an empty text; a route that does not serve the shape is a PluginError."""
    _route(FAMILIES[shape.op], solution, shape, device)
    return ""


@hookimpl
def supports() -> None:
    """Support every shape on every device."""


@hookimpl
def enumerate_solutions(shape: Shape, device: Device) -> Iterator[Solution]:
    """List ``native``, then the other routes; the one that ``native`` stands for is listed once."""
    yield _solution(NATIVE)
    if shape.m == 0:
        return
    family = FAMILIES[shape.op]
    native = family.native(shape, device)
    for name, route in family.routes.items():
        if name != native and not route.unfit(shape, device):
            for split in route.listed(shape, device):
                yield _solution(name, split)


@hookimpl
def heuristic_fallback() -> Solution:
    """Return ``native``, the last resort."""
    return _solution(NATIVE)


@hookimpl
def bind(solution: Solution, shape: Shape, device: Device) -> Launcher:
    """Bind a route; an unknown name, or a route that does not fit the shape, is a PluginError."""
    return _bound(FAMILIES[shape.op], solution, shape, device)


def _solution(name: str, split: int = 0) -> Solution:
    return Solution(BUILTIN, name, split, batch_invariant=False)


def _route(family: Family, solution: Solution, shape: Shape, device: Device) -> Route:
    """Return the route that a solution names.

    Raises:
        PluginError: there is none, or it does not fit the shape.
    """
    # AITER's rows name no route for the default one.
    name = family.native(shape, device) if solution.kernel_name in (NATIVE, "") else solution.kernel_name
    route = family.routes.get(name)
    if route is None:
        raise PluginError(f"torch has no route {name!r} for {shape.op}; use {NATIVE}, {', '.join(family.routes)}")
    if reason := route.unfit(shape, device):
        raise PluginError(f"{name} {reason}")
    return route


def _bound(family: Family, solution: Solution, shape: Shape, device: Device) -> Launcher:
    """Return the launcher of one route for one shape."""
    route = _route(family, solution, shape, device)
    if shape.m == 0:
        return Launcher(_empty(shape))
    call = route.make(shape, device, solution.split_k) if route.splits else route.make(shape, device)
    return Launcher(family.in_order(shape, call), route.graph_safe, keeps_weights=route.keeps_weights, is_nested=route.is_nested)


def _empty(shape: Shape) -> Callable[..., Any]:
    """Return the function of an empty batch, which computes nothing and calls no library."""
    n, out_dtype = shape.n, torch_dtype(shape.outdtype)

    def empty(x: Any, *_: Any) -> Any:
        return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)

    return empty

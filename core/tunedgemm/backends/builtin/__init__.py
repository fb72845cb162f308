"""The built-in backend ``torch``: every route of torch for every op and shape, behind the same hooks.

It ranks last and its route ``native`` never refuses, so it is the final fallback. One file per op
family defines that family's routes; see `route.Route`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from tunedgemm.backends.builtin import a8w8, a16w16, batched, blockscale, fmoe, mxfp4
from tunedgemm.backends.builtin.route import Family, Route
from tunedgemm.backends.hookspecs import hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.platforms import Platform
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import PluginError
from tunedgemm.ops import op_named
from tunedgemm.ops.scale_order import E8M0_ORDERS, M_MAJOR, M_MAJOR_PADDED
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported

LIBTYPE = "torch"
NATIVE = "native"
_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "a16w16": a16w16.family,
        "a8w8": a8w8.family,
        "a8w8_bpreshuffle": a8w8.family,
        "a8w8_blockscale": blockscale.family,
        "a8w8_blockscale_bpreshuffle": blockscale.family,
        "a4w4_blockscale": mxfp4.both,
        "a16w4_blockscale": mxfp4.weight_alone,
        "batched_bf16": batched.floats,
        "batched_a8w8": batched.bytes_,
        "fmoe": fmoe.family,
    }
)
OPS = tuple(_FAMILIES)
PLATFORMS = (Platform(("nvidia",), ran=("H200",)), Platform(("amd",)), Platform(("cpu",), ran=("x86-64",)))
SCALE_ORDERS = (M_MAJOR, M_MAJOR_PADDED, *E8M0_ORDERS)


def library_version(device: Device) -> str:
    """Return the torch version: the vendor libraries behind its routes change with it."""
    return dict(device.versions).get("torch", "")


def lacks(solution: Solution, shape: Shape, device: Device) -> str:
    """Return why no route of that name serves the shape, or an empty text."""
    try:
        if (family := _FAMILIES.get(shape.op)) is not None:
            _route(family, solution, shape, device)
    except PluginError as error:
        return str(error)
    return ""


@hookimpl
def supports() -> bool:
    """Support every shape on every device."""
    return True


@hookimpl
def enumerate_solutions(shape: Shape, device: Device) -> Iterator[Solution]:
    """List ``native``, then the other routes; the one that ``native`` stands for is listed once."""
    yield _solution(NATIVE)
    if shape.m == 0:
        return
    family = _FAMILIES[shape.op]
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
def bind(solution: Solution, shape: Shape, device: Device) -> Launcher | Unsupported:
    """Bind a route; refuse an unknown name, and a route that does not fit the shape."""
    family = _FAMILIES.get(shape.op)
    if family is None:
        return Unsupported(f"torch covers {', '.join(OPS)}, not op {shape.op!r}")
    try:
        call, graph_safe = _bound(family, solution, shape, device)
    except PluginError as error:
        return Unsupported(str(error))
    return Launcher(call, graph_safe=graph_safe)


def torch_launcher(shape: Shape, device: Device) -> Launcher | Unsupported:
    """Bind torch's default call for a shape on a present device, as a placeholder or a baseline.

    Its call takes None for an absent operand, even a trailing one. An op of another distribution
    has no torch routes. Its launcher computes the op's reference, rounded once, and refuses
    shuffled weights.
    """
    launcher = bind(_solution(NATIVE), shape, device) if shape.op in _FAMILIES else _of_reference(shape)
    if isinstance(launcher, Unsupported):
        return launcher
    call = launcher.call

    def shortened(*operands: Any) -> Any:
        while operands[-1] is None:
            operands = operands[:-1]
        return call(*operands)

    return Launcher(shortened, graph_safe=launcher.graph_safe)


def _of_reference(shape: Shape) -> Launcher | Unsupported:
    if shape.layout != "row":
        return Unsupported(f"torch has no call for op {shape.op!r} with weights in the layout {shape.layout}")
    op, dtype = op_named(shape.op), torch_dtype(shape.outdtype)

    def reference(*operands: Any) -> Any:
        return op.reference(shape, operands).to(dtype).reshape(op.fake(*operands, otype=dtype).shape)

    return Launcher(reference, graph_safe=False)


def _solution(name: str, split: int = 0) -> Solution:
    return Solution(LIBTYPE, name, split, batch_invariant=False)


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


def _bound(family: Family, solution: Solution, shape: Shape, device: Device) -> tuple[Callable[..., Any], bool]:
    """Return the function of one route for one shape, and whether it may be captured."""
    route = _route(family, solution, shape, device)
    if shape.m == 0:
        return _empty(shape), True
    call = route.make(shape, device, solution.split_k) if route.splits else route.make(shape, device)
    return family.in_order(shape, call), route.graph_safe


def _empty(shape: Shape) -> Callable[..., Any]:
    """Return the function of an empty batch, which computes nothing and calls no library."""
    n, out_dtype = shape.n, torch_dtype(shape.outdtype)

    def empty(x: Any, *_: Any) -> Any:
        return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)

    return empty

"""Routes of vLLM's linear layers: one op in vLLM's graphs that runs a table's kernel or vLLM's own, whichever is faster at this M.

A route stands for all layers of one product (op, N, K, dtypes, scales). Both sides take the same operands in vLLM's own order, so a layer
keeps the weights and the quantised activations that vLLM made. `compare` times both sides on the layers of the loaded model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from tunedgemm.device import Device, device_of
from tunedgemm.errors import UserError
from tunedgemm.integrations.torch_compile import opaque
from tunedgemm.integrations.vllm_timing import Arms, faster
from tunedgemm.shape import Shape
from tunedgemm.tuned_gemm import dispatcher

#: x, weight [N, K], scales of x, scales of the weight, bias: the last three may be None.
Product = Callable[..., torch.Tensor]


@attrs.define(eq=False)
class Route:
    """The layers of one product.

    Attributes:
        name: what tells the route from others, the same in each process: compiled graphs hold it.
        shape: of one row of x.
        ours, theirs: functions of the operands; *theirs* is None where vLLM has no kernel for such layers.
        inputs: makes x, and its scales or None, of M rows on a device.
        operands: a layer to its weight, the weight's scales and the bias.
        layers: layers by name.
        verdicts: M of a row to how many times faster than vLLM's kernel it was here.
        reasons: M to why a call of it is vLLM's.
        served: M to whether a call of it is ours; what the op reads.
    """

    name: str
    shape: Shape
    ours: Product
    theirs: Product | None
    inputs: Callable[[int, torch.device], tuple[torch.Tensor, torch.Tensor | None]]
    operands: Callable[[Any], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
    layers: dict[str, weakref.ref[Any]] = attrs.field(factory=dict)
    verdicts: dict[int, float] = attrs.field(factory=dict)
    reasons: dict[int, str] = attrs.field(factory=dict)
    served: dict[int, bool] = attrs.field(factory=dict)

    def serves(self, m: int, device: Device) -> bool:
        """Tell whether a call of M rows is ours: a row answers for it, and it was not slower here than vLLM's kernel."""
        known = dispatcher(self.shape.op)
        if self.theirs is None or known.settings.capture or known.on_miss is not None:
            return True
        row, reason = self.row_of(m, device)
        if row is not None and (gain := self.verdicts.get(row)) is not None and gain <= 1:
            reason = f"the row of M={row} was not faster here ({gain:.2f} times vLLM's speed)"
        if reason:
            self.reasons[m] = reason
        return not reason

    def row_of(self, m: int, device: Device) -> tuple[int | None, str]:
        """Return M of the row that answers for M rows of x, or None and the reason why none does."""
        known, shape = dispatcher(self.shape.op), self.shape.with_m(m)
        try:
            # Prefill meets ever new M: they must not wait for a backend's heuristic, which `explain` would bind.
            if not any(True for one in {shape, _unbiased(shape)} for _ in known.table.candidates(one, device)):
                return None, "no row"
            found = known.explain(shape, device)
        except UserError as error:
            return None, str(error)
        if found.offer.origin in ("table", "unbiased") and not found.refused:
            return (found.offer.match.row.shape.m if found.offer.match is not None else m), ""
        unusable = next((f"{offer.solution}: {why}" for offer, why in found.passed_over if offer.match is not None), "")
        return None, f"a row cannot be used: {unusable}" if unusable else "no row"


#: Routes by name.
routes: dict[str, Route] = {}


def _run(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor | None, w_scale: torch.Tensor | None, bias: torch.Tensor | None,
    dtype: torch.dtype, route: str,
) -> torch.Tensor:  # fmt: skip
    del dtype  # the route's own
    taken = routes[route]
    m = x.numel() // x.shape[-1] if x.shape[-1] else 0
    ours = taken.served.get(m)
    if ours is None:
        ours = taken.served[m] = taken.serves(m, device_of(x.get_device()))
    return (taken.ours if ours else taken.theirs)(x, weight, x_scale, w_scale, bias).contiguous()  # type: ignore[misc]


def _fake(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor | None, w_scale: torch.Tensor | None, bias: torch.Tensor | None,
    dtype: torch.dtype, route: str,
) -> torch.Tensor:  # fmt: skip
    del x_scale, w_scale, bias, route
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


_SCHEMA = "vllm_linear(Tensor x, Tensor weight, Tensor? x_scale, Tensor? w_scale, Tensor? bias, ScalarType dtype, str route) -> Tensor"
_op = opaque(_SCHEMA, run=_run, fake=_fake)


def product(*operands: Any) -> torch.Tensor:
    """Multiply for a routed layer: one op in graphs; in eager mode the function itself, which takes less of the host."""
    out: torch.Tensor = _op(*operands) if torch.compiler.is_compiling() else _run(*operands)
    return out


def kept(route: Route, module: Any) -> str:
    """Add a layer to the route of this name, which is this one if there is none; returns the name."""
    route = routes.setdefault(route.name, route)
    route.layers[getattr(module, "prefix", "") or f"layer {len(route.layers)}"] = weakref.ref(module)
    return route.name


def compare(seconds: float) -> None:
    """Time every row of every route against vLLM's kernel, on the weights of the model's layers.

    Args:
        seconds: the longest that all of it takes; a row that is not reached is taken at the table's word.
    """
    arms: Arms | None = None
    for route in routes.values():
        route.served.clear()
        weights = [route.operands(module) for module in (ref() for ref in route.layers.values()) if module is not None]
        if not weights or route.theirs is None or not weights[0][0].is_cuda:
            continue
        arms = arms or Arms(seconds)
        for m in rows_of(route, device_of(weights[0][0].get_device())):
            if arms.spent:
                return
            x, x_scale = route.inputs(m, weights[0][0].device)
            calls = [(x, weight, x_scale, *rest) for weight, *rest in weights]
            route.verdicts[m] = faster(arms, route.ours, route.theirs, calls)


def rows_of(route: Route, device: Device) -> list[int]:
    """List the M of the rows that answer for a route's product, ascending."""
    table = dispatcher(route.shape.op).table
    wanted = _unbiased(route.shape)
    return sorted({row.shape.m for row in table.rows_for(device) if row.shape.m and _unbiased(row.shape.with_m(1)) == wanted})


def _unbiased(shape: Shape) -> Shape:
    return attrs.evolve(shape, epilogue="none", bias_dtype="")


def summary(sizes: Sequence[int], device: Device) -> list[str]:
    """Sum up for vLLM's log how many layers go through tables, with which backends, and why others do not.

    Args:
        sizes: the numbers of tokens that vLLM captures graphs for.
        device: where the model is.
    """
    lines, used, missing, layers, idle = [], set(), set(), 0, []
    for route in routes.values():
        known = dispatcher(route.shape.op)
        ours = [m for m in sizes if route.serves(m, device)]
        missing |= {m for m in sizes if m not in ours}
        used |= {known.explain(route.shape.with_m(m), device).libtype for m in ours}
        layers += len(route.layers) if ours else 0
        if not route.served:
            idle.append(route)
        elif len(ours) < len(sizes):
            kept_at: dict[str, list[str]] = {}
            for m in sizes:
                if m not in ours:
                    kept_at.setdefault(route.reasons[m], []).append(str(m))
            why = "; ".join(f"M={', '.join(rows)}: {reason}" for reason, rows in kept_at.items())
            lines.append(f"tunedgemm: {len(route.layers)} layers with {route.shape} keep vLLM's kernel at some M: {why}")
    for route in idle:
        lines.append(
            f"tunedgemm: {len(route.layers)} layers with {route.shape} never reached the tables (as {next(iter(route.layers))}): "
            "vLLM runs a graph that was compiled without them; delete VLLM_CACHE_ROOT/torch_compile_cache"
        )
    told = f"; vLLM's kernels serve some products at M = {', '.join(map(str, sorted(missing)))}" if missing else ""
    gains = sorted(gain for route in routes.values() for gain in route.verdicts.values() if gain > 1)
    timed = f", {gains[0]:.2f} to {gains[-1]:.2f} times as fast as vLLM's kernels here" if gains else ""
    head = f"tunedgemm: {layers} linear layers go through tables ({', '.join(sorted(used)) or 'no backend'}{timed}){told}"
    return [head, *lines]

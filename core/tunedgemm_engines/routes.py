"""Routes of an engine's layers: each call runs the faster of our kernel and the engine's.

A route serves all layers of one shape (op, N, K, dtypes, scales). Both sides take the same
operands in the engine's own order, so a layer keeps the weights and the quantised activations that
the engine made. `gains.compare` times both sides on the layers of the loaded model. Linear layers
are one op in compiled graphs, `product`; experts are inside an op of vLLM's (`vllm_experts`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import distributed
from tunedgemm import dispatcher
from tunedgemm.integrations import current_device, define_op, logger, plain
from tunedgemm.plugin import Backend, Device, Shape, device_of
from tunedgemm.tools.files import artifact

from tunedgemm_engines import ahead
from tunedgemm_engines.bit_classes import PROBES, ClassMissing, class_of, is_on, is_unbound_in_capture, require_class, unbound
from tunedgemm_engines.phases import phase
from tunedgemm_engines.rows import PREFILL_M, UNTUNED_M, rows_of, unbiased, untuned_sizes
from tunedgemm_engines.scales import at_m, explain_row, is_served
from tunedgemm_engines.start import described, plugins

#: A function of a layer's operands. For a linear layer: x, weight [N, K], scales of x, scales of
#: the weight, bias; the last three may be None.
Product = Callable[..., torch.Tensor]
#: `Route.trusted_to` of a route that serves every M.
EVERY_M = 1 << 62
#: Steps with a new M that run the engine's kernel after its warm-up.
_STEPS = 3


@attrs.define(eq=False)
class Route:
    """The layers of one shape, and the chosen kernel at each M.

    Attributes:
        name: unique name, equal in all processes, since compiled graphs contain it.
        shape: the shape at M = 1; its field `scale_order` holds for larger M.
        device: the device of the weights.
        ours, theirs: our and the engine's function of the operands; *theirs* is None if the engine
            has no kernel for such layers.
        inputs: makes activations of M rows.
        operands: combines activations and a layer's weights into the operands of a call, the weight
            second.
        engine: the engine's name, for messages.
        tolerance: largest relative difference of both outputs (Frobenius); rounding gives 0.4 % in
            bf16.
        layers: layers by name.
        compared: whether rows must be measured before they serve, as on GPUs.
        untuned: M without a row that a backend would serve untuned; empty unless *compared*.
        verdicts: M (of the row, if any) -> speed-up over the engine's kernel, or less than 0, see
            `faster`.
        failures: M (of the row, if any) -> error that a kernel raised.
        reasons: M -> why the engine's kernel serves it.
        calls: M -> the function that runs.
        reference: computes the first columns in float32 by torch, to check outputs without the
            engine's kernel, which has to compile; None to time against that.
        trusted_to: largest M up to which ours serves, checked but not timed; 0 for none.
        waiting: M -> remaining calls of the engine's kernel before a row may serve; None during
            warm-up.
        invariant: whether batch-invariant mode is on.
        bit_class: the weight's class in the mode; "" for none.
        settle: gives all layers to ours, or for a reason to the engine's kernel, at every M; None
            for a layout that both read.
        outcome: why ours has all layers.
    """

    name: str
    shape: Shape
    device: torch.device
    ours: Product
    theirs: Product | None
    inputs: Callable[[int], tuple[Any, ...]]
    operands: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]
    engine: str = "vLLM"
    tolerance: float = 0.05
    layers: dict[str, weakref.ref[Any]] = attrs.field(factory=dict)
    compared: bool = False
    untuned: frozenset[int] = frozenset()
    verdicts: dict[int, float] = attrs.field(factory=dict)
    failures: dict[int, str] = attrs.field(factory=dict)
    reasons: dict[int, str] = attrs.field(factory=dict)
    calls: dict[int, Product] = attrs.field(factory=dict)
    reference: Product | None = None
    trusted_to: int = 0
    waiting: dict[int, int] | None = None
    invariant: bool = False
    bit_class: str = ""
    settle: Callable[[str], None] | None = None
    outcome: str = ""

    @phase("routing")
    def call_of(self, operands: tuple[Any, ...], m: int) -> Product:
        """Choose and cache the function for calls of M rows; during capture, count the calls."""
        call = self.calls.get(m)
        if call is None and self.invariant:
            return self._in_class(operands, m)
        if call is None:
            op_dispatcher = dispatcher(self.shape.op)
            if self.theirs is not None and not op_dispatcher.settings.capture and self._is_rare(m):
                return self.theirs
            if self.theirs is None:
                call = self.ours
            elif self.serves(m, device_of(operands[0].get_device())):
                return self._first(m, self.theirs)
            else:
                call = op_dispatcher.with_capture(self.theirs, at_m(self.shape, m), operands)
            self.calls[m] = call
        return call

    def _in_class(self, operands: tuple[Any, ...], m: int) -> Product:
        """Choose the function for M in batch-invariant mode: ours if the weight has a class, or the engine's."""
        theirs, shape = self.theirs, at_m(self.shape, m)
        if theirs is not None and self.bit_class:
            if not is_unbound_in_capture(self.shape, device_of(operands[0].get_device()), m):
                return self._first_in_class(m, theirs)
            self.fail(m, ClassMissing("its first call was captured in a graph"))
        call = self.ours if theirs is None else dispatcher(shape.op).with_capture(theirs, shape, operands)
        self.calls[m] = call
        return call

    def _first_in_class(self, m: int, theirs: Product) -> Product:
        """Return the function of the first call at M, which looks up the class after ours has run."""

        def first(*operands: Any) -> torch.Tensor:
            try:
                out = self.ours(*operands)
                require_class(self.bit_class, self.shape, device_of(operands[0].get_device()), (m,))
            except Exception as error:  # a kernel may raise anything
                self.fail(m, error)
                leave_class(self.shape)
                return theirs(*operands)
            self.calls.setdefault(m, self.ours)
            return out

        return first

    def _first(self, m: int, theirs: Product) -> Product:
        """Return the function of the first call at M, after which the engine serves if ours raises."""

        def first(*operands: Any) -> torch.Tensor:
            try:
                with phase("our kernels"):
                    out = self.ours(*operands)
            except Exception as error:  # a kernel may raise anything
                self.fail(m, error)
                self.calls[m] = theirs
                return theirs(*operands)
            self.calls.setdefault(m, self.ours)  # in another thread it may have failed meanwhile
            return out

        return first

    def fail(self, m: int, error: Exception) -> None:
        """Let the engine's kernel serve M after an error, and log the error once."""
        text = described(error)
        if text not in self.failures.values():
            log = logger(f"{self.engine.lower()}.tunedgemm")
            log.warning("tunedgemm: %s: %s's kernel serves M=%d, because a kernel failed there: %s", self.shape, self.engine, m, text)
            if self.bit_class:
                log.error("tunedgemm: batch-invariant: %d layers with %s: bits may now depend on M", len(self.layers), self.shape)
        self.failures[m] = text

    def _is_rare(self, m: int) -> bool:
        """Count a call at M; return whether M is still too rare for a row.

        Most M of prefill occur once, and binding a kernel takes longer than the step it speeds up.
        """
        if self.waiting is None or m <= self.trusted_to:
            return False
        remaining = self.waiting.setdefault(m, _STEPS * len(self.layers))
        self.waiting[m] = remaining - 1
        return remaining > 0

    def serves(self, m: int, device: Device) -> bool:
        """Check whether a row or an untuned kernel serves M and was faster than the engine's."""
        if self.theirs is None or dispatcher(self.shape.op).on_miss is not None:
            return True
        if m <= self.trusted_to and m not in self.failures:
            return True
        is_untuned = m in self.untuned
        row, reason = (m, "") if is_untuned else self.row_of(m, device)
        what = f"the {'untuned kernel' if is_untuned else 'row'} of M={row}"
        gain = None if row is None else self.verdicts.get(row)
        failure = "" if row is None else self.failures.get(m) or self.failures.get(row)
        if failure:
            reason = f"{what} failed here ({failure})"
        elif gain is not None and gain < 0:
            reason = f"the outputs of {what} are not those of {self.engine}'s kernel (relative difference {-gain:.2g})"
        elif gain is not None and gain <= 1:
            reason = f"{what} was not faster here ({gain:.2f} times {self.engine}'s speed)"
        elif row is not None and gain is None and self.compared:
            reason = f"{what} was not timed against {self.engine}'s kernel yet; the next start times it"
        if reason:
            self.reasons[m] = reason
        return not reason

    def row_of(self, m: int, device: Device) -> tuple[int | None, str]:
        """Return the M of the row that serves M, or None and the reason."""
        op_dispatcher, shape = dispatcher(self.shape.op), at_m(self.shape, m)
        try:
            # New M of prefill must not wait for `explain` to bind a backend's heuristic.
            if not any(True for variant in {shape, unbiased(shape)} for _ in op_dispatcher.table.candidates(variant, device)):
                return None, "no row"
            explanation = explain_row(op_dispatcher, shape, device)
        except Exception as error:  # a plugin may raise anything
            return None, described(error)
        offer = explanation.offer
        if is_served(explanation):
            return (offer.match.row.shape.m if offer.match is not None else m), ""
        unusable = next((f"{skipped.solution}: {why}" for skipped, why in explanation.passed_over if skipped.match is not None), "")
        return None, f"a row cannot be used: {unusable}" if unusable else "no row"


#: Routes by name.
routes: dict[str, Route] = {}


def leave_class(shape: Shape) -> None:
    """Leave all M of a shape to the engine's kernels: after an error a dispatcher runs torch for all."""
    for route in [route for route in routes.values() if route.shape == shape]:
        if route.settle is not None:
            route.settle("its bit class does not hold here")
        elif route.theirs is not None:
            route.bit_class, route.trusted_to = "", 0
            route.calls.clear()


#: Shapes whose kernels `compile_ahead` has begun, and whether for prefill, too.
_begun: set[tuple[Shape, bool]] = set()


def _run(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor | None, w_scale: torch.Tensor | None, bias: torch.Tensor | None,
    dtype: torch.dtype, route: str,
) -> torch.Tensor:  # fmt: skip
    del dtype  # the route's own
    # Eager steps make hundreds of these calls; an engine's parameter class would slow each down.
    chosen = routes[route]
    weight, w_scale, bias = plain(weight), plain(w_scale), plain(bias)
    m = x.shape[0] if x.dim() == 2 else x.shape[:-1].numel()
    call = chosen.calls.get(m) or chosen.call_of((x, weight, x_scale, w_scale, bias), m)
    return call(x, weight, x_scale, w_scale, bias).contiguous()


def _fake(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor | None, w_scale: torch.Tensor | None, bias: torch.Tensor | None,
    dtype: torch.dtype, route: str,
) -> torch.Tensor:  # fmt: skip
    del x_scale, w_scale, bias, route
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


_SCHEMA = "vllm_linear(Tensor x, Tensor weight, Tensor? x_scale, Tensor? w_scale, Tensor? bias, ScalarType dtype, str route) -> Tensor"
_op = define_op(_SCHEMA, run=_run, fake=_fake)


def product(*operands: Any) -> torch.Tensor:
    """Run a routed layer: as a custom op in graphs, directly in eager mode to save host time."""
    out: torch.Tensor = _op(*operands) if torch.compiler.is_compiling() else _run(*operands)
    return out


def add_layer(route: Route, module: Any, name: str = "") -> Route:
    """Add a layer to the route of this name, which is this one if it is new; return the route.

    Raises:
        ClassMissing: in batch-invariant mode, the weight has no class, and the engine has a kernel.
    """
    if route.name not in routes and is_on(route.shape.op):
        _enter_class(route)
    if route.name not in routes and route.device.type == "cuda":
        compile_ahead(route.shape, device_of(route.device.index or 0), prefill=route.reference is not None or route.invariant)
    route = routes.setdefault(route.name, route)
    name = name or getattr(module, "prefix", "") or f"layer {len(route.layers)}"
    if (known := route.layers.get(name)) is not None and known() not in (None, module):  # models may repeat a prefix
        name = f"{name} ({len(route.layers) + 1})"
    route.layers[name] = weakref.ref(module)
    return route


def _enter_class(route: Route) -> None:
    """Look up the class of a new route's weight, without binding a kernel."""
    device = device_of(route.device.index or 0) if route.device.type == "cuda" else current_device()
    route.invariant = True
    route.bit_class, reason = class_of(route.shape, unbound(device))
    if not route.bit_class and route.theirs is not None and not dispatcher(route.shape.op).settings.capture:
        raise ClassMissing(f"{route.shape}: {reason}")


def compile_ahead(shape: Shape, device: Device, *, prefill: bool = False) -> None:
    """Begin to compile the kernels that start-up will run for a weight, unless an earlier start did.

    An error is ignored, since the first calls compile what is missing, and report it. Without a
    cache that can be written nothing begins, because processes would compile in vain.

    Args:
        shape: the route's shape, as known so far.
        device: the device of the weight.
        prefill: whether ours may serve all M, so that those of prefill must not compile in a call.
    """
    if device.index < 0 or (shape, prefill) in _begun:
        return
    _begun.add((shape, prefill))
    tasks: list[ahead.Task] = []

    def begun() -> bytes:
        tasks.extend(_tasks(shape, device, PREFILL_M if prefill else ()))
        return b"begun"

    with phase("compiling ahead"), contextlib.suppress(Exception):
        settings = dispatcher(shape.op).settings
        tables = f"{dispatcher(shape.op).table.fingerprint()} {settings.untuned} {settings.batch_invariant}"  # of one op: all take 50 ms
        artifact(f"compiled ahead{' for prefill' * prefill} {shape} {device} {device.versions} {plugins()} {tables}", begun, on_disk=True)
        ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        ahead.begin(tasks, ranks)


def _tasks(shape: Shape, device: Device, more: Sequence[int]) -> list[ahead.Task]:
    """Return the kernels that first calls would compile, at *more* M, too.

    Some backends refuse what is not compiled.
    """
    op_dispatcher = dispatcher(shape.op)
    sizes = (*UNTUNED_M, *PROBES) if op_dispatcher.settings.batch_invariant else untuned_sizes(shape, device)
    sizes = tuple(dict.fromkeys((*rows_of(shape, device), *sizes, *more)))
    found = [explain_row(op_dispatcher, at_m(shape, m), unbound(device)) for m in sizes]
    tasks = [(device, explanation.shape, explanation.offer.solution) for explanation in found]
    backends = [op_dispatcher.registry.get(solution.libtype) for _, _, solution in tasks]
    return [
        task
        for task, backend in zip(tasks, backends, strict=True)
        if isinstance(backend, Backend) and not backend.lacks(task[2], task[1], device)
    ]


def adds_bias(layer: Any) -> bool:
    """Check whether a layer adds its bias itself."""
    return getattr(layer, "bias", None) is not None and not getattr(layer, "skip_bias_add", False)


def end_warm_up(device: Device) -> None:
    """End the warm-up: from now on, new M without an exact row wait."""
    for route in routes.values():
        route.waiting = dict.fromkeys([*rows_of(route.shape, device), *route.untuned], 0)


#: Why vLLM's graphs may never call a route.
STALE = "vLLM runs a graph that was compiled without them; delete VLLM_CACHE_ROOT/torch_compile_cache"


def summary(sizes: Sequence[int], device: Device, engine: str = "vLLM", stale: str = STALE) -> list[str]:
    """Sum up the routed layers, their backends, and the reasons of the others, for the engine's log.

    Args:
        sizes: the token counts of the engine's CUDA graphs.
        device: the model's device.
        engine: the engine's name.
        stale: why a route was never called; "" if that is normal.
    """
    lines, used, missing, layers, untuned, captured = [], set(), set(), 0, 0, 0
    for route in routes.values():
        op_dispatcher = dispatcher(route.shape.op)
        ours = [m for m in sizes if route.serves(m, device)]
        if op_dispatcher.settings.capture:
            captured += len(route.layers)
        else:
            missing |= {m for m in sizes if m not in ours}
        served = {*ours, *(m for m, gain in route.verdicts.items() if gain > 1)}  # without a graph, as in prefill, too
        used |= {explain_row(op_dispatcher, at_m(route.shape, m), device).libtype for m in served}
        layers += len(route.layers) if served else 0
        untuned += len(route.layers) if served & route.untuned else 0
        if route.settle is not None:
            lines.append(f"tunedgemm: {len(route.layers)} layers with {route.shape} are ours at every M: {route.outcome}")
        elif not route.calls and stale:
            first = next(iter(route.layers))
            lines.append(f"tunedgemm: {len(route.layers)} layers with {route.shape} never reached the tables (as {first}): {stale}")
        elif len(ours) < len(sizes) and not op_dispatcher.settings.capture:
            kept_at: dict[str, list[str]] = {}
            for m in sizes:
                if m not in ours:
                    kept_at.setdefault(route.reasons[m], []).append(str(m))
            why = "; ".join(f"M={', '.join(rows)}: {reason}" for reason, rows in kept_at.items())
            lines.append(f"tunedgemm: {len(route.layers)} layers with {route.shape} keep {engine}'s kernel at some M: {why}")
    kept_here = f"; {engine}'s kernels serve some products at M = {', '.join(map(str, sorted(missing)))}" if missing else ""
    gains = sorted(gain for route in routes.values() for gain in route.verdicts.values() if gain > 1)
    timed = f", {gains[0]:.2f} to {gains[-1]:.2f} times as fast as {engine}'s kernels here" if gains else ""
    guessed = f", {untuned} of them untuned at some M" if untuned else ""
    head = f"tunedgemm: {layers} layers go through tables{guessed} ({', '.join(sorted(used)) or 'no backend'}{timed}){kept_here}"
    if captured:
        lines.append(f"tunedgemm: the shapes of {captured} layers are captured; stop, run `tunedgemm tune`, serve without AITER_TUNE_GEMM")
    return [head, *lines]

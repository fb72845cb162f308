"""Layers of weights alone (op ``a16wn``): whole by our kernels, or whole by the engine's.

An engine repacks such a weight for its kernel when it has loaded it. Here that waits until
`gains.compare` has timed both: our kernels on the loaded layout, the engine's on repacked copies
of some layers. Then each layer goes to one side at all M, and keeps that side's layout alone.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import torch
from tunedgemm import dispatcher, gemm_a16wn
from tunedgemm.integrations import check_values, pack, plain, unpack
from tunedgemm.plugin import Shape
from tunedgemm.tools.launching import FORMATS, short_dtype

from tunedgemm_engines.bit_classes import is_on
from tunedgemm_engines.routes import Route, add_layer, adds_bias, routes
from tunedgemm_engines.rows import record_unrouted, routing, unserved_reason

OP = "a16wn"
#: Attribute of a layer with its `WeightOnly`.
ATTRIBUTE = "tunedgemm_weight_only"
#: An engine's context in which a layer's parameters are on the device that computes it.
Loading = Callable[[Any, torch.device], contextlib.AbstractContextManager[Any]]
#: Elements of K that are repacked at once, since codes are unpacked to 8 bytes.
_REPACKED = 512


class Kernel(Protocol):
    """An engine's kernel of a layer, which keeps its weights in the layer's parameters."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Repack the weights."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [..., K]."""


@attrs.frozen
class Stored:
    """How a loaded layer stores its weight.

    Attributes:
        w_format: the format that our kernels read.
        k: K of the weight on this rank.
        names: attributes of the layer in the order of the op's operands: weight, scales, zero
            points, index, global scale; "" for none.
        is_awq: whether an AWQ weight is loaded as vLLM unpacks it for its kernels: codes along K in
            GPTQ's order, zero points in that of compressed-tensors.
    """

    w_format: str
    k: int
    names: tuple[str, ...]
    is_awq: bool = False


class WeightOnly:
    """One layer of weights alone, and who computes it.

    Attributes:
        theirs: the engine's kernel, None where it has none.
        stored: the layout that our kernels read; None if the engine's kernel computes the layer.
        is_settled: whether the layer is ours at every M; until it goes to a side ours computes it.
        is_theirs: whether it went to the engine's kernel.
    """

    def __init__(self, engine: str, theirs: Kernel | None, loading: Loading) -> None:
        self.engine, self.theirs, self._loading = engine, theirs, loading
        self.stored: Stored | None = None
        self.is_settled = self.is_theirs = False
        self._loaded: dict[str, Any] = {}

    def load(self, layer: Any, described: Callable[[], tuple[Stored, torch.dtype]], name: str) -> None:
        """Keep the loaded layout until the routes are timed, or let the engine's kernel repack it.

        Args:
            layer: the loaded layer.
            described: returns how it stores its weight, and the dtype of the activations.
            name: name of the layer.

        Raises:
            ValueError: neither side can compute the layer.
        """
        self.stored = None
        if not self.is_theirs:  # else the engine has loaded the weights again
            with routing(name):
                self._take(layer, *described(), name)
        if self.stored is None and self.theirs is None:
            raise ValueError(f"{name or 'a weight-only layer'}: neither {self.engine} nor the tables have a kernel for it")
        if self.stored is None and self.theirs is not None:
            self.theirs.process_weights_after_loading(layer)

    def leave(self, reason: str, name: str) -> None:
        """Leave a layer to the engine's kernel, for which its weight is repacked already."""
        self.stored, self.is_settled, self.is_theirs = None, False, True
        record_unrouted(reason, name)

    def _take(self, layer: Any, stored: Stored, dtype: torch.dtype, name: str) -> None:
        """Take a loaded layer if its weight has rows.

        Raises:
            UserError: the operands are not those of the format, or a class is missing in the mode.
        """
        shape = self._shape(layer, stored, dtype)
        if unserved_reason(OP, shape.n, shape.k, scale="block", dtype=shape.dtype, layer=name, extras=(shape.extra,)):
            return
        setattr(layer, ATTRIBUTE, self)
        self._device = getattr(layer, stored.names[0]).device
        add_layer(_route(self, stored, shape, dtype, self._device, adds_bias(layer)), layer, name)
        self.stored = stored
        if self.is_settled:
            self._keep(layer)

    def _shape(self, layer: Any, stored: Stored, dtype: torch.dtype) -> Shape:
        """Return the shape at M = 1, after checks of the operands' sizes and values."""
        operands = _parameters(layer, stored)
        weight, scale, _, index, factor = operands
        if not stored.is_awq:
            bias = plain(layer.bias) if adds_bias(layer) else None
            x = torch.empty(1, stored.k, dtype=dtype, device=weight.device)
            shape: Shape = dispatcher(OP).op.shape_of(x, *operands, bias, otype=None, w_format=stored.w_format)
            check_values(index, factor, scale.shape[0] if FORMATS[stored.w_format].is_kn else scale.shape[-1])
            return shape
        groups, epilogue = scale.shape[0], "bias" if adds_bias(layer) else "none"
        extra = {"w_format": stored.w_format, "w_group": stored.k // groups if groups > 1 else 0}
        return Shape(OP, 1, weight.shape[1], stored.k, short_dtype(dtype), epilogue=epilogue, scale="block", extra=extra)

    def multiply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [..., K] to [..., N] by the side that has the layer."""
        if self.stored is None and self.theirs is not None:
            return self.theirs.apply_weights(layer, x, bias)
        if self.stored is None:
            raise RuntimeError(f"{self.engine} has no kernel for this layer, whose weight is not loaded")
        # Graphs read the layer's own parameters, which `settle` has made torch's.
        names = self.stored.names
        own = tuple(getattr(layer, name) if name else None for name in names) if self.is_settled else _operands(layer, self.stored)
        operands: tuple[Any, ...] = (x, *own, bias)
        return gemm_a16wn(*operands, w_format=self.stored.w_format)

    def settle(self, layer: Any, is_ours: bool) -> None:
        """Give the layer to one side, and free what the other needs."""
        if self.stored is None or (self.is_settled and is_ours):
            return
        if is_ours:
            self._keep(layer)
            return
        if self.is_settled and not self._loaded:
            return  # converted: the engine's kernel cannot read it any more
        for name, parameter in self._loaded.items():
            setattr(layer, name, parameter)
        self._loaded, self.stored, self.is_settled, self.is_theirs = {}, None, False, True
        if self.theirs is not None:
            with self._loading(layer, self._device):
                self.theirs.process_weights_after_loading(layer)

    def _keep(self, layer: Any) -> None:
        """Keep the layout that our kernels read, in parameters of torch's class, which tables serve."""
        stored = self.stored
        if stored is None:
            return
        if is_on(OP) and not stored.is_awq:  # ranks may still disagree on classes; the memory is shared
            self._loaded = {name: getattr(layer, name) for name in stored.names if name}
        for name, value in zip(stored.names, _operands(layer, stored), strict=True):
            if name:
                setattr(layer, name, torch.nn.Parameter(value.data, requires_grad=False))
        self.stored, self.is_settled = attrs.evolve(stored, is_awq=False), True


def settled() -> str:
    """Name the routes whose layers are ours at every M, for graphs to call our op."""
    return " ".join(sorted(route.name for route in routes.values() if route.settle is not None and route.theirs is None))


def _parameters(layer: Any, stored: Stored) -> tuple[Any, ...]:
    return tuple(plain(getattr(layer, name)) if name else None for name in stored.names)


def _operands(layer: Any, stored: Stored) -> tuple[Any, ...]:
    """Return the operands of the op, in new memory for an AWQ weight that is stored otherwise."""
    weight, scale, zeros, *rest = _parameters(layer, stored)
    if not stored.is_awq:
        return weight, scale, zeros, *rest
    form = FORMATS[stored.w_format]
    parts = weight.split(_REPACKED // FORMATS["gptq_int4_zp"].per)
    packed = torch.cat([pack(unpack(part, FORMATS["gptq_int4_zp"], "k"), form, form.along) for part in parts])
    return packed, scale, pack(unpack(zeros, FORMATS["ct_int4_zp"], "n")[: weight.shape[1]], form, "n"), *rest


def _route(whole: WeightOnly, stored: Stored, shape: Shape, dtype: torch.dtype, device: torch.device, biased: bool) -> Route:
    """Make a layer's route, whose operands end with the engine's product on a repacked copy."""
    copies: weakref.WeakKeyDictionary[Any, Callable[[torch.Tensor], torch.Tensor]] = weakref.WeakKeyDictionary()

    def ours(x: torch.Tensor, *operands: Any) -> torch.Tensor:
        return gemm_a16wn(x, *operands[:-1], w_format=stored.w_format)

    def theirs(x: torch.Tensor, *operands: Any) -> torch.Tensor:
        out: torch.Tensor = operands[-1](x)
        return out

    def operands(inputs: tuple[Any, ...], layer: Any) -> tuple[Any, ...]:
        own = getattr(layer, ATTRIBUTE)
        if layer not in copies and own.theirs is not None:
            copies[layer] = _repacked(layer, own.theirs)
        return *inputs, *_operands(layer, own.stored), plain(layer.bias) if biased else None, copies.get(layer)

    def settle(reason: str) -> None:
        copies.clear()
        for name, layer in [(name, ref()) for name, ref in route.layers.items()]:
            if layer is not None:
                getattr(layer, ATTRIBUTE).settle(layer, not reason)
            if reason:
                record_unrouted(reason, name)
        if reason:
            routes.pop(route.name, None)
        route.theirs = None

    route = Route(
        f"{shape} {type(whole.theirs).__name__}", shape, device, ours, theirs if whole.theirs is not None else None,
        lambda m: (torch.randn(m, shape.k, dtype=dtype, device=device),), operands, engine=whole.engine, settle=settle,
    )  # fmt: skip
    return route


def _repacked(layer: Any, theirs: Kernel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the engine's product on a copy of a layer and its kernel, which has repacked it."""
    kernel, twin = copy.copy(theirs), copy.copy(layer)
    twin.__dict__ |= {part: dict(vars(layer)[part]) for part in ("_parameters", "_buffers", "_modules")}
    for name, parameter in layer.named_parameters(recurse=False):
        double = torch.Tensor._make_subclass(type(parameter), parameter.data.clone(), False)
        double.__dict__.update(vars(parameter))
        twin.register_parameter(name, double)
    kernel.process_weights_after_loading(twin)
    return lambda x: kernel.apply_weights(twin, x, twin.bias if adds_bias(twin) else None)

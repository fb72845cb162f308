"""Classes that `convert` gives to linear layers: their forward goes through the tables.

Only a layer's class changes. Parameters, hooks, names and ``isinstance(layer, torch.nn.Linear)``
stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.compiler import is_compiling

from tunedgemm.dispatch.captures import capture_check, is_captured, may_synchronize, watch_graphs
from tunedgemm.dispatch.prewarm import OpCall
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.errors import UserError
from tunedgemm.integrations.linear import linear
from tunedgemm.integrations.scripting import with_class
from tunedgemm.integrations.torch_compile import inside_transform
from tunedgemm.ops import DEFAULT_OP
from tunedgemm.ops.formats.dual_layout import DualLayoutWeight, Orders, copied, is_kept_elsewhere, uncopied
from tunedgemm.ops.formats.quant import per_1x128_quant, per_tensor_quant, pertoken_quant

_autocast = torch._C._is_any_autocast_enabled


class TunedLinear(torch.nn.Linear):
    """``nn.Linear`` by `tunedgemm.linear`, with a weight in any layout."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute ``input[..., K] @ weight[N, K].T (+ bias)``."""
        out: torch.Tensor = linear(input, self.weight, self.bias)
        return out

    def __prepare_scriptable__(self) -> torch.nn.Linear:
        """Return the layer that TorchScript compiles: torch's own, with the same parameters."""
        return with_class(self, torch.nn.Linear)

    def tuned_calls(self, m: int) -> Iterator[OpCall]:
        """Yield the calls that `tunedgemm.prewarm` binds."""
        x = torch.zeros(m, self.in_features, dtype=self.weight.dtype, device=self.weight.device)
        yield DEFAULT_OP, (x, self.weight) if self.bias is None else (x, self.weight, self.bias), None


class DualLayoutLinear(TunedLinear):
    """A `TunedLinear` with a plain and a shuffled weight; each call uses the faster one.

    torch.compile, CUDA graphs, training, autocast and functional transforms use the plain weight. A
    CUDA graph replay could not renew the copy.

    Attributes:
        copy_layout: the layout of the copy, which `DualLayoutWeight` holds.
    """

    copy_layout: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute ``input[..., K] @ weight[N, K].T (+ bias)``."""
        out: torch.Tensor
        if is_compiling():
            out = linear(input, self.weight, self.bias)
            return out
        weight: Any
        try:  # `self.weight` would take 0.2 us, in a Python function of torch
            weight, bias = self._parameters["weight"], self._parameters["bias"]
            orders: Orders = weight.orders
            plain = orders.plain
            current = plain._version == orders.version and plain.data_ptr() == orders.address
        except (AttributeError, KeyError):
            current = False
        if not current:
            orders = plain = None  # type: ignore[assignment]  # they would count as other holders of the memory
            renewed = self.renew()
            if renewed is None:
                out = linear(input, self.weight, self.bias)
                return out
            orders, plain, weight, bias = renewed, renewed.plain, self.weight, self.bias
        chosen, shuffled = plain, orders.shuffled
        if shuffled is not None:
            try:
                chosen = tgemm.dispatcher.preferred(input, plain, shuffled, bias)
            except (UserError, RuntimeError, TypeError, ValueError):  # the tables cannot serve it: torch does, or raises
                chosen = plain if isinstance(input, torch.Tensor) else weight  # a symbolic trace needs the parameter
            if chosen is shuffled and (_autocast() or inside_transform() or is_captured(capture_check(input))):
                chosen = plain
        out = linear(input, chosen, bias)
        return out

    def renew(self) -> Orders | None:
        """Return the current weight with a renewed copy, or without one for now.

        While other tensors share the memory of a new parameter, their writes may go uncounted, so
        it gets no copy. Returns None for a trained or parametrised weight.
        """
        weight: Any = self._parameters.get("weight")
        if type(weight) not in (DualLayoutWeight, torch.nn.Parameter) or weight.requires_grad or is_kept_elsewhere(weight):
            return None
        if weight.is_cuda:
            watch_graphs()
        traced = inside_transform() or torch._C._len_torch_dispatch_stack() or not may_synchronize(weight)
        return uncopied(weight) if traced or weight.is_inference() else copied(weight, self.copy_layout)

    def tuned_calls(self, m: int) -> Iterator[OpCall]:
        """Yield the calls that `tunedgemm.prewarm` binds, with either weight."""
        orders = self.renew()
        for op, (x, weight, *bias), otype in super().tuned_calls(m):
            yield op, (x, weight if orders is None else orders.plain, *bias), otype
            if orders is not None and orders.shuffled is not None:
                yield op, (x, orders.shuffled, *bias), otype


class TunedFp8Linear(torch.nn.Linear):
    """An fp8 linear layer by `gemm_a8w8` or `gemm_a8w8_blockscale`.

    torch's operations quantise the activations at each call.

    Attributes:
        scale_name: the attribute with the weight's scales.
        blocks: whether they are 128x128 block scales; else per-tensor or row-wise.
        untuned: the original class, whose forward serves calls that need a gradient.
    """

    scale_name: str
    blocks: bool
    untuned: type[torch.nn.Linear]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute ``input[..., K] @ (weight[N, K] * scales).T (+ bias)``, in the dtype of *input*."""
        if torch.is_grad_enabled() and (input.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            return self.untuned.forward(self, input)
        with torch.no_grad():  # some libraries make scales parameters with gradients
            _, operands, otype = self._call(input)
            out: torch.Tensor = tgemm.gemm_a8w8_blockscale(*operands, otype) if self.blocks else tgemm.gemm_a8w8(*operands, dtype=otype)
            return out.add_(self.bias) if self.blocks and self.bias is not None else out

    def tuned_calls(self, m: int) -> Iterator[OpCall]:
        """Yield the call that `tunedgemm.prewarm` binds, for activations in bf16."""
        yield self._call(torch.zeros(m, self.in_features, dtype=torch.bfloat16, device=self.weight.device))

    def __prepare_scriptable__(self) -> torch.nn.Linear:
        """Return the layer that TorchScript compiles: one of the previous class."""
        return with_class(self, self.untuned)

    def _call(self, x: torch.Tensor) -> OpCall:
        """Return the op, its operands, and the output's dtype."""
        weight, scale = self.weight, getattr(self, self.scale_name)
        if self.blocks:
            return "a8w8_blockscale", (*_crossed(per_1x128_quant(x, weight.dtype), weight), scale), x.dtype
        scale = scale.reshape(-1).float()
        fixed: Any = getattr(self, "activation_scale", None)
        fixed = getattr(self, "input_scale", None) if fixed is None else fixed
        if fixed is None:
            quantised = pertoken_quant(x, quant_dtype=weight.dtype)
            scale = scale.expand(self.out_features).contiguous()
        else:
            q, x_scale = per_tensor_quant(x, fixed.detach().float().reshape(1), quant_dtype=weight.dtype)
            quantised = q, x_scale if scale.numel() == 1 else x_scale.expand(x.shape[:-1].numel()).contiguous()
        operands = (*_crossed(quantised, weight), scale)
        return "a8w8", operands if self.bias is None else (*operands, self.bias), x.dtype


def _crossed(quantised: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return activations, weight and the activations' scales, in the order of the ops."""
    return quantised[0], weight, quantised[1]

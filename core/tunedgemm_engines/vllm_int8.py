"""int8 layers for vLLM: each GEMM by vLLM's kernel, or by the tables where that is faster."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from tunedgemm import gemm_a8w8
from tunedgemm.integrations import plain
from tunedgemm.plugin import Shape
from tunedgemm.tools.launching import short_dtype
from vllm import _custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.platforms import current_platform

from tunedgemm_engines.routes import Route, add_layer, adds_bias, product
from tunedgemm_engines.rows import record_unrouted, routing, unserved_reason
from tunedgemm_engines.scales import one_a_row
from tunedgemm_engines.vllm_kernels import Everywhere, answering, chosen_by_vllm, prefer, replace_parameter

#: vLLM's kernel of int8 whose weight is a view [K, N] and whose product is `cutlass_scaled_mm`.
_CUTLASS = "CutlassInt8ScaledMMLinearKernel"


def install(schemes: Collection[str]) -> None:
    """Put our kernel before all others of the platform.

    Raises:
        AttributeError: this version of vLLM keeps its kernels in another form.
    """
    del schemes  # it has one
    prefer(TunedGemmInt8Kernel, linear._POSSIBLE_INT8_KERNELS)


class TunedGemmInt8Kernel(Everywhere, Int8ScaledMMLinearKernel):  # type: ignore[misc,unused-ignore]
    """int8 kernel with symmetric scales: `tunedgemm.gemm_a8w8`, or vLLM's kernel where that is faster.

    vLLM chooses it before the weight's size is known. If the weight has no rows, vLLM's own kernel
    computes the layer.
    """

    def __init__(self, c: Any, layer_param_names: Sequence[str]) -> None:
        super().__init__(c, layer_param_names)
        self._theirs: Any = None
        self._route = ""

    @answering
    def can_implement(cls, c: Any) -> str:
        """Require symmetric scales."""
        return "" if c.input_symmetric else "needs symmetric scales of the activations"

    def process_weights_after_loading(self, layer: Any) -> None:
        """Process them by vLLM's kernel.

        Without one, make one scale a row of the weight, and a single scale of x if it is static.
        """
        weight_name, scale_name, x_scale_name = self.layer_param_names[:3]
        (n, k), name = getattr(layer, weight_name).shape, getattr(layer, "prefix", "")
        reason = unserved_reason("a8w8", n, k, scale="row", dtype="int8", layer=name)
        own = chosen_by_vllm(linear._POSSIBLE_INT8_KERNELS[current_platform._enum], self.config)
        if own is None and reason:
            raise ValueError(f"{name or 'an int8 layer'}: neither vLLM nor the tables have a kernel for it ({reason})")
        if reason or not (own is None or current_platform.is_cpu()):
            self._theirs = own(self.config, self.layer_param_names)
            self._theirs.process_weights_after_loading(layer)
            if not reason and own.__name__ == _CUTLASS:
                with routing(name):
                    self._route = add_layer(self._make_route(layer, n, k), layer).name
            elif not reason:
                record_unrouted(f"vLLM computes int8 by {own.__name__}, whose operands are not known here", name)
            return
        scale = getattr(layer, scale_name)
        if len(layer.logical_widths) > 1 and not self.config.is_channelwise:
            scale = convert_to_channelwise(scale, layer.logical_widths)
        replace_parameter(layer, weight_name, getattr(layer, weight_name).data)
        replace_parameter(layer, scale_name, scale.data.reshape(-1).expand(n).contiguous())
        if self.config.is_static_input_scheme:
            replace_parameter(layer, x_scale_name, getattr(layer, x_scale_name).data.max())
        else:
            setattr(layer, x_scale_name, None)

    def _make_route(self, layer: Any, n: int, k: int) -> Route:
        names, single = self.layer_param_names, self.config.is_static_input_scheme
        dtype, device = getattr(layer, "params_dtype", None) or torch.get_default_dtype(), getattr(layer, names[0]).device
        first, biased = weakref.ref(layer), adds_bias(layer)
        shape = Shape("a8w8", 1, n, k, "int8", outdtype=short_dtype(dtype), scale="row", epilogue="bias" if biased else "none")

        def ours(x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, bias: torch.Tensor | None) -> Any:
            return gemm_a8w8(x, weight, one_a_row(xs, x.shape[0]), one_a_row(ws, n), bias, dtype)

        def theirs(x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, bias: torch.Tensor | None) -> Any:
            return _custom_ops.cutlass_scaled_mm(x, weight.t(), scale_a=xs, scale_b=ws, out_dtype=dtype, bias=bias)

        def inputs(m: int) -> tuple[Any, ...]:
            return _int8(torch.randn(m, k, dtype=dtype, device=device), plain(getattr(first(), names[2], None)))

        def operands(inputs: tuple[Any, ...], module: Any) -> tuple[Any, ...]:
            weight, scale = (plain(getattr(module, name)) for name in names[:2])
            return inputs[0], weight.t(), inputs[1], scale, plain(module.bias) if biased else None

        return Route(f"{shape} static={single}", shape, device, ours, theirs, inputs, operands)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [..., K] of 16 bits to [..., N]."""
        if self._theirs is not None and not self._route:
            theirs: torch.Tensor = self._theirs.apply_weights(layer, x, bias)
            return theirs
        weight, w_scale, x_scale = self._get_layer_params(layer)[:3]
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        q, scale = _int8(rows, x_scale)
        out: torch.Tensor
        if self._route:
            out = product(q, weight.t(), scale, w_scale, bias, x.dtype, self._route)
        else:
            out = gemm_a8w8(q, weight, one_a_row(scale, rows.shape[0]), w_scale, bias, x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])


def _int8(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [M, K] by vLLM's function: to the scale given, or to one of each row."""
    quantise = _custom_ops.onednn_scaled_int8_quant if x.device.type == "cpu" else _custom_ops.scaled_int8_quant
    quantised: tuple[torch.Tensor, torch.Tensor] = quantise(x, scale, None, True)[:2]
    return quantised

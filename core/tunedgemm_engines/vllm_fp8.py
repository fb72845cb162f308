"""fp8 layers for vLLM: each GEMM by vLLM's kernel, or by the tables where that is faster.

A layer keeps the weights of vLLM's kernel and the activations that vLLM quantises, with scales in
that kernel's order. Only the GEMM is routed (`tunedgemm_engines.routes`).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from tunedgemm import gemm_a8w8, gemm_a8w8_blockscale
from tunedgemm.integrations import current_device, plain, with_order
from tunedgemm.plugin import Shape
from tunedgemm.tools.launching import short_dtype
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.platforms import current_platform

from tunedgemm_engines import vllm_warmup
from tunedgemm_engines.bit_classes import is_on
from tunedgemm_engines.routes import Route, add_layer, adds_bias, compile_ahead, product, routes
from tunedgemm_engines.rows import forget_unrouted, record_unrouted, routing, unserved_reason
from tunedgemm_engines.scales import M_MAJOR_PADDED, ROW, one_a_row, order_made, scales_for_rows
from tunedgemm_engines.vllm_kernels import Everywhere, answering, chosen_by_vllm, prefer, replace_parameter

_OUTPUTS = (torch.bfloat16, torch.float16)
_BLOCK = 128
#: vLLM's fp8 kernels that keep the checkpoint's order of weights; others shuffle or pack them.
_AS_LOADED = (
    "CutlassFP8ScaledMMLinearKernel", "FlashInferFP8ScaledMMLinearKernel", "ROCmFP8ScaledMMLinearKernel",
    "TritonFP8ScaledMMLinearKernel", "PerTensorTorchFP8ScaledMMLinearKernel", "RowWiseTorchFP8ScaledMMLinearKernel",
    "ChannelWiseTorchFP8ScaledMMLinearKernel", "FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "DeepGemmFp8BlockScaledMMKernel",
    "CutlassFp8BlockScaledMMKernel", "B12xFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel",
    "BlockWiseTorchFP8ScaledMMLinearKernel", "AiterFp8BlockScaledMMKernel",
)  # fmt: skip
#: Those whose products vLLM's batch-invariant mode calls. For others it dequantises the weights.
_INVARIANT = ("CutlassFP8ScaledMMLinearKernel", "TritonFP8ScaledMMLinearKernel")
#: vLLM's kernel that compiles for each class of M at its first call.
_COMPILING = "DeepGemmFp8BlockScaledMMKernel"
#: Reasons why layers keep vLLM's kernels. Some methods of vLLM quantise at loading and bypass a
#: kernel (0.20).
_PASSED_BY = "vLLM does not hand their weights to its kernels after loading"
_REORDERED = "vLLM's kernel has padded, packed or shuffled their weights"


def install(schemes: Collection[str]) -> None:
    """Put our kernels of some of vLLM's schemes before all others of the platform.

    Raises:
        AttributeError: this version of vLLM keeps its kernels in another form.
    """
    if TunedGemmFp8Kernel.scheme in schemes:
        prefer(TunedGemmFp8Kernel, linear._POSSIBLE_FP8_KERNELS)
    if TunedGemmFp8BlockKernel.scheme in schemes:
        prefer(TunedGemmFp8BlockKernel, linear._POSSIBLE_FP8_BLOCK_KERNELS)


def _dequantised(config: Any) -> str:
    """Return why batch-invariant mode does not reach our product or must not run it, "" if it may."""
    scale = config.activation_quant_key.scale
    if not is_on("a8w8"):
        return ""
    theirs = None if current_platform.is_cpu() else chosen_by_vllm(linear._POSSIBLE_FP8_KERNELS[current_platform._enum], config)
    reason = ""
    if scale.group_shape.is_per_tensor() and not scale.static:
        reason = "one scale for all rows of x depends on the batch"
    elif theirs is not None and theirs.__name__ not in _INVARIANT:
        reason = f"vLLM multiplies dequantised weights in its mode instead of {theirs.__name__}"
    if reason:
        record_unrouted(reason, "")
    return reason


def _unknown(kernels: dict[Any, list[Any]], config: Any) -> str:
    """Return why an fp8 layer with rows keeps vLLM's kernel; "" if that kernel's operands are known."""
    theirs = None if current_platform.is_cpu() else chosen_by_vllm(kernels[current_platform._enum], config)
    if theirs is None or theirs.__name__ in _AS_LOADED:
        return ""
    reason = f"vLLM computes fp8 by {theirs.__name__}, whose operands are unknown"
    record_unrouted(reason, "")
    return reason


class _Fp8(Everywhere):
    """A kernel that wraps the one that vLLM would choose, if any."""

    #: vLLM's name of the layers.
    scheme: str
    _theirs: Any

    def _routing(self, layer: Any) -> contextlib.AbstractContextManager[None]:
        """Return the block that routes a layer; where vLLM has a kernel, an error leaves the layer to it."""
        return routing(getattr(layer, "prefix", "")) if self._theirs is not None else contextlib.nullcontext()


def _hand_back(layer: Any, ours: Any) -> None:
    """Restore vLLM's own kernel, whose product is now routed: vLLM 0.25 warms DeepGEMM up by its class."""
    method: Any = getattr(layer, "quant_method", None)
    if hasattr(method, "fp8_linear") and method.fp8_linear is ours:
        method.fp8_linear = ours._theirs


class TunedGemmFp8Kernel(_Fp8, FP8ScaledMMLinearKernel):  # type: ignore[misc,unused-ignore]
    """fp8 kernel with scales of the tensor, of tokens or of channels.

    It runs `tunedgemm.gemm_a8w8`, or vLLM's kernel where that is faster.
    """

    scheme = "fp8_w8a8"

    def __init__(self, c: Any, layer_param_names: Sequence[str]) -> None:
        super().__init__(c, layer_param_names)
        theirs = chosen_by_vllm(linear._POSSIBLE_FP8_KERNELS[current_platform._enum], c)
        self._theirs = None if theirs is None or current_platform.is_cpu() else theirs(c, layer_param_names)
        self._pads = self._theirs is not None and self._theirs.get_output_padding() is not None
        self._route = ""
        self._waits = record_unrouted(_PASSED_BY, "")

    @answering
    def can_implement(cls, c: Any) -> str:
        """Require symmetric scales, a 16-bit output, and a weight with rows."""
        x, weight = c.activation_quant_key, c.weight_quant_key
        of_x, of_weight = x.scale.group_shape, weight.scale.group_shape
        if not (of_x.is_per_tensor() or of_x.is_per_token()) or not (of_weight.is_per_tensor() or of_weight.is_per_channel()):
            return "needs scales of the tensor, of tokens or of channels"
        if c.out_dtype not in _OUTPUTS or not (x.symmetric and weight.symmetric):
            return "needs symmetric scales and an output of bfloat16 or float16"
        scale = "tensor" if _both_of_tensors(c) else "row"
        reason = unserved_reason("a8w8", *c.weight_shape, scale=scale, dtype="fp8") or _unknown(linear._POSSIBLE_FP8_KERNELS, c)
        reason = reason or _dequantised(c)
        if not reason:
            compile_ahead(_shape("a8w8", c, scale), current_device())
        return reason

    def input_quant_key(self) -> Any:
        """Return the key of vLLM's kernel, or of static scales, whose activations a fused norm may quantise."""
        if self._theirs is not None:
            return self._theirs.input_quant_key()
        key = self.config.activation_quant_key
        return key if key.scale.static and key.scale.group_shape.is_per_tensor() else None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the weight a view [K, N] of unpadded rows, with one scale a row unless both have a single one."""
        self._waits = self._waits and forget_unrouted(_PASSED_BY)
        weight_name, scale_name = self.layer_param_names[:2]
        n, k = getattr(layer, weight_name).shape[::-1]
        if self._theirs is not None:
            if is_on("a8w8"):  # else vLLM does not know its kernel, and dequantises the weight
                _hand_back(layer, self)
            self._theirs.process_weights_after_loading(layer)
            weight = getattr(layer, weight_name)
            if tuple(weight.shape) != (k, n) or weight.dtype is not self.config.weight_quant_key.dtype:
                record_unrouted(_REORDERED, getattr(layer, "prefix", ""))
                return
            if not weight.t().is_contiguous():  # each call would copy it
                replace_parameter(layer, weight_name, weight.data.t().contiguous().t())
        else:
            weight, scale = getattr(layer, weight_name), getattr(layer, scale_name)
            replace_parameter(layer, weight_name, weight.data.t().contiguous().t())
            single = _both_of_tensors(self.config)
            replace_parameter(layer, scale_name, scale.data.reshape(1) if single else scale.data.reshape(-1).expand(n).contiguous())
        with self._routing(layer):
            self._route = add_layer(self._make_route(layer, n, k), layer).name
            if self._theirs is not None:
                self._theirs.apply_scaled_mm = self.apply_scaled_mm
                _hand_back(layer, self)

    def _make_route(self, layer: Any, n: int, k: int) -> Route:
        config, own, names = self.config, self._theirs, self.layer_param_names
        single = _both_of_tensors(config) and getattr(layer, names[1]).numel() == 1
        dtype = config.weight_quant_key.dtype
        biased = adds_bias(layer)
        shape = Shape(
            "a8w8", 1, n, k, short_dtype(dtype), outdtype=short_dtype(config.out_dtype), scale="tensor" if single else "row",
            epilogue="bias" if biased else "none",
        )  # fmt: skip
        vllms: Any = None if own is None else own.apply_scaled_mm

        def ours(x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, bias: torch.Tensor | None) -> Any:
            scales = (xs.reshape(1), ws.reshape(1)) if single else (one_a_row(xs, x.shape[0]), one_a_row(ws, n))
            return gemm_a8w8(x, weight, *scales, bias, config.out_dtype)

        def theirs(x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, bias: torch.Tensor | None) -> Any:
            return vllms(A=x, B=weight.t(), out_dtype=config.out_dtype, As=xs, Bs=ws, bias=bias, output_shape=[x.shape[0], n])

        first, device = weakref.ref(layer), getattr(layer, names[0]).device

        def inputs(m: int) -> tuple[Any, ...]:
            x = torch.randn(m, k, dtype=config.out_dtype, device=device)
            return _quantised(own, x, plain(getattr(first(), names[2], None)))

        def operands(inputs: tuple[Any, ...], module: Any) -> tuple[Any, ...]:
            weight, scale = (plain(getattr(module, name)) for name in names[:2])
            return inputs[0], weight.t(), inputs[1], scale, plain(module.bias) if biased else None

        return Route(f"{shape} {type(own).__name__}", shape, device, ours, theirs if vllms else None, inputs, operands)

    def apply_weights(self, layer: Any, x: Any, bias: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        """Multiply x [..., K] to [..., N], quantised as vLLM's kernel has it."""
        serve = super().apply_weights if self._theirs is None else self._theirs.apply_weights
        out: torch.Tensor = serve(layer, x, bias, **named)
        return out

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        """Multiply A [M, K] by B, a view [K, N] of the weight, in the names of vLLM's signature."""
        out = product(A, B.t(), As, Bs, bias, out_dtype, self._route)
        out = out[: math.prod(output_shape[:-1])] if self._pads else out  # A has more rows then
        return out.view(*output_shape)


def _shape(op: str, config: Any, scale: str) -> Shape:
    """Return the shape at M = 1 of a layer that does not exist yet; a bias is unknown."""
    (n, k), dtype = config.weight_shape, short_dtype(config.weight_quant_key.dtype)
    return Shape(op, 1, n, k, dtype, outdtype=short_dtype(config.out_dtype), scale=scale)


def _both_of_tensors(config: Any) -> bool:
    """Return whether x and the weight have one scale each; else both count as having one a row."""
    return all(key.scale.group_shape.is_per_tensor() for key in (config.activation_quant_key, config.weight_quant_key))


def _quantised(kernel: Any, x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x for a kernel of vLLM, by the function that does not compile itself first."""
    quantise = kernel.quant_fp8
    quantised: tuple[torch.Tensor, torch.Tensor] = (quantise.forward_cuda if current_platform.is_cuda() else quantise)(x, scale, None)
    return quantised


class TunedGemmFp8BlockKernel(_Fp8, Fp8BlockScaledMMLinearKernel):  # type: ignore[misc,unused-ignore]
    """fp8 kernel with scales of 1 x 128 of x and 128 x 128 of the weight.

    It runs `tunedgemm.gemm_a8w8_blockscale`, or vLLM's kernel where that is faster.
    """

    scheme = "fp8_block_w8a8"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        theirs = chosen_by_vllm(linear._POSSIBLE_FP8_BLOCK_KERNELS[current_platform._enum], config)
        wraps_theirs = theirs is not None and issubclass(theirs, Fp8BlockScaledMMLinearKernel) and not current_platform.is_cpu()
        self._theirs = theirs(config) if wraps_theirs else None
        self._route = ""
        self._waits = record_unrouted(_PASSED_BY, "")

    @answering
    def can_implement(cls, config: Any) -> str:
        """Require dynamic float32 scales of these blocks, a 16-bit output, and a weight with rows."""
        able, reason = Fp8BlockScaledMMLinearKernel.can_implement(config)
        if not able:
            return str(reason)
        x, weight = config.activation_quant_key.scale, config.weight_quant_key.scale
        if tuple(x.group_shape) != (1, _BLOCK) or tuple(weight.group_shape) != (_BLOCK, _BLOCK) or weight.dtype is not torch.float32:
            return f"needs float32 scales of 1 x {_BLOCK} elements of x and {_BLOCK} x {_BLOCK} of the weight"
        if config.out_dtype not in _OUTPUTS:
            return "needs an output of bfloat16 or float16"
        reason = unserved_reason("a8w8_blockscale", *config.weight_shape, scale="block", dtype="fp8")
        reason = reason or _unknown(linear._POSSIBLE_FP8_BLOCK_KERNELS, config)
        if not reason:  # DeepGEMM's order on Hopper; at M that four divides, CUTLASS's is the same
            theirs = chosen_by_vllm(linear._POSSIBLE_FP8_BLOCK_KERNELS[current_platform._enum], config)
            ordered = with_order(_shape("a8w8_blockscale", config, "block"), M_MAJOR_PADDED)
            compile_ahead(ordered, current_device(), prefill=_compiles(theirs))
        return reason

    def process_weights_after_loading(self, layer: Any) -> None:
        """Process them by vLLM's kernel; route the layer if weight and scales are plain matrices then."""
        self._waits = self._waits and forget_unrouted(_PASSED_BY)
        if self._theirs is None:
            super().process_weights_after_loading(layer)
            params = self._get_layer_params(layer)
            replace_parameter(layer, params.WEIGHT, params.weight.data.contiguous())
            name = _scale_name(layer)
            replace_parameter(layer, name, getattr(layer, name).data.contiguous())
        else:
            self._theirs.process_weights_after_loading(layer)
        weight, scale = layer.weight, getattr(layer, _scale_name(layer))
        n, k = self.config.weight_shape
        blocks = (-(-n // _BLOCK), -(-k // _BLOCK))
        plain_scale = tuple(scale.shape) == blocks and scale.dtype is torch.float32 and scale.is_contiguous()
        if tuple(weight.shape) != (n, k) or not plain_scale or getattr(layer, "aiter_bpreshuffled", False):
            record_unrouted(_REORDERED, getattr(layer, "prefix", ""))
            return
        with self._routing(layer):
            self._route = add_layer(self._make_route(k, weight.device), layer).name
            if self._theirs is not None:
                self._theirs.apply_block_scaled_mm = self.apply_block_scaled_mm
                _hand_back(layer, self)

    def _make_route(self, k: int, device: torch.device) -> Route:
        config, own = self.config, self._theirs
        shape = _shape("a8w8_blockscale", config, "block")
        vllms: Any = None if own is None else own.apply_block_scaled_mm
        wide = own is not None and not own.apply_input_quant  # FlashInfer's kernel quantises x itself
        if own is not None:
            shape = _ordered(own, shape, device, config.out_dtype)
        scales = scales_for_rows(shape)

        def ours(x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, _: None) -> Any:
            if wide:
                x, xs = _quantised(own, x, None)
            return gemm_a8w8_blockscale(x, weight, scales(xs), ws, config.out_dtype)

        def theirs(x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, _: None) -> Any:
            return vllms(A=x, B=weight, As=xs, Bs=ws)

        def inputs(m: int) -> tuple[Any, ...]:
            x = torch.randn(m, k, dtype=config.out_dtype, device=device)
            return (x, x.new_empty(1)) if wide else _quantised(own, x, None)

        def operands(inputs: tuple[Any, ...], module: Any) -> tuple[Any, ...]:
            return inputs[0], plain(module.weight), inputs[1], plain(getattr(module, _scale_name(module))), None

        return Route(
            f"{shape} {type(own).__name__}", shape, device, ours, theirs if vllms else None, inputs, operands,
            reference=_first_columns if _compiles(type(own)) else None,
        )  # fmt: skip

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        """Multiply x [..., K] to [..., N], quantised as vLLM's kernel has it."""
        serve = super().apply_weights if self._theirs is None else self._theirs.apply_weights
        out: torch.Tensor = serve(layer, x, bias, **named)
        return out

    def apply_block_scaled_mm(self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor) -> torch.Tensor:
        """Multiply A [M, K] by the weight B [N, K], in the names of vLLM's signature."""
        out: torch.Tensor = product(A, B, As, Bs, None, self.config.out_dtype, self._route)
        return out


def _ordered(own: Any, shape: Shape, device: torch.device, dtype: torch.dtype) -> Shape:
    """Return a shape with the order of scales that vLLM's kernel makes; one layer of a route tries it."""
    routed = (route.shape for route in routes.values() if route.name == f"{route.shape} {type(own).__name__}")
    known = next((other for other in routed if with_order(other, ROW) == shape), None)
    return known or with_order(shape, order_made(lambda x: _quantised(own, x, None)[1], shape.k, dtype, device))


def _compiles(theirs: type | None) -> bool:
    """Check whether vLLM's kernel compiles in calls, and its warm-up may be shortened."""
    return theirs is not None and theirs.__name__ == _COMPILING and vllm_warmup.skips()


def _first_columns(x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor, _: None) -> torch.Tensor:
    """Compute the columns of the weight's first block in float32."""
    k = x.shape[1]
    wide = x.float() * xs.float().repeat_interleave(_BLOCK, 1)[:, :k]
    return wide @ (weight[:_BLOCK].float() * ws[:1].float().repeat_interleave(_BLOCK, 1)[:, :k]).t()


def _scale_name(layer: Any) -> str:
    """Return the attribute with the scales of blocks, which has two names in quantisation methods."""
    return "weight_scale" if getattr(layer, "weight_scale_inv", None) is None else "weight_scale_inv"

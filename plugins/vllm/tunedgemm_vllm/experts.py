"""Compute experts by vLLM's grouped products in fp8, with its quantisation, sorting and activation.

The steps are those of vLLM's experts: quantise the tokens, group their pairs by expert, multiply,
activate, quantise, multiply, and add each token's results. Sizes stay on the device.
"""

from __future__ import annotations

from typing import Any

from tunedgemm.plugin import Launcher, Shape
from tunedgemm.tools.launching import torch_dtype

from tunedgemm_vllm.library import GROUPED, Vendor, operator


def bind(vendor: Vendor, shape: Shape) -> Launcher:
    """Return the launcher for exactly this shape.

    A further group without a weight collects the pairs of unknown experts. Its rows are not
    computed and add zeros.

    Raises:
        PluginError: the library lacks an operator, or one takes other arguments.
    """
    import torch

    grouped, group = operator(vendor, GROUPED), operator(vendor, "get_cutlass_moe_mm_data")
    quantise, activate = operator(vendor, "dynamic_per_token_scaled_fp8_quant"), operator(vendor, "silu_and_mul")
    experts, topk, wide, inner = int(shape["expert"]), int(shape["topk"]), shape.n, shape.k
    pairs, fp8, int32 = shape.m * topk, torch.float8_e4m3fn, torch.int32
    dtype, out_dtype = torch_dtype(shape.dtype), torch_dtype(shape.outdtype)

    def quantised(x: Any) -> tuple[Any, Any]:
        values = x.new_empty(x.shape, dtype=fp8)
        scales = x.new_empty((len(x), 1), dtype=torch.float32)
        quantise(values, x, scales, None)
        return values, scales

    def routing(ids: Any) -> tuple[Any, ...]:
        ends, sizes = ids.new_empty(experts + 2, dtype=int32), ids.new_empty((2, experts + 1, 3), dtype=int32)
        order, places = ids.new_empty((2, pairs), dtype=int32)
        known = ids.clamp(-1, experts).remainder_(experts + 1)  # -1 becomes the further group, too
        group(known, ends, sizes[0], sizes[1], order, places, experts + 1, inner, wide, None, True)
        return ends[:experts].to(torch.int64), sizes[0, :experts], sizes[1, :experts], order, places

    def call(hidden: Any, w1: Any, w2: Any, weight: Any, ids: Any, w1_scale: Any, w2_scale: Any, *_: Any) -> Any:
        strides = {length: ids.new_full((experts,), length, dtype=torch.int64) for length in (wide, inner, 2 * inner)}
        starts, first, second, order, places = routing(ids)
        values, scales = quantised(hidden)
        rows = values.view(torch.uint8).index_select(0, order).view(fp8)
        product = hidden.new_empty((pairs, 2 * inner), dtype=dtype)
        of_rows = scales.index_select(0, order)
        apart, joint = strides[wide], strides[2 * inner]
        grouped(product, rows, w1, of_rows, w1_scale, starts, first, apart, apart, joint, True, True)
        middle = hidden.new_empty((pairs, inner), dtype=dtype)
        activate(middle, product)
        rows, of_rows = quantised(middle)
        results = hidden.new_zeros((pairs, wide), dtype=out_dtype)
        grouped(results, rows, w2, of_rows, w2_scale, starts, second, strides[inner], strides[inner], apart, True, True)
        return results.index_select(0, places).mul_(weight.view(pairs, 1)).view(-1, topk, wide).sum(1)

    return Launcher(call, workspace_bytes=pairs * (7 * inner + 5 * wide))

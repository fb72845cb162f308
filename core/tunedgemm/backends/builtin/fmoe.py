"""Routes of fmoe: two products for each (token, expert) pair, and the weighted sum of their results.

The first product is gated and an activation follows it. Launcher operands: hidden [T, D];
w1 [E, 2 * I or I, D] and w2 [E, D, I] (last dimension halved for fp4x2); topk_weight and topk_ids
[T, topk]; then w1_scale, w2_scale, a1_scale, a2_scale, bias1 [E, rows of w1] and bias2 [E, D], each
present or absent.

The op defines the activation (`tunedgemm.ops.moe`) and each stage's quantisation
(`tunedgemm.ops.moe_formats`). Pairs with an id outside the experts add nothing. Products are of
dequantised operands, in the dtype of the hidden states, or float32 on a CPU. They accumulate in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.backends.builtin.blockscale import spread, times_blocks
from tunedgemm.backends.builtin.product import aligned, capability
from tunedgemm.backends.builtin.route import Family, Route
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops import moe, moe_formats
from tunedgemm.ops.moe_options import options_of
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

    #: function of (input [T or T * topk, cols] of any float dtype, its given scale or None, stage).
    #: It returns the products [T * topk, rows], with any values for pairs without an expert.
    Stage = Callable[[torch.Tensor, torch.Tensor | None, int], torch.Tensor]

#: Most bytes of dequantised weights at a time.
_DEQUANTISED = 1 << 32
#: Bytes of one chunk of gathered weights.
_GATHERED = 1 << 28
#: Most pairs to gather a matrix for each, and most experts to multiply with all rows.
_FEW_PAIRS, _FEW_EXPERTS = 64, 16


@attrs.frozen(eq=False)
class _Call:
    """State that the routes of one call share.

    Attributes:
        shape: the shape to compute.
        dtype: of the products' operands.
        ids: the pairs' experts [T * topk], E for a pair without one.
        weights: w1 and w2, in order.
        scales: their scales in order, by expert, or None.
    """

    shape: Shape
    dtype: torch.dtype
    ids: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor | None, torch.Tensor | None]

    def size(self, stage: int) -> tuple[int, int]:
        """Return (rows, columns) of one expert's matrix."""
        return _sizes(self.shape)[stage]

    def matrix(self, stage: int, expert: int) -> torch.Tensor:
        """Return one expert's matrix [rows, cols]."""
        return moe_formats.expert_weight(self.weights[stage], self.scales[stage], expert, self.shape, self.dtype)

    def matrices(self, stage: int, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Return [experts, rows, cols] of the *chosen* experts, by their indices on the device, or of all."""
        weight, scale = self.weights[stage], self.scales[stage]
        if chosen is not None:
            weight, scale = _select(weight, chosen), None if scale is None else _select(scale, chosen)
        if self.shape["q_type"] == "per_1x128" and scale is not None:
            rows, cols = self.size(stage)
            flat = weight.view(-1, cols)
            return times_blocks(flat, spread(scale, rows).reshape(len(flat), -1), self.dtype).view(-1, rows, cols)
        return moe_formats.dequantised(weight, scale, self.shape, self.dtype)

    def quantised(self, x: torch.Tensor, scale: torch.Tensor | None, stage: int) -> torch.Tensor:
        """Quantise and dequantise the input of a stage."""
        function = moe_formats.as_quantised if stage else moe_formats.stage1_input
        return function(x, self.shape, scale, self.dtype)

    def step(self, stage: int) -> int:
        """Return how many matrices are gathered at a time."""
        rows, cols = self.size(stage)
        return max(1, _GATHERED // (rows * cols * self.dtype.itemsize))

    def by_pair(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat rows of tokens for each of their pairs; return rows of pairs unchanged."""
        topk = int(self.shape["topk"])
        return values if len(values) == len(self.ids) else values.repeat_interleave(topk, 0)


def _select(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Select these indices of the first dimension; 8-bit types have no operation for it."""
    import torch

    if tensor.element_size() > 1:
        return tensor.index_select(0, indices)
    return tensor.view(torch.uint8).index_select(0, indices).view(tensor.dtype)


def _sizes(shape: Shape) -> tuple[tuple[int, int], tuple[int, int]]:
    return (moe_formats.stage_rows(shape), shape.n), (shape.n, shape.k)


def _two_stages(shape: Shape, device: Device, stage_of: Callable[[_Call], Stage]) -> Callable[..., Any]:
    """Return both stages and the steps around them; *stage_of* gives the products of one call."""
    import torch

    topk, experts, early = int(shape["topk"]), int(shape["expert"]), bool(shape["doweight_stage1"])
    out_dtype, (first, second) = torch_dtype(shape.outdtype), _sizes(shape)
    inner = torch.float32 if device.kind == "cpu" else torch_dtype(shape.dtype)

    def fmoe(hidden: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weight: torch.Tensor, topk_ids: Any, *rest: Any) -> Any:
        w1_scale, w2_scale, a1_scale, a2_scale, bias1, bias2 = (*rest, *[None] * 6)[:6]
        ids = topk_ids.reshape(-1).long()
        ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
        hit = (ids < experts).unsqueeze(1)
        factors = topk_weight.reshape(-1, 1).float()
        in_order = (moe_formats.plain_scale(w1_scale, shape, *first), moe_formats.plain_scale(w2_scale, shape, *second))
        weights = (moe_formats.ordered_weight(w1, shape), moe_formats.ordered_weight(w2, shape))
        stage = stage_of(_Call(shape, inner, ids, weights, in_order))

        product = moe.gate_first(stage(hidden, a1_scale, 0).float(), shape)
        product = _biased(product * factors if early else product, bias1, ids)
        middle = moe.activated(product, shape).masked_fill_(~hit, 0.0)
        out = _biased(stage(middle, a2_scale, 1).float(), bias2, ids)
        out = (out if early else out * factors).masked_fill_(~hit, 0.0)
        return out.view(-1, topk, shape.n).sum(1).to(out_dtype).view(*hidden.shape[:-1], shape.n)

    return fmoe


def _biased(product: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """Add each pair's bias [experts, columns]; any to a pair without an expert."""
    return product if bias is None else product + bias.float()[ids.clamp(max=len(bias) - 1)]


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply left [..., R, cols] by right [..., rows, cols], in float32 where the device can."""
    import torch

    transposed = right.transpose(-1, -2)
    if left.is_cuda and left.dtype is not torch.float32:
        multiply = torch.mm if left.dim() == 2 else torch.bmm
        return multiply(left, transposed, out_dtype=torch.float32)
    return torch.matmul(left, transposed)


def _sorted(call: _Call) -> Stage:
    """Sort pairs by expert, one product for each expert in use: the host waits to learn which."""
    import torch

    topk, experts = int(call.shape["topk"]), int(call.shape["expert"])
    counts = torch.bincount(call.ids, minlength=experts + 1).tolist()[:experts]
    order = torch.argsort(call.ids, stable=True)

    def stage(x: torch.Tensor, scale: torch.Tensor | None, stage_number: int) -> torch.Tensor:
        values = call.quantised(x, scale, stage_number)
        out = torch.empty(len(call.ids), call.size(stage_number)[0], dtype=torch.float32, device=x.device)
        sources, start = order if len(x) == len(call.ids) else order // topk, 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                out[order[part]] = _product(values[sources[part]], call.matrix(stage_number, expert)).float()
            start += count
        return out

    return stage


def _dense(call: _Call) -> Stage:
    """Multiply every expert with every row, and take the results of its pairs."""
    import torch

    def stage(x: torch.Tensor, scale: torch.Tensor | None, stage_number: int) -> torch.Tensor:
        values = call.quantised(x, scale, stage_number)
        out = torch.zeros(len(call.ids), call.size(stage_number)[0], dtype=torch.float32, device=x.device)
        for expert in range(int(call.shape["expert"])):
            part = call.by_pair(_product(values, call.matrix(stage_number, expert)).float())
            out = torch.where((call.ids == expert).unsqueeze(1), part, out)
        return out

    return stage


def _gather(call: _Call) -> Stage:
    """Copy its expert's matrix for each pair, some pairs at a time."""
    import torch

    last = int(call.shape["expert"]) - 1

    def stage(x: torch.Tensor, scale: torch.Tensor | None, stage_number: int) -> torch.Tensor:
        values, step = call.by_pair(call.quantised(x, scale, stage_number)).unsqueeze(1), call.step(stage_number)
        chunks = zip(values.split(step), call.ids.clamp(max=last).split(step), strict=True)
        return torch.cat([_product(rows, call.matrices(stage_number, chosen)).squeeze(1) for rows, chosen in chunks])

    return stage


@attrs.frozen(eq=False)
class _Groups:
    """The pairs grouped by expert, without the host knowing the sizes of the groups.

    Attributes:
        order: indices of the pairs, by expert, those without one at the end.
        sources: indices of the tokens in that order.
        ends: int32 [experts], the end of each expert's pairs.
    """

    order: torch.Tensor
    sources: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, call: _Call) -> _Groups:
        """Group the pairs of one call."""
        import torch

        order = torch.argsort(call.ids, stable=True)
        every = torch.arange(int(call.shape["expert"]), device=order.device)
        ends = torch.searchsorted(call.ids[order], every, right=True).to(torch.int32)
        return cls(order, order // int(call.shape["topk"]), ends)

    def input_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of a stage's input, by expert."""
        return self.order if len(x) == len(self.order) else self.sources

    def put_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows by expert in the order of the pairs."""
        import torch

        return torch.empty_like(rows).index_copy_(0, self.order, rows)


def _blocks(call: _Call) -> Stage:
    """Pad each expert's pairs to blocks of one size, and copy its expert's matrix for each block.

    Some blocks are processed at a time.
    """
    import torch

    groups, experts, pairs = _Groups.of(call), int(call.shape["expert"]), len(call.ids)
    size = min(256, max(16, 1 << (pairs // experts).bit_length()))
    count = pairs // size + min(experts, pairs)  # most blocks: the full ones, and one more for each expert in use
    ends = groups.ends.long()
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    block_ends = ((ends - starts + size - 1) // size).cumsum(0)
    first = torch.nn.functional.pad(block_ends[:-1], (1, 0)) * size
    # Pairs without an expert go to one more row, which nothing reads.
    shift = torch.nn.functional.pad(first - starts, (0, 1))
    ids = call.ids[groups.order]
    indices = torch.arange(pairs, device=ids.device) + shift[ids]
    indices = torch.where(ids < experts, indices, count * size)
    owners = torch.searchsorted(block_ends, torch.arange(count, device=ids.device), right=True).clamp(max=experts - 1)

    def stage(x: torch.Tensor, scale: torch.Tensor | None, stage_number: int) -> torch.Tensor:
        values, step = call.quantised(x, scale, stage_number), call.step(stage_number)
        padded = values.new_zeros(count * size + 1, values.shape[1])
        padded[indices] = values[groups.input_rows(x)]
        chunks = zip(padded[:-1].view(count, size, -1).split(step), owners.split(step), strict=True)
        outputs = torch.cat([_product(rows, call.matrices(stage_number, chosen)).flatten(0, 1) for rows, chosen in chunks])
        return groups.put_back(outputs[indices.clamp(max=len(outputs) - 1)])

    return stage


def _grouped_mm(call: _Call) -> Stage:
    import torch

    groups = _Groups.of(call)

    def stage(x: torch.Tensor, scale: torch.Tensor | None, stage_number: int) -> torch.Tensor:
        rows = call.quantised(x, scale, stage_number)[groups.input_rows(x)]
        return groups.put_back(torch._grouped_mm(rows, aligned(call.matrices(stage_number)).transpose(1, 2), offs=groups.ends))

    return stage


def _no_grouped_mm(shape: Shape, device: Device) -> str:
    """Return why `torch._grouped_mm` does not apply, or "".

    On other devices it is a loop that waits for the device; its rows must be a multiple of 16
    bytes.
    """
    if capability(device) not in (90, 100) or shape.dtype != "bf16":
        return f"is a loop over the experts for {shape.dtype} on {device.gfx}"
    if shape.n % 8 or shape.k % 8:
        return f"needs model_dim and inter_dim divisible by 8 (model_dim={shape.n}, inter_dim={shape.k})"
    size = 0 if shape["q_type"] == "No" else max(rows * cols for rows, cols in _sizes(shape)) * int(shape["expert"]) * 2
    return f"would dequantise {size >> 20} MiB of weights at once, more than {_DEQUANTISED >> 20}" if size > _DEQUANTISED else ""


def _scaled_grouped_mm(call: _Call) -> Stage:
    """Multiply fp8 rows by fp8 weights without dequantising."""
    import torch

    groups, experts = _Groups.of(call), int(call.shape["expert"])

    def stage(x: torch.Tensor, scale: torch.Tensor | None, stage_number: int) -> torch.Tensor:
        values, by_row = _fp8_rows(call.shape, x, scale)
        indices, weight_scale = groups.input_rows(x), call.scales[stage_number]
        by_column = weight_scale.reshape(experts, -1).expand(-1, call.size(stage_number)[0]).contiguous()  # type: ignore[union-attr]
        rows = values.view(torch.uint8)[indices].view(values.dtype)
        weight = call.weights[stage_number].transpose(1, 2)
        outputs = torch._scaled_grouped_mm(rows, weight, by_row[indices], by_column, offs=groups.ends, out_dtype=torch.bfloat16)
        return groups.put_back(outputs)

    return stage


def _fp8_rows(shape: Shape, x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of a stage [R, cols] as fp8, and one scale for each row [R]."""
    from tunedgemm.ops.formats.quant import per_tensor_quant, pertoken_quant

    dtype = torch_dtype(str(shape["q_dtype_a"]))
    if shape["q_type"] == "per_Token":
        values, by_row = pertoken_quant(x, quant_dtype=dtype)
        return values, by_row.view(-1)
    values, tensor_scale = per_tensor_quant(x, scale, quant_dtype=dtype)
    return values, tensor_scale.view(1).expand(len(x)).contiguous()


def _no_scaled_grouped_mm(shape: Shape, device: Device) -> str:
    if options_of(shape).quantised:
        return "quantises the hidden states itself"
    if capability(device) != 90 or {shape["q_dtype_w"], shape["q_dtype_a"]} != {"fp8_e4m3fn"}:
        return f"multiplies fp8_e4m3fn on sm_90, not {shape['q_dtype_a']} by {shape['q_dtype_w']} on {device.gfx}"
    if shape["q_type"] not in ("per_Token", "per_Tensor") or shape.dtype != "bf16":
        return f"takes one scale a row and gives bf16, not {shape['q_type']} and {shape.dtype}"
    fits = shape.n % 16 == 0 and shape.k % 16 == 0
    return "" if fits else f"needs model_dim and inter_dim divisible by 16 (model_dim={shape.n}, inter_dim={shape.k})"


def _listed_if_few(limit: int, *fields: str) -> Callable[[Shape, Device], tuple[int, ...]]:
    """Return a list function for routes worth a try where the product of these numbers is small."""

    def listed(shape: Shape, device: Device) -> tuple[int, ...]:
        del device
        return (0,) if math.prod(shape.m if field == "m" else int(shape[field]) for field in fields) <= limit else ()

    return listed


def _as_given(shape: Shape, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged: each route puts weights and scales in order."""
    del shape
    return call


def _native(shape: Shape, device: Device) -> str:
    if device.kind == "cpu":
        return "sorted"
    if not _no_scaled_grouped_mm(shape, device):
        return "scaled_grouped_mm"
    if not _no_grouped_mm(shape, device):
        return "grouped_mm"
    return "gather" if shape.m * int(shape["topk"]) <= _FEW_PAIRS else "blocks"


family = Family(
    MappingProxyType(
        {
            "scaled_grouped_mm": Route(partial(_two_stages, stage_of=_scaled_grouped_mm), _no_scaled_grouped_mm),
            "grouped_mm": Route(partial(_two_stages, stage_of=_grouped_mm), _no_grouped_mm),
            "sorted": Route(partial(_two_stages, stage_of=_sorted), graph_safe=False),
            "gather": Route(partial(_two_stages, stage_of=_gather), listed=_listed_if_few(_FEW_PAIRS, "m", "topk")),
            "dense": Route(partial(_two_stages, stage_of=_dense), listed=_listed_if_few(_FEW_EXPERTS, "expert")),
            "blocks": Route(partial(_two_stages, stage_of=_blocks)),
        }
    ),
    _native,
    _as_given,
)

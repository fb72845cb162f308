"""The steps around products of experts, in torch: what the Triton kernels compute."""

from __future__ import annotations

from typing import Any

import torch
from tunedgemm import per_1x128_quant
from tunedgemm_deepgemm.experts.plan import Plan
from tunedgemm_deepgemm.experts.steps import Steps


def host_steps(plan: Plan) -> Steps:
    """Return functions that compute a plan's steps on the host."""
    first = plan.products[0]
    alignment, masked = plan.place.program.constants[2], bool(first.expected_m)

    def place(ids: Any, places: Any, groups: Any) -> None:
        flat, start = ids.reshape(-1), 0
        places.fill_(-1)
        groups.fill_(0 if masked else -1)
        for expert in range(plan.experts):
            (pairs,) = (flat == expert).nonzero(as_tuple=True)
            begin = expert * first.m if masked else start
            places[pairs] = torch.arange(begin, begin + len(pairs), dtype=torch.int32)
            groups[expert if masked else slice(begin, begin + len(pairs))] = len(pairs) if masked else expert
            start += -(-len(pairs) // alignment) * alignment

    def stored(places: Any, values: Any, q: Any, scale: Any) -> None:
        """Store quantised rows of pairs, and their scales, at their places."""
        known = places >= 0
        quantised, scales = per_1x128_quant(values[known], torch.float8_e4m3fn)
        at = places[known].long()
        q.view(-1, q.shape[-1]).view(torch.uint8)[at] = quantised.view(torch.uint8)
        matrices = scale if q.dim() == 3 else scale.transpose(1, 2) if plan.spills else scale[None]
        per = matrices.shape[1]
        matrices[at // per, at % per] = scales

    def quantise(x: Any, places: Any, q: Any, scale: Any) -> None:
        stored(places, x.repeat_interleave(plan.topk, 0), q, scale)

    def pairs_of(product: Any, places: Any) -> Any:
        rows = product.view(-1, product.shape[-1]).float()[places.clamp(min=0).long()]
        return rows.masked_fill_((places < 0)[:, None], 0.0)

    def activate(product: Any, places: Any, weight: Any, q: Any, scale: Any) -> None:
        pairs = pairs_of(product, places) * (weight.reshape(-1, 1) if plan.weighted_first else 1.0)
        gate, up = pairs.chunk(2, -1)
        stored(places, torch.nn.functional.silu(gate) * up, q, scale)

    def combine(product: Any, places: Any, weight: Any, out: Any) -> None:
        pairs = pairs_of(product, places)
        if not plan.weighted_first:
            pairs *= weight.reshape(-1, 1).masked_fill((places < 0)[:, None], 0.0)
        out.copy_(pairs.view(len(out), plan.topk, -1).sum(1))

    def spill(x: Any, scale: Any, weight: Any, w_scale: Any, groups: Any, out: Any) -> None:
        columns, (_, n, k) = scale.shape[1], weight.shape
        by_row = scale.transpose(1, 2).reshape(-1, columns)[: len(x)]
        for row in range(first.m, len(x)):
            if (expert := int(groups[row])) >= 0:
                wide = w_scale[expert].view(-1, columns).repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
                out[row] = (weight[expert].float() * wide) @ (x[row].float() * by_row[row].repeat_interleave(128)[:k])

    return Steps(place, quantise, activate, combine, (spill, spill) if plan.spills else ())

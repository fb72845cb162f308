"""Fuse: the layers of a rank as serving engines run them: what reads one input is one product."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from tunedgemm.workload.models.layer import Layer
from tunedgemm.workload.models.roles import crosses

#: roles that are one product -> the last word of its name
_TOGETHER = {
    ("q", "k", "v"): "qkv_proj",
    ("k", "v"): "kv_proj",
    ("gate", "up"): "gate_up_proj",
    ("q_a", "kv_a"): "fused_qkv_a_proj",
}


@attrs.frozen
class Latent:
    """Widths of an attention with a latent vector for keys and values (MLA), of one head.

    Attributes:
        rank: width of the latent vector (kv_lora_rank).
        nope: part of a key without position (qk_nope_head_dim).
        value: a value (v_head_dim).
    """

    rank: int
    nope: int
    value: int


def fused(layers: Iterable[Layer], latent: Latent | None) -> tuple[Layer, ...]:
    """Join siblings of one input; give an attention with a latent vector the two products by which decoding goes around it.

    Args:
        layers: of one rank.
        latent: the widths of such an attention, None for a model without.
    """
    found: list[Layer] = []
    waiting = list(layers)
    while waiting:
        first = waiting.pop(0)
        siblings = [layer for layer in waiting if _alike(first, layer)]
        parts = _joined([first, *siblings])
        waiting = [layer for layer in waiting if layer not in parts]
        found.append(_one(parts) if len(parts) > 1 else first)
        if latent is not None and first.role == "kv_b" and first.unit == latent.nope + latent.value:
            found += _absorbed(first, latent)
    return tuple(found)


def _alike(first: Layer, other: Layer) -> bool:
    """Whether two layers may be one product: of the same modules, and with the same input and number formats."""
    mine = (first.kind, first.parent, first.k, first.count, first.dtype, first.scheme)
    return mine == (other.kind, other.parent, other.k, other.count, other.dtype, other.scheme) and other.kind == "linear"


def _joined(layers: list[Layer]) -> list[Layer]:
    """Those among siblings that are one product with the first, in the order in which engines lay them; else the first alone.

    Queries of a decoder that looks at its encoder have another input than keys and values.
    """
    by_role = {layer.role: layer for layer in reversed(layers)}
    for roles in _TOGETHER:
        if layers[0].role in roles and set(roles) <= set(by_role) and not ("q" in roles and crosses(layers[0].name)):
            return [by_role[role] for role in roles]
    return layers[:1]


def _one(parts: list[Layer]) -> Layer:
    name = f"{parts[0].parent}.{_TOGETHER[tuple(part.role for part in parts)]}"
    return attrs.evolve(parts[0], name=name, n=sum(part.n for part in parts), bias=any(part.bias for part in parts), role="")


def _absorbed(layer: Layer, latent: Latent) -> list[Layer]:
    """kv_b_proj as decoding has it: one product a head from the query into the latent space, one from there to the value.

    Its halves are kept in 16 bits, whatever the weights of the model are.
    """
    heads = layer.n // layer.unit
    plain = attrs.evolve(layer, kind="batched", batch=heads, bias=False, scheme="", role="", unit=1)
    return [
        attrs.evolve(plain, name=f"{layer.parent}.w_uk", n=latent.rank, k=latent.nope),
        attrs.evolve(plain, name=f"{layer.parent}.w_uv", n=latent.value, k=latent.rank),
    ]

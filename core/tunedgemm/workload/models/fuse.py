"""Fuse: one rank's layers as serving engines run them: layers that read one input become one product."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from tunedgemm.workload.models.layer import Layer
from tunedgemm.workload.models.roles import crosses

#: roles fused into one product -> the last word of its name
_TOGETHER = {
    ("q", "k", "v"): "qkv_proj",
    ("k", "v"): "kv_proj",
    ("gate", "up"): "gate_up_proj",
    ("q_a", "kv_a"): "fused_qkv_a_proj",
}


@attrs.frozen
class Latent:
    """Widths of one head of an attention with a latent vector for keys and values (MLA).

    Attributes:
        rank: width of the latent vector (kv_lora_rank).
        nope: part of a key without position (qk_nope_head_dim).
        value: a value (v_head_dim).
    """

    rank: int
    nope: int
    value: int


def fused(layers: Iterable[Layer], latent: Latent | None) -> tuple[Layer, ...]:
    """Join layers of one input; replace the kv up-projection of MLA by the two products of decoding.

    Args:
        layers: of one rank.
        latent: the widths of MLA, None for a model without it.
    """
    joined: list[Layer] = []
    waiting = list(layers)
    while waiting:
        first = waiting.pop(0)
        siblings = [layer for layer in waiting if _may_fuse(first, layer)]
        parts = _fusible([first, *siblings])
        waiting = [layer for layer in waiting if layer not in parts]
        joined.append(_fuse(parts) if len(parts) > 1 else first)
        if latent is not None and first.role == "kv_b" and first.unit == latent.nope + latent.value:
            joined += _absorbed(first, latent)
    return tuple(joined)


def _may_fuse(first: Layer, other: Layer) -> bool:
    """Tell whether two layers may be fused: same modules, input and number formats."""
    mine = (first.kind, first.parent, first.k, first.count, first.dtype, first.scheme)
    return mine == (other.kind, other.parent, other.k, other.count, other.dtype, other.scheme) and other.kind == "linear"


def _fusible(layers: list[Layer]) -> list[Layer]:
    """Return the siblings that fuse with the first, in the engines' order; else the first alone.

    Queries of a decoder that attends to its encoder have another input than keys and values.
    """
    by_role = {layer.role: layer for layer in reversed(layers)}
    for roles in _TOGETHER:
        if layers[0].role in roles and set(roles) <= set(by_role) and not ("q" in roles and crosses(layers[0].name)):
            return [by_role[role] for role in roles]
    return layers[:1]


def _fuse(parts: list[Layer]) -> Layer:
    name = f"{parts[0].parent}.{_TOGETHER[tuple(part.role for part in parts)]}"
    return attrs.evolve(parts[0], name=name, n=sum(part.n for part in parts), bias=any(part.bias for part in parts), role="")


def _absorbed(layer: Layer, latent: Latent) -> list[Layer]:
    """Return kv_b_proj as decoding has it: per head, one product into the latent space and one out of it.

    Its halves stay in 16 bits, whatever the weights of the model are.
    """
    heads = layer.n // layer.unit
    plain = attrs.evolve(layer, kind="batched", batch=heads, bias=False, scheme="", role="", unit=1)
    return [
        attrs.evolve(plain, name=f"{layer.parent}.w_uk", n=latent.rank, k=latent.nope),
        attrs.evolve(plain, name=f"{layer.parent}.w_uv", n=latent.value, k=latent.rank),
    ]

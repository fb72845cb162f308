"""Fuse: merge layers with a common input into one GEMM, as serving engines do."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from tunedgemm.workload.models.layer import Layer
from tunedgemm.workload.models.roles import crosses

#: Roles that are fused -> last word of the fused layer's name.
TOGETHER = {
    ("q", "k", "v"): "qkv_proj",
    ("k", "v"): "kv_proj",
    ("gate", "up"): "gate_up_proj",
    ("q_a", "kv_a"): "fused_qkv_a_proj",
}


@attrs.frozen
class Latent:
    """Widths of a head in multi-head latent attention (MLA).

    Attributes:
        rank: width of the latent vector (kv_lora_rank).
        nope: part of a key without position encoding (qk_nope_head_dim).
        value: width of a value (v_head_dim).
    """

    rank: int
    nope: int
    value: int


def fused(layers: Iterable[Layer], latent: Latent | None) -> tuple[Layer, ...]:
    """Fuse layers with a common input; replace MLA's kv up-projection by decoding's two GEMMs.

    Args:
        layers: the layers of one rank.
        latent: the widths of MLA; None for a model without it.
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
    """Return the siblings that fuse with the first, in the engines' order; else the first only.

    In cross-attention, queries have another input than keys and values.
    """
    by_role = {layer.role: layer for layer in reversed(layers)}
    for roles in TOGETHER:
        if layers[0].role in roles and set(roles) <= set(by_role) and not ("q" in roles and crosses(layers[0].name)):
            return [by_role[role] for role in roles]
    return layers[:1]


def _fuse(parts: list[Layer]) -> Layer:
    name = f"{parts[0].parent}.{TOGETHER[tuple(part.role for part in parts)]}"
    return attrs.evolve(parts[0], name=name, n=sum(part.n for part in parts), bias=any(part.bias for part in parts), role="")


def _absorbed(layer: Layer, latent: Latent) -> list[Layer]:
    """Return the absorbed kv_b_proj of decoding: per head, one GEMM into latent space and one out.

    Both stay in 16 bits, regardless of the model's quantisation.
    """
    heads = layer.n // layer.unit
    plain = attrs.evolve(layer, kind="batched", batch=heads, bias=False, scheme="", role="", unit=1)
    return [
        attrs.evolve(plain, name=f"{layer.parent}.w_uk", n=latent.rank, k=latent.nope),
        attrs.evolve(plain, name=f"{layer.parent}.w_uv", n=latent.value, k=latent.rank),
    ]

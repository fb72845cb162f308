"""Layer: one product that a model computes, and its count per forward pass; torch-free."""

from __future__ import annotations

import attrs

from tunedgemm.dtype import parse_dtype
from tunedgemm.errors import UserError

#: kinds of layers: a plain product, a router of experts, the logits, experts, one product per head
KINDS = ("linear", "router", "head", "experts", "batched")


def _positive(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise UserError(f"{attribute.name!r} of a layer must be at least 1 (got {value})")


@attrs.frozen
class Experts:
    """Fields of a layer of experts beyond its sizes.

    Attributes:
        count: routed experts.
        topk: experts per token.
        act: the activation between both products, as in `Shape.extra` of fmoe; "" for one that no
            op computes.
        gated: whether the first product has a gate and an up half.
    """

    count: int = attrs.field(validator=_positive)
    topk: int = attrs.field(validator=_positive)
    act: str = "silu"
    gated: bool = True


@attrs.frozen
class Layer:
    """Equal products of a model: ``out[M, n] = x[M, k] @ weight[n, k].T``.

    Attributes:
        name: its module path, with ``*`` for numbers: ``model.layers.*.self_attn.q_proj``.
        kind: one of `KINDS`.
        n, k: rows and columns of the weight. For experts n is the model's width (model_dim) and k
            the width between both products (inter_dim).
        count: how many a forward pass runs; a module that it runs more than once counts once.
        bias: whether a bias [n] is added.
        dtype: of activations and output, as a short text; `scheme` says what is quantised.
        role: its role (`tunedgemm.workload.models.roles`), "" for an unknown name.
        unit: rows that are never split, or columns where its role closes a block: the width of a
            head; 1 for none.
        kv_units: how many units are heads of keys or values, which ranks share where there are
            fewer heads than ranks.
        kv_heads: heads of keys, and as many of values.
        batch: products of kind ``batched`` in one call.
        experts: of kind ``experts``, else None.
        scheme: the quantisation of weights and activations (`tunedgemm.workload.models.scheme`), ""
            for none.
        refused: why it is left out, as the end of "left out, as …"; "" for a layer that is listed.
        tower: whether it is outside the text part of the model, as an encoder of images is.
    """

    name: str
    kind: str = attrs.field(validator=attrs.validators.in_(KINDS))
    n: int = attrs.field(validator=_positive)
    k: int = attrs.field(validator=_positive)
    count: int = attrs.field(default=1, validator=_positive)
    bias: bool = False
    dtype: str = attrs.field(default="bf16", converter=parse_dtype)
    role: str = ""
    unit: int = attrs.field(default=1, validator=_positive)
    kv_units: int = 0
    kv_heads: int = 0
    batch: int = 0
    experts: Experts | None = None
    scheme: str = ""
    refused: str = ""
    tower: bool = False

    @property
    def own_name(self) -> str:
        """Return the last word of the name."""
        return self.name.rpartition(".")[2]

    @property
    def parent(self) -> str:
        """Return the name without its last word."""
        return self.name.rpartition(".")[0]

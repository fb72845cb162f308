"""Layer: one product that a model computes, as often as a forward pass does; torch-free."""

from __future__ import annotations

import attrs

from tunedgemm.dtype import parse_dtype
from tunedgemm.errors import UserError

#: what a layer is: a plain product, the router of experts, the product for the logits, experts, one product for each head
KINDS = ("linear", "router", "head", "experts", "batched")


def _positive(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise UserError(f"{attribute.name!r} of a layer must be at least 1 (got {value})")


@attrs.frozen
class Experts:
    """What a layer of experts has beyond its sizes.

    Attributes:
        count: routed experts.
        topk: those that a token goes to.
        act: the activation between both products, as `Shape.extra` of fmoe says it; "" for one that
            no op computes.
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
        name: where it stands, with ``*`` for numbers: ``model.layers.*.self_attn.q_proj``.
        kind: one of `KINDS`.
        n, k: rows and columns of the weight. Of experts n is the model's width (model_dim) and k
            that between both products (inter_dim).
        count: how many a forward pass runs, a module that it runs more than once counted once.
        bias: whether a bias [n] is added.
        dtype: of activations and output, as a short text; what is quantised says `scheme`.
        role: what it is for (`tunedgemm.workload.models.roles`), "" where its name does not tell.
        unit: rows (columns where its role closes a block) that are never cut: the width of a head;
            1 for none.
        kv_units: how many units are heads of keys or values, which ranks share where there are
            fewer heads than ranks.
        kv_heads: heads of keys, and as many of values.
        batch: products of kind ``batched`` in one call.
        experts: of kind ``experts``, else None.
        scheme: how weights and activations are quantised (`tunedgemm.workload.models.scheme`), ""
            for not at all.
        tower: whether it stands outside of the part that makes text, as an encoder of images does.
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
    tower: bool = False

    @property
    def own_name(self) -> str:
        """The last word of the name."""
        return self.name.rpartition(".")[2]

    @property
    def parent(self) -> str:
        """The name without its last word."""
        return self.name.rpartition(".")[0]

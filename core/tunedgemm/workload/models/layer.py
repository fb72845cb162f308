"""Layer: a GEMM layer of a model and its count per forward pass. Torch-free."""

from __future__ import annotations

import attrs

from tunedgemm.dtype import parse_dtype
from tunedgemm.errors import UserError

#: Kinds of layers: a linear layer, an expert router, the LM head, experts, one GEMM per head.
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
        act: the activation between both GEMMs, as in `Shape.extra` of fmoe; "" if unsupported.
        gated: whether the first GEMM has a gate and an up half.
    """

    count: int = attrs.field(validator=_positive)
    topk: int = attrs.field(validator=_positive)
    act: str = "silu"
    gated: bool = True


@attrs.frozen
class Layer:
    """Equal layers of a model: ``out[M, n] = x[M, k] @ weight[n, k].T``.

    Attributes:
        name: its module path, with ``*`` for numbers: ``model.layers.*.self_attn.q_proj``.
        kind: one of `KINDS`.
        n, k: rows and columns of the weight; for experts model_dim and inter_dim.
        count: number of such modules in a forward pass; a reused module counts once.
        bias: whether a bias [n] is added.
        dtype: short dtype of activations and output, before quantisation by `scheme`.
        role: its role (`tunedgemm.workload.models.roles`); "" if unknown.
        unit: rows (or columns, for a closing role) that tensor parallelism never splits: the head
            width; 1 for none.
        kv_units: number of units that are key or value heads, which ranks share if there are fewer
            heads than ranks.
        kv_heads: number of key heads, equal to that of value heads.
        batch: number of GEMMs per call of kind ``batched``.
        experts: fields of kind ``experts``; else None.
        scheme: the quantisation (`tunedgemm.workload.models.scheme`); "" for none.
        refused: why it is left out, as the end of "left out, as …"; "" for a listed layer.
        tower: whether it is outside the text part of the model, such as an image encoder.
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

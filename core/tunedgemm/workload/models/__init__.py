"""Shapes from models: ``config.json`` → modules without memory → layers → those of one rank, as engines run them → shapes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.errors import UserError
from tunedgemm.table.folders import named_model
from tunedgemm.workload.models.fuse import Latent, fused
from tunedgemm.workload.models.layer import Experts, Layer
from tunedgemm.workload.models.listing import Formats, listed, rows_of, together
from tunedgemm.workload.models.parallel import sharded
from tunedgemm.workload.models.scheme import REFUSED, scheme_of
from tunedgemm.workload.models.source import Source, number_of, read
from tunedgemm.workload.models.walk import generic
from tunedgemm.workload.models.walk import layers as walked

if TYPE_CHECKING:
    from tunedgemm.table.csvfile import Untuned

__all__ = [
    "NSETS",
    "Experts",
    "Formats",
    "Layer",
    "ModelShapes",
    "layers_of_model",
    "only",
    "rows_of",
    "shapes_of_model",
    "together",
    "with_shapes",
]

#: AITER's default of ``--nsets``.
NSETS = (1, 512, 1024, 2048, 3072, 4096, 8192, 16384)


@attrs.frozen
class ModelShapes:
    """What a forward pass of a model multiplies, on one rank.

    Attributes:
        folder: the model's.
        architecture: transformers' name of it.
        tp: ranks of tensor parallelism.
        layers: the products, each with how many a pass runs.
        by_op: their shapes for all numbers of rows asked for, by the name of the op.
        notes: what is not in there, or rests on a default, a sentence each.
    """

    folder: Path
    architecture: str
    tp: int
    layers: tuple[Layer, ...]
    by_op: Mapping[str, tuple[Untuned, ...]]
    notes: tuple[str, ...] = ()


def layers_of_model(folder: Path | str, tp: int = 1, *, fuse: bool = True, fuse_shared_experts: bool = False) -> ModelShapes:
    """The products of a model, whatever their number of rows; the arguments are those of `shapes_of_model`."""
    folder = named_model(str(folder))
    source = read(folder)
    scheme = scheme_of(source.raw)
    found, unknown = walked(source, scheme)
    notes = [*source.notes, *unknown]
    refused = dict.fromkeys(layer.name for layer in found if layer.scheme == REFUSED)
    if refused:
        notes.append(f"left out, for no op has {scheme.refused}: {', '.join(refused)}")
        found = tuple(layer for layer in found if layer.scheme != REFUSED)
    if fuse:
        found = tuple(attrs.evolve(layer, dtype=_model_dtype(found)) if layer.kind == "router" else layer for layer in found)
        found = _with_shared_experts(found, source) if fuse_shared_experts else found
    plan: dict[str, str] = dict(getattr(source.module, "tp_plan", None) or getattr(source.module, "_tp_plan", None) or {})
    found, whole = sharded(found, tp, plan, engine=fuse)
    found = fused(found, _latent(source.settings)) if fuse else found
    architecture = type(source.module).__name__
    return ModelShapes(folder, architecture, tp, found, {}, (*notes, *whole))


def shapes_of_model(
    folder: Path | str,
    tp: int = 1,
    nsets: Iterable[int] = NSETS,
    *,
    batch_size: int = 1,
    fuse: bool = True,
    fuse_shared_experts: bool = False,
    formats: Formats | None = None,
) -> ModelShapes:
    """What one rank multiplies in a forward pass of the model of a folder, as shapes of ops.

    Args:
        folder: holds ``config.json``; nothing else of it is read. A bare name that is no folder
            here is that of a shipped one.
        tp: ranks of tensor parallelism; the shapes are those of each.
        nsets, batch_size: rows of the activations: each number times the batch size.
        fuse: as serving engines run it: queries, keys and values as one product, gate and up as
            one, the way down to the latent vectors of MLA as one, the vocabulary padded to a
            multiple of 64, the router in the model's dtype. False: as transformers runs it, product
            for product, split by its own plan.
        fuse_shared_experts: count shared experts among the routed ones, as AITER's engines do.
        formats: number formats that the checkpoint leaves open.

    Raises:
        UserError: the folder, its ``config.json``, tp or the numbers of rows cannot be used;
            transformers is not installed.
    """
    rows = rows_of(nsets, batch_size)
    return with_shapes(layers_of_model(folder, tp, fuse=fuse, fuse_shared_experts=fuse_shared_experts), rows, formats or Formats())


def with_shapes(model: ModelShapes, rows: Iterable[int], formats: Formats) -> ModelShapes:
    """A model with the shapes of its layers for these numbers of rows, and notes on what no op has."""
    by_op, notes = listed(model.layers, rows, formats)
    return attrs.evolve(model, by_op=by_op, notes=(*model.notes, *notes))


def only(model: ModelShapes, patterns: Iterable[str]) -> ModelShapes:
    """A model with those of its layers alone whose names fit a pattern of `fnmatch`; numbers in it stand for all layers.

    Raises:
        UserError: a pattern that no layer fits; the message lists what there is.
    """
    kept: dict[Layer, None] = {}
    for pattern in patterns:
        fitting = [layer for layer in model.layers if fnmatch.fnmatchcase(layer.name, generic(pattern))]
        if not fitting:
            names = ", ".join(dict.fromkeys(layer.name for layer in model.layers))
            raise UserError(f"{model.folder}: no layer fits {pattern!r}; there are {names}")
        kept |= dict.fromkeys(fitting)
    return attrs.evolve(model, layers=tuple(layer for layer in model.layers if layer in kept))


def _model_dtype(layers: Iterable[Layer]) -> str:
    """The dtype of most of a model."""
    dtypes = [layer.dtype for layer in layers if layer.kind == "linear"]
    return max(set(dtypes), key=dtypes.count) if dtypes else "bf16"


def _latent(settings: Any) -> Latent | None:
    rank, nope, value = (number_of(settings, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    return Latent(rank, nope, value) if rank and nope and value else None


def _with_shared_experts(layers: tuple[Layer, ...], source: Source) -> tuple[Layer, ...]:
    """Shared experts, which every token goes to, as so many routed ones more.

    Raises:
        UserError: the model has none, or of another width than the routed ones.
    """
    shared = [layer for layer in layers if "shared_expert" in layer.name and layer.role in ("gate", "up", "down")]
    banks = [layer for layer in layers if layer.experts is not None]
    down = next((layer for layer in shared if layer.role == "down"), None)
    if down is None or not banks or down.k % banks[0].k:
        told = "no shared experts" if down is None or not banks else f"shared experts {down.k} wide beside routed ones of {banks[0].k}"
        raise UserError(f"{source.folder}: --fuse-shared-experts: the model has {told}")
    more = down.k // banks[0].k
    kept = []
    for layer in layers:
        if layer.experts is not None:
            experts = attrs.evolve(layer.experts, count=layer.experts.count + more, topk=layer.experts.topk + more)
            kept.append(attrs.evolve(layer, experts=experts))
        elif layer not in shared:
            kept.append(layer)
    return tuple(kept)

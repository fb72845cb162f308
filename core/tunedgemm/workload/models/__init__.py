"""Shapes from models: ``config.json`` → meta-device modules → layers → one rank's layers → shapes."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from tunedgemm.errors import UserError
from tunedgemm.table.folders import named_model
from tunedgemm.workload.models.architecture import architecture_of
from tunedgemm.workload.models.fuse import fused
from tunedgemm.workload.models.layer import Experts, Layer
from tunedgemm.workload.models.listing import Formats, by_tokens, left_out, listed, merge_lists, rows_of
from tunedgemm.workload.models.parallel import sharded
from tunedgemm.workload.models.walk import generic

if TYPE_CHECKING:
    from tunedgemm.table.untuned import Untuned

__all__ = [
    "NSETS",
    "Experts",
    "Formats",
    "Layer",
    "ModelShapes",
    "by_tokens",
    "layers_of_model",
    "merge_lists",
    "rows_of",
    "select_layers",
    "shapes_of_model",
    "with_shapes",
]

#: AITER's default of ``--nsets``.
NSETS = (1, 512, 1024, 2048, 3072, 4096, 8192, 16384)


@attrs.frozen
class ModelShapes:
    """The GEMMs of a model's forward pass on one rank of tensor parallelism.

    Attributes:
        folder: the model's folder.
        architecture: transformers' name of it.
        tp: ranks of tensor parallelism; 0 for a file of one rank's calls.
        layers: the layers with their counts per forward pass.
        by_op: their shapes for all requested M, by op name.
        notes: a sentence for each missing layer and assumed default.
    """

    folder: Path
    architecture: str
    tp: int
    layers: tuple[Layer, ...]
    by_op: Mapping[str, tuple[Untuned, ...]]
    notes: tuple[str, ...] = ()


def layers_of_model(
    folder: Path | str,
    tp: int = 1,
    *,
    fuse: bool = True,
    fuse_shared_experts: bool = False,
    as_run: Callable[[tuple[Layer, ...]], tuple[tuple[Layer, ...], tuple[str, ...]]] = lambda layers: (layers, ()),
) -> ModelShapes:
    """Return the layers of a model, without M; arguments as in `shapes_of_model`.

    *as_run* changes layers to the formats that an engine multiplies, and returns notes on them.
    """
    folder = named_model(str(folder))
    model = architecture_of(folder)
    layers, changes = as_run(model.layers)
    notes = [*model.notes, *changes]
    reasons: dict[str, dict[str, None]] = {}
    for layer in layers:
        reasons.setdefault(left_out(layer), {})[layer.name] = None
    notes += [f"left out, as {reason}: {', '.join(names)}" for reason, names in reasons.items() if reason]
    products = tuple(layer for layer in layers if not left_out(layer))
    if fuse:
        products = tuple(attrs.evolve(layer, dtype=_model_dtype(products)) if layer.kind == "router" else layer for layer in products)
        products = _with_shared_experts(products, folder) if fuse_shared_experts else products
    products, whole = sharded(products, tp, model.tp_plan, engine=fuse)
    products = fused(products, model.latent) if fuse else products
    return ModelShapes(folder, model.name, tp, products, {}, (*notes, *whole))


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
    """Return the shapes of one rank in a forward pass of a model.

    Args:
        folder: holds ``config.json``, and perhaps a quantisation's file and the weights, of which
            the names are read. A bare name that is not a folder names a shipped model.
        tp: ranks of tensor parallelism; the shapes are those of each.
        nsets, batch_size: M is each number times the batch size.
        fuse: True for the layers of serving engines: fused QKV, fused gate and up, fused down
            projections of MLA, the vocabulary padded to a multiple of 64, and the router in the
            model's dtype. False for transformers' layers and tensor-parallel plan.
        fuse_shared_experts: count shared experts as routed ones, like AITER's engines.
        formats: number formats that the checkpoint does not determine.

    Raises:
        UserError: the folder, its ``config.json``, tp or the M cannot be used; transformers is not
            installed.
    """
    rows = rows_of(nsets, batch_size)
    return with_shapes(layers_of_model(folder, tp, fuse=fuse, fuse_shared_experts=fuse_shared_experts), rows, formats or Formats())


def with_shapes(model: ModelShapes, rows: Iterable[int], formats: Formats) -> ModelShapes:
    """Return a model with the shapes of its layers for these M, and notes on products without an op."""
    by_op, notes = listed(model.layers, rows, formats)
    return attrs.evolve(model, by_op=by_op, notes=(*model.notes, *notes))


def select_layers(model: ModelShapes, patterns: Iterable[str]) -> ModelShapes:
    """Select the layers whose names match an `fnmatch` pattern; numbers match any number.

    Raises:
        UserError: a pattern that no layer matches; the message lists the layers.
    """
    kept: dict[Layer, None] = {}
    for pattern in patterns:
        fitting = [layer for layer in model.layers if fnmatch.fnmatchcase(layer.name, generic(pattern))]
        if not fitting:
            names = ", ".join(dict.fromkeys(layer.name for layer in model.layers))
            raise UserError(f"{model.folder}: no layer matches {pattern!r}; the layers are {names}")
        kept |= dict.fromkeys(fitting)
    return attrs.evolve(model, layers=tuple(layer for layer in model.layers if layer in kept))


def _model_dtype(layers: Iterable[Layer]) -> str:
    dtypes = [layer.dtype for layer in layers if layer.kind == "linear"]
    return max(set(dtypes), key=dtypes.count) if dtypes else "bf16"


def _with_shared_experts(layers: tuple[Layer, ...], folder: Path) -> tuple[Layer, ...]:
    """Count shared experts as additional routed ones.

    Raises:
        UserError: the model has none, or of another width than the routed ones.
    """
    shared = [layer for layer in layers if "shared_expert" in layer.name and layer.role in ("gate", "up", "down")]
    banks = [layer for layer in layers if layer.experts is not None]
    down = next((layer for layer in shared if layer.role == "down"), None)
    if down is None or not banks or down.k % banks[0].k:
        fault = "no shared experts" if down is None or not banks else f"shared experts of width {down.k} and routed ones of {banks[0].k}"
        raise UserError(f"{folder}: --fuse-shared-experts: the model has {fault}")
    more = down.k // banks[0].k
    kept = []
    for layer in layers:
        if layer.experts is not None:
            experts = attrs.evolve(layer.experts, count=layer.experts.count + more, topk=layer.experts.topk + more)
            kept.append(attrs.evolve(layer, experts=experts))
        elif layer not in shared:
            kept.append(layer)
    return tuple(kept)

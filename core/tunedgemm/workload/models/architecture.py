"""Architecture: what listing a model's shapes takes, computed from ``config.json`` in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from tunedgemm.errors import UserError
from tunedgemm.workload.models.confine import Limits
from tunedgemm.workload.models.fuse import Latent
from tunedgemm.workload.models.layer import Experts, Layer
from tunedgemm.workload.models.names import weights_of
from tunedgemm.workload.models.quantisers import quantisation_of
from tunedgemm.workload.models.sandbox import ask
from tunedgemm.workload.models.scheme import stated_parts
from tunedgemm.workload.models.source import build, config_of, number_of, with_quantisation
from tunedgemm.workload.models.walk import layers


@attrs.frozen
class Architecture:
    """A model's products of full size, and what splitting and fusing them takes.

    Attributes:
        name: transformers' name of it.
        layers: the products, each with its count per pass.
        tp_plan: transformers' tensor-parallel plan, by the names of modules.
        latent: the widths of MLA, None for a model without it.
        notes: a sentence for each missing product and assumed default.
    """

    name: str
    layers: tuple[Layer, ...]
    tp_plan: Mapping[str, str]
    latent: Latent | None
    notes: tuple[str, ...]


def architecture_of(folder: Path, limits: Limits | None = None) -> Architecture:
    """Return the architecture that a folder's ``config.json`` describes.

    Raises:
        UserError: the file cannot be used, transformers is not installed or cannot build the model,
            or a limit is exceeded.
    """
    raw, notes = with_quantisation(folder, config_of(folder))
    if find_spec("transformers") is None:
        raise UserError("shapes from models need transformers: pip install 'tunedgemm[models]'")
    found = ask({"folder": str(folder), "raw": raw}, limits or Limits())
    latent = found["latent"] and Latent(**found["latent"])
    return Architecture(**(found | {"layers": tuple(map(_layer, found["layers"])), "latent": latent, "notes": (*notes, *found["notes"])}))


def _layer(fields: dict[str, Any]) -> Layer:
    return Layer(**(fields | {"experts": fields["experts"] and Experts(**fields["experts"])}))


def describe(folder: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an `Architecture` as JSON has them; called in the sandbox only."""
    source = build(Path(folder), raw)
    weights = weights_of(Path(folder)) if any(stated_parts(raw)) else frozenset()
    quantisation = quantisation_of(raw, weights)
    products, unknown = layers(source, quantisation, weights)
    plan = getattr(source.module, "tp_plan", None) or getattr(source.module, "_tp_plan", None) or {}
    rank, nope, value = (number_of(source.settings, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    latent = Latent(rank, nope, value) if rank and nope and value else None
    name = type(source.module).__name__
    return attrs.asdict(Architecture(name, products, dict(plan), latent, (*source.notes, *quantisation.notes, *unknown)))

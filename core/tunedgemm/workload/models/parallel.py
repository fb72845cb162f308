"""Parallel: split layers over the ranks of tensor parallelism.

Serving engines split by the role of a layer, or by the model's plan if the role is unknown. Ranks
share key and value heads if there are fewer heads than ranks, and the vocabulary is padded.
Transformers splits by the model's plan, or by role without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from tunedgemm.errors import UserError
from tunedgemm.workload.models.layer import Layer
from tunedgemm.workload.models.roles import NEVER_SPLIT, SPLIT_BY_COLUMNS, SPLIT_BY_ROWS
from tunedgemm.workload.models.scheme import weight_format

#: Multiple to which engines pad the vocabulary (DEFAULT_VOCAB_PADDING_SIZE of vLLM and SGLang).
VOCAB_STEP = 64
#: Scheme of both sides -> rows and columns per weight scale, which engines do not split.
_BLOCKS = {"fp8_block": 128, **dict.fromkeys(("mxfp4", "mxfp4_fp8", "mxfp8", "int4/32"), 32)}
#: Most ranks, more than any engine uses.
MOST_RANKS = 1024

#: transformers' styles of a plan (transformers.distributed.tensor_parallel) -> how the weight is
#: split; others leave it whole
_BY_ROWS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "local_colwise", "local_packed_colwise")
_BY_COLUMNS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "local_rowwise", "local_packed_rowwise")


def sharded(layers: tuple[Layer, ...], tp: int, plan: Mapping[str, str], *, engine: bool) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """Return the layers of the first of *tp* ranks, and notes on layers that are not split.

    Args:
        plan: transformers' plan of the model, a style for each generic name; it may be empty.
        engine: as serving engines split, not as transformers does.

    Raises:
        UserError: tp is out of range, or does not divide heads, a width or the vocabulary.
    """
    if not 1 <= tp <= MOST_RANKS:
        raise UserError(f"tp must be in 1..{MOST_RANKS} (got {tp})")
    planned = any(_planned(layer, plan) is not None for layer in layers if layer.kind in ("linear", "experts"))
    plans = [(layer, _planned(layer, plan)) for layer in layers]
    splits = [(layer, (style or "") if planned and not engine else _by_role(layer, style or "")) for layer, style in plans]
    notes = []
    reason = _uncut([pair for pair in splits if pair[0].tower], tp, engine=engine)
    if reason:
        parts = dict.fromkeys(_tower(layer) for layer in layers if layer.tower)
        notes.append(f"left whole on every rank: {', '.join(parts)}, as {reason}")
    cut = tuple(layer if layer.tower and reason else _of_rank(layer, tp, split, engine=engine) for layer, split in splits)
    notes += dict.fromkeys(note for (layer, _), part in zip(splits, cut, strict=True) for note in _broken_blocks(layer, part))
    cut = tuple(_with_all_groups(layer, part) for (layer, _), part in zip(splits, cut, strict=True))
    nameless = [layer for (layer, split), (_, style) in zip(splits, plans, strict=True) if not (split or layer.role) and style is None]
    whole = dict.fromkeys(layer.name for layer in nameless if layer.kind in ("linear", "batched"))
    if whole and tp > 1 and (engine or not planned):
        notes.append(f"not split over ranks, as their names have no known role: {', '.join(whole)}")
    return cut, tuple(notes)


def _broken_blocks(whole: Layer, part: Layer) -> Iterator[str]:
    """Yield a note on each size that a rank's share cuts inside a block with one scale."""
    blocks = (_BLOCKS.get(whole.scheme, 1),) * 2
    form, group = weight_format(whole.scheme)
    if form is not None:
        by_group = not form.has_index and group
        blocks = (max(form.rows, 1) if form.zeros is None else form.per, by_group or form.per)
    names = ("model_dim", "inter_dim") if whole.kind == "experts" else ("N", "K")
    for name, before, size, block in zip(names, (whole.n, whole.k), (part.n, part.k), blocks, strict=True):
        if size != before and size % block:
            yield f"{whole.name}: {name} {size} is not a multiple of the block {block}: engines refuse this or pad"
    if (own := _with_all_groups(whole, part)) != part:
        group = weight_format(own.scheme)[1]
        yield f"{whole.name}: K is split and has act-order: a rank keeps the scales of all groups, as if of groups of {group}"


def _with_all_groups(whole: Layer, part: Layer) -> Layer:
    """Return a rank's layer with the group that its operands have.

    An index of act-order names any group, so each rank keeps the scales of all groups. For its part
    of K these are scales of smaller groups.
    """
    form, group = weight_format(whole.scheme)
    if part.k == whole.k or form is None or not form.has_index:
        return part
    return attrs.evolve(part, scheme=f"{form.name}/{group * part.k // whole.k}")


def _uncut(towers: list[tuple[Layer, str]], tp: int, *, engine: bool) -> str:
    """Return why non-text parts cannot be split, which engines then run whole on each rank; "" otherwise."""
    try:
        for layer, split in towers:
            _of_rank(layer, tp, split, engine=engine)
    except UserError as error:
        return str(error).partition(";")[0]
    return ""


def _tower(layer: Layer) -> str:
    """Return the part of the model that contains a non-text layer."""
    words = layer.name.split(".")
    return ".".join(words[: 2 if words[0] == "model" and len(words) > 2 else 1])


def _of_rank(layer: Layer, tp: int, split: str, *, engine: bool) -> Layer:
    if layer.kind == "head" and engine:
        layer = attrs.evolve(layer, n=-(-layer.n // VOCAB_STEP) * VOCAB_STEP)
    if tp == 1 or not split:
        return layer
    if layer.kind == "experts":
        return attrs.evolve(layer, k=_share(layer, "the width of an expert", layer.k, 1, tp))
    if layer.kind == "head":
        return attrs.evolve(layer, n=_share(layer, "the vocabulary", layer.n, 1, tp))
    if split == "columns":
        return attrs.evolve(layer, k=_share(layer, "columns", layer.k, layer.unit, tp))
    return attrs.evolve(layer, n=_heads(layer, tp, shared=engine))


def _planned(layer: Layer, plan: Mapping[str, str]) -> str | None:
    """Return how the model's plan splits a layer: ``rows``, ``columns`` or ""; None where it says nothing."""
    names = [layer.name] if layer.kind != "experts" else [f"{layer.name}.{part}" for part in ("down_proj", "w2", "*.down_proj", "*.w2")]
    style = next((plan[name] for name in names if name in plan), None)
    return style if style is None else "rows" if style in _BY_ROWS else "columns" if style in _BY_COLUMNS else ""


def _by_role(layer: Layer, otherwise: str) -> str:
    """Return ``rows``, ``columns``, or "" for a layer that every rank has whole."""
    if layer.kind in ("head", "experts"):
        return "rows"
    if layer.kind != "linear" or layer.role in NEVER_SPLIT:
        return ""
    return "rows" if layer.role in SPLIT_BY_ROWS else "columns" if layer.role in SPLIT_BY_COLUMNS else otherwise


def _heads(layer: Layer, tp: int, *, shared: bool) -> int:
    """Return the rows of a rank: its share of heads, and of those of keys and values.

    Where ranks may share heads of keys and values, each has at least one of both.
    """
    units = layer.n // layer.unit - layer.kv_units
    own = _share(layer, "heads" if layer.unit > 1 else "rows", units, 1, tp)
    if not layer.kv_units:
        return own * layer.unit
    if layer.kv_heads % tp == 0:
        return (own + layer.kv_units // tp) * layer.unit
    if not shared or tp % layer.kv_heads:
        how = "" if shared else "; transformers' own tensor parallelism does not share them among ranks"
        raise _indivisible(layer, "heads of keys and values", layer.kv_heads, tp, how)
    return (own + layer.kv_units // layer.kv_heads) * layer.unit


def _share(layer: Layer, what: str, size: int, unit: int, tp: int) -> int:
    """Return a rank's part of *size*, which is split between units alone."""
    units = size // unit
    if units % tp:
        raise _indivisible(layer, "heads" if unit > 1 else what, units, tp)
    return units // tp * unit


def _indivisible(layer: Layer, what: str, number: int, tp: int, more: str = "") -> UserError:
    fitting = [str(other) for other in (1, 2, 4, 8, 16, 32) if number % other == 0 and other != tp]
    return UserError(f"tp={tp} does not divide {what} of {layer.name}: {number}{more}; use one of {', '.join(fitting)}")

"""Shared flags that name a model and change shapes, and the shapes that they select."""

from __future__ import annotations

import argparse
import functools
import math
import operator
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import attrs

from tunedgemm.dtype import FP8
from tunedgemm.errors import UserError
from tunedgemm.text.number import whole_number

if TYPE_CHECKING:
    from tunedgemm.device import Device
    from tunedgemm.table.untuned import Untuned
    from tunedgemm.workload.lists import ShapeOverrides
    from tunedgemm.workload.models import ModelShapes

#: AITER's words for dtypes in flags.
DTYPES = ("f32", "f16", "bf16", FP8)
#: Flags that need a model.
_OF_A_MODEL = ("tp", "nsets", "max_num_seqs", "max_num_batched_tokens", "batch_size", "no_fuse", "fuse_shared_experts", "layers")
#: Ending of the name of an op for shuffled weights.
SHUFFLED = "_bpreshuffle"

_Value = TypeVar("_Value")


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse a comma list of whole numbers."""
    numbers = tuple(number for part in text.split(",") if (number := whole_number(part)) is not None)
    if len(numbers) <= text.count(","):
        raise argparse.ArgumentTypeError(f"expected whole numbers such as 1,2,4 (got {text!r:.60})")
    return numbers


def _whole_number(text: str) -> int:
    if (number := whole_number(text)) is None:
        raise argparse.ArgumentTypeError(f"expected a whole number (got {text!r:.60})")
    return number


def positive_number(text: str) -> int:
    """Parse a whole number above 0."""
    if not (number := whole_number(text)):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0 (got {text!r:.60})")
    return number


def per_cent(text: str) -> float:
    """Parse per cent, as ``1%`` or ``0.5``; return the share."""
    try:
        share = float(text.strip().removesuffix("%")) / 100.0
    except ValueError:
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise argparse.ArgumentTypeError(f"expected per cent in 0 to 100, such as 1% (got {text!r:.60})")
    return share


def add_model(group: argparse._ArgumentGroup) -> None:
    """Define the flags that name a model and select its shapes; the environment's defaults are read late."""
    add = group.add_argument
    folder = "a folder with config.json, or the bare name of a shipped one; default: GTUNE_MODEL"
    add("--model_dir", default="", metavar="DIR", help=folder)
    several = "several models, each as --model_dir, with a TP of its own if stated; counts are calls if each M serves as many tokens"
    add("--models", type=_names, default=(), metavar="NAME[:TP],…", help=several)
    add(
        "--tp",
        type=whole_numbers,
        metavar="N,N",
        help="ranks of tensor parallelism; a list gives the shapes of each; default: GTUNE_TP, else 1",
    )
    sets = "values of M, or an engine for the batch sizes that it runs; default: 1,512,1024,2048,3072,4096,8192,16384"
    add("--nsets", type=_nsets, metavar="M,M|vllm|sglang", help=sets)
    add("--max-num-seqs", type=_whole_number, metavar="N", help="with --nsets vllm or sglang: sequences decoded at once (default: 256)")
    add("--max-num-batched-tokens", type=_whole_number, metavar="N", help="with --nsets vllm or sglang: tokens of a step (default: 8192)")
    add("--batch_size", type=_whole_number, metavar="N", help="factor of each M; default: GTUNE_BATCH_SIZE, else 1")
    add("--layers", default="", metavar="GLOB,GLOB", help="only layers whose names match, such as '*.mlp.*,lm_head'")
    add(
        "--no-fuse", action="store_true", help="list each product separately, as transformers runs it; default: fused as in serving engines"
    )
    add("--fuse-shared-experts", action="store_true", help="count shared experts among the routed ones")


def _names(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Parse ``--models``: names or folders, each with its own degrees of parallelism, if any."""
    ranks: dict[str, tuple[int, ...]] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, colon, tp = part.rpartition(":")
        rank = whole_number(tp) if colon else None
        if rank is None:
            name = part
        ranks[name] = (*ranks.get(name, ()), *(() if rank is None else (rank,)))
    return tuple(ranks.items())


def _nsets(text: str) -> tuple[int, ...] | str:
    """Parse ``--nsets``: whole numbers, or the name of an engine."""
    return text if text.strip().isalpha() else whole_numbers(text)


def add_overrides(group: argparse._ArgumentGroup) -> None:
    """Define the flags that change every shape, of a file or a model."""
    add = group.add_argument
    add("--indtype", choices=DTYPES, default="", help="dtype of the activations of all shapes")
    out = "dtype of the output of all shapes; default with --indtype: the same, bf16 for fp8"
    add("--outdtype", choices=DTYPES, default="", help=out)
    add("--all_bias", action="store_true", help="tune each shape with a bias and without")
    add("--fp8", choices=("e4m3fn", "e4m3fnuz"), default="", help="format of fp8; default: the device's, e4m3fnuz on MI300")


def default(flag_value: _Value | None, variable: str, kind: Callable[[str], _Value], otherwise: _Value) -> _Value:
    """Return a flag's value, else the environment variable's, else *otherwise*.

    Raises:
        UserError: the variable's value is invalid.
    """
    if flag_value is not None:
        return flag_value
    text = os.environ.get(variable, "").strip()
    try:
        return kind(text) if text else otherwise
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{variable}={text}: {error}") from None


def models_of(arguments: argparse.Namespace, other: str | None = None) -> dict[str, tuple[int, ...]]:
    """Return the models of the flags, else of the environment unless *other* is given, with each one's TP.

    Args:
        other: the file of shapes on the command line.

    Raises:
        UserError: several of these are given, or flags of a model without a model.
    """
    given = {"-i": other, "--model_dir": arguments.model_dir, "--models": arguments.models}
    if len(named := [flag for flag, value in given.items() if value]) > 1:
        raise UserError(f"{' and '.join(named)}: are mutually exclusive; leave out one of them")
    model: str = arguments.model_dir or ("" if named else os.environ.get("GTUNE_MODEL", "").strip())
    models = dict(arguments.models) or ({model: ()} if model else {})
    if flags_set := [name for name in _OF_A_MODEL if getattr(arguments, name) and not models]:
        flag = flags_set[0] if flags_set[0] in ("batch_size", "nsets") else flags_set[0].replace("_", "-")
        raise UserError(f"--{flag}: requires a model; name one with --model_dir")
    ranks = tuple(dict.fromkeys(default(arguments.tp, "GTUNE_TP", whole_numbers, (1,)))) if models else ()
    return {name: tuple(dict.fromkeys(own)) or ranks for name, own in models.items()}


@attrs.frozen
class Listed:
    """The selected shapes of one model or several.

    Attributes:
        models: each model at each of its degrees of tensor parallelism.
        by_op: the selected shapes of all of them, by the name of the op.
        rows: the values of M.
        commands: the command line of the engine that runs these M, one for each model.
    """

    models: tuple[ModelShapes, ...]
    by_op: Mapping[str, tuple[Untuned, ...]]
    rows: tuple[int, ...]
    commands: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each omitted product and each assumed default."""
        return tuple(dict.fromkeys(note for model in self.models for note in model.notes))

    def __str__(self) -> str:
        ranks: dict[str, list[str]] = {}
        for model in self.models:
            ranks.setdefault(f"{model.architecture} of {model.folder}", []).extend([str(model.tp)] if model.tp else [])
        models = "; ".join(f"{model} at TP {', '.join(degrees)}" if degrees else model for model, degrees in ranks.items())
        counts = ", ".join(f"{len(rows)} of {name}" for name, rows in self.by_op.items())
        return f"{models}, {_of_rows(self.rows)}; shapes: {counts}"


def _of_rows(rows: tuple[int, ...]) -> str:
    return f"M = {', '.join(map(str, rows))}" if len(rows) <= 16 else f"{len(rows)} M in {rows[0]}..{rows[-1]}"


def listed(named: Mapping[str, tuple[int, ...]], arguments: argparse.Namespace, device_of: Callable[[], Device]) -> Listed:
    """Return the shapes selected by the flags of `add_model`, `add_overrides`, ``--op``, ``--preshuffle``.

    Args:
        named: models with the degrees of parallelism of each; see `models_of`.
        device_of: returns the device that is tuned for, which decides how an engine calls.

    Raises:
        UserError: a model or a flag cannot be used, or no shape is left.
    """
    from tunedgemm.workload.models import NSETS, Formats, by_tokens, layers_of_model, merge_lists, rows_of, select_layers, with_shapes
    from tunedgemm.workload.models.engines import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, as_called, as_run, command_of, rows_of_engine

    engine = arguments.nsets if isinstance(arguments.nsets, str) else ""
    limits = (arguments.max_num_seqs or MAX_NUM_SEQS, arguments.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS)
    if not engine and (arguments.max_num_seqs or arguments.max_num_batched_tokens):
        raise UserError("--max-num-seqs and --max-num-batched-tokens: require an engine; add --nsets vllm or --nsets sglang")
    sets = rows_of_engine(engine, *limits) if engine else arguments.nsets or NSETS
    rows = rows_of(sets, default(arguments.batch_size, "GTUNE_BATCH_SIZE", _whole_number, 1))
    formats = Formats(fp8=_fp8(arguments), preshuffle=arguments.preshuffle)
    patterns = tuple(pattern.strip() for pattern in arguments.layers.split(",") if pattern.strip())
    run = functools.partial(as_run, engine, device_of)
    models: dict[str, list[ModelShapes]] = {}
    for model, tp in ((model, tp) for model, ranks in named.items() for tp in ranks):
        layers = layers_of_model(model, tp, fuse=not arguments.no_fuse, fuse_shared_experts=arguments.fuse_shared_experts, as_run=run)
        shaped = with_shapes(select_layers(layers, patterns) if patterns else layers, rows, formats)
        wanted = _wanted(shaped, arguments, several=len(named) > 1)
        by_op, notes = as_called(engine, wanted, device_of) if engine else (wanted, ())
        models.setdefault(model, []).append(attrs.evolve(shaped, by_op=by_op, notes=(*shaped.notes, *notes)))
    merged = merge_lists((merge_lists(rank.by_op for rank in ranks) for ranks in models.values()), operator.add)
    if not merged:
        raise UserError(f"--op {arguments.op}: no product of {', '.join(named)} is of this op; leave --op out to see their ops")
    commands = tuple(command_of(engine, model, tp, *limits) for model, ranks in named.items() for tp in ranks) if engine else ()
    every = tuple(rank for ranks in models.values() for rank in ranks)
    return Listed(every, by_tokens(merged) if arguments.models else merged, rows, commands)


def listed_file(arguments: argparse.Namespace) -> Listed:
    """Return the shapes in another tuner's file that ``--op`` and the flags of `add_overrides` select.

    Raises:
        UserError: the file cannot be used, or no shape is left.
    """
    from tunedgemm.workload.foreign import read_foreign
    from tunedgemm.workload.models import ModelShapes

    form, by_op, notes = read_foreign(arguments.file)
    model = ModelShapes(arguments.file, form, 0, (), by_op, notes)
    wanted = _wanted(model, arguments, several=False)
    rows = sorted({row.shape.m for rows in wanted.values() for row in rows})
    return Listed((attrs.evolve(model, by_op=wanted),), wanted, tuple(rows))


def _wanted(model: ModelShapes, arguments: argparse.Namespace, *, several: bool) -> dict[str, tuple[Untuned, ...]]:
    """Return a model's shapes of the requested op, with the requested changes.

    One of *several* models may have none; a single one is an error then.
    """
    from tunedgemm.ops import op_named, ops
    from tunedgemm.workload.lists import override_shapes

    by_op, name = dict(model.by_op), arguments.op
    if not by_op:
        raise UserError(f"{model.folder}: no op covers a product of this model: {'; '.join(model.notes) or 'it has none'}")
    if name:
        op_named(name)
        name = name + SHUFFLED if arguments.preshuffle and name + SHUFFLED in ops() else name
        if name not in by_op and several:
            return {}
        if name not in by_op:
            raise UserError(f"{model.folder}: has no products of the op {name}; it has products of {', '.join(by_op)}")
        by_op = {name: by_op[name]}
    overrides = overrides_of(arguments)
    return {name: override_shapes(op_named(name), rows, overrides) for name, rows in by_op.items()} if overrides else by_op


def _fp8(arguments: argparse.Namespace) -> str:
    return f"{FP8}_{arguments.fp8}" if arguments.fp8 else FP8


def overrides_of(arguments: argparse.Namespace) -> ShapeOverrides | None:
    """Return the changes of the flags of `add_overrides`, None without any."""
    from tunedgemm.workload.lists import ShapeOverrides

    indtype, outdtype = (_fp8(arguments) if text == FP8 else text for text in (arguments.indtype, arguments.outdtype))
    return ShapeOverrides(indtype, outdtype, arguments.all_bias) if indtype or outdtype or arguments.all_bias else None

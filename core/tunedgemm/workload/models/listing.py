"""Listing: convert the layers of a rank to shapes of ops for given M."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import attrs

from tunedgemm.dtype import FP8, parse_dtype, table_text
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named, quantised
from tunedgemm.ops.moe_operands import default_q_dtype_a
from tunedgemm.ops.moe_words import ACTIVATIONS
from tunedgemm.ops.weight_formats import FORMAT, GROUP
from tunedgemm.shape import MAX_SIZE, Shape
from tunedgemm.table.untuned import Untuned, layers_of_both
from tunedgemm.workload.models.layer import Layer
from tunedgemm.workload.models.scheme import SCHEMES, WEIGHTS_ALONE

#: Most M per list.
MOST_ROWS = 4096

#: scheme -> the op of a plain product, the op for shuffled weights, "" where no op has such
#: products, and fmoe's word for the quantisation; others are of weights alone
_OPS = {
    "": ("a16w16", "a16w16", "No"),
    "fp8_tensor": ("a16w16", "a16w16", "per_Tensor"),
    "fp8_row": ("a8w8", "a8w8_bpreshuffle", "per_Token"),
    "int8_row": ("a8w8", "a8w8_bpreshuffle", "per_Token"),
    "fp8_block": ("a8w8_blockscale", "a8w8_blockscale_bpreshuffle", "per_1x128"),
    "mxfp4": ("a4w4_blockscale", "a4w4_blockscale", "per_1x32"),
    "mxfp4/32": ("a16w4_blockscale", "a16w4_blockscale", "per_1x32"),
    "mxfp4_fp8": ("", "", "per_1x32"),
    "mxfp8": ("", "", "per_1x32"),
    "nvfp4": ("", "", ""),
    "int4/32": ("", "", "per_1x32"),
    "ct_int4/32": ("a16wn", "a16wn", "per_1x32"),
    "int8_channel/0": ("a16wn", "a16wn", "per_Token"),
    "fp8_block/128": ("a16wn", "a16wn", "per_1x128"),
    "fp8_channel/0": ("a16wn", "a16wn", "per_Token"),
    "fp8_tensor/0": ("a16wn", "a16wn", "per_Tensor"),
}
_WEIGHTS_ALONE = ("a16wn", "a16wn", "")
#: scheme -> dtype of the weights where it is not fp8
_WEIGHTS = {
    **dict.fromkeys(("int8_row", "int8_channel/0"), "int8"), **dict.fromkeys(("int4/32", "ct_int4/32"), "int4"),
    **dict.fromkeys(("mxfp4", "mxfp4/32", "mxfp4_fp8"), "fp4x2"),
}  # fmt: skip
#: schemes of experts whose activations `fused_moe` chooses by the number of tokens and the device
_CHOSEN = ("mxfp4/32",)
_SHUFFLED = "aiter16x16"


@attrs.frozen
class Formats:
    """Number formats that a checkpoint does not determine.

    Attributes:
        fp8: the fp8 dtype, ``fp8_e4m3fn`` or ``fp8_e4m3fnuz``; by default the current device's.
        preshuffle: whether weights are shuffled, as in AITER's engines.
    """

    fp8: str = attrs.field(default=FP8, converter=parse_dtype, validator=attrs.validators.in_(quantised.FP8))
    preshuffle: bool = False


def rows_of(sets: Iterable[int], batch_size: int = 1) -> tuple[int, ...]:
    """Return the distinct M, each times *batch_size*, ascending.

    Raises:
        UserError: no M, an invalid M, or too many.
    """
    numbers = tuple(sets)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UserError(f"the batch size must be at least 1 (got {batch_size})")
    rows = sorted({number * batch_size for number in numbers})
    if not rows:
        raise UserError("no M given; name some, as --nsets 1,16,256,4096")
    if rows[0] < 1 or rows[-1] >= MAX_SIZE:
        wrong = rows[0] if rows[0] < 1 else rows[-1]
        raise UserError(f"M (--nsets times --batch_size) must be in 1..{MAX_SIZE - 1} (got {wrong})")
    if len(rows) > MOST_ROWS:
        raise UserError(f"at most {MOST_ROWS} numbers of rows (got {len(rows)}); a table pads M to its next row, see docs/which-shapes.md")
    return tuple(rows)


def listed(layers: Iterable[Layer], rows: Iterable[int], formats: Formats) -> tuple[dict[str, tuple[Untuned, ...]], tuple[str, ...]]:
    """Return the shapes of a forward pass by op, and notes on layers without an op.

    Each shape is listed once, with the number and names of its layers.

    Args:
        layers: the layers of one rank.
        rows: the M of each layer.
    """
    by_op: dict[str, dict[Shape, Untuned]] = {}
    notes: dict[str, None] = {}
    rows = tuple(rows)
    for layer in layers:
        name, cells = _cells(layer, formats)
        op = op_named(name)
        column = "token" if layer.kind == "experts" else "M"
        for m in rows:
            try:
                shape = op.columns.parse({**cells, column: str(m)})
                shape = _as_called(shape) if layer.scheme in _CHOSEN and shape.op == "fmoe" else shape
            except UserError as error:
                notes[f"{layer.name}: {op.name} cannot have it: {error}"] = None
                break
            by_op.setdefault(name, {})
            row = Untuned(shape, layer.count, layer=layer.name)
            by_op[name][shape] = by_op[name][shape].joined(row) if shape in by_op[name] else row
    return {name: tuple(shapes.values()) for name, shapes in by_op.items()}, tuple(notes)


def merge_lists(
    lists: Iterable[Mapping[str, tuple[Untuned, ...]]], together: Callable[[int, int], int] = max
) -> dict[str, tuple[Untuned, ...]]:
    """Merge the lists of several degrees of parallelism, or of several models.

    Args:
        together: combines the counts of a shape that several lists have: `max` for one model, whose
            degrees are alternatives, `operator.add` for several.
    """
    merged: dict[str, dict[Shape, Untuned]] = {}
    for by_op in lists:
        for name, rows in by_op.items():
            shapes = merged.setdefault(name, {})
            for row in rows:
                if (earlier := shapes.get(row.shape)) is not None:
                    row = attrs.evolve(row, count=together(earlier.count, row.count), layer=layers_of_both(earlier.layer, row.layer))  # noqa: PLW2901
                shapes[row.shape] = row
    return {
        name: tuple(sorted(shapes.values(), key=lambda row: (row.shape.n, row.shape.k, row.shape.m))) for name, shapes in merged.items()
    }


def by_tokens(by_op: Mapping[str, tuple[Untuned, ...]]) -> dict[str, tuple[Untuned, ...]]:
    """Weight counts as if each M served equally many tokens, so that M = 1 runs most often."""
    most = max((row.shape.m for rows in by_op.values() for row in rows), default=1)
    return {
        name: tuple(attrs.evolve(row, count=row.count * max(1, round(most / row.shape.m))) for row in rows) for name, rows in by_op.items()
    }


def left_out(layer: Layer) -> str:
    """Return why a layer is not listed, as the end of "left out, as …"; "" if it is."""
    if layer.refused or _OPS.get(layer.scheme, _WEIGHTS_ALONE)[2 if layer.kind == "experts" else 0]:
        return layer.refused
    if layer.kind == "experts":
        return f"no op has experts with {SCHEMES[layer.scheme]}"
    if layer.scheme not in WEIGHTS_ALONE:
        return f"no op has {SCHEMES[layer.scheme]}"
    older = "vLLM runs the weights alone on GPUs before sm_100, listed with --nsets vllm --device sm_90:132"
    return f"no engine's calls of ours have {SCHEMES[layer.scheme]}; {older}"


def _cells(layer: Layer, formats: Formats) -> tuple[str, dict[str, str]]:
    """Return the op of a layer, and the texts of its columns except M."""
    plain, shuffled, word = _OPS.get(layer.scheme, _WEIGHTS_ALONE)
    if layer.experts is not None:
        return "fmoe", _experts_cells(layer, word, formats)
    sizes = {"N": str(layer.n), "K": str(layer.k), "bias": str(layer.bias)}
    if layer.kind == "batched":
        return "batched_bf16", {**sizes, "B": str(layer.batch), "dtype": layer.dtype, "outdtype": layer.dtype}
    multiplied = _multiplied(layer, formats)
    cells = sizes | dict.fromkeys(("dtype", "q_dtype_w", "x_dtype"), multiplied)
    cells |= {"outdtype": layer.dtype, "scaleAB": str(layer.scheme == "fp8_tensor")}
    cells |= dict(zip((FORMAT, GROUP), layer.scheme.split("/"), strict=False))
    if formats.preshuffle and plain != _WEIGHTS_ALONE[0]:
        cells |= {"bpreshuffle": "True", "layout": _SHUFFLED}
    op = shuffled if formats.preshuffle else plain
    columns = (*op_named(op).columns.key, *op_named(op).columns.own)
    return op, {column: text for column, text in cells.items() if column in columns}


def _multiplied(layer: Layer, formats: Formats) -> str:
    """Return the dtype of the activations in the multiplication."""
    if not layer.scheme or "/" in layer.scheme:
        return layer.dtype
    return formats.fp8 if layer.scheme == "mxfp4_fp8" else _WEIGHTS.get(layer.scheme, formats.fp8)


def _experts_cells(layer: Layer, word: str, formats: Formats) -> dict[str, str]:
    experts = layer.experts
    assert experts is not None
    weights = _WEIGHTS.get(layer.scheme, formats.fp8) if layer.scheme else layer.dtype
    act = ACTIVATIONS.get(experts.act)
    return {
        "model_dim": str(layer.n),
        "inter_dim": str(layer.k),
        "expert": str(experts.count),
        "topk": str(experts.topk),
        "act_type": f"ActivationType.{act.name}" if act is not None else "",
        "dtype": table_text(layer.dtype),
        "q_dtype_a": table_text(_multiplied(layer, formats)),
        "q_dtype_w": table_text(weights),
        "q_type": f"QuantType.{word}",
        "use_g1u1": str(int(experts.gated)),
        "doweight_stage1": "0",
        "layout": _SHUFFLED if formats.preshuffle or weights == "int4" else "row",
        "options": "bias1 bias2" if layer.bias else "",
    }


def _as_called(shape: Shape) -> Shape:
    """Return experts with the dtype to which `fused_moe` quantises activations."""
    return attrs.evolve(shape, extra={**dict(shape.extra), "q_dtype_a": default_q_dtype_a(shape)})  # type: ignore[arg-type]

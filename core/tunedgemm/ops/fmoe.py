"""fmoe: fused mixture of experts, the weighted sum of each token's topk gated MLPs.

``out[t] = sum_j weight[t, j] * act(hidden[t] @ w1[e].T) @ w2[e].T`` with ``e = topk_ids[t, j]``.
AITER's ``fused_moe``, with the table ``tuned_fmoe.csv``. In a Shape, m is the number of tokens, n
is model_dim and k is inter_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.dtype import dtype_bits, table_text
from tunedgemm.errors import OperandError, ShapeError
from tunedgemm.libtypes import libtype_of_kernel
from tunedgemm.ops import moe, moe_formats, moe_words
from tunedgemm.ops.moe_domain import DOMAIN, LAYOUT, usual_layout
from tunedgemm.ops.moe_entry import OPERANDS, entry
from tunedgemm.ops.moe_operands import default_q_dtype_a, make_inputs, shape_of
from tunedgemm.ops.moe_options import GATE_MODE, OPTIONS, Options, canonical, gate_word, options_of, parse_options
from tunedgemm.ops.moe_words import (
    ACTIVATIONS,
    ANY_TOPK,
    BLOCK_ROWS,
    DTYPES,
    EXPERT_PARALLEL,
    GATED,
    WEIGHT_DTYPES,
    ActivationType,
    QuantType,
    activation_dtypes,
)  # fmt: skip
from tunedgemm.ops.op import Columns, Factors, Op, Tolerance, taken
from tunedgemm.ops.padded_m import tokens
from tunedgemm.ops.product import TOLERANCES
from tunedgemm.ops.scale_order import E8M0_ORDERS, FIELD, ROW, SHUFFLED, stated_order, usual_order, with_order
from tunedgemm.ops.schema import Cells, Column, Dtype, Flag, Schema, Size, Word
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

__all__ = ["ActivationType", "QuantType", "op"]

_ACT_TEXTS = {str(member): word for word, member in ACTIVATIONS.items()}
_QUANT_TEXTS = {str(member): moe_words.quant_word(member) for member in QuantType}
#: Columns with the kernel names of the two stages.
_STAGES = ("kernelName1", "kernelName2")
_VALUES = (
    "block_m", "ksplit", "us1", "kernelName1", "err1", "us2", "kernelName2", "err2", "us", "run_1stage", "tflops", "bw", "_tag",
)  # fmt: skip
_NOTHING = ("", "0", "nan", "none", "null")


def _kind(cells: Cells) -> str:
    return str(_Q_TYPE.value(cells))


@attrs.frozen
class _Meaning(Column):
    """A member of AITER's enums: *words* maps its texts to our words, *names* the reverse."""

    default: Any = None
    words: Mapping[str, str] = attrs.field(factory=dict)

    def read(self, text: str, cells: Cells) -> str:
        del cells
        return moe_words.cell_word(self.name, text, dict(self.words))

    def write(self, value: Any) -> str:
        return next(text for text, word in self.words.items() if word == value)


@attrs.frozen
class _TopK(Size):
    """A number of experts, or AITER's value for any number."""

    def read(self, text: str, cells: Cells) -> int:
        return ANY_TOPK if text == str(ANY_TOPK) else super().read(text, cells)


@attrs.frozen
class _GateMode(Column):
    """Order of gate and up rows in w1, in AITER's spelling or ours."""

    def read(self, text: str, cells: Cells) -> str:
        try:
            return gate_word(text, cells.get("gfx", ""))
        except OperandError as error:
            raise ShapeError(f"column {self.name!r}: {error}") from None


@attrs.frozen
class _Options(Column):
    def read(self, text: str, cells: Cells) -> str:
        del cells
        return str(parse_options(text))


_DTYPE = Dtype("dtype", "dtype", DTYPES[0], allowed=DTYPES)
_Q_TYPE = _Meaning("q_type", "q_type", words=_QUANT_TEXTS)
_Q_DTYPE_W = Dtype("q_dtype_w", "q_dtype_w", None, allowed=lambda cells: WEIGHT_DTYPES[_kind(cells)])


def _orders(cells: Cells) -> tuple[str, ...]:
    return E8M0_ORDERS if _kind(cells) == "per_1x32" and _Q_DTYPE_W.value(cells) != "int4" else (ROW,)


_SCHEMA = Schema(
    {"op": moe_words.NAME},
    key=(
        Size("token", "m"),
        Size("model_dim", "n"),
        Size("inter_dim", "k"),
        Size("expert", "expert"),
        _TopK("topk", "topk"),
        _Meaning("act_type", "act", words=_ACT_TEXTS),
        _DTYPE,
        Dtype("q_dtype_a", "q_dtype_a", None, allowed=lambda cells: activation_dtypes(_kind(cells), _DTYPE.value(cells))),
        _Q_DTYPE_W,
        _Q_TYPE,
        Flag("use_g1u1", "g1u1", texts=("0", "1")),
        Flag("doweight_stage1", "doweight_stage1", texts=("0", "1")),
    ),
    own=(
        Column("layout", "layout", usual_layout),
        Dtype("outdtype", "outdtype", lambda shape: shape.dtype, allowed=DTYPES),
        Word(FIELD, FIELD, usual_order, spare=True, allowed=_orders),
        Flag(EXPERT_PARALLEL, EXPERT_PARALLEL, spare=True),
        _GateMode(GATE_MODE, GATE_MODE, spare=True),
        _Options(OPTIONS, OPTIONS, spare=True),
    ),
)


def _read(row: Mapping[str, str]) -> Mapping[str, str]:
    """Merge the cells of AITER's two stages: kernel names as ``first+second``, the larger error.

    Raises:
        ShapeError: only the second stage has a kernel name.
    """
    names = [name for column in _STAGES if (name := row.get(column, "").strip()).lower() not in _NOTHING]
    if len(names) == 1 and row.get(_STAGES[0], "").strip() != names[0]:
        raise ShapeError(f"{_STAGES[1]!r} names a second stage (got {names[0][:80]!r}), and {_STAGES[0]!r} no first one")
    errors = [text for column in ("err1", "err2") if (text := row.get(column, "").strip())]
    cells_read = {"kernelName": "+".join(names), "splitK": row.get("ksplit", ""), "us": row.get("us", "")}
    cells_read["libtype"] = row.get("libtype", "") or "+".join(dict.fromkeys(map(libtype_of_kernel, names)))
    if errors:
        cells_read["err_ratio"] = max(errors, key=_share)
    return {name: text for name, text in cells_read.items() if text}


def _write(row: Mapping[str, str]) -> Mapping[str, str]:
    """Split merged cells into AITER's columns, the inverse of `_read`."""
    kept = {name: text for name, text in row.items() if name not in ("kernelName", "splitK", "err_ratio", "solidx")}
    first, _, second = row.get("kernelName", "").partition("+")
    kept |= {"kernelName1": first, "kernelName2": second, "ksplit": row.get("splitK", "0")}
    ratio, stages = row.get("err_ratio", "") or "0", [row.get("err1", ""), row.get("err2", "")]
    if not all(stages) or round(max(map(_share, stages)), 4) != round(_share(ratio), 4):
        kept["err1"] = kept["err2"] = f"{100 * _share(ratio):.1f}%"  # both stages are verified together
    return kept


def _share(text: str) -> float:
    """Parse a fraction or a percentage; return infinity for other texts, which `row` reports."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return float("inf")


def _equivalent_shapes(shape: Shape) -> tuple[Shape, ...]:
    """Return the shape, then its forms in AITER's key, which lacks layout and options.

    The same forms follow with other activations, as in AITER's look-up. Expert-parallel calls have
    a topk smaller by one in AITER's key, as its callers add a slot for an absent expert.
    """
    fields, asked = dict(shape.extra), [shape]
    if GATE_MODE in fields or OPTIONS in fields:
        fields = {name: value for name, value in fields.items() if name not in (GATE_MODE, OPTIONS)}
        asked.append(attrs.evolve(shape, extra=fields))  # type: ignore[arg-type]
    if fields.pop(EXPERT_PARALLEL, False):
        topk = int(shape["topk"])
        asked += [attrs.evolve(shape, extra={**fields, "topk": count}) for count in (topk - 1, topk) if count]  # type: ignore[arg-type]
    return tuple(form for one in asked for form in _forms(one))


def _forms(shape: Shape) -> tuple[Shape, ...]:
    """Return a shape in each layout and activation dtype whose rows may serve it.

    Another layout has its default scale order. int4 weights have one layout.
    """
    acts = [str(shape["act"]), *(word for word in ACTIVATIONS if word != shape["act"] and (word not in GATED or shape["g1u1"]))]
    usual = with_order(shape, usual_order(shape))
    layouts = (LAYOUT,) if shape["q_dtype_w"] == "int4" else dict.fromkeys((usual_layout(shape), "row"))
    forms = [shape, attrs.evolve(shape, outdtype=shape.dtype)]
    forms += [attrs.evolve(usual, layout=layout, outdtype=shape.dtype) for layout in layouts]
    return tuple(
        attrs.evolve(form, extra={**dict(form.extra), "act": act})  # type: ignore[arg-type]
        for act in acts
        for form in dict.fromkeys(forms)
    )


def _flops(shape: Shape) -> int:
    """Count the operations of both stages for topk experts per token (one if topk is any)."""
    return 2 * shape.m * abs(int(shape["topk"])) * shape.n * (moe_formats.stage_rows(shape) + shape.k)


def _bytes_moved(shape: Shape) -> int:
    """Count the weights of reachable experts, hidden states, routing and output once.

    The intermediate is assumed to stay on chip.
    """
    hit = min(int(shape["expert"]), shape.m * abs(int(shape["topk"])))
    kind, rows, bits = shape["q_type"], moe_formats.stage_rows(shape), 0
    by_scale = 32 if kind != "per_1x32" else 16 if shape["q_dtype_w"] == "int4" else 8
    for high, wide in ((rows, shape.n), (shape.n, shape.k)):
        bits += high * wide * dtype_bits(str(shape["q_dtype_w"])) // moe_formats.packed(shape)
        plain = attrs.evolve(shape, layout="row", extra={**dict(shape.extra), "expert": 1})  # type: ignore[arg-type]
        bits += math.prod(moe_formats.scale_shape(with_order(plain, ROW), high, wide)) * by_scale if kind != "No" else 0
    tokens_bits = shape.n * (dtype_bits(shape.dtype) + dtype_bits(shape.outdtype)) + abs(int(shape["topk"])) * 64
    return (hit * bits + shape.m * tokens_bits) // 8


def _fields(shape: Shape) -> Mapping[str, Any]:
    kind, act, q_dtype_a = (str(shape[name]) for name in ("q_type", "act", "q_dtype_a"))
    declared, options = dict(shape.extra), options_of(shape)
    bounds = {name: getattr(options, name) for name in ("swiglu_limit", "beta", "linear_beta")} if options != Options() else {}
    return {
        "activation": ACTIVATIONS[act],
        "quant_type": QuantType[kind],
        "doweight_stage1": bool(shape["doweight_stage1"]),
        "expert_parallel": (EXPERT_PARALLEL, True) in shape.extra,
        **stated_order(shape),
        **({"q_dtype_a": q_dtype_a} if q_dtype_a != default_q_dtype_a(shape) else {}),
        **({GATE_MODE: declared[GATE_MODE]} if GATE_MODE in declared else {}),
        **bounds,
    }


def _fake(hidden: torch.Tensor, *_: Any, otype: torch.dtype | None = None) -> torch.Tensor:
    width = hidden.shape[1] * (2 if str(hidden.dtype) == table_text("fp4x2") else 1)
    return hidden.new_empty(hidden.shape[0], width, dtype=otype or hidden.dtype)


def _some_rows(shape: Shape, operands: tuple[Any, ...], indices: torch.Tensor) -> tuple[Any, ...]:
    scales = (7,) if options_of(shape).quantised and shape["q_type"] != "per_Tensor" else ()
    return tuple(taken(operand, indices) if index in (0, 3, 4, *scales) else operand for index, operand in enumerate(operands))


def _factors(shape: Shape) -> tuple[Factors, ...]:
    """Return stage 1's factors, and stage 2's unless stage 1 applies the routing weights."""
    first = Factors((0, 7), (1, 5), is_linear=False, k="n")
    return (first,) if shape["doweight_stage1"] else (first, Factors((3,), (2, 6)))


#: Tolerances by quantisation. Worst row errors measured with silu, gelu and swiglu, 1 to 2048
#: tokens, for correct kernels whose intermediate differs from the reference's: kept in 16 or 32
#: bits instead of quantised, or rounded to bf16 before quantisation, which moves its scales.
#: 16 bits: 0.0041 bf16, 0.0005 fp16. fp8 per token or block: 0.070. int8 per token: 0.047.
#: mxfp4: 0.32, from a group of 32 whose scale rounds to the next power of two. One scale per
#: tensor, which costs small rows precision: 0.10 fp8, 0.34 int8.
#: A wrong kernel that does not quantise hidden states: 0.17 to 0.23 in fp8, 0.91 in mxfp4.
#:
#: The element bounds assume outputs of about 1, as `make_inputs` draws them. With a relative
#: error e and atol = rtol = t, the fraction of elements out of bounds is
#: ``P(|z| e > t (1 + |o|))``, with z and o standard normal: 0.7 % for t = 2 e, 1.2 % for
#: t = 1.8 e, 2.2 % for t = 1.6 e, 11 % for t = e. So t is about 1.8 times the worst row error
#: above. About 1 % of a correct kernel's elements are then out of bounds, even in the worst row.
#: The limit of 5 % is reached at an error of 0.76 t. Measured over 1200 draws of 1 and 16 tokens
#: with a bf16 intermediate: at most 3.9 %, for an output of 5.5 instead of 1.
_TOLERANCES = {
    ("No", "bf16"): TOLERANCES["bf16"],
    ("No", "fp16"): TOLERANCES["fp16"],
    ("per_Tensor", "int8"): Tolerance(6e-1, 6e-1, 2.0**-1),
    ("per_Tensor", ""): Tolerance(2e-1, 2e-1, 2.0**-2),
    ("per_Token", "int8"): Tolerance(1e-1, 1e-1, 2.0**-3),
    ("per_Token", ""): Tolerance(1.25e-1, 1.25e-1, 2.0**-3),
    **dict.fromkeys(((kind, "") for kind in BLOCK_ROWS), Tolerance(1.25e-1, 1.25e-1, 2.0**-3)),
    ("per_1x32", ""): Tolerance(1.25e-1, 1.25e-1, 2.0**-3),
    ("per_1x32", "fp4x2"): Tolerance(6e-1, 6e-1, 2.0**-1),
}


def _tolerance(shape: Shape) -> Tolerance:
    kind, q_dtype_a = str(shape["q_type"]), str(shape["q_dtype_a"])
    if q_dtype_a in DTYPES:
        exact = kind == "No" and shape.dtype == shape.outdtype == "fp16"  # dequantised weights are rounded to 16 bits
        return _TOLERANCES["No", "fp16" if exact else "bf16"]
    return _TOLERANCES.get((kind, q_dtype_a)) or _TOLERANCES[kind, ""]


def _example(sizes: tuple[int, int, int, int, int], kind: str = "No", q_dtype: str = "bf16", act: str = "Silu", **cells: str) -> Shape:
    """Make a shape from (token, model_dim, inter_dim, expert, topk).

    By default it is gated and its weights are plain; *cells* override any column.
    """
    names = ("token", "model_dim", "inter_dim", "expert", "topk")
    words = {"act_type": act, "q_type": kind, "q_dtype_a": q_dtype, "q_dtype_w": q_dtype, "use_g1u1": "1", "layout": "row"}
    return _SCHEMA.parse({**dict(zip(names, map(str, sizes), strict=True)), **words, **cells})


_FP8, _FNUZ, _INT8, _FP4 = "fp8_e4m3fn", "fp8_e4m3fnuz", "int8", "fp4x2"

op = Op(
    name=moe_words.NAME,
    operands=OPERANDS,
    weights=(1, 2, 5, 6),
    shuffled_scales=(5, 6, 7),
    columns=Columns(
        tuned_file="tuned_fmoe.csv",
        untuned_file="untuned_fmoe.csv",
        variable="AITER_CONFIG_FMOE",
        values=_VALUES,
        **_SCHEMA.columns(),
        read=_read,
        write=_write,
    ),
    shape_of=shape_of,
    make_inputs=make_inputs,
    reference=moe.reference,
    tolerance=_tolerance,
    flops=_flops,
    bytes_moved=_bytes_moved,
    fake=_fake,
    fields=_fields,
    problem=DOMAIN.problem,
    canonical=canonical,
    equivalent_shapes=_equivalent_shapes,
    padded_m=tokens,
    some_rows=_some_rows,
    factors=_factors,
    examples=lambda: (
        _example((1, 128, 64, 8, 2)),
        _example((5, 128, 96, 4, 1), act="Gelu", doweight_stage1="1"),
        _example((33, 64, 64, 8, 3), act="Swiglu"),
        _example((17, 96, 32, 4, 4), use_g1u1="0"),
        _example((8, 128, 64, 4, 2), q_dtype="fp16", dtype="fp16", layout=LAYOUT),
        _example((9, 64, 64, 4, 2), outdtype="fp16"),
        _example((16, 128, 128, 8, 2), "per_Tensor", _FP8),
        _example((3, 128, 64, 16, 2), "per_Tensor", _INT8, doweight_stage1="1"),
        _example((24, 128, 64, 4, 2), "per_Token", _FP8, layout=LAYOUT),
        _example((7, 160, 96, 8, 1), "per_Token", _INT8, act="Gelu", use_g1u1="0", doweight_stage1="1"),
        _example((12, 128, 64, 4, 2), "per_Token", _FNUZ, act="Gelu"),
        _example((16, 256, 128, 8, 2), "per_1x128", _FP8),
        _example((6, 320, 192, 4, 2), "per_1x128", _FP8, act="Gelu", layout=LAYOUT),  # partial blocks
        _example((10, 128, 64, 4, 3), "per_1x128", _FNUZ, use_g1u1="0"),
        _example((16, 128, 64, 8, 2), "per_1x32", _FP4),
        _example((5, 128, 192, 4, 2), "per_1x32", _FP4, layout=LAYOUT),
        _example((4, 96, 32, 4, 1), "per_1x32", _FP4, act="Swiglu", doweight_stage1="1"),
        _example((8, 128, 64, 4, 2), "per_1x32", _FP4, scale_order=SHUFFLED),  # AITER's kernels for plain weights
        _example((6, 128, 64, 2, 5), expert_parallel="True"),  # most of a token's experts are on other ranks
        _example((9, 128, 64, 4, 2), "per_1x32", _FP4, q_dtype_a=_FP8, layout=LAYOUT),
        _example((11, 64, 96, 4, 2), "per_1x32", _FP4, q_dtype_a="bf16", act="Situv2"),
        _example((6, 128, 64, 4, 1), "per_1x32", _FP8, act="Swiglu"),
        _example((7, 64, 64, 4, 2), "per_1x32", _FNUZ, layout=LAYOUT),
        _example((13, 128, 128, 4, 2), "per_1x32", "int4", q_dtype_a="bf16", layout=LAYOUT),
        _example((3, 64, 64, 4, 2), "per_1x32", "int4", q_dtype_a="bf16", dtype="fp16", layout=LAYOUT),
        _example((5, 64, 32, 4, 2), "per_Token", _INT8, q_dtype_a="bf16", act="No"),
        _example((4, 128, 320, 4, 2), "per_256x128", _FP8),
        _example((4, 160, 64, 4, 2), "per_1024x128", _FP8, use_g1u1="0", act="No"),
        _example((8, 128, 64, 4, 2), "per_1x32", _FP4, q_dtype_a="bf16", act="Swiglu", layout=LAYOUT, gate_mode="interleave"),
        _example((5, 64, 64, 4, 2), act="Gelu", options="bias1 bias2 swiglu_limit=1.5"),
        _example((6, 64, 64, 4, 2), "per_1x32", _FP8, act="Gelu", gate_mode="interleave"),
        _example((3, 64, 64, 4, 1), "per_1x32", _FP4, act="Situv2", options="beta=4.0 linear_beta=25.0"),
        _example((7, 128, 64, 4, 2), "per_1x128", _FP8, options="quantised"),
        _example((4, 64, 96, 4, 2), "per_1x32", _FP4, options="bias2 quantised", doweight_stage1="1"),
        _example((0, 128, 64, 4, 2)),
        _example((0, 128, 128, 4, 2), "per_1x128", _FP8),
    ),
    large=lambda: (
        _example((512, 4096, 1792, 8, 2), layout=LAYOUT),  # Mixtral 8x7B, tensor parallel 8
        _example((64, 7168, 256, 256, 8), "per_1x128", _FP8, layout=LAYOUT),  # DeepSeek V3, tensor parallel 8
        _example((1024, 2048, 768, 128, 8), "per_Token", _FP8),  # Qwen 3 30B A3B
        _example((128, 2880, 2880, 32, 4), "per_1x32", _FP4, act="Swiglu"),  # gpt-oss 20B
    ),
    functions=("fused_moe",),
    entry=entry,
)

"""a16w8: ``out[..., N] = (x[..., K] @ weight[N, K].T) * w_scale[N] (+ bias[N])``, weight in int8.

Activations are in bf16 or fp16, and each row of the weight has a float32 scale. The file is the
whole op, in the core's folder of ops or behind an entry point. The core names it nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedgemm.dtype import short_dtype, torch_dtype
from tunedgemm.ops import quantised
from tunedgemm.ops.domain import Domain
from tunedgemm.ops.hot import hot, public
from tunedgemm.ops.op import unbiased
from tunedgemm.ops.product import exact_dtype, exact_product, fake
from tunedgemm.ops.schema import BIAS, MNK, Dtype, Schema
from tunedgemm.shape import Shape

if TYPE_CHECKING:
    import torch

OPERANDS = ("x", "weight", "w_scale", "bias?")
DTYPES = ("bf16", "fp16")

SCHEMA = Schema(
    {"op": "a16w8", "scale": "row"},
    key=(*MNK, Dtype("act_dtype", "dtype", DTYPES[0], allowed=DTYPES)),
    own=(Dtype("outdtype", "outdtype", lambda shape: shape.dtype), BIAS),
)
example = quantised.example_of(SCHEMA)


def shape_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    otype: torch.dtype | None = None,
) -> Shape:
    """Return the shape of a call; raise OperandError for mismatched operands."""
    quantised.check_dtype("a16w8", "x", x, DTYPES)
    quantised.check_dtype("a16w8", "weight", weight, ("i8",))
    quantised.check_matrices("a16w8", x, weight)
    n, k = weight.shape
    quantised.check_scale("a16w8", "w_scale", w_scale, ((n,), (n, 1)), ("fp32",), x.device)
    dtype, bias_dtype = short_dtype(x.dtype), quantised.bias_dtype_of("a16w8", bias, n, x.device)
    return Shape(
        op="a16w8",
        m=quantised.rows_of(x),
        n=n,
        k=k,
        dtype=dtype,
        outdtype=quantised.outdtype_of("a16w8", otype, dtype),
        epilogue="bias" if bias_dtype else "none",
        bias_dtype=bias_dtype,
        scale="row",
    )


def make_inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Draw normal x [m, k], an int8 weight [n, k] with scales [n], and the shape's bias [n]."""
    import torch
    from tunedgemm.ops.formats.quant import pertoken_quant

    generator = torch.Generator(device).manual_seed(seed)
    x = quantised.draw(shape.m, shape.k, shape.k, generator).to(torch_dtype(shape.dtype))
    weight, w_scale = pertoken_quant(quantised.draw(shape.n, shape.k, shape.k, generator), quant_dtype=torch.int8)
    return x, weight, w_scale.reshape(-1), *quantised.draw_bias(shape, generator)


def reference(shape: Shape, operands: tuple[Any, ...]) -> torch.Tensor:
    """Compute the exact result [m, n] in float64, or in float32 for large shapes."""
    x, weight, w_scale, bias = (*operands, None)[:4]
    wide = exact_dtype(shape.m, shape.n, shape.k)
    out = exact_product(x.reshape(shape.m, shape.k), weight, wide).mul_(w_scale.to(wide).reshape(1, -1))
    return out if bias is None else out.add_(bias.to(wide).reshape(1, -1))


def gemm_a16w8(
    x: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    otype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute ``(x @ weight.T) * w_scale (+ bias)`` by the solution that the tables choose."""
    return hot(x, weight, w_scale, bias, otype)


op = quantised.product_op(
    SCHEMA,
    "TUNEDGEMM_CONFIG_A16W8",
    values=("libtype", *quantised.VALUES),
    operands=OPERANDS,
    weights=(1, 2, 3),
    shape_of=shape_of,
    make_inputs=make_inputs,
    reference=reference,
    bytes_moved=lambda shape: quantised.bytes_moved(shape, 32 * shape.n, "i8"),
    fake=fake,
    problem=Domain(DTYPES, quantised.OUTDTYPES, quantised.BIAS_DTYPES, ("row",), weight="i8").problem,
    unbiased=unbiased,
    weight_dtype=lambda _: "i8",
    examples=lambda: (
        example(1, 640, 2048),  # decoding one token
        example(127, 256, 512),  # a prime M
        example(33, 130, 99),  # ragged in all three
        example(16, 256, 512, act_dtype="fp16"),
        example(3, 160, 256, bias="True", outdtype="fp32"),
        example(0, 256, 512),  # an empty batch
    ),
    functions=("gemm_a16w8",),
    entry=public(gemm_a16w8, OPERANDS),
)

"""Problem: a shape as the libraries see it, in columns, and what is left to do after them.

Our ``out[M, N] = x[M, K] @ weight[N, K].T`` in rows is ``D[N, M] = weight.T[N, K] @ x.T[K, M]`` in columns: A is the weight, stored
[K, N] and transposed, B is x, stored [K, M]. That is also the one form in which fp8 products exist.
"""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Shape
from tunedgemm.tools import dtype_bits

BLOCK = 128
#: Rows of x are whole fours where each block of K has its own scales (cuBLAS manual, 128-element scaling factors).
_ROWS = 4

#: What is left to do after the library's product: ``bias`` is added, or ``scales`` are multiplied in and the bias is added.
REMAINDERS = ("", "bias", "scales")


def quantised(dtype: str) -> bool:
    """Whether the values are fp8 or int8."""
    return dtype_bits(dtype) == 8


@attrs.frozen
class Matrix:
    """One matrix in memory, column by column.

    Attributes:
        dtype: short name of the elements' type.
        rows, columns: sizes as stored.
        ld: elements from one column to the next.
        stride: elements from one matrix of a batch to the next.
        order: ``col``, or ``shuffled8`` or ``shuffled16`` for AITER's shuffled weights of 8 and 16 bits.
    """

    dtype: str
    rows: int
    columns: int
    ld: int
    stride: int
    order: str = "col"


@attrs.frozen
class Problem:
    """One product of the library.

    Attributes:
        a, b, d: the weight, the activations and the output.
        batch: matrices of each.
        compute: ``32f`` or ``32i``.
        a_scale, b_scale: what the scales belong to: "" without, ``tensor``, ``row``, ``block`` (1x128), ``square`` (128x128).
        bias_dtype: dtype of the bias that the library adds, "" for none.
        fast: whether fp8 products may be summed in fewer bits.
        remainder: one of `REMAINDERS`.
    """

    a: Matrix
    b: Matrix
    d: Matrix
    batch: int = 1
    compute: str = "32f"
    a_scale: str = ""
    b_scale: str = ""
    bias_dtype: str = ""
    fast: bool = False
    remainder: str = attrs.field(default="", validator=attrs.validators.in_(REMAINDERS))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows and columns of D, and K: our N, the rows of x, K."""
        return self.d.rows, self.d.columns, self.b.rows


def problem_of(shape: Shape, *, after: bool = False, fast: bool = False) -> Problem:
    """The library's problem for a shape that `limits.supports` takes.

    Args:
        shape: what is asked.
        after: the bias is added after the product instead of within it.
        fast: fp8 products may be summed in fewer bits.
    """
    batched = shape.op.startswith("batched_")
    batch = int(shape["B"]) if batched else 1
    a_scale, b_scale = _scales(shape, batch)
    unscaled = quantised(shape.dtype) and shape.scale != "none" and not a_scale
    rows = -(-shape.m // _ROWS) * _ROWS if b_scale == "block" else shape.m
    within = shape.bias and not (after or unscaled or batched)
    return Problem(
        a=Matrix(shape.dtype, shape.k, shape.n, shape.k, shape.n * shape.k, _order(shape)),
        b=Matrix(shape.dtype, shape.k, rows, shape.k, rows * shape.k),
        d=Matrix(_product_dtype(shape, unscaled), shape.n, rows, shape.n, rows * shape.n),
        batch=batch,
        compute="32i" if shape.dtype == "int8" else "32f",
        a_scale=a_scale,
        b_scale=b_scale,
        bias_dtype=shape.bias_dtype if within else "",
        fast=fast,
        remainder="scales" if unscaled else "bias" if shape.bias and not within else "",
    )


def _order(shape: Shape) -> str:
    return "col" if shape.layout == "row" else f"shuffled{dtype_bits(shape.dtype)}"


def _scales(shape: Shape, batch: int) -> tuple[str, str]:
    """Of A and B; none where the library cannot multiply them in: int8, and scales by row of several matrices."""
    if shape.dtype == "int8" or shape.scale == "none" or (batch > 1 and shape.scale == "row"):
        return "", ""
    return ("square", "block") if shape.scale == "block" else (shape.scale, shape.scale)


def _product_dtype(shape: Shape, unscaled: bool) -> str:
    """Of D: whole numbers of int8 products, float32 where scales come after, else the output's."""
    if shape.dtype == "int8":
        return "int32"
    return "fp32" if unscaled else shape.outdtype

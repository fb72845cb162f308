"""Problems: a shape in columns. What the numbers of the launches show is in `test_mutations`; here is what must be exactly so."""

from __future__ import annotations

import pytest
from tunedgemm.plugin import Shape
from tunedgemm_hipblaslt.limits import Matrix, Problem, is_quantised, make_problem

BATCHED = {"extra": {"B": 3}}


def test_a_linear_layer() -> None:
    """A is the weight as it is stored and transposed, B is x, D is the output: nothing is copied."""
    found = make_problem(Shape("a16w16", 5, 48, 64))
    assert found == Problem(a=Matrix("bf16", 64, 48, 64, 3072), b=Matrix("bf16", 64, 5, 64, 320), d=Matrix("bf16", 48, 5, 48, 240))
    assert found.sizes == (48, 5, 64)


@pytest.mark.parametrize(
    ("fields", "after", "within", "remainder"),
    [
        ({"op": "a16w16"}, False, "", ""),
        ({"op": "a16w16", "epilogue": "bias"}, False, "bf16", ""),
        ({"op": "a16w16", "epilogue": "bias"}, True, "", "bias"),
        ({"op": "a16w16", "epilogue": "bias", "bias_dtype": "fp32"}, False, "fp32", ""),
        ({"op": "a8w8", "dtype": "fp8_e4m3fn", "outdtype": "bf16", "scale": "row", "epilogue": "bias"}, False, "bf16", ""),
        ({"op": "a8w8", "dtype": "int8", "outdtype": "bf16", "scale": "row", "epilogue": "bias"}, False, "", "scales"),
        ({"op": "a8w8", "dtype": "int8", "outdtype": "bf16", "scale": "row"}, True, "", "scales"),
        ({"op": "batched_bf16", "epilogue": "bias", **BATCHED}, False, "", "bias"),
        ({"op": "batched_a8w8", "dtype": "int8", "outdtype": "bf16", "scale": "row", "epilogue": "bias", **BATCHED}, False, "", "scales"),
    ],
)  # fmt: skip
def test_where_the_bias_goes(fields: dict, after: bool, within: str, remainder: str) -> None:
    """Within the product where the library can add it, else after it, together with scales that come after."""
    found = make_problem(Shape(m=5, n=48, k=64, **fields), bias_after=after)
    assert (found.bias_dtype, found.remainder) == (within, remainder)


@pytest.mark.parametrize(
    ("fields", "scales", "output"),
    [
        ({"op": "a8w8", "dtype": "fp8_e4m3fn", "scale": "row"}, ("row", "row"), "bf16"),
        ({"op": "a8w8", "dtype": "fp8_e4m3fn", "scale": "tensor"}, ("tensor", "tensor"), "bf16"),
        ({"op": "a8w8", "dtype": "int8", "scale": "row"}, ("", ""), "int32"),
        ({"op": "a8w8", "dtype": "int8", "scale": "tensor"}, ("", ""), "int32"),
        ({"op": "a8w8_blockscale", "dtype": "fp8_e4m3fn", "scale": "block"}, ("square", "block"), "bf16"),
        ({"op": "batched_a8w8", "dtype": "fp8_e4m3fn", "scale": "row", "extra": {"B": 3}}, ("", ""), "fp32"),
        ({"op": "batched_a8w8", "dtype": "fp8_e4m3fn", "scale": "row", "extra": {"B": 1}}, ("row", "row"), "bf16"),
        ({"op": "batched_a8w8", "dtype": "int8", "scale": "row", "extra": {"B": 1}}, ("", ""), "int32"),
        ({"op": "a16w16", "dtype": "fp8_e4m3fn"}, ("", ""), "bf16"),
    ],
)
def test_where_the_scales_go(fields: dict, scales: tuple[str, str], output: str) -> None:
    """Within the product where the library can multiply them in; else the product is not rounded before them."""
    found = make_problem(Shape(m=5, n=48, k=64, outdtype="bf16", **fields))
    assert (found.a_scale, found.b_scale) == scales
    assert found.d.dtype == output
    assert found.compute == ("32i" if output == "int32" else "32f")
    assert (found.remainder == "scales") == (not scales[0] and fields.get("scale", "none") != "none")


@pytest.mark.parametrize(("m", "rows"), [(1, 4), (3, 4), (4, 4), (5, 8)])
def test_rows_of_block_scales_are_whole_fours(m: int, rows: int) -> None:
    """Rows of x are added up to fours where each block of K has scales of its own, and nowhere else."""
    found = make_problem(Shape("a8w8_blockscale", m, 48, 64, dtype="fp8_e4m3fn", outdtype="bf16", scale="block"))
    assert (found.b.columns, found.d.columns, found.sizes) == (rows, rows, (48, rows, 64))
    assert make_problem(Shape("a8w8", m, 48, 64, dtype="fp8_e4m3fn", outdtype="bf16", scale="row")).b.columns == m


def test_batches_lie_one_after_the_other() -> None:
    """The strides of a batch are whole matrices; an op without batches has one."""
    found = make_problem(Shape("batched_bf16", 5, 48, 64, **BATCHED))
    assert (found.batch, found.a.stride, found.b.stride, found.d.stride) == (3, 48 * 64, 5 * 64, 5 * 48)
    assert make_problem(Shape("a16w16", 5, 48, 64)).batch == 1


@pytest.mark.parametrize(("dtype", "order"), [("bf16", "shuffled16"), ("fp16", "shuffled16"), ("fp8_e4m3fnuz", "shuffled8")])
def test_shuffled_weights_have_an_order_of_their_size(dtype: str, order: str) -> None:
    """Only A is shuffled."""
    found = make_problem(Shape("a16w16", 5, 48, 64, dtype=dtype, layout="aiter16x16"))
    assert (found.a.order, found.b.order, found.d.order) == (order, "col", "col")


def test_fast_sums_are_asked_for() -> None:
    """Summing in fewer bits is part of the problem, off unless asked for."""
    shape = Shape("a8w8", 5, 48, 64, dtype="fp8_e4m3fn", outdtype="bf16", scale="row")
    assert [make_problem(shape, fast_accum=fast).fast_accum for fast in (False, True)] == [False, True]
    assert not make_problem(shape).fast_accum


def test_remainders_are_known() -> None:
    """A problem with another remainder is not made."""
    matrix = Matrix("bf16", 64, 48, 64, 3072)
    with pytest.raises(ValueError, match="remainder"):
        Problem(matrix, matrix, matrix, remainder="gelu")


def test_quantised() -> None:
    """Quantised are fp8 and int8."""
    assert [dtype for dtype in ("bf16", "fp16", "fp32", "int8", "fp8_e4m3fn", "fp8_e4m3fnuz") if is_quantised(dtype)] == [
        "int8", "fp8_e4m3fn", "fp8_e4m3fnuz",
    ]  # fmt: skip

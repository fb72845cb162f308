"""Orders of x's scales: from strides to the shape, its key and its rows, without a copy."""

import math
import re

import attrs
import pytest
import torch
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.a8w8_blockscale import in_order
from tunedgemm.ops.scale_order import (
    FIELD,
    canonical_order,
    equivalent_orders,
    field_of,
    of_any_m,
    order_of,
    scale_order,
    scale_strides,
    stated_order,
    swizzled_sizes,
    with_order,
)
from tunedgemm.shape import Shape
from tunedgemm.testing.fakes import fake_registry
from tunedgemm.testing.listed import listed

OP = op_named("a8w8_blockscale")
CPU = torch.device("cpu")


def shape_of(m, n=130, k=328, order="row"):
    return with_order(OP.columns.parse({"M": str(m), "N": str(n), "K": str(k)}), order)


def strided(m, blocks, along_m, along_k):
    """Return distinct scales [m, blocks] with these strides."""
    memory = torch.full((1 + m * along_m + blocks * along_k,), math.nan)
    view = memory.as_strided((m, blocks), (along_m, along_k))
    return view.copy_(torch.arange(1.0, m * blocks + 1).view(m, blocks)) if m * blocks and along_m and along_k else view


@listed(
    ("m", "blocks", "strides", "order"),
    [
        (61, 3, (3, 1), "row"),
        (61, 3, (1, 61), "m_major"),
        (61, 3, (1, 64), "m_major_padded"),
        (64, 3, (1, 64), "m_major"),
        (2, 3, (1, 2), "m_major"),
        (3, 3, (1, 4), "m_major_padded"),
        (1, 3, (3, 1), "row"),
        (1, 3, (1, 1), "row"),
        (1, 3, (1, 4), "m_major_padded"),
        (1, 3, (7, 4), "m_major_padded"),
        (61, 1, (1, 61), "row"),
        (61, 1, (1, 64), "row"),
        (0, 3, (1, 0), "row"),
        (0, 3, (1, 4), "row"),
    ],
)
def test_strides_name_the_order(m, blocks, strides, order):
    """Strides of two orders name the first; those of one row, one block or no row are row-major."""
    assert order_of("op", strided(m, blocks, *strides), m) == order


@listed(
    "scales",
    [
        strided(61, 3, 1, 72),  # padded to another multiple
        strided(61, 3, 4, 1),  # gaps between rows
        strided(61, 3, 1, 1),  # overlapping
        strided(61, 3, 0, 0),  # one value, expanded
        strided(61, 3, 0, 1),  # one row, expanded
        strided(61, 3, 1, 61)[5:6],  # one row of M-major scales
        strided(61, 3, 1, 64)[:60],  # rows of a longer tensor
        strided(61, 1, 2, 1),  # one block of K with gaps
    ],
    ids=str,
)
def test_other_strides_are_refused(scales):
    """The error names the operand, its strides, the strides that are taken, and the remedy."""
    m = scales.shape[0]
    got = re.escape(f"(got {tuple(scales.stride())} for {tuple(scales.shape)}); pass x_scale.contiguous()")
    with pytest.raises(OperandError, match=rf"^op: x_scale: the strides of {m} rows must be .*\(1, {m}\).*{got}$"):
        order_of("op", scales, m)


@listed("order", ["m_major", "m_major_padded"])
def test_leading_dimensions_have_an_order_where_they_fold(order):
    """Scales with x's leading dimensions have the order of their rows, and none where those do not fold."""
    shape = shape_of(6, order=order)
    x, weight, x_scale, w_scale = OP.make_inputs(shape, CPU, 0)
    assert OP.shape_of(x.view(2, 3, 328), weight, x_scale.view(2, 3, 3), w_scale) == shape
    apart = torch.empty(2, 2, 3, 3)[:, 0].transpose(0, 1)
    with pytest.raises(OperandError, match=r"x_scale: the strides of 6 rows"):
        OP.shape_of(x.view(3, 2, 328), weight, apart, w_scale)


def test_packed_scales_are_refused_by_name():
    """Scales of DeepGEMM's kernels for Blackwell are not covered, and the error says what is."""
    x, weight, _, w_scale = OP.make_inputs(shape_of(4, k=512), CPU, 0)
    with pytest.raises(OperandError, match=r"x_scale: ue8m0 scales, packed or not, are not covered \(got \(4, 1\) torch.int32.*float32"):
        OP.shape_of(x, weight, torch.zeros(4, 1, dtype=torch.int32), w_scale)
    with pytest.raises(OperandError, match=r"x_scale must be torch.float32 \(got torch.float64\)"):
        OP.shape_of(x, weight, torch.ones(4, 4, dtype=torch.float64), w_scale)


class TestShape:
    """The field of the shape, its strides and its column."""

    @listed(
        ("m", "k", "order", "canonical", "strides"),
        [
            (61, 328, "row", "row", (3, 1)),
            (61, 328, "m_major", "m_major", (1, 61)),
            (61, 328, "m_major_padded", "m_major_padded", (1, 64)),
            (64, 328, "m_major_padded", "m_major", (1, 64)),
            (1, 328, "m_major", "row", (3, 1)),
            (1, 328, "m_major_padded", "m_major_padded", (1, 4)),
            (61, 128, "m_major", "row", (1, 1)),
            (0, 328, "m_major", "row", (3, 1)),
        ],
    )
    def test_an_order_at_any_m(self, m, k, order, canonical, strides):
        """A shape whose M has changed names the order that its strides now are."""
        shape = shape_of(9, k=k, order=order).with_m(m)
        assert (scale_order(shape), scale_strides(shape)) == (canonical, strides)

    def test_row_major_shapes_are_as_before(self):
        """The field is absent, so that keys, logs and files keep their text."""
        shape = shape_of(9)
        assert (shape.extra, "scale_order" in str(shape), shape.to_dict()["extra"]) == ((), False, {})
        assert OP.columns.format(shape)["scale_order"] == ""
        assert OP.equivalent_shapes(shape) == (shape,)

    def test_equivalent_shapes(self):
        """Either M-major order serves the other, then row-major; in each, AITER's form comes second."""
        assert equivalent_orders(shape_of(61, order="m_major_padded")) == ("m_major_padded", "m_major", "row")
        assert equivalent_orders(shape_of(61, order="m_major")) == ("m_major", "m_major_padded", "row")
        shape = attrs.evolve(shape_of(61, order="m_major"), outdtype="fp16")
        assert [(scale_order(s), s.outdtype) for s in OP.equivalent_shapes(shape)] == [
            (order, outdtype) for order in ("m_major", "m_major_padded", "row") for outdtype in ("fp16", "bf16")
        ]


@listed("order", ["128x4", "8x4"])
def test_tiles_keep_their_order_at_every_m(order):
    """No M makes scales in tiles equal to those of another order, so no row of another kind serves them."""
    for m in (0, 1, 4, 5, 128):
        for k in (32, 128, 512):
            shape = Shape("a8w8_mxfp8", m, 64, k, "fp8_e4m3fn", "bf16", scale="block", extra={FIELD: order})
            assert scale_order(shape) == field_of(shape) == order
            assert canonical_order(shape) == shape and of_any_m(shape)[FIELD] == order and stated_order(shape) == {FIELD: order}
    assert swizzled_sizes(order, 129, 5) == {"128x4": (256, 8), "8x4": (136, 8)}[order]


class TestCalls:
    """Calls of the public function."""

    def test_launchers_get_the_callers_memory(self):
        """No order is copied, each has its launcher, and equal calls share one."""
        gemm, seen = TunedGemm(fake_registry(), settings=Settings()), []
        for m, order in ((6, "row"), (6, "m_major"), (6, "m_major_padded"), (8, "m_major")):
            x, weight, x_scale, w_scale = OP.make_inputs(shape_of(m, order=order), CPU, 0)
            gemm.gemm_a8w8_blockscale(x, weight, x_scale, w_scale)
            dispatcher = gemm.of(OP.name)
            key = list(dispatcher.launchers)[-1]
            call = dispatcher.launchers[key]
            dispatcher.launchers[key] = lambda *operands, call=call: seen.append(operands[2]) or call(*operands)
            gemm.gemm_a8w8_blockscale(x, weight, x_scale, w_scale)
            assert seen[-1] is x_scale
        assert len(seen) == len(dispatcher.launchers) == 4

    def test_inputs_have_nan_in_their_padding(self):
        """What no kernel may use is NaN in the operands that the tuner and the conformance suite draw."""
        shape = shape_of(61, order="m_major_padded")
        x_scale = OP.make_inputs(shape, CPU, 0)[2]
        row_major = OP.make_inputs(shape_of(61), CPU, 0)[2]
        assert torch.equal(x_scale, row_major) and x_scale.stride() == (1, 64)
        assert x_scale.as_strided((64, 3), (1, 64))[61:].isnan().all()
        assert in_order(row_major, shape_of(61)) is row_major

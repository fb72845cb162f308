"""Block scales for cuBLASLt: M-major scales pass without a copy, others are transposed or padded."""

import pytest
import torch
from tunedgemm.backends.builtin import blockscale
from tunedgemm.device import Device
from tunedgemm.dtype import torch_dtype
from tunedgemm.ops import op_named
from tunedgemm.ops.accuracy import worst_row_error
from tunedgemm.ops.scale_order import with_order
from tunedgemm.testing.listed import listed

OP = op_named("a8w8_blockscale")
H200 = Device("sm_90", 132, "nvidia-h200")
ORDERS = ("row", "m_major", "m_major_padded")


def shape_of(m, order, n=144, k=512):
    return with_order(OP.columns.parse({"M": str(m), "N": str(n), "K": str(k)}), order)


@pytest.fixture
def passed(monkeypatch):
    """Compute the library's product on a CPU; list the operands it got."""
    operands = []

    def product(k, out_dtype):
        def call(x, weight, x_scale, w_scale):
            assert len(x) % 4 == 0 and (x_scale.stride(0) == 1 or len(x) == 1) and x_scale.stride(1) == len(x)
            operands.append((x, x_scale))
            left = blockscale.times_blocks(x, x_scale, torch.float32)
            return (left @ blockscale.times_blocks(weight, blockscale.spread(w_scale, len(weight)), torch.float32).t()).to(out_dtype)

        return call

    monkeypatch.setattr(blockscale, "scaled_blocks", product)
    return operands


@listed("m", [1, 2, 3, 4, 59, 61, 64])
@listed("order", ORDERS)
def test_each_order_at_each_m(m, order, passed):
    """The library gets M-major scales of a multiple of four rows, and the right rows come back."""
    shape = shape_of(m, order)
    operands = OP.make_inputs(shape, torch.device("cpu"), 0)
    out = blockscale.family.routes["scaled_mm"].make(shape, H200)(*operands)
    assert (out.shape, out.dtype) == ((m, 144), torch_dtype(shape.outdtype))
    assert worst_row_error(out, OP.reference(shape, operands)) <= OP.tolerance(shape).row_error


@listed(
    ("m", "order", "shared"),
    [(64, "m_major", True), (61, "m_major_padded", True), (1, "m_major_padded", True), (61, "m_major", False), (64, "row", False)],
)
def test_m_major_scales_are_not_copied(m, order, shared, passed):
    """Scales of whole fours of rows, or with their padding, reach the library in the caller's memory."""
    shape = shape_of(m, order)
    operands = OP.make_inputs(shape, torch.device("cpu"), 0)
    blockscale.family.routes["scaled_mm"].make(shape, H200)(*operands)
    assert (passed[-1][1].data_ptr() == operands[2].data_ptr()) is shared


def test_padding_beyond_the_memory_is_not_read(passed):
    """Padded scales whose memory ends at their last element are copied."""
    shape = shape_of(61, "m_major_padded")
    x, weight, x_scale, w_scale = OP.make_inputs(shape, torch.device("cpu"), 0)
    short = torch.empty_strided((61, 4), (1, 64)).copy_(x_scale)
    assert short.untyped_storage().nbytes() < 4 * 64 * 4
    out = blockscale.family.routes["scaled_mm"].make(shape, H200)(x, weight, short, w_scale)
    assert worst_row_error(out, OP.reference(shape, (x, weight, x_scale, w_scale))) <= OP.tolerance(shape).row_error

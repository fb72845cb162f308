"""layout: the memory order of a weight, and the errors for other orders."""

import contextlib

import attrs
import pytest
import torch
import tunedgemm
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dtype import torch_dtype
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named, ops
from tunedgemm.ops.formats.scales import shuffle_scale
from tunedgemm.ops.formats.shuffle import as_shuffled, plain_weight, shuffle_weight
from tunedgemm.ops.hot import hot_function
from tunedgemm.ops.layout import _PLACES, SHUFFLED_ADDRESSES, check_not_transposed, layout_of, plain_layout, shuffled_layout
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed

WEIGHT = torch.randn(32, 64).bfloat16()


def test_the_type_gives_the_layout():
    """A plain weight is of layout row, a shuffled one of the layout in its type."""
    assert layout_of("a16w16", WEIGHT) == "row"
    assert layout_of("a16w16", shuffle_weight(WEIGHT)) == "aiter16x16"


def test_the_other_kind_is_refused():
    """The message has the given and the valid layout."""
    assert plain_layout("a8w8", WEIGHT, "other") == "row"
    with pytest.raises(OperandError, match=r"a8w8: .*plain .got layout aiter16x16.; call other, or pass unshuffle_weight"):
        plain_layout("a8w8", shuffle_weight(WEIGHT), "other")
    assert shuffled_layout("a8w8", shuffle_weight(WEIGHT, (32, 16)), "(16, 16)", "other") == "aiter32x16"
    with pytest.raises(OperandError, match=r"a8w8: .*shuffled .got a plain tensor.; pass shuffle_weight.weight, .16, 16.*or call other"):
        shuffled_layout("a8w8", WEIGHT, "(16, 16)", "other")


@listed("name", sorted(ops()))
def test_a_weight_shuffled_by_another_library_is_refused(name):
    """A tensor that AITER marked as shuffled is refused;
    multiplied as plain it would give wrong numbers."""
    op = op_named(name)
    shape = next((shape for shape in op.examples if shape.m), Shape(name, 4, 32, 64))
    operands = list(op.make_inputs(shape, torch.device("cpu"), 0))
    operands[1] = plain_weight(operands[1]).view(torch.uint8).clone().view(operands[1].dtype)
    operands[1].is_shuffled = True
    with pytest.raises(OperandError, match="is_shuffled; pass as_shuffled"):
        op.shape_of(*operands, **op.fields(shape))


def test_a_declared_shuffled_weight_runs():
    """The declaration that the error message names is accepted."""
    shuffled = shuffle_weight(WEIGHT)
    theirs = shuffled.plain.clone()
    theirs.is_shuffled = True
    x = torch.randn(3, 64).bfloat16()
    with pytest.raises(OperandError, match="is_shuffled"):
        tunedgemm.gemm_a16w16(x, theirs)
    assert torch.equal(tunedgemm.gemm_a16w16(x, as_shuffled(theirs, (16, 16))), tunedgemm.gemm_a16w16(x, shuffled))


def functions_of_plain_weights():
    """Yield each function with an op whose weight may be plain, and the operands of a call."""
    for name in sorted(ops()):
        op = op_named(name)
        shapes = [shape for shape in op.examples or [Shape(name, 4, 32, 64)] if shape.m and shape.layout == "row"]
        for shape in shapes[:1]:
            yield pytest.param(op, shape, id=name)


def mark(weight: torch.nn.Parameter) -> None:
    """Set AITER's mark of a shuffled weight."""
    weight.is_shuffled = True  # type: ignore[attr-defined]


def lose_type(weight: torch.nn.Parameter) -> None:
    """Shuffle a parameter's memory, which keeps the parameter's type."""
    weight.data = as_shuffled(weight.data, (16, 16))


def check_that_a_change_is_seen(op, shape, place, change, message):
    """Serve a call, change one of its operands if it has that, and check that both ways refuse it."""
    dispatcher = Dispatcher(op)
    hot = hot_function(dispatcher, op.operands, fields=tuple(op.fields(shape)))
    operands = list(op.make_inputs(shape, torch.device("cpu"), 0))
    fields, otype = op.fields(shape), torch_dtype(shape.outdtype)
    if place >= len(operands) or operands[place] is None:
        return
    operands[place] = torch.nn.Parameter(operands[place].clone(), requires_grad=False)
    absent = [None] * (len(op.operands) - len(operands))
    dispatcher.call(*operands, otype=otype, **fields)
    hot(*operands, *absent, *fields.values(), otype)
    change(operands[place])
    with pytest.raises(OperandError, match=message):
        dispatcher.call(*operands, otype=otype, **fields)
    with pytest.raises(OperandError, match=message):
        hot(*operands, *absent, *fields.values(), otype)


@pytest.mark.parametrize(("change", "message"), [(mark, "is_shuffled"), (lose_type, "lost the type")])
@pytest.mark.parametrize(("op", "shape"), functions_of_plain_weights())
def test_a_shuffled_weight_is_seen_after_a_plain_one_was_served(op, shape, change, message):
    """Functions and `call` refuse a weight whose mark or memory says shuffled, although a plain one
    of its shape has a launcher."""
    for weight in op.matrices:
        check_that_a_change_is_seen(op, shape, weight, change, message)


def with_scales_of_both_orders(name):
    """Return an op, and a shape of it whose scales have sizes of row-major and of shuffled ones."""
    op, wanted = op_named(name), {"w_format": "mxfp4", "q_type": "per_1x32", "q_dtype_w": "fp4x2"}
    plain = [shape for shape in op.examples if shape.layout == "row" and shape.m]
    shape = next(shape for shape in plain if all(wanted.get(field, value) == value for field, value in shape.extra))
    return op, attrs.evolve(shape, m=256, n=256, k=256)


@pytest.mark.parametrize("name", sorted(op.name for op in ops().values() if op.shuffled_scales))
def test_shuffled_scales_are_seen_after_plain_ones_were_served(name):
    """Functions and `call` refuse scales whose memory is in AITER's order, although row-major ones
    of their sizes have a launcher."""
    op, shape = with_scales_of_both_orders(name)

    def shuffle(scale):
        scale.data = shuffle_scale(scale.view(torch.uint8)).plain.view(scale.dtype).view(scale.shape)

    for place in op.shuffled_scales:
        check_that_a_change_is_seen(op, shape, place, shuffle, f"{op.operands[place].removesuffix('?')} .*shuffle")


def test_addresses_of_shuffled_weights_end_with_them():
    """The memory that a shuffled weight leaves is ordinary memory."""
    weight = shuffle_weight(WEIGHT)
    address, part = weight.data_ptr(), weight[:16]
    assert address in SHUFFLED_ADDRESSES
    del weight
    assert address in SHUFFLED_ADDRESSES and part.data_ptr() == address
    del part
    assert address not in SHUFFLED_ADDRESSES


@pytest.mark.parametrize("lose", [torch.from_dlpack, lambda weight: weight.plain[:16]], ids=["dlpack", "first rows"])
def test_memory_of_a_shuffled_weight_is_refused_in_any_tensor(lose):
    """An alias by DLPack and the first rows alone are refused, and their calls leave no launcher."""
    weight = shuffle_weight(WEIGHT)
    lost = lose(weight)
    with pytest.raises(OperandError, match="bytes of layout aiter16x16"):
        layout_of("a16w16", lost)
    with pytest.raises(OperandError, match="lost the type"):
        Dispatcher(op_named("a16w16")).call(torch.ones(4, lost.shape[1], dtype=lost.dtype), lost)


SQUARE = torch.randn(64, 64).bfloat16()


def test_a_transposed_square_weight_is_refused():
    """Its strides show it, also after a call whose x is not contiguous; the error has the remedy."""
    x = torch.randn(3, 64).bfloat16()
    remedy = (
        r"transposed view \(got \(64, 64\) with strides \(1, 64\)\); pass the \[N, K\] weight itself, without .t\(\), or call .contiguous"
    )
    tunedgemm.gemm_a16w16(torch.randn(64, 3).bfloat16().t(), SQUARE)
    one = torch.ones(1)
    for more in ((), (None, None, one, one)):
        with pytest.raises(OperandError, match=f"a16w16: the square weight is a {remedy}"):
            tunedgemm.gemm_a16w16(x, SQUARE.t(), *more)
    q, scales = torch.ones(3, 64, dtype=torch.int8), (torch.ones(3, 1), torch.ones(64, 1))
    with pytest.raises(OperandError, match=f"a8w8: the square weight is a {remedy}"):
        tunedgemm.gemm_a8w8(q, SQUARE.to(torch.int8).t(), *scales)
    assert torch.equal(tunedgemm.gemm_a16w16(x, SQUARE.t().contiguous()), x @ SQUARE)


def test_torch_takes_a_transposed_square_weight_while_routed():
    """F.linear and torch.mm compute what torch's own do, before and after each other, and compiled."""
    x = torch.randn(3, 64).bfloat16()
    with tunedgemm.patched():
        for _ in range(2):
            assert torch.equal(torch.nn.functional.linear(x, SQUARE.t()), x @ SQUARE)
            assert torch.equal(torch.mm(x, SQUARE), x @ SQUARE)
            assert torch.equal(torch.mm(x, SQUARE.t()), x @ SQUARE.t())
    with pytest.raises(OperandError, match="transposed view"):
        tunedgemm.gemm_a16w16(x, SQUARE.t())


@listed(
    ("weight", "refused"),
    [
        (SQUARE, False),
        (SQUARE.t(), True),
        (torch.zeros(64, 128)[:, :64].t(), True),
        (torch.zeros(64, 128)[:, :64], False),
        (torch.zeros(64, 32).t(), False),
        (torch.zeros(1, 1).t(), False),
        (None, False),
    ],
)
def test_which_weights_are_transposed(weight, refused):
    """Only a square matrix whose columns are runs of memory."""
    with pytest.raises(OperandError) if refused else contextlib.nullcontext():
        check_not_transposed("a16w16", weight)


def test_memory_that_was_freed_is_plain_again():
    """A plain weight in memory that `resize_` took from a shuffled one is served, and keeps no wrong key."""
    shuffled = shuffle_weight(torch.randn(32, 64))
    storage = shuffled.plain.untyped_storage()
    x, plain = torch.randn(4, 64), torch.randn(32, 64)
    name, places = SHUFFLED_ADDRESSES[shuffled.data_ptr()], _PLACES[shuffled.data_ptr()]
    storage.resize_(0)
    SHUFFLED_ADDRESSES[plain.data_ptr()], _PLACES[plain.data_ptr()] = name, places  # as if the allocator had given the memory to it
    places().addresses[plain.data_ptr()] = None
    for _ in range(2):
        torch.testing.assert_close(tunedgemm.gemm_a16w16(x, plain), torch.nn.functional.linear(x, plain))
    assert plain.data_ptr() not in SHUFFLED_ADDRESSES

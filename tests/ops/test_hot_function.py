"""entry: the hot paths of the products with scales."""

import pytest
import torch
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.errors import OperandError
from tunedgemm.ops import op_named
from tunedgemm.ops.hot import hot_function
from tunedgemm.shape import Shape
from tunedgemm.testing.listed import listed

OP = op_named("a8w8")
OPERANDS = OP.make_inputs(Shape("a8w8", 4, 32, 64, "fp8_e4m3fn", "bf16", scale="row"), torch.device("cpu"), 0)


@pytest.fixture
def dispatcher():
    """Return a separate dispatcher of a8w8."""
    return Dispatcher(OP)


def test_equal_calls_share_a_launcher(dispatcher):
    """The second call of the same sizes and dtypes meets the launcher of the first, whatever the values."""
    call = hot_function(dispatcher, dispatcher.op.operands)
    first = call(*OPERANDS, None, None)
    assert len(dispatcher.launchers) == 1
    (launcher,) = dispatcher.launchers.values()
    again = call(*[operand.clone() for operand in OPERANDS], None, None)
    assert torch.equal(first, again)
    assert list(dispatcher.launchers.values()) == [launcher]


def padded(x):
    """The same values with rows that are further apart."""
    wide = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=torch.uint8).view(x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


CHANGES = {
    "M": lambda x, w, s, t: ((x[:3].contiguous(), w, s[:3].contiguous(), t), None, None),
    "form of x_scale": lambda x, w, s, t: ((x, w, s.flatten(), t), None, None),
    "form of w_scale": lambda x, w, s, t: ((x, w, s, t.flatten()), None, None),
    "kind of scales": lambda x, w, s, t: ((x, w, s[:1].contiguous(), t[:1].contiguous()), None, None),
    "dtype": lambda x, w, s, t: ((x.to(torch.int8), w.to(torch.int8), s, t), None, None),
    "output": lambda x, w, s, t: ((x, w, s, t), None, torch.float16),
    "density of x": lambda x, w, s, t: ((padded(x), w, s, t), None, None),
    "density of x_scale": lambda x, w, s, t: ((x, w, s.repeat(1, 2)[:, :1], t), None, None),
    "density of w_scale": lambda x, w, s, t: ((x, w, s, t.repeat(1, 2)[:, :1]), None, None),
    "bias": lambda x, w, s, t: ((x, w, s, t), torch.ones(32), None),
    "dtype of the bias": lambda x, w, s, t: ((x, w, s, t), torch.ones(32, dtype=torch.float16), None),
    "form of the bias": lambda x, w, s, t: ((x, w, s, t), torch.ones(1, 32), None),
    "gradient": lambda x, w, s, t: ((x, w, s.clone().requires_grad_(), t), None, None),
    "type": lambda x, w, s, t: ((x, w, s, torch.nn.Parameter(t, requires_grad=False)), None, None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_different_calls_have_different_launchers(dispatcher, what):
    """Whatever a launcher may rely on is part of its key."""
    call = hot_function(dispatcher, dispatcher.op.operands)
    call(*OPERANDS, None, None)
    operands, bias, otype = CHANGES[what](*OPERANDS)
    call(*operands, bias, otype)
    assert len(dispatcher.launchers) == 2


def test_an_operand_that_is_not_a_tensor(dispatcher):
    """The error names it, and nothing is cached."""
    with pytest.raises(OperandError, match=r"a8w8: x_scale must be a tensor \(got None\)"):
        hot_function(dispatcher, dispatcher.op.operands)(OPERANDS[0], OPERANDS[1], None, OPERANDS[3], None, None)
    assert not dispatcher.launchers


def test_a_launcher_that_fails_is_replaced(dispatcher):
    """The call is served by another, and the next one does not meet the failing one again."""
    call = hot_function(dispatcher, dispatcher.op.operands)
    wanted = call(*OPERANDS, None, None)
    (key,) = dispatcher.launchers
    replaced = []

    def failing(*operands):
        raise RuntimeError("no such kernel")

    def demote(call, error, launcher):
        assert launcher is failing
        replaced.append((str(error), call.key, len(call.operands), call.otype))
        return wanted

    dispatcher.launchers[key] = failing
    dispatcher.demote = demote
    assert hot_function(dispatcher, dispatcher.op.operands)(*OPERANDS, None, None) is wanted
    assert replaced == [("no such kernel", key, 4, None)]


class TestWeightScaled:
    """The same of products in which the weight alone has a scale."""

    op = op_named("a16w4_blockscale")
    operands = op.make_inputs(Shape("a16w4_blockscale", 4, 32, 64, outdtype="bf16", scale="block"), torch.device("cpu"), 0)
    changes = {
        "M": lambda x, w, s: ((x[:3].contiguous(), w, s), None, None),
        "dtype of x": lambda x, w, s: ((x.half(), w, s), None, None),
        "dtype of the weight": lambda x, w, s: ((x, w.view(torch.uint8), s), None, None),
        "dtype of w_scale": lambda x, w, s: ((x, w, s.view(torch.uint8)), None, None),
        "output": lambda x, w, s: ((x, w, s), None, torch.float16),
        "density of x": lambda x, w, s: ((x.repeat(1, 2)[:, :64], w, s), None, None),
        "density of w_scale": lambda x, w, s: ((x, w, padded(s)), None, None),
        "bias": lambda x, w, s: ((x, w, s), torch.ones(32), None),
        "form of the bias": lambda x, w, s: ((x, w, s), torch.ones(1, 32), None),
        "gradient": lambda x, w, s: ((x.clone().requires_grad_(), w, s), None, None),
        "type": lambda x, w, s: ((x, w, torch.nn.Parameter(s, requires_grad=False)), None, None),
    }

    @listed("what", changes)
    def test_different_calls_have_different_launchers(self, what):
        """Equal calls share one, whatever the values; whatever a launcher may rely on is part of its key."""
        dispatcher = Dispatcher(self.op)
        call = hot_function(dispatcher, dispatcher.op.operands)
        first = call(*self.operands, None, None)
        assert torch.equal(call(*[operand.clone() for operand in self.operands], None, None), first)
        assert len(dispatcher.launchers) == 1
        operands, bias, otype = self.changes[what](*self.operands)
        call(*operands, bias, otype)
        assert len(dispatcher.launchers) == 2

    def test_an_operand_that_is_not_a_tensor(self):
        """The error names it, and nothing is cached."""
        dispatcher = Dispatcher(self.op)
        with pytest.raises(OperandError, match=r"a16w4_blockscale: w_scale must be a tensor \(got None\)"):
            hot_function(dispatcher, dispatcher.op.operands)(*self.operands[:2], None, None, None)
        assert not dispatcher.launchers

    def test_a_launcher_that_fails_is_replaced(self):
        """Its error, the call's key and its operands go to the function that finds another."""
        dispatcher = Dispatcher(self.op)
        wanted = hot_function(dispatcher, dispatcher.op.operands)(*self.operands, None, None)
        (key,) = dispatcher.launchers

        def failing(*operands):
            raise RuntimeError("no such kernel")

        dispatcher.launchers[key] = failing
        dispatcher.demote = lambda call, error, launcher: (str(error), call.key, len(call.operands), call.otype)
        assert hot_function(dispatcher, dispatcher.op.operands)(*self.operands, None, None) == ("no such kernel", key, 3, None)
        assert wanted.shape == (4, 32)

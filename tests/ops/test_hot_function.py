"""tunedgemm.ops.hot: functions over a dispatcher's launchers, and the functions of ops that call them."""

import inspect
from collections.abc import Callable

import pytest
import torch
import tunedgemm
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import OperandError, UserError
from tunedgemm.ops import functions, op_named
from tunedgemm.ops.a8w8 import gemm_a8w8
from tunedgemm.ops.hot import hot_function
from tunedgemm.shape import Shape

SHAPES = (
    Shape("a8w8", 4, 32, 64, "fp8_e4m3fn", "bf16", scale="row"),
    Shape("a16w4_blockscale", 4, 32, 64, outdtype="bf16", scale="block"),
)
EACH = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.op)


def made(shape: Shape) -> tuple[Dispatcher, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """Make a dispatcher, its hot function, and operands of a shape."""
    dispatcher = Dispatcher(op_named(shape.op))
    operands = dispatcher.op.make_inputs(shape, torch.device("cpu"), 0)
    return dispatcher, hot_function(dispatcher, dispatcher.op.operands), operands


@EACH
def test_an_operand_that_is_not_a_tensor(shape: Shape) -> None:
    """The error names it, and nothing is cached."""
    dispatcher, call, operands = made(shape)
    name = dispatcher.op.operands[2]
    with pytest.raises(OperandError, match=rf"{shape.op}: {name} must be a tensor \(got None\)"):
        call(*operands[:2], None, *operands[3:], None, None)
    assert not dispatcher.launchers


@EACH
def test_a_launcher_that_fails_is_replaced(shape: Shape) -> None:
    """Its error and the call go to the function that finds another launcher."""
    dispatcher, call, operands = made(shape)
    call(*operands, None, None)
    (key,) = dispatcher.launchers

    def failing(*operands):
        raise RuntimeError("no such kernel")

    dispatcher.launchers[key] = failing
    dispatcher.demote = lambda call, error, launcher: (str(error), call.key, len(call.operands), call.otype, launcher)
    again = hot_function(dispatcher, dispatcher.op.operands)
    assert again(*operands, None, None) == ("no such kernel", key, len(operands), None, failing)


@pytest.mark.parametrize("name", sorted(functions()))
def test_the_functions_of_ops_are_found_in_their_files(name: str) -> None:
    """The source, names and defaults of a public function are those of a function in its op's file."""
    function = getattr(tunedgemm, name)
    written = inspect.unwrap(function)
    assert inspect.getsource(function).startswith(f"def {written.__name__}(")
    assert "/tunedgemm/ops/" in str(inspect.getsourcefile(written)) and function.__doc__ == written.__doc__
    dtype = inspect.signature(function).parameters.get("dtype")
    assert dtype is None or dtype.default in (None, torch.bfloat16)


def test_functions_of_an_instance_use_its_tables() -> None:
    """Each instance has copies over its own launchers; the function of the file has none."""
    one, other = TunedGemm(), TunedGemm()
    assert one.gemm_a8w8 is not other.gemm_a8w8
    operands = made(SHAPES[0])[2]
    one.gemm_a8w8(*operands)
    assert len(one.of("a8w8").launchers) == 1 and not other.of("a8w8").launchers
    with pytest.raises(UserError, match="call it by its name in tunedgemm"):
        gemm_a8w8(*operands)

"""tunedgemm.dispatch.traced: it knows the functions that compilers cannot trace, and their argument
order."""

import gc

import pytest
import torch
from tunedgemm.dispatch import traced
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.traced import hot_functions
from tunedgemm.dispatch.tuned_gemm import TunedGemm, tgemm
from tunedgemm.ops import op_named
from tunedgemm.ops.a16w16 import SPELLINGS


def test_the_menus_function_is_known() -> None:
    """Functions made at import of the package are found
    later with the dispatcher that serves them."""
    dispatcher, _ = hot_functions[tgemm.gemm_a16w16]
    assert dispatcher is tgemm.dispatcher


def test_arguments_are_placed_as_call_takes_them() -> None:
    """The function and `Dispatcher.call` of the placed arguments are one call."""
    x, weight, scale = torch.randn(3, 8), torch.randn(4, 8), torch.tensor([0.5])
    dispatcher, place = hot_functions[tgemm.gemm_a16w16]
    arguments = {"otype": torch.float32, "scale_b": scale}
    operands, otype, fields = place(x, weight, **arguments)
    assert len(operands) == len(dispatcher.op.operands)
    assert torch.equal(dispatcher.call(*operands, otype=otype, **fields), tgemm.gemm_a16w16(x, weight, **arguments))


def test_later_functions_are_added_and_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered graph ops learn of functions from before and after, and keep none of them alive."""
    learned = []

    class Learning:
        def add(self, function, dispatcher, place):
            learned.append(dispatcher.op.name)

        def stand_in(self, dispatcher, call):
            return None

    monkeypatch.setattr(traced, "_graph_ops", [])
    traced.register_graph_ops(Learning())
    before = len(learned)
    assert before == len(hot_functions)
    TunedGemm()
    Dispatcher(op_named("a16w16")).hot(lambda: torch.ones(1), lambda: ((), None, {}))
    spelled = 1 + len(SPELLINGS)
    assert learned[before:] == ["a16w16"] * (spelled + 1)
    gc.collect()
    alive = len(hot_functions)
    made = TunedGemm()
    assert len(hot_functions) == alive + spelled
    del made
    gc.collect()
    assert len(hot_functions) == alive

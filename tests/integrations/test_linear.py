"""F.linear routing: patched() changes speed and nothing else."""

from __future__ import annotations

import pytest
import torch
import tunedgemm
from torch.nn import functional
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.errors import OperandError
from tunedgemm.integrations.linear import linear
from tunedgemm.integrations.patching import patched


def calls_the_patched_one(*operands):
    return functional.linear(*operands)


def test_an_unmodified_model_runs_the_tables_choice_inside_the_block_only(routed) -> None:
    """nn.Linear reaches the tuned kernel under patched() and not after it."""
    calls = routed(torch._C._nn.linear)
    layer, x = torch.nn.Linear(32, 16, bias=False), torch.randn(2, 2, 32)

    with torch.no_grad():
        with patched():
            inside = layer(x)
        outside = layer(x)

    torch.testing.assert_close(inside, outside)
    assert calls == ["fake"]
    assert functional.linear is not linear


def test_the_original_comes_back_after_an_error_and_after_nesting() -> None:
    """Leaving the block in any way restores the previous function."""
    before = functional.linear
    with pytest.raises(ZeroDivisionError), patched(), patched():
        raise ZeroDivisionError

    assert functional.linear is before


def test_a_launcher_that_calls_the_patched_function_gets_torchs_own(routed) -> None:
    """A backend whose kernel calls F.linear does not recurse."""
    calls = routed(calls_the_patched_one)
    x, weight = torch.randn(4, 32), torch.randn(16, 32)
    with patched(), torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(functional.linear(x, weight), torch._C._nn.linear(x, weight))

    assert calls == ["fake", "fake"]


def test_a_launcher_that_recurses_at_its_second_call_is_demoted_once(routed) -> None:
    """A launcher that calls the patched function at its second call fails and is demoted,
    and torch serves the call."""
    times = [0]

    def later(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        times[0] += 1
        return functional.linear(x, weight) if times[0] > 1 else torch._C._nn.linear(x, weight)

    routed(later)
    x, weight = torch.randn(4, 32), torch.randn(16, 32)
    with patched(), torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(functional.linear(x, weight), torch._C._nn.linear(x, weight))
        met = times[0]  # by the first calls
        functional.linear(x, weight)

    assert times[0] == met


def test_torchs_own_call_runs_none_of_our_code(routed) -> None:
    """If torch's launcher is chosen, the cache has torch's function itself."""
    routed(torch._C._nn.linear)
    x, weight = torch.randn(5, 32), torch.randn(16, 32)
    with torch.no_grad():
        linear(x, weight)

    assert list(tgemm.dispatcher.launchers.values()) == [torch._C._nn.linear]


def test_a_row_is_used_after_the_tables_are_read_again(routed) -> None:
    """A cached launcher is dropped with the tables that it came from."""
    x, weight = torch.randn(4, 32), torch.randn(16, 32)
    with torch.no_grad():
        linear(x, weight)
        calls = routed(torch._C._nn.linear)
        linear(x, weight)

    assert calls == ["fake"]


def test_a_module_with_a_shuffled_weight_runs_when_routed() -> None:
    """patched() honours the layout of a shuffled weight; without it torch refuses the weight."""
    layer, x = torch.nn.Linear(64, 32, dtype=torch.bfloat16), torch.randn(4, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x)
        layer.weight = torch.nn.Parameter(tunedgemm.shuffle_weight(layer.weight.data), requires_grad=False)
        with patched():
            torch.testing.assert_close(layer(x), expected)
        with pytest.raises(OperandError, match="as if it were plain"):
            layer(x)

"""testing.sharing: faults of calls that share one launcher."""

import itertools

import pytest
import torch
from tunedgemm.backends.launcher import Launcher
from tunedgemm.testing.sharing import differing_calls, fault_of_graphs, fault_of_threads


def drawn(count, device="cpu"):
    """Return the operands of several calls."""
    return [(torch.randn(4, 8, device=device), torch.randn(3, 8, device=device)) for _ in range(count)]


def product(x, weight):
    return x @ weight.t()


def test_calls_with_other_bits_are_counted():
    """Each call is compared with the first, whatever is between."""
    calls = itertools.count()
    assert differing_calls(Launcher(product), drawn(1)[0], 5) == 0
    assert differing_calls(Launcher(lambda x, weight: product(x, weight) + next(calls) % 2), drawn(1)[0], 5) == 3


def test_threads_get_the_bits_of_plain_calls_or_pass_another_check():
    """A launcher that answers threads with another product is found, by bits or by the caller's check."""
    first, given = [], drawn(3)

    def stale(x, weight):
        first.append((x, weight))
        return product(*first[0])

    assert fault_of_threads(Launcher(product), given, calls=4) == ""
    assert fault_of_threads(Launcher(stale), given, fault=lambda index, out: "" if torch.equal(out, product(*given[index])) else "is stale")
    assert fault_of_threads(Launcher(product), given, fault=lambda index, out: f"of thread {index}" * (index == 2)) == "of thread 2"


@pytest.mark.gpu
def test_graphs_that_keep_state_or_operands_are_found():
    """A launch that leaves a counter, and a graph that does not read its operands, have other bits."""
    given, counter = drawn(3, "cuda"), torch.zeros((), device="cuda")
    held = product(*given[0])

    def counting(x, weight):
        return product(x, weight) + counter.add_(1)

    def stale(x, weight):
        return held.clone() if torch.cuda.is_current_stream_capturing() else product(x, weight)

    assert fault_of_graphs(Launcher(product), given) == ""
    for launcher in (counting, stale):
        assert fault_of_graphs(Launcher(launcher), given).endswith("has other bits than a plain call")

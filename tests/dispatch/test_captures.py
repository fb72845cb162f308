"""The counters between a call and its launcher while shapes are captured."""

from __future__ import annotations

import pytest
import torch
from tunedgemm.dispatch.captures import capture_check, is_captured, watch_graphs, with_call_counter
from tunedgemm.testing.listed import listed


@listed("operands", [1, 2, 3, 5])
def test_calls_are_counted_by_kind_and_passed_on(operands: int, graphs: type[Graph]) -> None:
    """A counted call passes any number of operands unchanged and adds one to one of two counts."""
    given, counter, now = tuple(torch.ones(1) for _ in range(operands)), [0, 0], [False]

    def launch(*received: torch.Tensor | None) -> torch.Tensor:
        assert all(ours is theirs for ours, theirs in zip(received, given, strict=True))
        return given[-1]

    graph = graphs()
    asked = with_call_counter(launch, counter, lambda: now[0], operands)
    graph.capture_begin()
    for answer in (False, True, True):
        now[0] = answer
        assert asked(*given) is given[-1]
    graph.capture_end()
    assert counter == [1, 2]
    assert asked(*given) is given[-1]
    assert counter == [2, 2]

    assert with_call_counter(launch, counter, None, operands)(*given) is given[-1]
    assert counter == [3, 2]


def test_a_call_that_raises_is_not_counted() -> None:
    """Whoever serves it instead counts it, so that a kernel that is demoted makes no call two."""
    counter = [0, 0]

    def fail(*_: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("no")

    for operands in (1, 2, 3):
        for ask in (None, lambda: False):
            with pytest.raises(RuntimeError, match="no"):
                with_call_counter(fail, counter, ask, operands)(*[torch.ones(1)] * operands)
    assert counter == [0, 0]


def test_calls_on_the_cpu_are_never_asked_whether_they_are_recorded() -> None:
    """A graph has none of them, and a torch without CUDA cannot answer."""
    assert capture_check(torch.ones(1)) is None


class Graph:
    """A fake of torch's CUDA graph: capture begins, unless it is set to fail, and ends."""

    def capture_begin(self, *, fail: bool = False) -> None:
        if fail:
            raise RuntimeError("no")

    def capture_end(self) -> None:
        pass


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    """The kind of graph that is watched, in place of torch's, which needs a GPU."""

    class Watched(Graph):
        pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Watched)
    watch_graphs.__wrapped__()
    return Watched


def test_calls_ask_only_while_a_graph_is_captured(graphs: type[Graph]) -> None:
    """Calls ask about capture only from the first open capture to the last; failed starts and
    second ends do not count."""
    one, two = graphs(), graphs()
    assert not is_captured(lambda: True)
    with pytest.raises(RuntimeError, match="no"):
        one.capture_begin(fail=True)
    assert not is_captured(lambda: True)

    one.capture_begin()
    two.capture_begin()
    assert is_captured(lambda: True) and not is_captured(lambda: False) and not is_captured(None)
    one.capture_end()
    one.capture_end()
    assert is_captured(lambda: True)
    two.capture_end()
    assert not is_captured(lambda: True)

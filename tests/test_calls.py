"""What stands between a call and its launcher while shapes are captured."""

from __future__ import annotations

import pytest
import torch
from tunedgemm.calls import counted, recording


@pytest.mark.parametrize("operands", [1, 2, 3, 5])
def test_calls_are_counted_by_kind_and_passed_on(operands: int) -> None:
    """However many operands a call has, they reach the launcher as they are, and one of the two counts goes up by one."""
    given, counter, now = tuple(torch.ones(1) for _ in range(operands)), [0, 0], [False]

    def launch(*received: torch.Tensor | None) -> torch.Tensor:
        assert all(ours is theirs for ours, theirs in zip(received, given, strict=True))
        return given[-1]

    asked = counted(launch, counter, lambda: now[0], operands)
    for recorded in (False, True, True):
        now[0] = recorded
        assert asked(*given) is given[-1]
    assert counter == [1, 2]

    assert counted(launch, counter, None, operands)(*given) is given[-1]
    assert counter == [2, 2]


def test_a_call_that_raises_is_counted() -> None:
    """The workload has asked for it: who serves it in the end is another matter."""
    counter = [0, 0]

    def fail(*_: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        counted(fail, counter, None, 1)(torch.ones(1))
    assert counter == [1, 0]


def test_calls_on_the_cpu_are_never_asked_whether_they_are_recorded() -> None:
    """A graph has none of them, and a torch without CUDA cannot answer."""
    assert recording(torch.ones(1)) is None

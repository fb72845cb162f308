"""Kept copies of weights: made once, counted, renewed by writes, and freed with their weights."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from tunedgemm.backends import kept_weights
from tunedgemm.backends.kept_weights import LIMIT, cost, kept, renew, used
from tunedgemm.backends.launcher import WeightRefused

SIZE = 4 * 8 * 4


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow two copies; the test frees all of them."""
    gc.collect()
    monkeypatch.setenv(LIMIT, str(2 * SIZE))
    before = used()
    yield
    gc.collect()
    assert used() == before == 0


class Maker:
    """Multiplies a weight by its scales, and counts."""

    calls = 0

    def __call__(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return weight.float() * scale


def drawn(value: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((4, 8), value, dtype=torch.int8), torch.ones(4, 1)


def test_a_copy_is_made_once_for_each_form() -> None:
    """A second call and a view of the weight get the same copy, another form its own."""
    make, (weight, scale) = Maker(), drawn()
    first = kept((weight, scale), "a", SIZE, make)
    assert kept((weight.view(4, 8), scale.detach()), "a", SIZE, make) is first
    assert torch.equal(first, torch.full((4, 8), 3.0)) and (make.calls, used()) == (1, SIZE)
    assert kept((weight, scale), "b", SIZE, make) is not first
    assert cost((weight, scale, None)).count(f" ms, {SIZE} bytes kept") == 2


def test_the_limit_refuses_and_evicts_nothing() -> None:
    """A third weight is refused with the variable's name, until one of the others is freed."""
    make, given = Maker(), [drawn(value) for value in (1, 2, 3)]
    first, _ = [kept(pair, "a", SIZE, make) for pair in given[:2]]
    with pytest.raises(WeightRefused, match=f"{LIMIT}: {2 * SIZE} of {2 * SIZE} bytes are in use.*set a higher limit"):
        kept(given[2], "a", SIZE, make)
    assert kept(given[0], "a", SIZE, make) is first and make.calls == 2
    del given[1], _
    gc.collect()
    assert float(kept(given[1], "a", SIZE, make)[0, 0]) == 3


def test_counted_writes_renew_a_copy_in_its_memory() -> None:
    """Writes to the weight or its scales are followed by the next call, at the same address."""
    make, (weight, scale) = Maker(), drawn()
    address = kept((weight, scale), "a", SIZE, make).data_ptr()
    for write, value in ((lambda: weight.fill_(5), 5), (lambda: scale.mul_(2), 10), (lambda: weight.view(-1).copy_(torch.ones(32)), 2)):
        write()
        again = kept((weight, scale), "a", SIZE, make)
        assert (float(again[0, 0]), again.data_ptr()) == (value, address)
    assert (make.calls, used()) == (4, SIZE)


def test_other_writes_need_a_renewal() -> None:
    """A write through ``data`` is followed after `renew`, also by readers of the copy's memory."""
    make, (weight, scale) = Maker(), drawn()
    copy = kept((weight, scale), "a", SIZE, make)
    weight.data.fill_(7)
    assert float(kept((weight, scale), "a", SIZE, make)[0, 0]) == 3
    renew([None, "text", weight, torch.zeros(2)])
    assert float(copy[0, 0]) == 7


def test_other_scales_get_another_copy() -> None:
    """A captured graph may read the copy of a weight with its earlier scales."""
    make, (weight, scale) = Maker(), drawn()
    first, other = kept((weight, scale), "a", SIZE, make), kept((weight, scale * 2), "a", SIZE, make)
    assert (float(first[0, 0]), float(other[0, 0])) == (3, 6)


def test_replaced_scales_free_their_copy() -> None:
    """Copies of freed scales do not fill the limit, nor serve scales at a reused address."""
    make, (weight, scale) = Maker(), drawn()
    kept((weight, scale), "a", SIZE, make)
    for value in range(5):
        scale = torch.full((4, 1), float(value))
        assert float(kept((weight, scale), "a", SIZE, make)[0, 0]) == 3 * value and used() == SIZE
    del scale
    assert used() == 0


def test_scales_of_each_call_are_refused() -> None:
    """Else each call would decode the weight; other weights are kept."""
    make, (weight, scale) = Maker(), drawn()
    for _ in range(8):
        kept((weight, scale.clone()), "a", SIZE, make)
    with pytest.raises(WeightRefused, match="8 copies were dropped with its scales, which were freed; keep them between calls"):
        kept((weight, scale.clone()), "a", SIZE, make)
    kept((weight.clone(), scale.clone()), "a", SIZE, make)


def test_a_failed_decode_refuses_its_weight_alone(caplog: pytest.LogCaptureFixture) -> None:
    """It is not tried again before a write, and takes no room."""
    (weight, scale), (other, _), tries = drawn(), drawn(), []

    def failing(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        tries.append(1)
        if scale[0, 0] == 1:
            raise ValueError("odd scales")
        return weight.float() * scale

    for _ in range(2):
        with pytest.raises(WeightRefused, match="decoding it failed: ValueError: odd scales"):
            kept((weight, scale), "a", SIZE, failing)
    assert len(tries) == 1 and not used() and caplog.text.count("is not dequantised") == 1
    assert float(kept((other, scale * 2), "a", SIZE, failing)[0, 0]) == 6
    scale.fill_(4)
    copy = kept((weight, scale), "a", SIZE, failing)
    scale.fill_(1)
    with pytest.raises(WeightRefused, match="odd scales"):
        kept((weight, scale), "a", SIZE, failing)
    scale.fill_(5)
    assert kept((weight, scale), "a", SIZE, failing) is copy and float(copy[0, 0]) == 15


def test_a_copy_does_not_keep_its_weight_alive() -> None:
    """Also where weight and scales share a storage, as in one buffer of a checkpoint."""
    buffer = torch.ones(4 * 8 + 4)
    assert float(kept((buffer[:32].view(4, 8), buffer[32:].view(4, 1)), "a", SIZE, Maker()).sum()) == 32
    buffer.mul_(2)
    renew([buffer])
    assert used() == SIZE
    del buffer
    gc.collect()
    assert used() == 0


def test_refusals() -> None:
    """A weight whose writes are not counted, a capture and short memory are refused with the reason."""
    weight, scale = drawn()
    with torch.inference_mode():
        with pytest.raises(WeightRefused, match="made in inference mode"):
            kept((weight.clone(), scale), "a", SIZE, Maker())
        assert not kept((weight, scale), "b", SIZE, Maker()).is_inference()
    with pytest.raises(WeightRefused, match="other processes"):
        kept((weight.clone().share_memory_(), scale), "a", SIZE, Maker())

    def short(*_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(WeightRefused, match="no memory"):
        kept((weight, scale), "a", SIZE, short)


def test_a_capture_makes_and_renews_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy made before is read in a capture; a missing or outdated one is refused."""

    class OnGpu(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    weight, scale = torch.ones(4, 8).as_subclass(OnGpu), torch.ones(4, 1)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(kept_weights, "_synchronize", lambda tensor: None)
    with pytest.raises(WeightRefused, match="capture"):
        kept((weight, scale), "a", SIZE, Maker())
    capturing[0] = False
    copy = kept((weight, scale), "a", SIZE, Maker())
    capturing[0] = True
    assert kept((weight, scale), "a", SIZE, Maker()) is copy
    scale.mul_(2)
    with pytest.raises(WeightRefused, match="capture"):
        kept((weight, scale), "a", SIZE, Maker())
    capturing[0] = False
    del scale
    assert used() == SIZE, "a graph may read it"
    scale = torch.full((4, 1), 7.0)
    assert kept((weight, scale), "a", SIZE, Maker()) is not copy
    weight.data.fill_(9)
    renew([weight])
    assert float(copy[0, 0]) == 1, "its scales are unknown"


def test_threads_make_one_copy() -> None:
    """Eight threads that call at once get one copy."""
    make, pair, start, found = Maker(), drawn(), threading.Barrier(8), []

    def call() -> None:
        start.wait(10)
        found.append(kept(pair, "a", SIZE, make))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make.calls == 1 and len({id(copy) for copy in found}) == 1

"""dispatcher: a lack of memory costs one call, and no kernel its shape."""

from __future__ import annotations

import pytest
import torch
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import current_device
from tunedgemm.dispatch.settings import Settings
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.shape import Shape
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr
)
def test_running_out_of_memory_demotes_no_kernel(error: Exception) -> None:
    """An out-of-memory error reaches the caller, and the kernel keeps its shape."""
    calls: list[str] = []

    def call(solution, shape, x, weight):
        calls.append("tried")
        raise error

    gemm = TunedGemm(fake_registry(fake_backend("turbo", heuristic="fake", call=call)), settings=Settings(untuned=("turbo",)))

    for _ in range(2):
        with pytest.raises(type(error)):
            gemm.mm(torch.randn(4, 32), torch.randn(16, 32))

    assert len(calls) == 2


def test_running_out_of_memory_in_bind_costs_one_call() -> None:
    """A call whose kernel finds no memory to bind is torch's; the next one binds it again."""
    errors: list[Exception] = [MemoryError()]

    def bind(solution, shape, device):
        if errors:
            raise errors.pop()
        return Launcher(torch._C._nn.linear)

    backend = fake_backend("turbo", heuristic="fake")
    backend = with_hooks(backend, bind=bind)
    gemm = TunedGemm(fake_registry(backend), settings=Settings(untuned=("turbo",)))
    x, weight, shape = torch.randn(4, 32), torch.randn(16, 32), Shape("a16w16", 4, 16, 32, dtype="fp32")

    for bound in (False, True):
        torch.testing.assert_close(gemm.mm(x, weight), torch.nn.functional.linear(x, weight))
        assert gemm.dispatcher.is_bound(shape, current_device()) is bound

"""Verification on a GPU: no call waits for the device, and a wrong kernel is found."""

from __future__ import annotations

import pytest
import torch
from tunedgemm.device import device_of
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row
from tunedgemm.table.deny import user_list
from tunedgemm.table.lookup import Table
from tunedgemm.testing.fakes import fake_backend, fake_registry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

OP = op_named("a16w16")
SHAPE = Shape("a16w16", 64, 512, 1024)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_no_call_waits_for_the_device(factor: float) -> None:
    """Verified calls do not synchronise, and a wrong kernel is denied some calls later."""
    here = device_of(0)
    row = Row(gfx=here.gfx, cu_num=here.cu_num, device=here.name, shape=SHAPE, us=1.0, solution=Solution("turbo", "k"))
    backend = fake_backend(
        "turbo", solutions=("k",), call=lambda solution, shape, x, weight, *rest: torch.nn.functional.linear(x, weight) * factor
    )
    made = Dispatcher(OP, fake_registry(backend), settings=Settings(untuned=(), verify=1.0), table=Table(OP, [[row]]))
    x, weight = (torch.randn(size, 1024, device="cuda", dtype=torch.bfloat16) for size in (64, 512))
    made.call(x, weight)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            made.call(x, weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for _ in range(100):
        made.call(x, weight)
    assert user_list().exists() == (made.explain(SHAPE, here).libtype == "torch") == (factor != 1.0)

"""Online tuning in the background, of layers of an engine."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
import tunedgemm
from tunedgemm.dispatch import online
from tunedgemm.dispatch.tuned_gemm import dispatcher
from tunedgemm_engines import vllm as plugin

N, K = 256, 384

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates


@pytest.fixture
def in_background(vllm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the plugin with online tuning, whose tuner never starts."""
    monkeypatch.setattr(online, "_COUNTED", float("inf"))
    monkeypatch.setenv("TUNEDGEMM_ONLINE", "background")
    monkeypatch.setenv("TUNEDGEMM_ONLINE_SECONDS", "33")
    tunedgemm.reload()
    plugin.register()
    yield
    monkeypatch.delenv("TUNEDGEMM_ONLINE")
    tunedgemm.reload()


def test_a_layer_without_a_row_is_counted(in_background: None) -> None:
    """Its product is unchanged, and its calls are counted by shape."""
    layer, x = torch.nn.Module(), torch.randn(3, K)
    layer.weight = torch.nn.Parameter(torch.randn(N, K), requires_grad=False)
    expected = x @ layer.weight.t()
    module, name = plugin.PLAIN[0]
    serve = getattr(importlib.import_module(module), name)()
    serve.process_weights_after_loading(layer)
    for _ in range(2):
        torch.testing.assert_close(serve.apply(layer, x), expected, atol=1e-4, rtol=1e-4)

    waiting = dispatcher("a16w16").background._waiting
    assert {(shape.m, shape.n, shape.k): sum(counter) for (shape, _), counter in waiting.items()} == {(3, N, K): 2}

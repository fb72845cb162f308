"""The plugin's switch, its replacements in vLLM, and warnings about an unknown vLLM."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tunedgemm_engines import vllm as plugin

STUB = Path(__file__).parent / "vllm_stub"

in_every_form = pytest.mark.parametrize("vllm_form", ["0.20.2", "0.25.1", "0.33.0"], indirect=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses much that torch deprecates


def method(place: tuple[str, str]) -> type:
    """A class of vLLM's."""
    found: type = getattr(importlib.import_module(place[0]), place[1])
    return found


def module(name: str) -> Any:
    """A module of vLLM's experts."""
    return importlib.import_module(f"vllm.model_executor.layers.fused_moe.{name}")


def test_it_is_off_unless_asked_for(child) -> None:
    """Without the variable nothing of vLLM is imported or replaced,
    and no routing module is loaded."""
    source = (
        "import sys, torch\nbefore = torch.nn.functional.linear\nfrom tunedgemm_engines.vllm import register\nregister()\n"
        "print(torch.nn.functional.linear is before, [name for name in sys.modules if name.startswith('vllm') or 'patching' in name])"
    )
    assert child(source, STUB) == "True []"


def test_no_worker_is_imported(child, monkeypatch) -> None:
    """Registering imports neither vLLM's worker nor its layers, and routes once vLLM imports the worker."""
    source = (
        "import os, sys, torch\nfrom tunedgemm_engines.vllm import register\nregister()\n"
        "early = [name for name in sys.modules if name.startswith(('vllm.model_executor', 'vllm.v1'))]\n"
        "from vllm.v1.worker.gpu_worker import Worker\n"
        "from vllm.model_executor.layers.linear import UnquantizedLinearMethod\n"
        "wrapped = [hasattr(each, '__wrapped__') for each in (Worker.compile_or_warm_up_model, UnquantizedLinearMethod.apply)]\n"
        "print([name for name in early if name != 'vllm.v1' and name != 'vllm.v1.worker'], wrapped)"
    )
    monkeypatch.setenv("TUNEDGEMM_VLLM", "1")
    assert child(source, STUB) == "[] [True, True]"


def test_counters_are_exposed_without_layers(child, monkeypatch) -> None:
    """The API server, which loads no worker, shows what its engine's processes count."""
    pytest.importorskip("prometheus_client")
    source = (
        "import os\nfrom tunedgemm_engines.vllm import register\nregister()\nfrom prometheus_client import REGISTRY, generate_latest\n"
        "from tunedgemm.dispatch.counters import count\ncount('demotions', 'a16w16', 'turbo')\n"
        "print('tunedgemm_demotions_total{' in generate_latest(REGISTRY).decode(), 'TUNEDGEMM_METRICS_DIR' in os.environ)"
    )
    monkeypatch.setenv("TUNEDGEMM_VLLM", "1")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    assert child(source, STUB) == "False False"
    monkeypatch.setenv("TUNEDGEMM_METRICS", "1")
    assert child(source, STUB) == "True True"


def test_registering_twice_is_registering_once(vllm_captured) -> None:
    """After several registrations methods are wrapped and kernels listed once,
    and F.linear stays torch's."""
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    wrapped, listed = (
        method(plugin.PLAIN[0]).apply,
        {name: dict(one) for name, one in vars(linear).items() if name.startswith("_POSSIBLE_")},
    )
    plugin.register()

    assert method(plugin.PLAIN[0]).apply is wrapped
    assert {name: dict(one) for name, one in vars(linear).items() if name.startswith("_POSSIBLE_")} == listed
    assert torch.nn.functional.linear.__module__ != "tunedgemm.integrations.linear"


def test_a_vllm_of_another_form_is_named(vllm, monkeypatch, caplog) -> None:
    """A missing class or list is a warning; the rest is routed all the same."""
    monkeypatch.delattr(importlib.import_module("vllm.model_executor.kernels.linear"), "_POSSIBLE_FP8_KERNELS")
    monkeypatch.delattr(importlib.import_module(plugin.PLAIN[1][0]), plugin.PLAIN[1][1])
    plugin.register()

    assert "this vLLM has no vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod" in caplog.text
    assert "fp8_w8a8, fp8_block_w8a8 layers keep vLLM's kernels" in caplog.text
    assert hasattr(method(plugin.PLAIN[0]).apply, "__wrapped__")


@pytest.mark.parametrize(
    ("variables", "warning"),
    [
        ({"VLLM_BATCH_INVARIANT": "1", "TUNEDGEMM_BATCH_INVARIANT": "0"}, "=0 leaves all layers to vLLM"),
        ({"TUNEDGEMM_VLLM": "1"}, "TUNEDGEMM_VLLM=unpacked routes them"),
    ],
    ids=["batch-invariant", "cpu"],
)
def test_vllms_guarantees_are_kept(vllm, monkeypatch, caplog, variables, warning) -> None:
    """vLLM's mode without ours and CPU kernels with packed weights are left unreplaced and logged."""
    platform = importlib.import_module("vllm.platforms").current_platform
    monkeypatch.setattr(type(platform), "is_cpu", lambda self: True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = torch.nn.functional.linear
    plugin.register()

    assert warning in caplog.text
    assert torch.nn.functional.linear is before
    assert not hasattr(method(plugin.PLAIN[0]).apply, "__wrapped__")


@in_every_form
def test_a_cpu_has_a_summary_too(vllm, monkeypatch, caplog) -> None:
    """vLLM's CPU worker has a separate warm-up, after which the routed layers are logged."""
    monkeypatch.setattr(type(importlib.import_module("vllm.platforms").current_platform), "is_cpu", lambda self: True)
    plugin.register()
    caplog.set_level("INFO", "vllm.tunedgemm")
    config = importlib.import_module("vllm.config").VllmConfig()
    importlib.import_module(plugin.CPU_WARM[0]).CPUWorker(config).compile_or_warm_up_model()

    assert "0 layers go through tables" in caplog.text and "--linear-backend" not in caplog.text


@pytest.mark.parametrize(("version", "routed"), [("0.20.2", True), ("0.33.0", True), ("0.19.1", False), ("1.0", False), ("dev", False)])
def test_an_unknown_vllm_keeps_its_kernels(vllm, monkeypatch, caplog, version, routed) -> None:
    """A version that was not checked is named in one warning, and nothing is replaced."""
    monkeypatch.setattr(importlib.import_module("vllm"), "__version__", version)
    plugin.register()

    assert hasattr(method(plugin.PLAIN[0]).apply, "__wrapped__") is routed
    assert ("unknown version of vLLM" in caplog.text) is not routed


@pytest.mark.parametrize("gone", ["select_fp8_moe_backend", "make_fp8_moe_kernel"])
def test_experts_of_another_form_are_named(vllm, monkeypatch, caplog, gone) -> None:
    """A missing function, or one that takes no class of experts, is a warning;
    the others are replaced."""
    oracle = module("oracle.fp8")
    monkeypatch.setattr(oracle, gone, lambda moe_config: None) if gone.startswith("make") else monkeypatch.delattr(oracle, gone)
    importlib.import_module("tunedgemm_engines.vllm").register()

    assert "vLLM's fp8 experts: stay vLLM's, because this vLLM has another interface" in caplog.text
    assert not hasattr(getattr(oracle, "select_fp8_moe_backend", None), "__wrapped__")
    assert hasattr(module("oracle.unquantized").select_unquantized_moe_backend, "__wrapped__")


def test_experts_that_need_more_are_left_alone(vllm, monkeypatch, caplog) -> None:
    """Where vLLM's base has a method that ours lacks, nothing is replaced, and the method is named."""
    ours = importlib.import_module("tunedgemm_engines.vllm_cpu_experts")
    monkeypatch.setattr(ours.TunedGemmExperts, "__abstractmethods__", frozenset({"supports_more"}))
    importlib.import_module("tunedgemm_engines.vllm").register()

    assert "supports_more" in caplog.text
    assert not hasattr(module("oracle.unquantized").select_unquantized_moe_backend, "__wrapped__")

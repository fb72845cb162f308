"""Names of ``--linear-backend``: ours, offered to vLLM's parser, and what others keep of vLLM's."""

from __future__ import annotations

import argparse
import importlib
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tunedgemm.shape import Shape
from tunedgemm_engines import vllm as plugin
from tunedgemm_engines import vllm_backend

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
#: vLLM 0.20 has no ``--linear-backend``, 0.25 refuses a layer without a kernel of a named backend,
#: 0.33 chooses for it as for ``auto``.
with_names = pytest.mark.parametrize("vllm_form", ["0.25.1", "0.33.0"], indirect=True)
STUB = Path(__file__).parent / "vllm_stub"


@pytest.fixture
def front(vllm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the module of vLLM's arguments, with the plugin off."""
    pytest.importorskip("pydantic")
    monkeypatch.setenv("TUNEDGEMM_VLLM", "0")
    monkeypatch.setenv("TUNEDGEMM_VLLM_LAYERS", "")
    arguments = importlib.import_module("vllm.engine.arg_utils")
    settings = importlib.import_module("vllm.config").KernelConfig
    types = {field.name: field.type for field in vars(settings)["__dataclass_fields__"].values()}
    monkeypatch.setattr(arguments.EngineArgs, "create_engine_config", arguments.EngineArgs.create_engine_config)
    yield arguments
    for name, hint in types.items():
        settings.__dataclass_fields__[name].type = hint
    importlib.import_module("pydantic.dataclasses").rebuild_dataclass(settings, force=True)
    arguments._compute_kwargs.cache_clear()


def parsed(front: Any, value: str) -> str:
    """Return what vLLM's parser makes of a value."""
    return (
        front.EngineArgs.add_cli_args(argparse.ArgumentParser(exit_on_error=False)).parse_args(["--linear-backend", value]).linear_backend
    )


def routes(kind: str, scheme: str) -> bool:
    """Return whether vLLM chooses a kernel of ours for a layer of a scheme."""
    tests = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    torch = importlib.import_module("torch")
    if scheme == "int8_w8a8":
        return type(linear.init_int8_linear_kernel(True, False, True, kind)).__name__.startswith("TunedGemm")
    chosen = {
        "mixed_precision": lambda: linear.choose_mp_linear_kernel(
            linear.MPLinearLayerConfig((384, 256), (384, 256), "uint4b8", torch.bfloat16, 128, False)
        ),
        "nvfp4": lambda: type(linear.init_nvfp4_linear_kernel()),
        "mxfp8": lambda: type(linear.init_mxfp8_linear_kernel(weight_shape=(256, 384))),
        "mxfp4": lambda: type(linear.init_mxfp4_linear_kernel()),
    }
    if scheme in chosen:
        return chosen[scheme]().__name__.startswith("TunedGemm")
    groups = ((1, 128), (128, 128)) if scheme == "fp8_block_w8a8" else ((1, -1), (-1, 1))
    keys = [
        tests.QuantKey(torch.float8_e4m3fn, tests.ScaleDesc(torch.float32, static, tests.GroupShape(*group)), symmetric=True)
        for group, static in zip(groups, (False, True), strict=True)
    ]
    kernel = linear.init_fp8_linear_kernel(*keys, torch.bfloat16, torch.bfloat16, (256, 384))
    return type(kernel).__name__.startswith("TunedGemm")


@with_names
def test_our_name_is_a_value_of_vllms_option(front, vllm_form, monkeypatch) -> None:
    """Once vLLM has loaded the plugin, its parser and its check take the name;
    other unknown names stay errors, and vLLM's are as before."""
    settings = importlib.import_module("vllm.config").KernelConfig
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parsed(front, "tunedgemm")
    for _ in range(2):
        plugin.register()
    assert parsed(front, "TunedGEMM") == "tunedgemm" and parsed(front, "auto") == "auto"
    assert settings(linear_backend="tunedgemm").linear_backend == "tunedgemm"
    for wrong in ({"linear_backend": "tuned"}, {"linear_backend_per_quant": {"fp8_w8a8": "tuned"}}):
        with pytest.raises((ValueError, TypeError)):
            settings(**wrong)
    known = typing.get_args(settings.__dataclass_fields__["linear_backend"].type)
    assert known[-1] == "tunedgemm" and len(set(known)) == len(known)
    assert not plugin._registered and os.environ["TUNEDGEMM_VLLM"] == "0"


@with_names
@pytest.mark.parametrize("place", ["argument", "settings"])
def test_our_name_switches_the_plugin_on(front, vllm_form, monkeypatch, place) -> None:
    """Naming us routes as the variable does, in vLLM's processes, too; the rest of vLLM sees ``auto``."""
    plugin.register()
    named = {"linear_backend": "tunedgemm"} if place == "argument" else {"kernel_config": {"linear_backend": "tunedgemm"}}
    made = front.EngineArgs(**named).create_engine_config()
    assert made.kernel_config.linear_backend == "auto"
    assert (os.environ["TUNEDGEMM_VLLM"], os.environ["TUNEDGEMM_VLLM_LAYERS"], plugin._registered) == ("1", "", True)


@pytest.mark.parametrize("vllm_form", ["0.33.0"], indirect=True)
def test_a_failure_to_read_the_name_leaves_vllm_running(front, vllm_form, monkeypatch, caplog) -> None:
    """Where the arguments have another form, vLLM makes its configuration, and a warning says why."""
    plugin.register()
    monkeypatch.setattr(vllm_backend, "_take_name", lambda *_: 1 / 0)
    assert front.EngineArgs().create_engine_config().kernel_config.linear_backend == "auto"
    assert "reading --linear-backend failed, and the engine goes on without: ZeroDivisionError" in caplog.text


@with_names
def test_a_check_that_cannot_be_made_again_stays(front, vllm_form, monkeypatch, caplog) -> None:
    """Where pydantic fails half-way, vLLM's check and choices are as before, and a warning says why."""
    settings = importlib.import_module("vllm.config").KernelConfig

    def failing(of: Any, **_: Any) -> None:
        del of.__pydantic_validator__
        raise ValueError("an unknown type")

    with monkeypatch.context() as patched:
        patched.setattr("pydantic.dataclasses.rebuild_dataclass", failing)
        plugin.register()
    assert "offering a name to --linear-backend failed" in caplog.text
    assert settings(linear_backend="triton").linear_backend == "triton"
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parsed(front, "tunedgemm")
    assert front.EngineArgs(linear_backend="tunedgemm").create_engine_config().kernel_config.linear_backend == "auto"


@with_names
def test_a_limit_stays_where_all_layers_name_us(front, vllm_form, monkeypatch) -> None:
    """The user's list of kinds counts for our name, as it does for the switch."""
    monkeypatch.setenv("TUNEDGEMM_VLLM_LAYERS", "fp8_w8a8")
    plugin.register()
    front.EngineArgs(linear_backend="tunedgemm").create_engine_config()
    assert (os.environ["TUNEDGEMM_VLLM"], os.environ["TUNEDGEMM_VLLM_LAYERS"]) == ("1", "fp8_w8a8")


@pytest.mark.parametrize("vllm_form", ["0.33.0"], indirect=True)
def test_a_name_that_comes_too_late_is_said(front, vllm_form, caplog) -> None:
    """An engine after the first of a process, which names other layers, hears which are routed."""
    plugin.register()
    for _ in range(2):
        front.EngineArgs(kernel_config={"linear_backend_per_quant": {"fp8_w8a8": "tunedgemm"}}).create_engine_config()
    assert "was on before" not in caplog.text
    front.EngineArgs(linear_backend="tunedgemm").create_engine_config()
    assert "TUNEDGEMM_VLLM was on before --linear-backend named it, and routes fp8_w8a8 layers" in caplog.text


@pytest.mark.parametrize("vllm_form", ["0.33.0"], indirect=True)
@pytest.mark.parametrize("scheme", vllm_backend.SCHEMES)
def test_a_scheme_that_names_us_is_routed_alone(front, vllm_form, vllm_captured, monkeypatch, scheme) -> None:
    """One scheme's layers are ours, and the others keep the backend that they name."""
    monkeypatch.setattr(plugin, "_registered", False)
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    for name in vllm_backend.SCHEMES.values():
        mine = {key: [one for one in found if not one.__name__.startswith("Tuned")] for key, found in getattr(linear, name).items()}
        monkeypatch.setattr(linear, name, mine)
    monkeypatch.setattr(plugin, "off_reason", lambda *_: "")
    monkeypatch.setenv("TUNEDGEMM_VLLM", "0")
    plugin.register()
    others = {other: "cutlass" for other in vllm_backend.SCHEMES if other != scheme}
    made = front.EngineArgs(kernel_config={"linear_backend_per_quant": {scheme: "tunedgemm", **others}}).create_engine_config()
    assert made.kernel_config.linear_backend_per_quant == {scheme: "auto", **others}
    assert os.environ["TUNEDGEMM_VLLM_LAYERS"] == scheme
    with importlib.import_module("vllm.config").set_current_vllm_config(made):
        assert {each: routes("test", each) for each in vllm_backend.SCHEMES} == {each: each == scheme for each in vllm_backend.SCHEMES}


def test_schemes_without_a_kernel_of_ours_are_named(caplog) -> None:
    """A scheme that we lack is vLLM's choice, and a warning says so."""
    arguments = argparse.Namespace(kernel_config=argparse.Namespace(linear_backend_per_quant={"w8a16_fp8": "tunedgemm"}))
    assert vllm_backend._take_name(arguments, plugin._log) is None
    assert arguments.kernel_config.linear_backend_per_quant == {"w8a16_fp8": "auto"}
    assert "no kernels of w8a16_fp8 (it has fp8_w8a8, fp8_block_w8a8, int8_w8a8, mixed_precision, nvfp4" in caplog.text
    arguments.kernel_config.linear_backend_per_quant = {"nvfp4_w4a4": "tunedgemm", "nvfp4_w4a16": "tunedgemm"}
    assert vllm_backend._take_name(arguments, plugin._log) == ("nvfp4",)


@with_names
@pytest.mark.parametrize("scheme", vllm_backend.SCHEMES)
@pytest.mark.parametrize("backend", ["auto", "cutlass", "triton", "flashinfer_cudnn"])
def test_the_log_says_what_a_named_backend_keeps(vllm_captured, vllm_form, caplog, backend, scheme) -> None:
    """The line is true for the installed vLLM: a scheme that it calls kept is not routed, and conversely."""
    config = importlib.import_module("vllm.config")
    made = config.VllmConfig()
    made.kernel_config.linear_backend = backend
    lines = vllm_backend.other_names(made)
    with config.set_current_vllm_config(made):
        try:
            routed = routes("test", scheme)
        except ValueError:
            routed = None
    kept, left = ([line for line in lines if word in line and scheme in line.partition(word)[2]] for word in ("keeps", "has no kernel"))
    assert (bool(kept), bool(left)) == (routed is False, bool(routed) and backend != "auto")


@pytest.mark.parametrize("vllm_form", ["0.33.0"], indirect=True)
def test_a_named_kernel_of_16_bits_stays_vllms(vllm_table, vllm_form) -> None:
    """vLLM's FlashInfer kernel of 16 bits, which a user names, keeps its layers, with the reason."""
    import torch
    from tunedgemm_engines import rows as engine_rows

    vllm_table("AITER_CONFIG_GEMM_BF16", Shape("a16w16", 8, 256, 384, "bf16"))
    config = importlib.import_module("vllm.config")
    for backend, routed in (("flashinfer_cutedsl", False), ("cutlass", True)):
        made = config.VllmConfig()
        made.kernel_config.linear_backend = backend
        with config.set_current_vllm_config(made):
            serve = getattr(importlib.import_module(plugin.PLAIN[0][0]), plugin.PLAIN[0][1])()
        one = torch.nn.Module()
        one.weight, one.bias = torch.nn.Parameter(torch.randn(256, 384).bfloat16(), requires_grad=False), None
        serve.process_weights_after_loading(one)
        assert bool(one.tunedgemm_route) is routed
    assert "--linear-backend=flashinfer_cutedsl names vLLM's kernel of 16 bits" in engine_rows.unrouted()[0]


@pytest.mark.parametrize("layers", ["unquantized", "fp8_w8a8", "int8_w8a8, fp8_block_w8a8", "experts", ""])
def test_the_variable_limits_the_kinds_of_layers(vllm, monkeypatch, layers) -> None:
    """Each kind is routed if it is listed, or nothing is."""
    monkeypatch.setenv("TUNEDGEMM_VLLM_LAYERS", layers)
    plugin.register()
    linear = importlib.import_module("vllm.model_executor.kernels.linear")
    found = {scheme for scheme, name in vllm_backend.SCHEMES.items() if "TunedGemm" in str(next(iter(getattr(linear, name).values()))[0])}
    wanted = {word for word in layers.replace(" ", "").split(",") if word}
    assert found == {scheme for scheme in vllm_backend.SCHEMES if scheme in wanted or not wanted}
    plain = getattr(importlib.import_module(plugin.PLAIN[0][0]), plugin.PLAIN[0][1]).apply
    assert hasattr(plain, "__wrapped__") is (not wanted or "unquantized" in wanted)


def test_no_other_process_of_vllm_pays_for_the_name(child) -> None:
    """Where vLLM has made no arguments, nothing of it is imported, nor is pydantic."""
    source = (
        "import sys, torch\nfrom tunedgemm_engines.vllm import register\nregister()\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('vllm', 'pydantic')])"
    )
    assert child(source, STUB) == "[]"

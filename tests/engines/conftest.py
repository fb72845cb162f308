"""vLLM and SGLang, or stubs with their signatures, with the plugin in them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import tunedgemm
import tunedgemm_engines.sglang as sglang_plugin
import tunedgemm_engines.vllm as plugin
from tunedgemm.device import current_device
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.table.folders import untuned_path
from tunedgemm.table.untuned import read_untuned
from tunedgemm_engines import invariant, routes, rows, sglang_fp8
from tunedgemm_engines.start import INVARIANT

#: The plugin replaces these in vLLM: lists of linear layers' kernels, and functions that choose
#: experts, by module.
LISTS = tuple(f"_POSSIBLE_{kind}KERNELS" for kind in ("FP8_", "FP8_BLOCK_", "INT8_", "", "NVFP4_", "MXFP8_", "MXFP4_"))
EXPERTS = {kind: f"select_{kind}_moe_backend" for kind in ("unquantized", "fp8")}


STUB = Path(__file__).parent / "vllm_stub"
#: Modules whose classes inherit vLLM's.
IN_ITS_FORM = tuple(f"tunedgemm_engines.vllm_{one}" for one in ("kernels", "fp8", "int8", "weight_only", "cpu_experts"))


@pytest.fixture
def vllm_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the stub the form of a vLLM version;
    modules imported in another form are imported again."""
    form: str = getattr(request, "param", "0.25.1")
    found = importlib.util.find_spec("vllm")
    if found is not None and not str(found.origin).startswith(str(STUB)):
        if hasattr(request, "param"):
            pytest.skip("vLLM is installed, in a form of its own")
        return str(importlib.import_module("vllm").__version__)
    monkeypatch.setenv("VLLM_STUB", form)
    if getattr(sys.modules.get("vllm"), "__version__", form) != form:
        for name in [one for one in sys.modules if one.partition(".")[0] == "vllm" or one in IN_ITS_FORM]:
            del sys.modules[name]
        if (compiler := sys.modules.get("torch._dynamo.symbolic_convert")) is not None:
            getattr(compiler._import_module, "cache_clear", lambda: None)()
    for name in [one for one in vars(request.module) if one.startswith(("__import_vllm", "__import_tunedgemm"))]:
        delattr(request.module, name)  # torch's compiler puts modules there
    return form


@pytest.fixture
def mode_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End batch-invariant mode, which an engine's plugin turns on for its process."""
    monkeypatch.setenv(INVARIANT, "")
    monkeypatch.setattr(invariant, "_checked", set())
    monkeypatch.setattr(invariant, "_reasons", {})
    monkeypatch.setattr(invariant, "_agreed", [])
    yield
    on = os.environ.pop(INVARIANT, "")
    if on:
        tunedgemm.reload()


@pytest.fixture
def vllm(vllm_form: str, mode_ends: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make vLLM, or a stub with its signatures, importable and configured, with the plugin
    unregistered, and restore all afterwards."""
    if importlib.util.find_spec("vllm") is None:
        monkeypatch.syspath_prepend(str(STUB))
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setenv("TUNEDGEMM_VLLM", "unpacked")
    linear, config = importlib.import_module("vllm.model_executor.kernels.linear"), importlib.import_module("vllm.config")
    for name in [name for name in LISTS if hasattr(linear, name)]:
        monkeypatch.setattr(linear, name, {platform: list(kernels) for platform, kernels in getattr(linear, name).items()})
    if hasattr(linear, "init_nvfp4_linear_kernel"):
        monkeypatch.setattr(linear, "init_nvfp4_linear_kernel", linear.init_nvfp4_linear_kernel)
    for module, owner in plugin.PLAIN:
        method = getattr(importlib.import_module(module), owner)
        for name in ("apply", "create_weights", "process_weights_after_loading"):
            monkeypatch.setattr(method, name, getattr(method, name))
    layers = "vllm.model_executor.layers.fused_moe"
    importlib.import_module(f"{layers}.unquantized_fused_moe_method")
    for kind, name in EXPERTS.items():
        theirs = getattr(importlib.import_module(f"{layers}.oracle.{kind}"), name)
        for holder in [one for key, one in sys.modules.items() if key.startswith("vllm.") and vars(one).get(name) is theirs]:
            monkeypatch.setattr(holder, name, theirs)
    for module, owner, name in (plugin.HASH, plugin.LOADED, plugin.WARM, plugin.CPU_WARM):
        holder = importlib.import_module(module)
        holder = getattr(holder, owner) if owner else holder
        monkeypatch.setattr(holder, name, getattr(holder, name))
    routes.routes.clear()
    monkeypatch.setattr(rows, "_unrouted", {})
    rows._weights.cache_clear()
    if importlib.util.find_spec("vllm.v1.worker.workspace"):  # vLLM's worker makes it before it loads a model
        importlib.import_module("vllm.v1.worker.workspace").init_workspace_manager(torch.device("cpu"))
    with config.set_current_vllm_config(config.VllmConfig()):
        yield


@pytest.fixture
def vllm_captured(vllm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[int, int]]]:
    """Capture is on, and the plugin registered; an op's captured calls by M."""

    def calls(op: str) -> dict[int, int]:
        for one in tgemm.dispatchers:
            if one._capture is not None:
                one._capture.flush()
        path = untuned_path(op_named(op))
        return {row.shape.m: row.calls for row in read_untuned(path, op_named(op))} if path.exists() else {}

    monkeypatch.setenv("AITER_TUNE_GEMM", "1")
    tunedgemm.reload()
    plugin.register()
    yield calls
    monkeypatch.delenv("AITER_TUNE_GEMM")
    tunedgemm.reload()


def use_table(monkeypatch: pytest.MonkeyPatch, folder: Path, variable: str, shapes: tuple[Shape, ...], kernel: str = "native") -> None:
    """Write a table with a solution of torch's for each shape, and let the variable of its op name it."""
    path, here = folder / "tuned.csv", current_device()
    told = {"gfx": here.gfx, "cu_num": here.cu_num, "device": here.name, "solution": Solution("torch", kernel), "us": 1.0}
    write_rows(path, op_named(shapes[0].op), [Row(shape=shape, **told) for shape in shapes])
    monkeypatch.setenv(variable, str(path))
    tunedgemm.reload()


@pytest.fixture
def vllm_table(vllm: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Write a table of an op with torch's solution for some shapes, and register the plugin."""

    def written(variable: str, *shapes: Shape, kernel: str = "native") -> None:
        use_table(monkeypatch, tmp_path, variable, shapes, kernel)
        plugin.register()

    yield written
    monkeypatch.undo()
    tunedgemm.reload()


@pytest.fixture
def sglang(mode_ends: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make SGLang's stub importable, with the plugin on and unregistered,
    and restore all afterwards."""
    loaded = [name for name in sys.modules if name.partition(".")[0] == "sglang"]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "sglang_stub"))
    monkeypatch.setenv("TUNEDGEMM_SGLANG", "1")
    monkeypatch.setattr(sglang_plugin, "_registered", False)
    routes.routes.clear()
    monkeypatch.setattr(rows, "_unrouted", {})
    monkeypatch.setattr(sglang_fp8, "_routes", {})
    rows._weights.cache_clear()
    importlib.import_module("sglang.srt.layers.quantization.fp8")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.fixture
def sglang_table(sglang: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Write a table of an op with torch's solution for some shapes,
    register the plugin and apply its hooks."""

    def written(variable: str, *shapes: Shape) -> None:
        use_table(monkeypatch, tmp_path, variable, shapes)
        sglang_plugin.register()
        importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()

    yield written
    monkeypatch.undo()
    tunedgemm.reload()

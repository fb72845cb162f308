"""Plugin of vLLM: route linear layers and experts of 16 bits and less through the tables where faster.

vLLM calls `register` in each of its processes, by the entry point ``tunedgemm`` of the group
``vllm.general_plugins``. Unless ``TUNEDGEMM_VLLM`` is set, it does no more than offer its name to
``--linear-backend``, which sets it. A layer is routed if the
tables have a row for its weight, or a backend serves few rows of x untuned. After loading, each is
timed against vLLM's kernel on the model's own weights; vLLM's serves every M at which none is
faster.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import torch
from tunedgemm.integrations import expose_counters, logger, read, read_switch

from tunedgemm_engines import BEGUN, ranks
from tunedgemm_engines.phases import add, phase, report
from tunedgemm_engines.start import INVARIANT, after_import, fingerprint, refuses_mode, spared, unknown_version
from tunedgemm_engines.vllm_backend import LAYERS, TAKES_NAME, offer_name, other_names, with_named

# Routing modules are imported late: vLLM loads this module in all its processes, on or off.

add("imports", time.perf_counter() - BEGUN)

#: vLLM prints the messages of loggers below its root logger.
_log = logger("vllm.tunedgemm")

VARIABLE = "TUNEDGEMM_VLLM"
#: Value of the variable that also routes on a CPU, where vLLM would pack the weights.
UNPACKED = "unpacked"
#: Versions whose classes are known, the first and the last.
KNOWN = ((0, 20), (0, 33))
#: vLLM's variable of its batch-invariant mode.
MODE = "VLLM_BATCH_INVARIANT"
#: Variable with the longest time, in seconds, of timing the rows at start-up.
SECONDS = "TUNEDGEMM_VLLM_SECONDS"
_LAYERS = "vllm.model_executor.layers"
#: Module and class of the methods for weights of 16 bits.
PLAIN = ((f"{_LAYERS}.linear", "UnquantizedLinearMethod"), (f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"))
#: Wrapped functions of vLLM's start-up: module, class or "", function.
ARGUMENTS = ("vllm.engine.arg_utils", "EngineArgs", "create_engine_config")
LOADED = ("vllm.model_executor.model_loader.utils", "", "process_weights_after_loading")
WARM = ("vllm.v1.worker.gpu_worker", "Worker", "compile_or_warm_up_model")
CPU_WARM = ("vllm.v1.worker.cpu_worker", "CPUWorker", "compile_or_warm_up_model")
HASH = ("vllm.config", "VllmConfig", "compute_hash")
#: Modules of ours with the kinds of layers that they route.
_KERNELS = {
    "vllm_fp8": ("fp8_w8a8", "fp8_block_w8a8"),
    "vllm_int8": ("int8_w8a8",),
    "vllm_weight_only": ("mixed_precision", "nvfp4", "mxfp8", "mxfp4"),
    "vllm_cpu_experts": ("experts",),
}
_registered = False


def register() -> None:
    """Route vLLM's layers, once a process, if ``TUNEDGEMM_VLLM`` is set; vLLM may call it several times."""
    global _registered
    if not _registered and ARGUMENTS[0] in sys.modules:  # vLLM has not made its parser yet
        with spared(_log, "offering a name to --linear-backend"):
            _offer()
    switch = read_switch(VARIABLE)
    if _registered or not switch:
        return
    _registered = True
    with phase("registering"), spared(_log, "registering"):  # vLLM would not start
        _install(switch, read(LAYERS))


def _offer() -> None:
    """Offer our name as a value of ``--linear-backend`` where this vLLM is known, once a process."""
    import vllm

    method = getattr(getattr(sys.modules[ARGUMENTS[0]], ARGUMENTS[1], None), ARGUMENTS[2], None)
    if getattr(method, TAKES_NAME, False) or unknown_version("vLLM", getattr(vllm, "__version__", ""), KNOWN):
        return
    replace_function(ARGUMENTS, with_named(register, VARIABLE, _log))
    offer_name()


def _install(switch: str, layers: Collection[str]) -> None:
    """Prepare this process; `_route` follows where vLLM imports its worker, since others have no layers."""
    import vllm

    if reason := off_reason(switch, getattr(vllm, "__version__", "of no version"), _on_cpu):
        _log.warning("tunedgemm is off: %s", reason)
        return
    expose_counters()  # also where no layer is: the API server answers /metrics
    if _in_vllms_mode():
        from tunedgemm_engines.bit_classes import enter

        enter()
    replace_function(HASH, _hash)
    warm = CPU_WARM if _on_cpu() else WARM
    after_import(warm[0], functools.partial(_route, warm, layers))


def _route(warm: tuple[str, str, str], layers: Collection[str]) -> None:
    """Replace vLLM's functions and put our kernels first, for some kinds of layers; for all without any."""
    with phase("registering"), spared(_log, "registering"):
        _route_layers(layers)
        for target, wrapper in ((LOADED, _after_loading), (warm, _after_warm_up)):
            replace_function(target, wrapper)


def _route_layers(layers: Collection[str]) -> None:
    from tunedgemm_engines.bit_classes import is_on

    for module, name in PLAIN if not layers or "unquantized" in layers else ():
        replace_function((module, name, "process_weights_after_loading"), _plain_loaded)
        replace_function((module, name, "apply"), _plain_apply)
        replace_function((module, name, "create_weights"), _plain_created)
    for module_name, kinds in _KERNELS.items():
        wanted = [kind for kind in kinds if (not layers or kind in layers) and not (kind == "experts" and is_on())]
        layer_kind = f"{', '.join(kinds)} layers"
        try:
            if wanted:
                importlib.import_module(f"tunedgemm_engines.{module_name}").install(wanted)
        except Exception as error:
            _log.warning("tunedgemm: %s keep vLLM's kernels: this vLLM has another interface (%s)", layer_kind, error)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform  # unknown versions may lack it

    return bool(current_platform.is_cpu())


def off_reason(switch: str, version: str, is_cpu: Callable[[], bool]) -> str:
    """Return why the plugin, although switched on, routes nothing; "" if it routes.

    Args:
        switch: the value of the variable, as `read_switch` returns it.
        version: vLLM's version.
        is_cpu: tells whether vLLM runs on the CPU; called last.
    """
    if _in_vllms_mode() and refuses_mode():
        return f"{MODE} is set, and {INVARIANT}=0 leaves all layers to vLLM"
    if reason := unknown_version("vLLM", version, KNOWN):
        return reason
    if is_cpu() and switch != UNPACKED:
        return f"vLLM packs weights for this CPU, and its kernels are faster; {VARIABLE}={UNPACKED} routes them unpacked"
    return ""


def _in_vllms_mode() -> bool:
    return os.environ.get(MODE, "0") not in ("", "0")


def replace_function(target: tuple[str, str, str], wrapper: Callable[[Any], Any]) -> None:
    """Wrap a function or method of vLLM; warn if this vLLM lacks it."""
    module, owner, name = target
    try:
        holder: Any = importlib.import_module(module)
        holder = getattr(holder, owner) if owner else holder
        theirs = getattr(holder, name)
    except (ImportError, AttributeError) as error:
        _log.warning("tunedgemm: this vLLM has no %s: %s", ".".join(filter(None, target)), error)
        return
    ours = functools.wraps(theirs)(wrapper(theirs))
    setattr(holder, name, ours)
    if not owner:  # modules that were loaded earlier hold the function by its name
        for other in [loaded for key, loaded in sys.modules.items() if key.partition(".")[0] == "vllm"]:
            if getattr(other, "__dict__", {}).get(name) is theirs:
                setattr(other, name, ours)


def cache_factor() -> str:
    """Digest the settings that change the graphs that vLLM compiles."""
    return fingerprint(f"{os.environ.get(VARIABLE, '')} {os.environ.get(LAYERS, '')}".strip())


def _hash(theirs: Callable[..., str]) -> Callable[..., str]:
    """Wrap ``VllmConfig.compute_hash``, the key of vLLM's compile cache, because our ops change graphs."""

    def compute_hash(self: Any, *arguments: Any, **named: Any) -> str:
        from tunedgemm_engines.weight_only import settled

        digest = theirs(self, *arguments, **named)
        with phase("tables"):
            return hashlib.sha256(f"{digest} {cache_factor()} {settled()}".encode()).hexdigest()[: len(digest)]

    return compute_hash


def _after_loading(theirs: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``process_weights_after_loading`` of a whole model to time the rows against vLLM's kernels."""

    def process_weights_after_loading(*arguments: Any, **named: Any) -> None:
        theirs(*arguments, **named)
        import vllm

        from tunedgemm_engines.bit_classes import is_on
        from tunedgemm_engines.gains import compare_remembered
        from tunedgemm_engines.invariant import check_classes
        from tunedgemm_engines.vllm_experts import route_experts
        from tunedgemm_engines.vllm_warmup import skip_served

        with phase("tables"), spared(_log, "comparing the ranks' tables"):
            ranks.publish(cache_factor())
        layers, model = read(LAYERS), arguments[0] if arguments else named["model"]
        with phase("routing"), spared(_log, "routing experts"):
            if not layers or "experts" in layers:
                route_experts(model)
        if is_on():
            check_classes(_log)
        else:
            compare_remembered(_log, f"vLLM {vllm.__version__}", SECONDS, cache_factor())
        with phase("summary"), spared(_log, "shortening the warm-up of DeepGEMM"):
            skip_served(model)

    return process_weights_after_loading


def _after_warm_up(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``compile_or_warm_up_model`` to log afterwards which layers go through tables."""

    def compile_or_warm_up_model(self: Any) -> Any:
        from tunedgemm.integrations import current_device

        from tunedgemm_engines.bit_classes import is_on
        from tunedgemm_engines.invariant import agree
        from tunedgemm_engines.routes import end_warm_up

        if is_on():
            agree(_log, cache_factor())
        result = theirs(self)
        from tunedgemm_engines.vllm_warmup import left_out

        with phase("summary"), spared(_log, "summing up the routes"):
            sizes = getattr(self.vllm_config.compilation_config, "cudagraph_capture_sizes", None) or [1]
            for line in (*_summary(sorted(sizes)), *left_out()):
                _log.info("%s", line)
        with spared(_log, "reading the backends that --linear-backend names"):
            for line in other_names(self.vllm_config):
                _log.info("%s", line)
        with spared(_log, "comparing the ranks' tables"):
            for line in ranks.differing():
                _log.warning("%s", line)
        with phase("summary"), spared(_log, "ending the warm-up"):
            end_warm_up(current_device())
        _log.info("%s", report())
        return result

    return compile_or_warm_up_model


def _summary(sizes: list[int]) -> list[str]:
    """Sum up the routes in the mode that is on, and the reasons of the other layers."""
    from tunedgemm.integrations import current_device

    from tunedgemm_engines import invariant, routes
    from tunedgemm_engines.bit_classes import is_on
    from tunedgemm_engines.rows import unrouted

    if not is_on():
        return [*routes.summary(sizes, current_device()), *unrouted()]
    own_mode = "" if _in_vllms_mode() else MODE
    return [*invariant.summary(sizes, "vLLM", own_mode), *unrouted("vLLM", "kernels" if own_mode else "invariant kernels")]


def _plain_created(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``create_weights`` of 16 bits to compile kernels while vLLM loads the weights."""
    from tunedgemm.integrations import current_device
    from tunedgemm.plugin import Shape
    from tunedgemm.tools.launching import short_dtype

    from tunedgemm_engines.routes import compile_ahead

    def create_weights(self: Any, layer: Any, *arguments: Any, **named: Any) -> Any:
        result = theirs(self, layer, *arguments, **named)
        with spared(_log, "compiling ahead"):
            if _is_matrix(layer) and layer.weight.dtype in (torch.bfloat16, torch.float16):
                (n, k), dtype = layer.weight.shape, short_dtype(layer.weight.dtype)
                compile_ahead(Shape("a16w16", 1, n, k, dtype), current_device())
        return result

    return create_weights


def _plain_loaded(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``process_weights_after_loading`` of 16 bits to route layers with rows, without packing."""
    from tunedgemm.tools.launching import short_dtype

    from tunedgemm_engines.rows import record_unrouted, routing, unserved_reason

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        matrix = _is_matrix(layer)
        layer.tunedgemm_route, name = "", getattr(layer, "prefix", "")
        named = _named_backend(self)
        if matrix and named:
            record_unrouted(f"--linear-backend={named} names vLLM's kernel of 16 bits", name)
        elif matrix and not unserved_reason("a16w16", *layer.weight.shape, dtype=short_dtype(layer.weight.dtype), layer=name):
            with routing(name):
                layer.tunedgemm_route = _plain_route(self, layer)
        if not layer.tunedgemm_route:
            theirs(self, layer)

    return process_weights_after_loading


def _is_matrix(layer: Any) -> bool:
    """Check whether a layer multiplies by its weight; a plain embedding is only looked up."""
    weight = getattr(layer, "weight", None)
    matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2 and not weight.is_meta
    return matrix and type(layer).__name__ != "VocabParallelEmbedding"


def _named_backend(method: Any) -> str:
    """Return the backend of 16 bits that a user names for a method, "" if vLLM chooses it (0.33 has such)."""
    return str(getattr(getattr(method, "_gemm_impl", None), "keywords", {}).get("vllm_backend", ""))


def _plain_route(method: Any, layer: Any) -> str:
    """Return the name of the route of a layer of 16 bits."""
    from tunedgemm import linear
    from tunedgemm.integrations import plain
    from tunedgemm.plugin import Shape
    from tunedgemm.tools.launching import short_dtype
    from vllm.model_executor.layers.utils import dispatch_unquantized_gemm
    from vllm.platforms import current_platform

    from tunedgemm_engines.bit_classes import is_on
    from tunedgemm_engines.routes import Route, add_layer, adds_bias

    (n, k), dtype, device = layer.weight.shape, layer.weight.dtype, layer.weight.device
    bias = adds_bias(layer)
    gemm = getattr(method, "_gemm_impl", None) or dispatch_unquantized_gemm()
    apply = getattr(type(method).apply, "__wrapped__", None) if is_on() else None
    shape = Shape("a16w16", 1, n, k, short_dtype(dtype), epilogue="bias" if bias else "none")

    def ours(x: torch.Tensor, weight: torch.Tensor, _x: None, _w: None, bias: torch.Tensor | None) -> Any:
        return linear(x, weight, bias)

    def theirs(x: torch.Tensor, weight: torch.Tensor, _x: None, _w: None, bias: torch.Tensor | None) -> Any:
        if apply is not None:  # vLLM's mode is in its method, not in that function
            return apply(method, SimpleNamespace(weight=weight), x, bias)
        return gemm(None, x, weight, bias)

    return add_layer(
        Route(
            name=f"{shape}", shape=shape, device=device, ours=ours, theirs=None if current_platform.is_cpu() else theirs,
            inputs=lambda m: (torch.randn(m, k, dtype=dtype, device=device),),
            operands=lambda inputs, module: (*inputs, plain(module.weight), None, None, plain(module.bias) if bias else None),
        ),
        layer,
    ).name  # fmt: skip


def _plain_apply(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``apply`` of weights of 16 bits."""
    from tunedgemm_engines.routes import product

    def apply(self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        route = getattr(layer, "tunedgemm_route", "")
        if not route:
            return theirs(self, layer, x, bias)
        return product(x, layer.weight, None, None, bias, x.dtype, route)

    return apply

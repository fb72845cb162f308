"""Plugin of SGLang: route linear layers of 16 bits and less through the tables where faster.

SGLang calls `register` in each of its processes, by the entry point ``tunedgemm`` of the group
``sglang.srt.plugins``. It does nothing unless ``TUNEDGEMM_SGLANG`` is set. A layer is routed if the
tables have a row for its weight, or a backend serves few rows of x untuned. After loading, each is
timed against SGLang's kernel on the model's own weights; SGLang's serves every M at which none is
faster.
"""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable
from typing import Any

import torch
from tunedgemm.integrations import logger, read_switch

from tunedgemm_engines import BEGUN
from tunedgemm_engines.phases import add, phase, report
from tunedgemm_engines.start import INVARIANT, fingerprint, is_supported_version, refuses_mode, spared

# Routing modules are imported late: SGLang loads this module in all its processes, on or off.

add("imports", time.perf_counter() - BEGUN)

#: SGLang prints the messages of loggers below its root logger.
_log = logger("sglang.tunedgemm")

VARIABLE = "TUNEDGEMM_SGLANG"
#: Versions whose functions are known, the first and the last.
KNOWN = ((0, 5, 14), (0, 5, 23))
#: Variable with the longest time, in seconds, of timing the rows at start-up.
SECONDS = "TUNEDGEMM_SGLANG_SECONDS"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
#: SGLang's options of deterministic inference, which is batch-invariant.
MODES = ("rl_on_policy_target", "enable_deterministic_inference")
ON_POLICY = "--rl-on-policy-target"
_registered = False


def register() -> None:
    """Route SGLang's layers, once a process, if ``TUNEDGEMM_SGLANG`` is set; SGLang calls it."""
    global _registered
    if not read_switch(VARIABLE) or _registered:
        return
    _registered = True
    with spared(_log, "registering"):
        _install()


def _install() -> None:
    """Hook SGLang's functions."""
    import sglang

    if not is_supported_version(_log, "SGLang", getattr(sglang, "__version__", "of no version"), KNOWN):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tunedgemm_engines import sglang_fp8, sglang_layers, sglang_weight_only

    around: dict[str, Callable[..., Any]] = {f"{_RUNNER}.load_model": _load_model, f"{_RUNNER}.init_cuda_graphs": _init_cuda_graphs}
    for target, hook in (around | sglang_layers.HOOKS | sglang_fp8.HOOKS | sglang_weight_only.HOOKS).items():
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            # SGLang has the first on CUDA alone, and schemes of integers in some versions.
            if target not in sglang_weight_only.HOOKS and (target != sglang_fp8.CHANNEL or torch.cuda.is_available()):
                _log.warning("tunedgemm: this SGLang has no %s: %s", target, error)
        else:
            HookRegistry.register(target, hook, HookType.AROUND)


def _load_model(theirs: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
    """Load a model, route its layers, and time the rows against SGLang's kernels, or check the classes."""
    from tunedgemm_engines.bit_classes import enter, is_on
    from tunedgemm_engines.sglang_weight_only import hand_back

    own_mode, is_refused = _own_mode(runner), refuses_mode()
    if own_mode and not is_refused:
        enter()  # before weights are repacked
    result = theirs(runner, *arguments, **named)
    if own_mode and is_refused:
        hand_back(f"{INVARIANT}=0")
        _log.warning("tunedgemm is off: %s is set, and %s=0 leaves all layers to SGLang", own_mode, INVARIANT)
        return result
    import sglang

    from tunedgemm_engines.gains import compare_remembered
    from tunedgemm_engines.invariant import check_classes
    from tunedgemm_engines.sglang_layers import route_layers

    with phase("routing"), spared(_log, "routing layers"):
        route_layers(runner.model, runner.dtype, heads=own_mode != ON_POLICY)
    if is_on():
        check_classes(_log)
    else:
        compare_remembered(_log, f"SGLang {sglang.__version__}", SECONDS, fingerprint("1"))
    return result


def _own_mode(runner: Any) -> str:
    """Return SGLang's option that turns its deterministic inference on, "" if it is off."""
    options = getattr(runner, "server_args", None)
    return next((f"--{name.replace('_', '-')}" for name in MODES if getattr(options, name, None)), "")


def _init_cuda_graphs(theirs: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
    """Capture the graphs, then log which layers go through tables."""
    from tunedgemm.integrations import current_device

    from tunedgemm_engines import invariant, routes
    from tunedgemm_engines.bit_classes import is_on
    from tunedgemm_engines.rows import unrouted

    in_mode = is_on()
    if in_mode:
        invariant.agree(_log, fingerprint("1"))
    result = theirs(runner, *arguments, **named)
    with phase("summary"), spared(_log, "summing up the routes"):
        sizes = sorted(getattr(getattr(runner, "decode_cuda_graph_runner", None), "capture_bs", None) or [1])
        own_mode = "" if _own_mode(runner) else "--enable-deterministic-inference"
        lines = invariant.summary(sizes, "SGLang", own_mode, "") if in_mode else routes.summary(sizes, current_device(), "SGLang", "")
        for line in (*lines, *unrouted("SGLang", "invariant kernels" if in_mode and not own_mode else "kernels")):
            _log.info("%s", line)
    with phase("summary"), spared(_log, "ending the warm-up"):
        routes.end_warm_up(current_device())
    _log.info("%s", report())
    return result

"""Plugin of SGLang: route linear layers of 16 bits and fp8 through the tables where faster.

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
from tunedgemm_engines.start import fingerprint, is_supported_version, spared

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

    from tunedgemm_engines import sglang_fp8, sglang_layers

    around: dict[str, Callable[..., Any]] = {f"{_RUNNER}.load_model": _load_model, f"{_RUNNER}.init_cuda_graphs": _init_cuda_graphs}
    for target, hook in (around | sglang_layers.HOOKS | sglang_fp8.HOOKS).items():
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            if target != sglang_fp8.CHANNEL or torch.cuda.is_available():
                _log.warning("tunedgemm: this SGLang has no %s: %s", target, error)
        else:
            HookRegistry.register(target, hook, HookType.AROUND)


def _load_model(theirs: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
    """Load a model, route its layers, and time the rows against SGLang's kernels."""
    result = theirs(runner, *arguments, **named)
    options = getattr(runner, "server_args", None)
    if getattr(options, "enable_deterministic_inference", False) or getattr(options, "rl_on_policy_target", None):
        _log.warning("tunedgemm is off: SGLang runs deterministic inference, and a table may name another kernel for each M")
        return result
    import sglang

    from tunedgemm_engines.gains import compare_remembered
    from tunedgemm_engines.sglang_layers import route_layers

    with phase("routing"), spared(_log, "routing layers"):
        route_layers(runner.model, runner.dtype)
    compare_remembered(_log, f"SGLang {sglang.__version__}", SECONDS, fingerprint("1"))
    return result


def _init_cuda_graphs(theirs: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
    """Capture the graphs, then log which layers go through tables."""
    result = theirs(runner, *arguments, **named)
    from tunedgemm.integrations import current_device

    from tunedgemm_engines.routes import end_warm_up, summary
    from tunedgemm_engines.rows import unrouted

    with phase("summary"), spared(_log, "summing up the routes"):
        sizes = getattr(getattr(runner, "decode_cuda_graph_runner", None), "capture_bs", None) or [1]
        for line in (*summary(sorted(sizes), current_device(), "SGLang", ""), *unrouted("SGLang")):
            _log.info("%s", line)
    with phase("summary"), spared(_log, "ending the warm-up"):
        end_warm_up(current_device())
    _log.info("%s", report())
    return result

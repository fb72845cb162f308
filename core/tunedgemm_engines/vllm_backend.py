"""The name ``tunedgemm`` among the values of vLLM's ``--linear-backend``, and what other names leave.

vLLM lists the values in the type of a field of ``KernelConfig``: argparse takes its choices from
there, and pydantic its check. `offer_name` adds ours to the type, before vLLM makes its parser.
`with_named` turns the name into the plugin's variables, which vLLM's processes inherit. The rest
of vLLM sees ``auto``.
"""

from __future__ import annotations

import functools
import importlib
import logging
import operator
import os
import types
import typing
from collections.abc import Callable
from typing import Any

from tunedgemm.integrations import read

from tunedgemm_engines.start import spared

NAME, AUTO = "tunedgemm", "auto"
#: Variable with a comma list of the kinds of layers that are routed.
LAYERS = "TUNEDGEMM_VLLM_LAYERS"
#: Attribute of vLLM's function once it takes our name.
TAKES_NAME = "takes_tunedgemm"
#: vLLM's schemes of quantised linear layers, and its lists with our kernels.
SCHEMES = {
    "fp8_w8a8": "_POSSIBLE_FP8_KERNELS",
    "fp8_block_w8a8": "_POSSIBLE_FP8_BLOCK_KERNELS",
    "int8_w8a8": "_POSSIBLE_INT8_KERNELS",
    "mixed_precision": "_POSSIBLE_KERNELS",
    "nvfp4": "_POSSIBLE_NVFP4_KERNELS",
    "mxfp8": "_POSSIBLE_MXFP8_KERNELS",
    "mxfp4": "_POSSIBLE_MXFP4_KERNELS",
}
_OF_ALL, _OF_EACH = "linear_backend", "linear_backend_per_quant"


def offer_name() -> None:
    """Add our name to the values of both fields; vLLM before 0.25 has none, and stays."""
    settings: Any = importlib.import_module("vllm.config").KernelConfig
    fields = settings.__dataclass_fields__
    known = fields[_OF_ALL].type if _OF_ALL in fields else None
    if typing.get_origin(known) is not typing.Literal or NAME in typing.get_args(known):
        return
    from pydantic.dataclasses import rebuild_dataclass

    wider = operator.getitem(typing.Literal, (*typing.get_args(known), NAME))  # type: ignore[call-overload]
    types_before = {name: fields[name].type for name in (_OF_ALL, _OF_EACH) if name in fields}
    before = dict(vars(settings))
    try:
        for name, hint in types_before.items():
            fields[name].type = _replaced(hint, known, wider)
        rebuild_dataclass(settings, force=True)
    except BaseException:  # pydantic has removed the check by then, without which vLLM does not start
        for name, hint in types_before.items():
            fields[name].type = hint
        for name in [name for name, value in before.items() if vars(settings).get(name) is not value]:
            setattr(settings, name, before[name])
        raise
    arguments = importlib.import_module("vllm.engine.arg_utils")
    getattr(getattr(arguments, "_compute_kwargs", None), "cache_clear", lambda: None)()


def _replaced(hint: Any, known: Any, wider: Any) -> Any:
    """Return a type with another part."""
    if hint == known:
        return wider
    origin, parts = typing.get_origin(hint), tuple(_replaced(part, known, wider) for part in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return typing.Union[parts]  # noqa: UP007  of a tuple
    return origin[parts] if parts and origin is not None else hint


def with_named(register: Callable[[], None], variable: str, log: logging.Logger) -> Callable[[Callable[..., Any]], Any]:
    """Make the wrapper of ``EngineArgs.create_engine_config`` that reads our name.

    Args:
        register: registers the plugin, now that it is on.
        variable: the variable that switches it on.
        log: vLLM's.
    """

    def wrap(theirs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def create_engine_config(self: Any, *arguments: Any, **named: Any) -> Any:
            with spared(log, "reading --linear-backend"):
                layers = _take_name(self, log)
                if layers is not None and read(variable) is False:
                    os.environ[variable] = "1"
                    if layers:  # else a limit that the user has set counts
                        os.environ[LAYERS] = ",".join(layers)
                    register()
                elif layers is not None and set(layers) != set(found := read(LAYERS)):
                    routed = ", ".join(found) or "all"
                    log.warning("tunedgemm: %s was on before --linear-backend named it, and routes %s layers", variable, routed)
            return theirs(self, *arguments, **named)

        setattr(create_engine_config, TAKES_NAME, True)
        return create_engine_config

    return wrap


def _take_name(arguments: Any, log: logging.Logger) -> tuple[str, ...] | None:
    """Replace our name by ``auto``; return the layers that it names, none for all, or None without it."""
    settings = getattr(arguments, "kernel_config", None)
    named = [holder for holder in (arguments, settings) if getattr(holder, _OF_ALL, None) == NAME]
    for holder in named:
        setattr(holder, _OF_ALL, AUTO)
    of_each = getattr(settings, _OF_EACH, None) or {}
    schemes = [scheme for scheme, backend in of_each.items() if backend == NAME]
    for scheme in schemes:
        of_each[scheme] = AUTO
    if unknown := [scheme for scheme in schemes if _listed(scheme) not in SCHEMES]:
        log.warning("tunedgemm: no kernels of %s (it has %s); vLLM chooses by itself", ", ".join(unknown), ", ".join(SCHEMES))
    known = tuple(dict.fromkeys(_listed(scheme) for scheme in schemes if _listed(scheme) in SCHEMES))
    return () if named else known or None


def _listed(scheme: str) -> str:
    """Return the key in `SCHEMES` of a scheme: vLLM has two of nvfp4, which share a list."""
    return "nvfp4" if scheme.startswith("nvfp4_") else scheme


def other_names(vllm_config: Any) -> list[str]:
    """Report the backends that a user names instead of ours, and what they leave to us.

    A scheme of which the named backend has no kernel is chosen as for ``auto`` in newer versions of
    vLLM; older ones refuse such a layer.
    """
    settings = getattr(vllm_config, "kernel_config", None)
    of_all, of_each = getattr(settings, _OF_ALL, AUTO), getattr(settings, _OF_EACH, None) or {}
    kept: dict[str, list[str]] = {}
    left: dict[str, list[str]] = {}
    for scheme in SCHEMES:
        backend = next((backend for name, backend in of_each.items() if _listed(name) == scheme), "") or of_all
        keeps = None if backend == AUTO else _keeps(backend, scheme)
        if keeps is not None:
            (kept if keeps else left).setdefault(backend, []).append(scheme)
    lines = [
        f"tunedgemm: --linear-backend={backend} keeps vLLM's kernels of {', '.join(schemes)} layers; {NAME} or {AUTO} routes them"
        for backend, schemes in kept.items()
    ]
    lines += [
        f"tunedgemm: --linear-backend={backend} has no kernel of {', '.join(schemes)} layers; vLLM chooses as for {AUTO}, which routes them"
        for backend, schemes in left.items()
    ]
    return lines


def _keeps(backend: str, scheme: str) -> bool | None:
    """Return whether a backend keeps vLLM's kernels of a scheme, as the installed vLLM filters them.

    None stands for a scheme without a kernel of ours, and for one that this vLLM then refuses.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms import current_platform

    kernels = getattr(linear, SCHEMES[scheme], {}).get(current_platform._enum, [])
    ours = [kernel for kernel in kernels if kernel.__name__.startswith("TunedGemm")]
    if not ours:
        return None
    left = linear._filter_kernels_by_backend(backend, kernels)
    if not left:
        return False if hasattr(linear, "_resolve_backend_kernels") else None
    return not set(ours) & set(left)

"""What torch's compiler is told about functions of ours: which function it traces in place of one that runs.

A function that looks at addresses cannot be traced. `teach` names one that can, and costs the function that runs nothing: it asks in
no call whether it is being traced. The compiler is not loaded for it: what is taught before waits until torch loads it.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"

#: What is to be done when a module of torch has been loaded.
_awaiting: dict[str, list[Callable[[], None]]] = {}

#: Makes torch's functions those that it came with, while a module of torch is loaded. Modules of the compiler keep what they find:
#: one that found a routed function would have it in graphs that are made after routing has ended.
_unrouted: list[Callable[[], contextlib.AbstractContextManager[None]]] = []


def teach(function: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """Have the compiler trace *traced*, which takes the same arguments, wherever *function* is called.

    The compiler keeps both for ever, and what a function was taught is not to be changed.
    """

    def tell() -> None:
        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)
        _behind_a_frame(function)

    when_loaded(_COMPILER, tell)


def _behind_a_frame(function: Any) -> None:
    """Have ``torch.compile(function)`` compile a frame that calls the function, as it does for functions without a frame.

    What is traced in place of a function counts only where the function is called. Torch 2.13 adds that frame, and 2.11 does not: it
    follows these two attributes to what a function stands for.
    """
    from torch._dynamo.external_utils import wrap_inline

    function._torchdynamo_orig_callable, function._torchdynamo_wrapper_id = wrap_inline(function), id(function)


def when_loaded(module: str, do: Callable[[], None]) -> None:
    """Do something when torch has loaded a module of its own, which is not loaded for it; at once where it is."""
    if module in sys.modules:
        do()
    else:
        _awaiting.setdefault(module, []).append(do)


def load_unrouted(unrouted: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Enter this context around the loading of each module of torch from here on."""
    _unrouted.append(unrouted)


@contextlib.contextmanager
def _around(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for unrouted in _unrouted:
            stack.enter_context(unrouted())
        yield
    for do in _awaiting.pop(name, ()):
        do()


class _Loading(importlib.abc.MetaPathFinder):
    """Finds modules of torch as the other finders do, and stands around their loading."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith("torch."):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with _around(fullname):
                execute(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Loading())

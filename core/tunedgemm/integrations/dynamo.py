"""Make Dynamo trace another function in place of a hot function.

`trace_instead` marks the function without run-time cost, without importing the compiler and
without changing torch. Actions on the import of torch modules start with `watch_loading`, which
`patch` and traced graphs call.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch._C._dynamo import eval_frame

#: Module of torch -> actions after its import.
_awaiting: dict[str, list[Callable[[], None]]] = {}

#: Contexts that restore torch's functions during the import of a torch module: compiler modules
#: keep references to functions, and would keep routed ones.
_unrouted: list[Callable[[], contextlib.AbstractContextManager[None]]] = []


def trace_instead(function: Any, traced: Callable[..., Any]) -> None:
    """Make Dynamo trace *traced*, with the same signature, in place of *function*.

    It uses attributes that Dynamo reads from any function.
    """

    def framed(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    function._torchdynamo_inline = traced
    # torch.compile(function) compiles this frame instead: what is traced in place of a function
    # counts only where it is called.
    function._torchdynamo_orig_callable, function._torchdynamo_wrapper_id = framed, id(function)


def run_untraced(function: Any, *, breaks_graph: bool = False) -> None:
    """Make Dynamo run a function and its callees untraced.

    Args:
        breaks_graph: whether a call breaks the graph.
    """
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    if breaks_graph:
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = "an instance of TunedGemm has tables that no op in a graph knows"


def when_loaded(module: str, do: Callable[[], None]) -> None:
    """Run an action once a module of torch is imported: now, or when `watch_loading` sees it."""
    if module in sys.modules:
        do()
    else:
        _awaiting.setdefault(module, []).append(do)


def load_unrouted(unrouted: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Enter this context around each later import of a torch module."""
    if unrouted not in _unrouted:
        _unrouted.append(unrouted)
    watch_loading()


def watch_loading() -> None:
    """Watch imports of torch modules, and run the actions of those already imported."""
    if _LOADING not in sys.meta_path:
        sys.meta_path.insert(0, _LOADING)
    for module in [module for module in _awaiting if module in sys.modules]:
        _loaded(module)


def _loaded(module: str) -> None:
    for do in _awaiting.pop(module, ()):
        do()


@contextlib.contextmanager
def _around(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for unrouted in _unrouted:
            stack.enter_context(unrouted())
        yield
    _loaded(name)


class _Loading(importlib.abc.MetaPathFinder):
    """Import hook that runs the actions around imports of torch modules."""

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


_LOADING = _Loading()

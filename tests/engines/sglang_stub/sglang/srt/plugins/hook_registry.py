"""SGLang's hooks, of which the plugin uses one kind."""

from __future__ import annotations

import enum
import functools
import pkgutil
import sys
from collections.abc import Callable
from typing import Any


class HookType(enum.Enum):
    """The kinds of hooks."""

    AROUND = "around"


class HookRegistry:
    """Collects hooks by their target, and puts them in place once."""

    hooks: dict[str, list[Callable[..., Any]]] = {}
    applied: set[str] = set()

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        """Collect a hook."""
        assert hook_type is HookType.AROUND and not isinstance(hook, type)
        cls.hooks.setdefault(target, []).append(hook)

    @classmethod
    def apply_hooks(cls) -> None:
        """Wrap each target once, also in modules that imported the function by name."""
        for target in cls.hooks.keys() - cls.applied:
            path, _, name = target.rpartition(".")
            holder = pkgutil.resolve_name(path)
            function = own = getattr(holder, name)
            for hook in cls.hooks[target]:
                function = functools.wraps(function)(functools.partial(hook, function))
                function = _method(function) if isinstance(holder, type) else function
            setattr(holder, name, function)
            cls.applied.add(target)
            for module in list(sys.modules.values()):
                for key in [key for key, value in getattr(module, "__dict__", {}).items() if value is own]:
                    setattr(module, key, function)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that binds its instance, as a partial does not."""

    @functools.wraps(function)
    def bound(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    bound.__wrapped__ = function.__wrapped__  # type: ignore[attr-defined]
    return bound

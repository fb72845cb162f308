"""Restore the directory, environment and torch's global settings that plugin code changes."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from tunedgemm.process.forksafe import ForkSafeLock

_VARIES = object()
_variables = ForkSafeLock()


@attrs.frozen
class _Switch:
    """One switch: its name, its value and how to set it.

    Attributes:
        initial: of torch's, the value after its import; `_VARIES` where the machine decides.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    initial: Any = _VARIES


_DIRECTORY = _Switch("the working directory", os.getcwd, os.chdir)


@functools.cache
def _torch_switches() -> tuple[_Switch, ...]:
    """Return torch's global settings, in order of dependency; reading all takes 4 us."""
    import torch

    def default_device() -> Any:
        return getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None)

    def precision() -> str:
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:  # torch's newer settings, one for each backend, disagree with it
            return ""

    def set_precision(text: str) -> None:
        if text:
            torch.set_float32_matmul_precision(text)

    def autocast() -> tuple[bool, bool]:
        return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")

    def set_autocast(enabled: tuple[bool, bool]) -> None:
        torch.set_autocast_enabled("cpu", enabled[0])
        torch.set_autocast_enabled("cuda", enabled[1])

    return (
        _Switch("torch's default device", default_device, torch.set_default_device, None),
        _Switch("torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled, True),
        _Switch("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
        _Switch("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        _Switch("torch's determinism", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
        _Switch("torch's float32 precision", precision, set_precision, "highest"),
        _Switch("torch's autocast", autocast, set_autocast, (False, False)),
    )


@contextlib.contextmanager
def environment_with(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context, in one thread at a time.

    Concurrent contexts would restore each other's values.
    """
    with _variables:
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in before.items():
                _set_variable(name, value)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextlib.contextmanager
def kept_switches() -> Iterator[list[str]]:
    """Restore directory, environment and torch's settings on exit; list what changed.

    Warning filters are restored, too, but not listed, since libraries change them at import.
    """
    changed: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(_kept_variables(changed))
        stack.enter_context(_kept((_DIRECTORY,), changed))
        stack.enter_context(kept_torch_switches(changed))
        yield changed


@contextlib.contextmanager
def kept_torch_switches(changed: list[str]) -> Iterator[None]:
    """Restore torch's global settings on exit, and append the names of changed ones.

    If torch is imported meanwhile, they get its initial values.
    """
    loaded = bool(sys.modules.get("torch"))
    with _kept(_torch_switches() if loaded else (), changed):
        yield
    if not loaded and sys.modules.get("torch"):
        _restore([(switch, switch.initial) for switch in _torch_switches() if switch.initial is not _VARIES], changed)


@contextlib.contextmanager
def _kept(switches: tuple[_Switch, ...], changed: list[str]) -> Iterator[None]:
    before = [(switch, switch.read()) for switch in switches]
    try:
        yield
    finally:
        _restore(before, changed)


def _restore(before: list[tuple[_Switch, Any]], changed: list[str]) -> None:
    for switch, value in before:
        if switch.read() != value:
            switch.write(value)
            changed.append(switch.name)


@contextlib.contextmanager
def _kept_variables(changed: list[str]) -> Iterator[None]:
    with _variables:
        before = os.environ.copy()
        try:
            with _set_by_others() as others:
                yield
        finally:
            for name in sorted(before.keys() | os.environ.keys()):
                if os.environ.get(name) != before.get(name) and name not in others:
                    changed.append(name)
                    _set_variable(name, before.get(name))


@contextlib.contextmanager
def _set_by_others() -> Iterator[set[str]]:
    """Collect the variables that threads started before the context set or delete within it.

    `os.environ` writes through two functions of `os`, which are wrapped.
    """
    found: set[str] = set()
    others = sys._current_frames().keys() - {threading.get_ident()}

    def noting(write: Callable[..., None]) -> Callable[..., None]:
        def noted(name: str | bytes, *value: str | bytes) -> None:
            if threading.get_ident() in others:
                found.add(os.fsdecode(name))
            write(name, *value)

        return noted

    before = os.putenv, os.unsetenv
    os.putenv, os.unsetenv = noting(os.putenv), noting(os.unsetenv)
    try:
        yield found
    finally:
        os.putenv, os.unsetenv = before

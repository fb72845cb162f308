"""Routing: functions of torch are replaced by ours for a whole process, or inside a block, and put back."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import attrs
import torch

from tunedgemm.integrations import linear, products
from tunedgemm.integrations.dynamo import load_unrouted

_log = logging.getLogger("tunedgemm")


@attrs.frozen(eq=False)
class Place:
    """An attribute of a module of torch, the function that it has there, and ours."""

    module: ModuleType
    name: str
    ours: Callable[..., Any]
    torchs: Callable[..., Any] = attrs.field()

    @torchs.default
    def _there(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self.module, self.name)
        return found

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"


_LINEAR = (Place(torch.nn.functional, "linear", linear.linear),)
_PRODUCTS = tuple(Place(torch, name, getattr(products, name)) for name in ("mm", "addmm", "matmul"))

_lock = threading.Lock()
#: What each `patch` and each `patched` block under way has asked for.
_asked: list[tuple[Place, ...]] = []
#: Those of `patch`, in order.
_by_patch: list[tuple[Place, ...]] = []
#: How many modules of torch are being loaded.
_loading = [0]
_strange: set[Place] = set()


def _settle() -> None:
    """Have in each place what is asked for; what somebody else has put there stays. Called with the lock held."""
    wanted = {place for places in _asked for place in places} if not _loading[0] else set()
    for place in (*_LINEAR, *_PRODUCTS):
        there = getattr(place.module, place.name)
        if there is not place.torchs and there is not place.ours:
            if place not in _strange:
                _strange.add(place)
                _log.warning("%s is %r, neither torch's nor tunedgemm's: it is left as it is, and not routed here", place, there)
            continue
        setattr(place.module, place.name, place.ours if place in wanted else place.torchs)


def _places(linear: bool, products: bool) -> tuple[Place, ...]:
    return (*(_LINEAR if linear else ()), *(_PRODUCTS if products else ()))


def patch(*, linear: bool = True, products: bool = True) -> None:
    """Route torch's functions through the tables until `unpatch`, in all threads; as often as it is called, `unpatch` is to be.

    Args:
        linear: ``torch.nn.functional.linear``, so every ``nn.Linear``.
        products: ``torch.mm``, ``torch.addmm`` and ``torch.matmul`` of a weight's transpose.
            Methods and operators (``x @ w``), and names that were imported before, stay torch's.
    """
    with _lock:
        places = _places(linear, products)
        _asked.append(places)
        _by_patch.append(places)
        _settle()


def unpatch() -> None:
    """Take the last `patch` back; nothing where there is none. A function that somebody else has replaced meanwhile stays theirs."""
    with _lock:
        if _by_patch:
            _asked.remove(_by_patch.pop())
            _settle()


@contextlib.contextmanager
def patched(*, linear: bool = True, products: bool = True) -> Iterator[None]:
    """Route torch's functions through the tables inside the block; the arguments are those of `patch`.

    Blocks may be nested, and be under way in several threads: a function is torch's again when the
    last has ended.
    """
    with _lock:
        places = _places(linear, products)
        _asked.append(places)
        _settle()
    try:
        yield
    finally:
        with _lock:
            _asked.remove(places)
            _settle()


@contextlib.contextmanager
def _unrouted() -> Iterator[None]:
    """Torch's own functions everywhere, while a module is loaded that may keep what it finds."""
    with _lock:
        _loading[0] += 1
        _settle()
    try:
        yield
    finally:
        with _lock:
            _loading[0] -= 1
            _settle()


load_unrouted(_unrouted)

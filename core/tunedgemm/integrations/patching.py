"""Routing: replace functions of torch by ours, for a whole process or inside a block."""

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
    """An attribute of a module of torch, with torch's function and ours."""

    module: ModuleType
    name: str
    ours: Callable[..., Any]
    torchs: Callable[..., Any] = attrs.field()

    @torchs.default
    def _there(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self.module, self.name)
        return function

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"


_LINEAR = (Place(torch.nn.functional, "linear", linear.linear),)
_PRODUCTS = tuple(Place(torch, name, getattr(products, name)) for name in ("mm", "addmm", "matmul"))

_lock = threading.Lock()
#: Requests of each `patch` and of each active `patched` block.
_asked: list[tuple[Place, ...]] = []
#: Requests of `patch`, in order.
_by_patch: list[tuple[Place, ...]] = []
#: Number of modules of torch that are being loaded.
_loading = [0]
_strange: set[Place] = set()


def _settle() -> None:
    """Set each place to the requested function, except one that other code has replaced; needs the lock."""
    wanted = {place for places in _asked for place in places} if not _loading[0] else set()
    for place in (*_LINEAR, *_PRODUCTS):
        present = getattr(place.module, place.name)
        if present is not place.torchs and present is not place.ours:
            if place not in _strange:
                _strange.add(place)
                _log.warning("%s is %r, neither torch's nor tunedgemm's; it stays, and is not routed", place, present)
            continue
        setattr(place.module, place.name, place.ours if place in wanted else place.torchs)


def _places(linear: bool, products: bool) -> tuple[Place, ...]:
    return (*(_LINEAR if linear else ()), *(_PRODUCTS if products else ()))


def patch(*, linear: bool = True, products: bool = True) -> None:
    """Route torch's functions through the tables in all threads, until a matching `unpatch`.

    Args:
        linear: ``torch.nn.functional.linear``, so every ``nn.Linear``.
        products: ``torch.mm``, ``torch.addmm`` and ``torch.matmul`` of a weight's transpose.
            Methods and operators (``x @ w``), and names that were imported before, stay torch's.
    """
    load_unrouted(_unrouted)
    with _lock:
        places = _places(linear, products)
        _asked.append(places)
        _by_patch.append(places)
        _settle()


def unpatch() -> None:
    """Undo the last `patch`, if there is one; a function that other code has replaced stays theirs."""
    with _lock:
        if _by_patch:
            _asked.remove(_by_patch.pop())
            _settle()


@contextlib.contextmanager
def patched(*, linear: bool = True, products: bool = True) -> Iterator[None]:
    """Route torch's functions through the tables inside the block; the arguments are those of `patch`.

    Blocks may be nested, and run in several threads: a function is torch's again when the last
    block ends.
    """
    load_unrouted(_unrouted)
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
    """Restore torch's own functions while loading a module that may keep them."""
    with _lock:
        _loading[0] += 1
        _settle()
    try:
        yield
    finally:
        with _lock:
            _loading[0] -= 1
            _settle()

"""Routing: replace functions of torch by ours, for a whole process or inside a block."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import attrs
import torch

from tunedgemm.dispatch import tuned_gemm
from tunedgemm.integrations import linear, products
from tunedgemm.integrations.dynamo import load_unrouted
from tunedgemm.process.forksafe import ForkSafeLock

_log = logging.getLogger("tunedgemm")


@attrs.frozen(eq=False)
class PatchTarget:
    """An attribute of a module of torch, with torch's function and ours."""

    module: ModuleType
    name: str
    ours: Callable[..., Any]
    original: Callable[..., Any] = attrs.field()

    @original.default
    def _present_function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self.module, self.name)
        return function

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"


_LINEAR = (PatchTarget(torch.nn.functional, "linear", linear.linear),)
_PRODUCTS = tuple(PatchTarget(torch, name, getattr(products, name)) for name in ("mm", "addmm", "matmul"))

_lock = ForkSafeLock()
#: Requests of each `patch` and of each active `patched` block.
_requests: list[tuple[PatchTarget, ...]] = []
#: Requests of `patch`, in order.
_by_patch: list[tuple[PatchTarget, ...]] = []
#: Number of modules of torch that are being loaded.
_loading = [0]
_strange: set[PatchTarget] = set()


def _apply_requests() -> None:
    """Set each place to the requested function, except one that other code has replaced; needs the lock."""
    wanted = {target for targets in _requests for target in targets} if not _loading[0] else set()
    for target in (*_LINEAR, *_PRODUCTS):
        present = getattr(target.module, target.name)
        if present is not target.original and present is not target.ours:
            if target not in _strange:
                _strange.add(target)
                _log.warning("%s is %r, neither torch's nor tunedgemm's; it stays, and is not routed", target, present)
            continue
        setattr(target.module, target.name, target.ours if target in wanted else target.original)


def routed_functions() -> dict[str, str]:
    """Return each function of torch that can be routed, and whose it is now in this process."""
    owners = {}
    for target in (*_LINEAR, *_PRODUCTS):
        present = getattr(target.module, target.name)
        ours = "routed" if present is target.ours else f"another's: {present!r}"
        owners[str(target)] = "torch's own" if present is target.original else ours
    return owners


def _targets_of(linear: bool, products: bool) -> tuple[PatchTarget, ...]:
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
        targets = _targets_of(linear, products)
        _requests.append(targets)
        _by_patch.append(targets)
        _apply_requests()


def unpatch() -> None:
    """Undo the last `patch`, if there is one; a function that other code has replaced stays theirs."""
    with _lock:
        if _by_patch:
            _requests.remove(_by_patch.pop())
            _apply_requests()


@contextlib.contextmanager
def patched(*, linear: bool = True, products: bool = True, batch_invariant: bool = False) -> Iterator[None]:
    """Route torch's functions through the tables inside the block.

    Args:
        linear, products: as for `patch`.
        batch_invariant: turn batch-invariant mode on inside the block, for `tgemm`, too; see
            `set_batch_invariant`.

    Blocks may be nested, and run in several threads: a function is torch's again when the last
    block ends.
    """
    load_unrouted(_unrouted)
    with _lock:
        targets = _targets_of(linear, products)
        _requests.append(targets)
        _apply_requests()
    try:
        with tuned_gemm.batch_invariant() if batch_invariant else contextlib.nullcontext():
            yield
    finally:
        with _lock:
            _requests.remove(targets)
            _apply_requests()


@contextlib.contextmanager
def _unrouted() -> Iterator[None]:
    """Restore torch's own functions while loading a module that may keep them."""
    with _lock:
        _loading[0] += 1
        _apply_requests()
    try:
        yield
    finally:
        with _lock:
            _loading[0] -= 1
            _apply_requests()

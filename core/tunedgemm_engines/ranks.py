"""Comparison of an engine's ranks: their tables, and their bit classes in batch-invariant mode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch import distributed

#: Longest wait for the classes of all ranks, in seconds, since ranks load weights at different
#: speeds. The others wait for rank 0 as long again.
_WAIT = 300
_DECISION, _DECIDED = "tunedgemm/classes", "decided "


def ranks() -> tuple[Any, int, int]:
    """Return the store that all ranks see, or None for one rank, this rank, and the number of ranks."""
    alone = not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2
    return (
        (None, 0, 1) if alone else (distributed.distributed_c10d._get_default_store(), distributed.get_rank(), distributed.get_world_size())
    )


def publish(digest: str) -> None:
    """Publish the digest of this rank's tables without waiting, as the plugin may be off elsewhere."""
    store, rank, _ = ranks()
    if store is not None:
        store.set(f"tunedgemm/{rank}", digest)


def differing() -> list[str]:
    """Return each rank's digest if ranks differ in tables or backends, or the plugin is off on some."""
    store, _, count = ranks()
    if store is None:
        return []
    keys = [f"tunedgemm/{rank}" for rank in range(count)]
    digests = [store.get(key).decode() if store.check([key]) else "off" for key in keys]
    if len(set(digests)) < 2:
        return []
    listed = ", ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(digests))
    return [f"tunedgemm: ranks have different tables or backends ({listed}); give all ranks the same"]


def disagreement(classes: Mapping[str, str], digest: str) -> str:
    """Return why ranks must not use their bit classes, equal on all ranks; "" if they agree.

    Rank 0 waits for all ranks and decides, so that no rank uses its classes alone. A weight that
    only some ranks have, as in stages of a pipeline, may have any class.

    Args:
        classes: weight -> its class on this rank, "" for none.
        digest: of this rank's tables and backends.
    """
    store, rank, count = ranks()
    if store is None:
        return ""
    keys = [f"{_DECISION}/{other}" for other in range(count)]
    store.set(keys[rank], json.dumps([digest, dict(classes)]))
    wait = timedelta(seconds=_WAIT)
    if rank:
        try:
            store.wait([_DECISION], 2 * wait)
        except RuntimeError:
            return "rank 0 did not compare the classes of all ranks"
        return str(store.get(_DECISION).decode().removeprefix(_DECIDED))
    try:
        store.wait(keys, wait)
        reason = _difference([json.loads(store.get(key)) for key in keys])
    except RuntimeError:
        reason = f"some ranks did not publish their classes within {_WAIT} s; is the plugin off there?"
    store.set(_DECISION, _DECIDED + reason)
    return reason


def _difference(published: list[Any]) -> str:
    """Return the first difference of what ranks published."""
    first: dict[str, tuple[int, str]] = {}
    for rank, (digest, classes) in enumerate(published):
        for weight, name in {"tables and backends": digest, **classes}.items():
            other, named = first.setdefault(weight, (rank, name))
            if named != name:
                return f"ranks differ in {weight} (rank {other}: {named or 'no class'}, rank {rank}: {name or 'no class'})"
    return ""

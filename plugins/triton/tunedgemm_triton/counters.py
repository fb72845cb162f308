"""Arrival counters of split-K: zeroed once, left zero by every launch, safe for graphs and streams without a memset.

A launch's partial sums come from ``torch.empty``. Whoever holds that address at a time holds it alone: torch's
allocator hands it out per stream, and a graph's pool keeps it for the graph. So the counters belong to the address.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedgemm_triton.limits import MAX_TILES

if TYPE_CHECKING:
    import torch

#: Addresses that one block of counters serves (4 MiB a block).
_SLICES = 1024


@functools.cache
def counters_of(device: torch.device) -> Callable[[int], Any]:
    """A function from the address of a launch's partial sums to int32 counters [MAX_TILES], zero at entry.

    Call it once before any capture: it allocates the first block.
    """
    import torch

    lock, known = threading.Lock(), dict[int, Any]()

    def block() -> list[Any]:
        zeros = torch.zeros(_SLICES * MAX_TILES, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
        return list(zeros.split(MAX_TILES))

    free = block()

    def count(address: int) -> Any:
        found = known.get(address)
        if found is not None:
            return found
        with lock:
            if address in known:
                return known[address]
            if not free:
                if torch.cuda.is_current_stream_capturing():
                    # A captured memset zeroes these before each replay: right, only slower.
                    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
                free.extend(block())
            known[address] = free.pop()
            return known[address]

    return count

"""Keep arrival counters of split-K, which every launch leaves zero: graphs need no memset.

A launch's partial sums come from ``torch.empty``. Only one launch holds that address at a time:
torch's allocator reuses it in the order of its stream, and a graph's pool keeps it for the graph.
So counters belong to the address.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedgemm.tools.launching import ForkSafeLock

from tunedgemm_triton.limits import MAX_TILES

if TYPE_CHECKING:
    import torch

#: Addresses for which one block has counters (4 MiB a block).
_SLICES = 1024


@functools.cache
def counters_of(device: torch.device) -> Callable[[int], Any]:
    """Return a function from the address of a launch's partial sums to int32 counters [MAX_TILES],
    zero at entry.

    Call this once before any capture, since it allocates the first block.
    """
    import torch

    lock, known = ForkSafeLock(), dict[int, Any]()

    def block() -> list[Any]:
        zeros = torch.zeros(_SLICES * MAX_TILES, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
        return list(zeros.split(MAX_TILES))

    free = block()

    def count(address: int) -> Any:
        counters = known.get(address)
        if counters is not None:
            return counters
        with lock:
            if address in known:
                return known[address]
            if not free:
                if torch.cuda.is_current_stream_capturing():
                    # A captured memset zeroes these before each replay, which is correct but
                    # slower.
                    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
                free.extend(block())
            known[address] = free.pop()
            return known[address]

    return count

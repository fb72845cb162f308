"""Who arrives last at a tile: split-K without a second launch, summed in an order that never changes."""

import triton
import triton.language as tl


@triton.jit
def arrives_last(counter, SPLIT_K: tl.constexpr):
    """True in the program that is the last of SPLIT_K to reach *counter*; the stores of the others are then visible.

    The barrier puts every thread's partial stores before the release of the atomic, which one thread executes.
    """
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1


@triton.jit
def leave_zero(counter):
    """Reset the counter for the next launch, also for replays of a captured graph."""
    tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")

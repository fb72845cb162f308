"""Who arrives last at a tile: split-K without a second launch, summed in an order that never changes."""

import triton
import triton.language as tl


@triton.jit
def arrives_last(counter, programs):
    """True in the program that is the last of so many to reach *counter*; the stores of the others are then visible.

    The barrier puts every thread's partial stores before the release of the atomic, which one thread executes.
    """
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1


@triton.jit
def leave_zero(counter):
    """Reset the counter for the next launch, also for replays of a captured graph."""
    tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")


@triton.jit
def sum_parts(parts, size, SPLIT_K: tl.constexpr):
    """Sum the partial tiles that lie *size* elements apart, in the order of K whoever arrived last: the bits never change.

    The loads go past the L1 cache, which does not see other multiprocessors' stores.
    """
    total = tl.load(parts, cache_modifier=".cg")
    for part in range(1, SPLIT_K):
        total += tl.load(parts + part * size, cache_modifier=".cg")
    return total

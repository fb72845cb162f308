"""Fixup of split-K without a second launch: the last program to arrive sums in a fixed order."""

import triton
import triton.language as tl


@triton.jit
def arrives_last(counter, programs):
    """Return True in the last of *programs* programs to reach *counter*, which then sees the
    others' stores.

    The barrier orders every thread's partial stores before the release of the atomic, which one
    thread executes.
    """
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1


@triton.jit
def leave_zero(counter):
    """Reset the counter for the next launch and for replays of a captured graph."""
    tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")


@triton.jit
def sum_parts(parts, size, SPLIT_K: tl.constexpr):
    """Sum the partial tiles at a distance of *size* elements in the order of K, so that the bits
    never change.

    The loads bypass the L1 cache, which does not see other multiprocessors' stores.
    """
    total = tl.load(parts, cache_modifier=".cg")
    for part in range(1, SPLIT_K):
        total += tl.load(parts + part * size, cache_modifier=".cg")
    return total

"""Check whether a kernel fits an SM of Hopper: registers and shared memory."""

from __future__ import annotations

#: Bytes of shared memory of a CTA, of an SM, and reserved for each CTA (CUDA C++ Programming Guide,
#: "Compute Capability 9.x").
BLOCK_SHARED, SM_SHARED, SYSTEM_SHARED = 227 << 10, 228 << 10, 1 << 10

SM_REGISTERS = 1 << 16

#: Registers of a thread at entry; consumers -> registers of a producer's and a consumer's thread
#: after setmaxnreg. The sum never exceeds that at entry, because setmaxnreg waits for registers. A
#: single consumer with few accumulators leaves room for a second CTA on the SM.
ENTRY_REGISTERS, FEW_REGISTERS, FEW_ACCUMULATORS = 168, 128, 96

REGISTERS = {1: (24, 232), 2: (24, 240)}

#: Registers of a consumer for descriptors, addresses and coordinates; ptxas takes 26 to 50.
OTHER_REGISTERS = 40

#: Bytes of a barrier; bytes of a consumer's word after the barriers, for the fixup's counter; most
#: consumers.
BARRIER_BYTES, WORD_BYTES, MOST_CONSUMERS = 8, 4, 2


def unfit(accumulators: int, registers: int, shared_bytes: int) -> str | None:
    """Return why an SM cannot hold a kernel, or None.

    Args:
        accumulators: registers for sums of a consumer's thread.
        registers: all registers of a consumer's thread.
        shared_bytes: shared memory of a CTA.
    """
    if accumulators + OTHER_REGISTERS > registers:
        return f"{accumulators} accumulators and {OTHER_REGISTERS} other registers exceed the {registers} of a thread"
    if shared_bytes > BLOCK_SHARED:
        return f"{shared_bytes} bytes of shared memory exceed the {BLOCK_SHARED} of a block"
    return None

"""Check whether a kernel fits an SM of Hopper: registers and shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunedgemm_asm.ptx.names import KernelConfig

#: Bytes of shared memory that a thread block may have, those of an SM, and what the system keeps for each block (CUDA C++ Programming
#: Guide, "Compute Capability 9.x").
BLOCK_SHARED, SM_SHARED, SYSTEM_SHARED = 227 << 10, 228 << 10, 1 << 10

SM_REGISTERS = 1 << 16

#: Registers of a thread at entry, and consumers -> those of a producer's after it gave some back, and of a consumer's after it took
#: them: never more in all threads than at entry, because setmaxnreg waits for them. A single consumer with few accumulators leaves room for a
#: second block on the SM.
ENTRY_REGISTERS, FEW_REGISTERS, FEW_ACCUMULATORS = 168, 128, 96

REGISTERS = {1: (24, 232), 2: (24, 240)}

#: Registers of a consumer beside its accumulators: descriptors, addresses, coordinates; 26 to 50 are what ptxas takes.
OTHER_REGISTERS = 40

#: Bytes of a barrier, and bytes behind the barriers of stages: for each consumer a word that tells who adds the parts of K, and where
#: consumers take turns a barrier.
BARRIER_BYTES, WORD_BYTES, MOST_CONSUMERS = 8, 4, 2


def unfit(config: KernelConfig) -> str | None:
    """Return why an SM cannot hold the kernel, or None."""
    held = config.accumulators + config.promoted * config.portion // 2
    if held + OTHER_REGISTERS > config.consumer_registers:
        return f"{held} accumulators and {OTHER_REGISTERS} other registers exceed the {config.consumer_registers} of a thread"
    if config.shared_bytes > BLOCK_SHARED:
        return f"{config.shared_bytes} bytes of shared memory exceed the {BLOCK_SHARED} of a block"
    return None

"""List what an SM of Hopper holds: registers and shared memory."""

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

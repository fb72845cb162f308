"""Backends ``ck``, ``cktile`` and ``cutlass``: template kernels, compiled on demand."""

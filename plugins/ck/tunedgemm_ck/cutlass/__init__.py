"""CUTLASS: instances of its sm_90 collectives and of its sm_80 kernels."""

FAMILY = None

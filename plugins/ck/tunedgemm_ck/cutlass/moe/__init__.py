"""Serve fmoe by CUTLASS's grouped kernels: a solution is two instances, one per stage."""

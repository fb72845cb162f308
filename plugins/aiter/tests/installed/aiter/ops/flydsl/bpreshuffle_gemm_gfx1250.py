"""Stand for AITER's kernels named ``flydsl_bpreshuffle_wmma_``."""

"""Stand for the compiler of FlyDSL's kernels: AITER needs it installed."""

"""Stand for AITER's package ``aiter.ops.triton.gemm.basic``."""

"""Stand for AITER's package ``aiter.ops.triton.gluon``."""

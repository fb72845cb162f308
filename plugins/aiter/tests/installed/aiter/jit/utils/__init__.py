"""Stand for AITER's package ``aiter.jit.utils``."""

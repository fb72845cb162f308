"""Stand for AITER's package ``aiter.ops.flydsl``."""

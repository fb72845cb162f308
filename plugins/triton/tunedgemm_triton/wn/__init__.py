"""Serve products of weights in the core's weight-only formats (`a16wn`)."""

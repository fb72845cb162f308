"""Serve products of packed weights: mxfp4 (`a4w4_blockscale`, `a16w4_blockscale`) and `a16wn`."""

"""Serve products of mxfp4 weights (`a4w4_blockscale`, `a16w4_blockscale`)."""

"""Serve the fused mixture of experts (`fmoe`)."""

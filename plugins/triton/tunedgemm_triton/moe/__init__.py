"""The fused mixture of experts (`fmoe`)."""

"""Stand for AITER: its functions compute in host memory and check every argument."""

"""Composable Kernel: instances of its device operations."""

FAMILY = None

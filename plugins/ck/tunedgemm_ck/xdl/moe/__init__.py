"""Serve fmoe by Composable Kernel: a solution is two instances, one per stage."""

"""CK Tile: instances of its kernels."""

FAMILY = None

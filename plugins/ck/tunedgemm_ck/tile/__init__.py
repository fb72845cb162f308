"""CK Tile: instances of its kernels."""

"""Check which shapes and architectures CK Tile's instances support, as data.

They answer for absent devices too.
"""

from __future__ import annotations

import functools

from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.launching import ARCHITECTURES

from tunedgemm_ck.tile.names import TileInstance
from tunedgemm_ck.tile.resources import lds
from tunedgemm_ck.xdl.limits import MOST_SPLIT, SCALED_K, Accepts, not_accepted

_FP8 = ("fp8_e4m3fn", "fp8_e4m3fnuz")

ACCEPTS = {
    "a8w8_bpreshuffle": Accepts(_FP8, "row", "aiter16x16", False),
    "a8w8_blockscale": Accepts(_FP8, "block", "row", False),
    "a8w8_blockscale_bpreshuffle": Accepts(_FP8, "block", "aiter16x16", False),
}

#: Depth of the fp8 matrix instructions that only gfx950 has (AMD's CDNA 4 ISA guide).
DEEPEST = 128

#: Elements of fp8 that a thread loads at a time, and elements of the output that it stores.
_VECTOR, _STORE = 16, 8


@functools.lru_cache(maxsize=4096)
def unsupported(shape: Shape, device: Device) -> str | None:
    """Return why the op has no instance for dtypes, scales and layout on a device, or None."""
    return not_accepted(shape, device, "cktile", ACCEPTS[shape.op])


@functools.lru_cache(maxsize=16384)
def unfit_sizes(instance: TileInstance, split: int, shape: Shape, device: Device) -> str | None:
    """Return why an instance with a splitK cannot serve the sizes of a supported shape, or None."""
    _, tile_n, tile_k = instance.tile
    if instance.warp_tile[2] >= DEEPEST and device.gfx != "gfx950":
        return f"{instance.name}: its matrix instructions need gfx950 (got {device.gfx})"
    if instance.wave_groups != 1 or instance.permute_n:
        return f"{instance.name}: wave groups and a permuted N are not supported"
    if shape.k % _VECTOR or shape.n % _STORE:
        return f"K and N must be multiples of {_VECTOR} and {_STORE} (got {shape.k} and {shape.n})"
    if shape.op == "a8w8_bpreshuffle":
        _, pad_n, pad_k = instance.pad
        if (shape.n % tile_n and not pad_n) or (shape.k % tile_k and not pad_k):
            return f"N and K must be multiples of {tile_n} and {tile_k}, since the instance does not pad (got {shape.n} and {shape.k})"
        return None if split == 0 else f"splitK must be 0 (got {split})"
    if shape.k % SCALED_K:
        return f"K must be a multiple of {SCALED_K}, which share a scale (got {shape.k})"
    if lds(instance) > ARCHITECTURES[device.gfx].shared_bytes:
        return f"{instance.name}: {lds(instance)} bytes of LDS exceed the {ARCHITECTURES[device.gfx].shared_bytes} of {device.gfx}"
    if not 0 <= split <= MOST_SPLIT:
        return f"splitK is a logarithm and must be 0 to {MOST_SPLIT} (got {split})"
    if split and (instance.persistent or shape.k % (tile_k << split)):
        wanted = f"K must be a multiple of {tile_k << split}, and the instance not persistent"
        return f"{wanted}, for {1 << split} parts (got {shape.k})"
    return None

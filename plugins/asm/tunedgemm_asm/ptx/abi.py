"""Describe the one parameter of a generated kernel. Bytes that belong to no field are zero.

It starts with two tensor maps, 128 bytes each on a boundary of 64. The fields of `ABI` follow, then
those of `SCALED` for operands with scales, then the output's tensor map where TMA stores the
output. ``rows_a`` and ``rows_b`` are rows of the operands, ``stride`` is elements of an output row.
``units_a`` counts clusters along a, ``tiles`` their tiles, and ``items`` tiles times splits.
``last_a`` and ``last_b`` are the last rows where a tile may begin, ``loaded`` the bytes of a stage.
``steps`` counts steps of 128 bytes along K, ``part`` those of each split but the last. With
stream-K (`shares`), ``items`` is the number of shared tiles, ``part`` the steps of a range, and
``splits`` the most partials of a tile.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.abi import Abi, Field

#: Bytes of a tensor map, and the offsets of those of a and b.
MAP_BYTES, MAPS = 128, {"map_a": 0, "map_b": 128}
POINTERS = ("out", "bias", "workspace", "counters")
SCALES = ("x_scale", "w_scale")
NUMBERS = ("rows_a", "rows_b", "stride", "units_a", "tiles_b", "tiles", "items", "steps", "part", "splits", "last_a", "last_b", "loaded")

_POINTERS_AT = MAP_BYTES * len(MAPS)
_NUMBERS_AT = _POINTERS_AT + 8 * len(POINTERS)
_END = _NUMBERS_AT + 4 * len(NUMBERS)
#: Where pointers may follow: a boundary of 8.
_SCALES_AT = -(-_END // 8) * 8

ABI = Abi(
    name="tunedgemm-ptx",
    ops=("a16w16",),
    dtypes={"x": ("bf16", "fp16"), "weight": ("bf16", "fp16"), "out": ("bf16", "fp16", "fp32"), "bias": ("bf16", "fp16", "fp32")},
    fields=(
        *(Field(name, _POINTERS_AT + 8 * index, "pointer") for index, name in enumerate(POINTERS)),
        *(Field(name, _NUMBERS_AT + 4 * index, "u32") for index, name in enumerate(NUMBERS)),
    ),
    sizes=(_END,),
    sub_k=1,
    layout="row",
)
#: `ABI` followed by the scales of 8-bit operands.
SCALED = Abi(
    name="tunedgemm-ptx-scaled",
    ops=("a8w8", "a8w8_bpreshuffle", "a8w8_blockscale", "a8w8_blockscale_bpreshuffle"),
    dtypes={**ABI.dtypes, "x": ("fp8_e4m3fn", "int8"), "weight": ("fp8_e4m3fn", "int8")},
    fields=(*ABI.fields, *(Field(name, _SCALES_AT + 8 * index, "pointer") for index, name in enumerate(SCALES))),
    sizes=(_SCALES_AT + 8 * len(SCALES),),
    sub_k=1,
    layout="row",
)
#: Offset of the output's tensor map: the next boundary of 64 after either layout.
MAP_OUT = -(-SCALED.size // 64) * 64
#: Either layout followed by the output's tensor map.
_STORING = {abi: attrs.evolve(abi, name=f"{abi.name}-storing", sizes=(MAP_OUT + MAP_BYTES,)) for abi in (ABI, SCALED)}


def abi_of(scale: str, storing: bool = False) -> Abi:
    """Return the layout for this kind of scales; *storing* adds the output's tensor map."""
    abi = ABI if scale == "none" else SCALED
    return _STORING[abi] if storing else abi


#: Name of the parameter. There is one parameter, so that only the driver places it on a boundary of
#: 64.
PARAMETER = "arguments"


def declaration(scale: str, storing: bool = False) -> str:
    """Return the declaration of the parameter for this kind of scales."""
    return f".param .align 64 .b8 {PARAMETER}[{abi_of(scale, storing).size}]"


def argument(name: str) -> str:
    """Return the address of an argument in parameter space."""
    return f"[{PARAMETER}+{SCALED.field(name).offset}]"

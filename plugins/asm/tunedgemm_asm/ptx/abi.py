"""The arguments of a generated kernel, as data: its one parameter. Bytes that belong to no field are zero.

First the two descriptors of the copy engine, 128 bytes each on a boundary of 64, then what `ABI` has, for operands with scales what
`SCALED` adds; last the descriptor of the output, where the copy engine stores that. ``rows_a`` and ``rows_b`` are rows of the operands,
``stride`` elements of a row of the output. ``units_a`` counts clusters along a, ``tiles`` their tiles, ``items`` tiles times parts of K;
``steps`` are steps of 128 bytes along K, ``part`` those of each part but the last. Where steps are shared (`shares`) ``items`` are the
tiles of which they are, ``part`` the steps of a range, ``splits`` the parts of a tile at most.
"""

from __future__ import annotations

import attrs

from tunedgemm_asm.abi import Abi, Field

#: Bytes of a descriptor, and where those of a and b lie.
MAP_BYTES, MAPS = 128, {"map_a": 0, "map_b": 128}
POINTERS = ("out", "bias", "workspace", "counters")
SCALES = ("x_scale", "w_scale")
NUMBERS = ("rows_a", "rows_b", "stride", "units_a", "tiles_b", "tiles", "items", "steps", "part", "splits")

_POINTERS_AT = MAP_BYTES * len(MAPS)
_NUMBERS_AT = _POINTERS_AT + 8 * len(POINTERS)
_END = _NUMBERS_AT + 4 * len(NUMBERS)

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
#: The same with the scales of 8-bit operands behind.
SCALED = Abi(
    name="tunedgemm-ptx-scaled",
    ops=("a8w8", "a8w8_bpreshuffle", "a8w8_blockscale", "a8w8_blockscale_bpreshuffle"),
    dtypes={**ABI.dtypes, "x": ("fp8_e4m3fn", "int8"), "weight": ("fp8_e4m3fn", "int8")},
    fields=(*ABI.fields, *(Field(name, _END + 8 * index, "pointer") for index, name in enumerate(SCALES))),
    sizes=(_END + 8 * len(SCALES),),
    sub_k=1,
    layout="row",
)
#: Where the descriptor of the output lies: the next boundary of 64 behind either.
MAP_OUT = -(-SCALED.size // 64) * 64
#: The same with it.
_STORING = {abi: attrs.evolve(abi, name=f"{abi.name}-storing", sizes=(MAP_OUT + MAP_BYTES,)) for abi in (ABI, SCALED)}


def abi_of(scale: str, storing: bool = False) -> Abi:
    """The arguments of a kernel with such scales; *storing* with the output's descriptor."""
    abi = ABI if scale == "none" else SCALED
    return _STORING[abi] if storing else abi


#: The parameter's name, and its declaration. One, so that the driver alone decides where a boundary of 64 puts it.
PARAMETER = "arguments"


def declaration(scale: str, storing: bool = False) -> str:
    """The declaration of the parameter of a kernel with such scales."""
    return f".param .align 64 .b8 {PARAMETER}[{abi_of(scale, storing).size}]"


def argument(name: str) -> str:
    """The address of an argument in the space of parameters."""
    return f"[{PARAMETER}+{SCALED.field(name).offset}]"

"""The arguments of a generated kernel, as data: its one parameter. Bytes that belong to no field are zero.

First the two descriptors of the copy engine, 128 bytes each on a boundary of 64, then what `ABI` has. ``rows_a`` and ``rows_b`` are
rows of the operands, ``stride`` elements of a row of the output. ``units_a`` counts clusters along a, ``tiles`` their tiles, ``items``
tiles times parts of K; ``steps`` are steps of 64 along K, ``part`` those of each part but the last.
"""

from __future__ import annotations

from tunedgemm_asm.abi import Abi, Field

#: Bytes of a descriptor, and where those of a and b lie.
MAP_BYTES, MAPS = 128, {"map_a": 0, "map_b": 128}
POINTERS = ("out", "bias", "workspace", "counters")
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


#: The parameter's name, and its declaration. One, so that the driver alone decides where a boundary of 64 puts it.
PARAMETER = "arguments"
DECLARATION = f".param .align 64 .b8 {PARAMETER}[{_END}]"


def argument(name: str) -> str:
    """The address of an argument in the space of parameters."""
    return f"[{PARAMETER}+{ABI.field(name).offset}]"

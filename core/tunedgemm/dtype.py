"""Dtypes by short name: the closed list that tables, shapes and the CLI share.

Texts from files are looked up and never evaluated. Only `torch_dtype` imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.errors import DtypeError

if TYPE_CHECKING:
    import torch

#: Short name -> (attribute of `torch`, bits per element).
DTYPES: dict[str, tuple[str, int]] = {
    "bf16": ("bfloat16", 16),
    "fp16": ("float16", 16),
    "fp32": ("float32", 32),
    "fp64": ("float64", 64),
    "fp8_e4m3fn": ("float8_e4m3fn", 8),
    "fp8_e4m3fnuz": ("float8_e4m3fnuz", 8),
    "fp8_e5m2": ("float8_e5m2", 8),
    "fp8_e5m2fnuz": ("float8_e5m2fnuz", 8),
    "e8m0": ("float8_e8m0fnu", 8),
    "fp4x2": ("float4_e2m1fn_x2", 8),
    "int4": ("int4", 8),  # two values, as AITER stores them
    "int8": ("int8", 8),
    "uint8": ("uint8", 8),
    "int32": ("int32", 32),
}

#: Name of the e4m3 dtype of a device; see `fp8_of`.
FP8 = "fp8"

#: Other spellings in AITER's files and flags.
_ALIASES = {
    "f32": "fp32", "f16": "fp16", "half": "fp16", "float": "fp32",
    "i4x2": "int4", "i8": "int8", "i32": "int32", "u8": "uint8",
}  # fmt: skip
_SHORT = {name: short for short, (name, _) in DTYPES.items()} | _ALIASES

#: Spelling of a dtype -> its short name.
_SPELLED = {
    f"{prefix}{name}": short for short, (full, _) in DTYPES.items() for name in (short, full) for prefix in ("", "torch.", "dtypes.")
}


def fp8_of(gfx: str = "") -> str:
    """Return the e4m3 dtype that ``fp8`` means on an architecture, by default OCP's.

    gfx94x has FNUZ, with an exponent bias of 8 and no negative zero.

    Args:
        gfx: the architecture; "" for that of the current device.
    """
    # No warning about unknown architectures, since tables name those of other machines.
    kinds = {ARCHITECTURES[name].fp8 for name in ARCHITECTURES.stand_ins(gfx or _present_gfx())}
    return "fp8_e4m3fnuz" if kinds == {"fp8_e4m3fnuz"} else "fp8_e4m3fn"


def _present_gfx() -> str:
    """Return the architecture of the current AMD device; "" on others.

    The driver is queried only by torch for ROCm, since a forked process may be unable to do so.
    """
    import torch

    from tunedgemm.device import current_device

    return current_device().gfx if torch.version.hip else ""


def parse_dtype(text: str, gfx: str = "") -> str:
    """Return the short name of any spelling: ``torch.bfloat16``, ``dtypes.bf16``, ``bf16``.

    Args:
        gfx: the architecture that decides ``fp8``; "" for that of the current device.

    Raises:
        DtypeError: an unknown dtype.
    """
    if text.__class__ is str and (known := _SPELLED.get(text)):
        return known
    name = str(text).strip().removeprefix("torch.").removeprefix("dtypes.")
    if name == FP8:
        return fp8_of(gfx)
    short = name if name in DTYPES else _SHORT.get(name)
    if short is None:
        raise DtypeError(f"unknown dtype {str(text)[:80]!r}; known: {', '.join(DTYPES)}")
    return short


def dtype_bits(short: str) -> int:
    """Return the bits per element of a dtype."""
    return DTYPES[parse_dtype(short)][1]


def table_text(short: str) -> str:
    """Return the spelling of AITER's tables: ``torch.bfloat16``."""
    return f"torch.{DTYPES[parse_dtype(short)][0]}"


def torch_dtype(short: str) -> torch.dtype:
    """Return the torch dtype of a short name.

    Raises:
        DtypeError: this version of torch has no such dtype.
    """
    import torch

    name = DTYPES[parse_dtype(short)][0]
    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None:
        raise DtypeError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def short_dtype(dtype: torch.dtype) -> str:
    """Return the short name of a torch dtype."""
    return parse_dtype(str(dtype))

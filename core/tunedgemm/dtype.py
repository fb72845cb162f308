"""Dtypes as short texts: the one closed list that tables, shapes and the CLI share.

Texts from files are looked up here and never evaluated.
The values import no torch; `torch_dtype` does, when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunedgemm.architectures import ARCHITECTURES
from tunedgemm.errors import DtypeError

if TYPE_CHECKING:
    import torch

#: short text -> (name of the attribute of `torch`, bits of one element)
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

#: the word for the e4m3 of a device; see `fp8_of`
FP8 = "fp8"

#: other spellings met in AITER's files and flags
_ALIASES = {
    "f32": "fp32", "f16": "fp16", "half": "fp16", "float": "fp32",
    "i4x2": "int4", "i8": "int8", "i32": "int32", "u8": "uint8",
}  # fmt: skip
_SHORT = {name: short for short, (name, _) in DTYPES.items()} | _ALIASES

#: the usual spellings of each dtype -> its short text
_SPELLED = {
    f"{prefix}{name}": short for short, (full, _) in DTYPES.items() for name in (short, full) for prefix in ("", "torch.", "dtypes.")
}


def fp8_of(gfx: str = "") -> str:
    """Return the e4m3 that ``fp8`` means on an architecture: its own, else OCP's.

    FNUZ, of gfx94x, has a bias of 8 and no negative zero.

    Args:
        gfx: the architecture; "" for the present device's.
    """
    # Without a notice of unknown ones: tables name the architectures of other machines.
    kinds = {ARCHITECTURES[name].fp8 for name in ARCHITECTURES.stand_ins(gfx or _present_gfx())}
    return "fp8_e4m3fnuz" if kinds == {"fp8_e4m3fnuz"} else "fp8_e4m3fn"


def _present_gfx() -> str:
    """Return the architecture of the present AMD device, "" on others.

    Only a torch for AMD asks the driver, which a forked process may be unable to do.
    """
    import torch

    from tunedgemm.device import current_device

    return current_device().gfx if torch.version.hip else ""


def parse_dtype(text: str, gfx: str = "") -> str:
    """Turn any spelling in use (``torch.bfloat16``, ``dtypes.bf16``, ``bf16``) into the short text.

    Args:
        gfx: the architecture whose ``fp8`` is meant; "" for the present device's.

    Raises:
        DtypeError: the text names no dtype of the closed list.
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
    """Return the bits of one element of the dtype with this short text."""
    return DTYPES[parse_dtype(short)][1]


def table_text(short: str) -> str:
    """Return the spelling of AITER's tables: ``torch.bfloat16``."""
    return f"torch.{DTYPES[parse_dtype(short)][0]}"


def torch_dtype(short: str) -> torch.dtype:
    """Return the torch dtype of a short text.

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
    """Return the short text of a torch dtype."""
    return parse_dtype(str(dtype))

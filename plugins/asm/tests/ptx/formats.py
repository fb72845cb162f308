"""Convert numbers to and from the bytes of operands, bias and output."""

from __future__ import annotations

import numpy as np

#: Bytes of an element.
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3fn": 1, "int8": 1}


def _e4m3() -> np.ndarray:
    """Return the 256 values of OCP's e4m3."""
    bits = np.arange(256)
    sign, exponent, mantissa = np.where(bits & 128, -1.0, 1.0), bits >> 3 & 15, bits & 7
    values = np.where(exponent > 0, (8.0 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    return np.where(bits & 127 == 127, np.nan, sign * values).astype(np.float32)


E4M3 = _e4m3()
_E4M3_BITS = {float(value): bits for bits, value in reversed(list(enumerate(E4M3)))}


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return numbers in a dtype's bytes, rounded to nearest even; 8-bit values must be exact."""
    if dtype == "int8":
        return values.astype(np.int8).view(np.uint8)
    values = values.astype(np.float32)
    if dtype == "fp8_e4m3fn":
        return np.vectorize(lambda value: _E4M3_BITS[float(value)], otypes=[np.uint8])(values)
    if dtype == "fp32":
        return values
    if dtype == "fp16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bits(content: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers of an operand's bytes; *kind* is ``bf16``, ``f16``, ``e4m3`` or ``s8``."""
    content = np.ascontiguousarray(content)
    if kind == "s8":
        return content.view(np.int8).astype(np.float64)
    if kind == "e4m3":
        return E4M3[content]
    bits = content.view(np.uint16)
    return bits.view(np.float16).astype(np.float32) if kind == "f16" else (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)

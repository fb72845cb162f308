"""bf16 as numpy lacks it, weights as AITER shuffles them, and when a product is right."""

from __future__ import annotations

import numpy as np


def bf16(values: np.ndarray) -> np.ndarray:
    """Nearest bf16, ties to even, as 16 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def fp32(halves: np.ndarray) -> np.ndarray:
    """The values of bf16's bits."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def e4m3(*, fnuz: bool) -> np.ndarray:
    """The values of the 256 codes of fp8 e4m3, float32: OCP's, or that without a negative zero, whose exponents are one less."""
    code = np.arange(256)
    sign, exponent, fraction = np.where(code & 0x80, -1.0, 1.0), (code >> 3) & 15, code & 7
    bias = 8 if fnuz else 7
    values = np.where(exponent > 0, (1 + fraction / 8) * 2.0 ** (exponent - bias), fraction / 8 * 2.0 ** (1 - bias)) * sign
    values[[0x80] if fnuz else [0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)


def shuffled(weight: np.ndarray, rows: int = 16) -> np.ndarray:
    """A weight [n, k] as AITER's `shuffle_weight` with layout (rows, 16) lays it: blocks of so many rows and 16 bytes of k."""
    n, k = weight.shape
    each = 16 // weight.itemsize
    return np.ascontiguousarray(weight.reshape(n // rows, rows, k // each, each).transpose(0, 2, 1, 3)).reshape(n, k)


def wrong(got: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, dtype: str, roundings: int = 1) -> float:
    """How far an output [m, n] is from x @ weight.T + bias in units of what may be off: right up to 1.

    fp32's sums may be off by their own rounding, relative to the sum of the products' sizes; bf16 by half a last place for each rounding.
    """
    a, b = fp32(x).astype(np.float64), fp32(weight).astype(np.float64)
    exact = a @ b.T + (0 if bias is None else bias)
    size = np.abs(a) @ np.abs(b).T + (0 if bias is None else np.abs(bias))
    slack = 2.0**-22 * np.sqrt(x.shape[1]) * size + (
        roundings * 2.0**-8 * (np.abs(exact) if roundings == 1 else size) * 1.01 if dtype == "bf16" else 0
    )
    return float((np.abs(got - exact) / slack).max()) if np.isfinite(got).all() else float("inf")

"""Provide bf16, e4m3, AITER's weight shuffle, and the comparison of products."""

from __future__ import annotations

import numpy as np


def bf16(values: np.ndarray) -> np.ndarray:
    """Round to bf16, ties to even, as 16 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def fp32(halves: np.ndarray) -> np.ndarray:
    """Return the values of bf16 bits."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def e4m3(*, fnuz: bool) -> np.ndarray:
    """Return the 256 values of e4m3 or e4m3fnuz as float32."""
    code = np.arange(256)
    sign, exponent, fraction = np.where(code & 0x80, -1.0, 1.0), (code >> 3) & 15, code & 7
    bias = 8 if fnuz else 7
    values = np.where(exponent > 0, (1 + fraction / 8) * 2.0 ** (exponent - bias), fraction / 8 * 2.0 ** (1 - bias)) * sign
    values[[0x80] if fnuz else [0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)


def shuffled(weight: np.ndarray, rows: int = 16) -> np.ndarray:
    """Return a weight [n, k] in AITER's layout (rows, 16)."""
    n, k = weight.shape
    each = 16 // weight.itemsize
    return np.ascontiguousarray(weight.reshape(n // rows, rows, k // each, each).transpose(0, 2, 1, 3)).reshape(n, k)


def wrong(got: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, dtype: str, roundings: int = 1) -> float:
    """Return the error of an output in units of the allowed error; right up to 1."""
    a, b = fp32(x).astype(np.float64), fp32(weight).astype(np.float64)
    exact = a @ b.T + (0 if bias is None else bias)
    size = np.abs(a) @ np.abs(b).T + (0 if bias is None else np.abs(bias))
    slack = 2.0**-22 * np.sqrt(x.shape[1]) * size + (
        roundings * 2.0**-8 * (np.abs(exact) if roundings == 1 else size) * 1.01 if dtype == "bf16" else 0
    )
    return float((np.abs(got - exact) / slack).max()) if np.isfinite(got).all() else float("inf")

"""Padded M: the rows of which M may serve an M, in order, by AITER's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

#: AITER's fine padding: up to this M, to multiples of that many rows
_FINE = ((256, 16), (1024, 32), (4096, 64))
_FINE_BEYOND = 128

#: AITER's coarse padding clamps a larger M to this where N is above `_CLAMP_N`
_CLAMP_M, _CLAMP_N = 8192, 4096

#: most rows that kernels for vectors serve, and most that read the weight for most of their time
_VECTORS, _SKINNY = 4, 128

#: AITER's fused MoE: token counts from here on share the rows of these
_TIERS = (32768, 131072)


def padded_m(m: int, n: int, level: int) -> int:
    """Return the M whose row may serve *m*: AITER's ``getPaddedM`` (csrc/py_itfs_cu/gemm_common.cu).

    Args:
        m, n: rows of the activations and of the weight.
        level: 0 fine: up to a multiple of 16 to 128 rows; 1 coarse: up to a power of two, or *down*
            to 8192 for larger M with N above 4096; any other level leaves m unchanged.
    """
    if level == 0:
        for limit, step in _FINE:
            if m <= limit:
                return -(-m // step) * step
        return -(-m // _FINE_BEYOND) * _FINE_BEYOND
    if level == 1:
        return _CLAMP_M if m > _CLAMP_M and n > _CLAMP_N else _power(m)
    return m


def _power(m: int) -> int:
    return 1 << max(m - 1, 0).bit_length()


def padded(m: int, n: int) -> Mapping[int, str]:
    """Return the exact M, then padded finely, then coarsely; where two agree, the first names it."""
    words = {m: "exact"}
    words.setdefault(padded_m(m, n, 0), "fine")
    words.setdefault(_CLAMP_M if m > _CLAMP_M and n > _CLAMP_N else 1 << max(m - 1, 0).bit_length(), "coarse")
    return words


def on_nvidia(m: int, words: Mapping[int, str]) -> Mapping[int, str]:
    """Return the M whose rows may serve *m* on NVIDIA, the nearest first.

    bf16 over F.linear, 26 November 2026: the row of 16 served 1 to 4 rows at 0.81 to 0.97 (H200, 7
    weights). Up to 128 rows, the time is mostly that of reading the weight, whatever the M. Beyond,
    the row of 256 served 160 and 192 rows at 0.77 to 1.17, and 224 at 0.88 to 1.22 (H100, 12
    weights).
    """
    kept = {row: word for row, word in words.items() if not (_SKINNY < m < row if word == "coarse" else m <= _VECTORS < row)}
    return dict(sorted(kept.items(), key=lambda rung: abs(rung[0] - m)))


def serving(rule: Callable[[int, int], Mapping[int, str]], m: int, n: int, kind: str) -> Mapping[int, str]:
    """Return the M whose rows may serve *m* by an op's rule, on a device of a kind, in order."""
    words = rule(m, n)
    return on_nvidia(m, words) if kind == "nvidia" else words


def exact(m: int, n: int) -> Mapping[int, str]:
    """Return the exact M alone, as AITER looks up batched products."""
    del n
    return {m: "exact"}


def padded_tokens(m: int) -> int:
    """Return the number of tokens whose row AITER's fused MoE looks up first: its ``get_padded_M``."""
    return _power(m) if m < _TIERS[0] else max(tier for tier in _TIERS if m >= tier)


def tokens(m: int, n: int) -> Mapping[int, str]:
    """Return the exact number of tokens, then the rows of AITER's rule of fused MoE.

    The rule (fused_moe.py, ``get_padded_M`` and the tiers of its look-up) pads up to a power of two
    below 32768. From there it takes the row of 32768, from 131072 on that of 131072 and then that
    of 32768. AITER itself never asks for the exact number.
    """
    del n
    words = {m: "exact"}
    if m < _TIERS[0]:
        words.setdefault(_power(m), "padded")
    else:
        for tier in reversed(_TIERS):
            if m >= tier:
                words.setdefault(tier, "tier")
    return words

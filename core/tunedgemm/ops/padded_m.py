"""Padded M: which other M's rows may serve an M, in order, by AITER's rules."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence

#: AITER's fine padding: (largest M, multiple to which it is rounded up).
_FINE = ((256, 16), (1024, 32), (4096, 64))
_FINE_BEYOND = 128

#: AITER's coarse padding clamps M to `_CLAMP_M` if N is above `_CLAMP_N`.
_CLAMP_M, _CLAMP_N = 8192, 4096

#: Largest M of GEMV kernels, and largest M at which reading the weight dominates the time.
_VECTORS, _SKINNY = 4, 128

#: Times as many rows for which a tile is still taken rather than one for fewer.
_IN_VAIN = 8

#: AITER's fused MoE: larger token counts use the rows of these.
_TIERS = (32768, 131072)


def padded_m(m: int, n: int, level: int) -> int:
    """Return a padded M by AITER's ``getPaddedM`` (csrc/py_itfs_cu/gemm_common.cu).

    Args:
        m, n: M and N of the call.
        level: 0 (fine): up to a multiple of 16 to 128. 1 (coarse): up to a power of two, or down
            to 8192 if N is above 4096. Other levels return m.
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
    """Map the exact, fine and coarse M to their names; equal ones keep the first name."""
    words = {m: "exact"}
    words.setdefault(padded_m(m, n, 0), "fine")
    words.setdefault(_CLAMP_M if m > _CLAMP_M and n > _CLAMP_N else 1 << max(m - 1, 0).bit_length(), "coarse")
    return words


def on_nvidia(m: int, words: Mapping[int, str]) -> Mapping[int, str]:
    """Return the candidates for NVIDIA, the nearest M first, without those that measured slower.

    Speed-ups over F.linear in bf16, 26 November 2026: the row of M = 16 gave 0.81 to 0.97 at M = 1
    to 4 (H200, 7 weights). Up to M = 128, reading the weight dominates at every M. Above, the row
    of M = 256 gave 0.77 to 1.17 at M = 160 and 192, and 0.88 to 1.22 at M = 224 (H100, 12 weights).
    """
    kept = {row: word for row, word in words.items() if not (_SKINNY < m < row if word == "coarse" else m <= _VECTORS < row)}
    return dict(sorted(kept.items(), key=lambda rung: abs(rung[0] - m)))


def serving(rule: Callable[[int, int], Mapping[int, str]], m: int, n: int, kind: str) -> Mapping[int, str]:
    """Return the candidates for *m* by an op's rule on a kind of device, in order."""
    words = rule(m, n)
    return on_nvidia(m, words) if kind == "nvidia" else words


def nearest(m: int, tuned: Sequence[int]) -> Iterator[int]:
    """Yield the next larger and the next smaller tuned M, the better first.

    Tiles for more rows do some work in vain; those for fewer read the weight several times.

    Args:
        m: the M of the call.
        tuned: other M, ascending.
    """
    place = bisect.bisect_left(tuned, m)
    larger, smaller = tuned[place : place + 1], tuned[max(0, place - 1) : place]
    yield from (*larger, *smaller) if larger and larger[0] <= _IN_VAIN * m else (*smaller, *larger)


def exact(m: int, n: int) -> Mapping[int, str]:
    """Return the exact M only, as AITER looks up batched GEMMs."""
    del n
    return {m: "exact"}


def padded_tokens(m: int) -> int:
    """Return the token count that AITER's fused MoE looks up first: its ``get_padded_M``."""
    return _power(m) if m < _TIERS[0] else max(tier for tier in _TIERS if m >= tier)


def tokens(m: int, n: int) -> Mapping[int, str]:
    """Return the exact token count, then the padded ones of AITER's fused MoE.

    AITER (fused_moe.py, ``get_padded_M`` and the tiers of its look-up) pads up to a power of two
    below 32768. From 32768 on it uses the row of 32768; from 131072 on that of 131072, then that
    of 32768. AITER never looks up the exact count.
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

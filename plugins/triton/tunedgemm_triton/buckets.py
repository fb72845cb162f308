"""Buckets: which entry of a JSON file answers for M rows, and under which key what was tuned is written.

Two ways of keys: ``M_LEQ_64`` and ``M_GEQ_8192`` as AITER's files have them, and the older ``small``, ``medium_M64``, ``large`` and
``xlarge``, which AITER's guide to tuning Triton kernels shows. ``any`` answers in both where nothing else does.
"""

from __future__ import annotations

import re
from collections.abc import Collection

ANY = "any"
NEW, LEGACY = "new", "legacy"

#: AITER's limits of M; a key with another number is looked at by nobody.
BOUNDS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_OF_FP4 = (4, 8, 16, 31, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
#: Other limits, by the kernel's tag.
BOUNDS_OF = {
    "GEMM-AFP4WFP4": _OF_FP4,
    "GEMM-AFP4WFP4_PRESHUFFLED": _OF_FP4,
    "BATCHED_GEMM-AFP4WFP4": (1, 4, 8, 16, 32, 64, 128, 256, 320, 512, 1024, 2048, 4096, 8192),
}

_BOUND = re.compile(r"M_(LEQ|GEQ)_(\d+)")
_OLD = re.compile(r"small|medium_M(32|64|128)|large|xlarge|xlarge_M(\d+)")
#: The largest M of the older keys' ``small`` (exclusive), ``medium`` and ``large``.
_SMALL, _MEDIUM, _LARGE = 32, 128, 256


def bounds_of(tag: str) -> tuple[int, ...]:
    """The limits of M in the files of a tag, such as ``GEMM-A8W8``."""
    return BOUNDS_OF.get(tag, BOUNDS)


def style_of(keys: Collection[str]) -> str:
    """Whether a file has the older keys alone."""
    return LEGACY if any(map(_OLD.fullmatch, keys)) and not any(map(_BOUND.fullmatch, keys)) else NEW


def find(keys: Collection[str], m: int, bounds: tuple[int, ...] = BOUNDS) -> str | None:
    """The key that answers for *m* rows; None where none does.

    ``M_LEQ_x`` upwards, then ``M_GEQ_y`` downwards, then ``any`` (AITER, ``gemm_config_utils.py``); of the older keys the one of m's
    class, of ``xlarge`` first that of the next power of two, then ``any``.
    """
    if style_of(keys) == LEGACY:
        return next((key for key in (*_old_keys(m), ANY) if key in keys), None)
    upwards = (f"M_LEQ_{bound}" for bound in bounds if m <= bound)
    downwards = (f"M_GEQ_{bound}" for bound in reversed(bounds) if m >= bound)
    return next((key for key in (*upwards, *downwards, ANY) if key in keys), None)


def key_of(m: int, style: str = NEW, bounds: tuple[int, ...] = BOUNDS) -> str:
    """The key under which what was tuned for *m* rows is written: in a file with all such keys `find` returns it for m."""
    if style == LEGACY:
        return _old_keys(m)[0]
    return next((f"M_LEQ_{bound}" for bound in bounds if m <= bound), f"M_GEQ_{bounds[-1]}")


def _old_keys(m: int) -> tuple[str, ...]:
    power = 1 << max(m - 1, 0).bit_length()
    if m < _SMALL:
        return ("small",)
    if m <= _MEDIUM:
        return (f"medium_M{power}",)
    return ("large",) if m <= _LARGE else (f"xlarge_M{power}", "xlarge")


def rows_of(key: str) -> int:
    """An M for which a key may answer: the largest where it has one."""
    if found := _BOUND.fullmatch(key):
        return int(found[2])
    number = key.partition("_M")[2]
    return int(number) if number.isdecimal() else {"small": _SMALL - 1, "large": _LARGE}.get(key, 2 * _LARGE)


def dead_keys(keys: Collection[str], bounds: tuple[int, ...] = BOUNDS) -> dict[str, str]:
    """The keys for which no M asks, each with the reason."""
    style, found = style_of(keys), {}
    for key in keys:
        bound, old = _BOUND.fullmatch(key), _OLD.fullmatch(key)
        if key == ANY:
            continue
        if bound is None and old is None:
            found[key] = "is the key of no bucket: M_LEQ_x, M_GEQ_y and any are, or small, medium_M32 ..., large, xlarge, any"
        elif bound is not None and bound[2] not in map(str, bounds):
            found[key] = f"is never looked at: the limits of M are {', '.join(map(str, bounds))}"
        elif old is not None and style == NEW:
            found[key] = "is never looked at in a file with keys as M_LEQ_x"
        elif old is not None and old[2] and key != key_of(int(old[2]), LEGACY):
            found[key] = "is never looked at: xlarge goes by powers of two from 512 on"
    return found

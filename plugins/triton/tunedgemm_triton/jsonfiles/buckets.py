"""Choose the entry of a JSON file for M rows, and the key under which parameters are written.

Keys have two styles: ``M_LEQ_64`` and ``M_GEQ_8192`` as in AITER's files, and the older ``small``,
``medium_M64``, ``large`` and ``xlarge`` of AITER's guide to tuning Triton kernels. In both ``any``
serves M without another key.
"""

from __future__ import annotations

import re
from collections.abc import Collection

ANY = "any"
NEW, LEGACY = "new", "legacy"

#: AITER's limits of M; a key with another number is never read.
BOUNDS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_OF_FP4 = (4, 8, 16, 31, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
#: Tag -> other limits.
BOUNDS_OF = {
    "GEMM-AFP4WFP4": _OF_FP4,
    "GEMM-AFP4WFP4_PRESHUFFLED": _OF_FP4,
    "BATCHED_GEMM-AFP4WFP4": (1, 4, 8, 16, 32, 64, 128, 256, 320, 512, 1024, 2048, 4096, 8192),
}

_BOUND = re.compile(r"M_(LEQ|GEQ)_([0-9]{1,9})")
_OLD = re.compile(r"small|medium_M(32|64|128)|large|xlarge|xlarge_M([0-9]{1,9})")
#: The largest M of the older keys' ``small`` (exclusive), ``medium`` and ``large``.
_SMALL, _MEDIUM, _LARGE = 32, 128, 256


def bounds_of(tag: str) -> tuple[int, ...]:
    """Return the limits of M in the files of a tag, such as ``GEMM-A8W8``."""
    return BOUNDS_OF.get(tag, BOUNDS)


def style_of(keys: Collection[str]) -> str:
    """Return the style of a file's keys: legacy where it has only older ones."""
    return LEGACY if any(map(_OLD.fullmatch, keys)) and not any(map(_BOUND.fullmatch, keys)) else NEW


def find(keys: Collection[str], m: int, bounds: tuple[int, ...] = BOUNDS) -> str | None:
    """Return the key that answers for *m* rows, or None.

    The order is ``M_LEQ_x`` upwards, then ``M_GEQ_y`` downwards, then ``any`` (AITER,
    ``gemm_config_utils.py``). Of the older keys the one of m's class answers, of ``xlarge`` first
    that of the next power of two, then ``any``.
    """
    if style_of(keys) == LEGACY:
        return next((key for key in (*_old_keys(m), ANY) if key in keys), None)
    upwards = (f"M_LEQ_{bound}" for bound in bounds if m <= bound)
    downwards = (f"M_GEQ_{bound}" for bound in reversed(bounds) if m >= bound)
    return next((key for key in (*upwards, *downwards, ANY) if key in keys), None)


def key_of(m: int, style: str = NEW, bounds: tuple[int, ...] = BOUNDS) -> str:
    """Return the key under which parameters tuned for *m* rows are written, so that `find` returns
    it for m.
    """
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
    """Return an M for which a key may answer: the largest, if bounded."""
    if match := _BOUND.fullmatch(key):
        return int(match[2])
    old = _OLD.fullmatch(key)
    return int(old[1] or old[2]) if old and (old[1] or old[2]) else {"small": _SMALL - 1, "large": _LARGE}.get(key, 2 * _LARGE)


def dead_keys(keys: Collection[str], bounds: tuple[int, ...] = BOUNDS) -> dict[str, str]:
    """Return the keys that no M reads, each with the reason."""
    style, dead = style_of(keys), {}
    for key in keys:
        bound, old = _BOUND.fullmatch(key), _OLD.fullmatch(key)
        if key == ANY:
            continue
        if bound is None and old is None:
            dead[key] = "is not a bucket; use M_LEQ_x, M_GEQ_y and any, or small, medium_M32 ..., large, xlarge and any"
        elif bound is not None and bound[2] not in map(str, bounds):
            dead[key] = f"is never read: the limits of M are {', '.join(map(str, bounds))}"
        elif old is not None and style == NEW:
            dead[key] = "is never read in a file with keys such as M_LEQ_x"
        elif old is not None and old[2] and key != key_of(int(old[2]), LEGACY):
            dead[key] = "is never read: xlarge has powers of two from 512"
    return dead

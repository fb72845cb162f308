"""torch's settings of float32 products, read and written in any state without an error.

torch has an older setting, of matrix products alone, and newer ones for each backend and operation.
Its own functions raise where the two disagree. A newer setting that is ``none`` has the value of
the next wider one.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

_OPERATIONS = ("all", "matmul", "conv", "rnn")
#: Wider settings come first. torch's import allows TF32 in the last operations of a GPU.
_INITIAL = {
    ("generic", "all"): "none",
    **{("cuda", operation): "tf32" if operation in ("conv", "rnn") else "none" for operation in _OPERATIONS},
    **{("mkldnn", operation): "none" for operation in _OPERATIONS},
}

Precision = tuple[str, ...]


def read_precision() -> Precision:
    """Return the older setting, then the newer ones in effect; 2 us."""
    import torch

    get: Any = torch._C._get_fp32_precision_getter
    return _older(), *(get(*place) for place in _places())


def write_precision(before: Precision) -> None:
    """Restore what `read_precision` returned; settings that follow a wider one follow it again."""
    import torch

    get: Any = torch._C._get_fp32_precision_getter
    put: Any = torch._C._set_fp32_precision_setter
    torch.set_float32_matmul_precision(before[0])  # which fixes the newer settings of matmul, too
    for place, value in zip(_places(), before[1:], strict=True):
        if place[1] == "matmul" or get(*place) != value:
            put(*place, "none")
        if get(*place) != value:
            put(*place, value)


def initial_precision() -> Precision:
    """Return what `read_precision` returns after torch's import."""
    return "highest", *(_INITIAL[place] for place in _places())


@functools.cache
def _places() -> tuple[tuple[str, str], ...]:
    """Return the backends and operations that this torch has settings for."""
    import torch

    get: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
    return tuple(place for place in _INITIAL if get is not None and _exists(get, place))


def _exists(get: Any, place: tuple[str, str]) -> bool:
    try:
        get(*place)
    except RuntimeError:
        return False
    return True


def _older() -> str:
    """Return the older setting; where torch refuses to, deduce it from what its refusals compare."""
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        get: Any = torch._C._get_fp32_precision_getter
    allowed = get("cuda", "matmul") == "tf32"
    try:
        with warnings.catch_warnings():  # torch calls this function deprecated
            warnings.simplefilter("ignore")
            torch._C._get_cublas_allow_tf32()
    except RuntimeError:
        allowed = not allowed
    if not allowed:
        return "highest"
    return "medium" if get("mkldnn", "matmul") == "tf32" else "high"

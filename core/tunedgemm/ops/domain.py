"""Domain: the shapes that calls of an op can have. Imports no torch.

A row of another shape could never be looked up, so reading it is an error.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from tunedgemm.ops.layout import misfit
from tunedgemm.shape import Shape

#: Most bytes of a call's operands and output: 16 TiB, more than any device's memory.
MOST_BYTES = 1 << 44
#: Elements that certainly take fewer bytes, for a quick check of shapes without further fields.
_FEW = MOST_BYTES >> 5


def size_problem(shape: Shape, bytes_moved: Callable[[Shape], int]) -> str:
    """Return why no call can have the sizes of a shape, or ""; M = 0 is valid.

    Args:
        bytes_moved: the op's `Op.bytes_moved`.
    """
    m, n, k = shape.m, shape.n, shape.k
    if n < 1 or k < 1:
        return f"{'N' if n < 1 else 'K'} must be at least 1 (got 0)"
    if not shape.extra and m * n + (m + n) * k < _FEW:
        return ""
    taken, most = bytes_moved(shape) >> 40, MOST_BYTES >> 40
    return f"M={m}, N={n} and K={k} take {taken} TiB; sizes of at most {most} TiB fit a memory" if taken > most else ""


@attrs.frozen
class Domain:
    """Allowed values of the fields of an op's shapes.

    Attributes:
        dtypes, outdtypes: short names of the dtypes of activations and output.
        bias_dtypes: short names of bias dtypes; empty for an op without bias.
        scales: scale granularities.
        layouts: ``row`` for plain weights, ``shuffled``, ``any``, or ``own`` if *further* checks
            the layout.
        weight: short dtype of the weight in memory; "" for that of the activations.
        extra, optional: names of required and of optional fields of `Shape.extra`.
        further: returns why the other fields are invalid, or "".
    """

    dtypes: tuple[str, ...]
    outdtypes: tuple[str, ...]
    bias_dtypes: tuple[str, ...] = ()
    scales: tuple[str, ...] = ("none",)
    layouts: str = "row"
    weight: str = ""
    extra: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    further: Callable[[Shape], str] = lambda _: ""

    def format_problem(self, shape: Shape) -> str:
        """Return which dtype or scale granularity is invalid and which are valid; "" if none is."""
        if shape.dtype not in self.dtypes:
            return _wanted("dtype", self.dtypes, shape.dtype)
        if shape.outdtype not in self.outdtypes:
            return _wanted("outdtype", self.outdtypes, shape.outdtype)
        if shape.bias and shape.bias_dtype not in self.bias_dtypes:
            return _wanted("bias_dtype", self.bias_dtypes, shape.bias_dtype) if self.bias_dtypes else "bias: the op adds none"
        return "" if shape.scale in self.scales else _wanted("scale", self.scales, shape.scale)

    def problem(self, shape: Shape) -> str:
        """Return which field is invalid, its value and the valid ones; "" for a valid shape."""
        if fault := self.format_problem(shape):
            return fault
        if shape.extra or self.extra:
            names = [name for name, _ in shape.extra]
            for name in (*self.extra, *names):
                if name not in names:
                    return f"{name}: is missing"
                if name not in self.extra and name not in self.optional:
                    return f"{name}: the op has no such field (got {name}={shape[name]})"
        return (shape.layout != self.layouts and self._layout_problem(shape)) or self.further(shape)

    def _layout_problem(self, shape: Shape) -> str:
        if self.layouts == "own":
            return ""
        if self.layouts != "any" and (shape.layout == "row") is not (self.layouts == "row"):
            return f"layout: the op takes {'plain' if self.layouts == 'row' else 'shuffled'} weights (got {shape.layout})"
        return misfit(shape.layout, (shape.n, shape.k), self.weight or shape.dtype)


def _wanted(field: str, allowed: tuple[str, ...], value: str) -> str:
    return f"{field} must be {' or '.join(allowed)} (got {value})"

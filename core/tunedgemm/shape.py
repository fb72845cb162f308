"""Shape: one GEMM; with the device, the key of every table."""

from __future__ import annotations

import operator
import re
from typing import Any

import attrs

from tunedgemm.dtype import dtype_bits, parse_dtype
from tunedgemm.errors import ShapeError

#: Sizes must be smaller; a bf16 weight of this size by 1024 would take 4 TiB.
MAX_SIZE = 1 << 31

EPILOGUES = ("none", "bias")
_LAYOUT = re.compile(r"[a-z0-9_.-]+")
SCALES = ("none", "tensor", "row", "block")


def _size(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_SIZE:
        raise ShapeError(f"{attribute.name!r} must be an integer in 0..{MAX_SIZE - 1} (got {value!r})")


def _positive(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    _size(instance, attribute, value)
    if value == 0:
        raise ShapeError(f"{attribute.name!r} must be at least 1 (got 0)")


def _one_of(*allowed: str) -> Any:
    def check(_: object, attribute: attrs.Attribute[str], value: str) -> None:
        if value not in allowed:
            raise ShapeError(f"{attribute.name!r} must be one of {', '.join(allowed)} (got {value!r})")

    return check


def _layout(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not _LAYOUT.fullmatch(value):
        raise ShapeError(f"{attribute.name!r} must be letters a to z, digits, '_', '.' or '-' (got {str(value)[:40]!r})")


def _extra(value: Any) -> tuple[tuple[str, int | str | bool], ...]:
    items = tuple(sorted((str(name), item) for name, item in (value.items() if isinstance(value, dict) else value)))
    for name, item in items:
        if not isinstance(item, int | str):
            raise ShapeError(f"{name[:40]!r} must be an integer, a text or true or false (got {str(item)[:40]!r})")
    return items


def _outdtype(text: str, shape: Shape) -> str:
    return parse_dtype(text or shape.dtype)


def _bias_dtype(text: str, shape: Shape) -> str:
    if shape.epilogue != "bias":
        return ""
    wide = (dtype for dtype in (shape.dtype, shape.outdtype) if dtype_bits(dtype) >= 16)  # a bias is never quantised
    return parse_dtype(text or next(wide, "bf16"))


@attrs.frozen(cache_hash=True)
class Shape:
    """One GEMM: ``out[m, n] = x[m, k] @ weight[n, k].T`` of an op.

    Attributes:
        op: name of the op (family), such as ``a16w16``.
        m, n, k: rows of the activations, rows of the weight, and the reduction dimension.
            ``m`` is the product of all leading dimensions; 0 is an empty batch.
        dtype: short dtype of the activations; the op defines the weight's.
        outdtype: short dtype of the output; "" for that of the activations.
        epilogue: ``none`` or ``bias``.
        bias_dtype: short dtype of the bias; "" for that of the activations, or if those have fewer
            than 16 bits that of the output, else bf16. Not part of a table's key.
        scale: granularity of the scales: ``none``, ``tensor``, ``row`` or ``block``.
        layout: memory layout of the weight: ``row`` (plain [N, K]), ``aiter16x16``, or another
            named layout.
        extra: further fields of the op (B, experts, ...), as sorted pairs.
    """

    op: str = attrs.field(validator=attrs.validators.instance_of(str))
    m: int = attrs.field(validator=_size)
    n: int = attrs.field(validator=_positive)
    k: int = attrs.field(validator=_positive)
    dtype: str = attrs.field(default="bf16", converter=parse_dtype)
    outdtype: str = attrs.field(default="", converter=attrs.Converter(_outdtype, takes_self=True))  # type: ignore[misc, call-overload]
    epilogue: str = attrs.field(default="none", validator=_one_of(*EPILOGUES))
    bias_dtype: str = attrs.field(default="", converter=attrs.Converter(_bias_dtype, takes_self=True))  # type: ignore[misc, call-overload]
    scale: str = attrs.field(default="none", validator=_one_of(*SCALES))
    layout: str = attrs.field(default="row", validator=_layout)
    extra: tuple[tuple[str, int | str | bool], ...] = attrs.field(default=(), converter=_extra)

    @property
    def bias(self) -> bool:
        """Check whether a bias [N] is added."""
        return self.epilogue == "bias"

    def __getitem__(self, name: str) -> int | str | bool:
        """Return a field of `extra`."""
        for key, value in self.extra:
            if key == name:
                return value
        raise KeyError(f"shape of op {self.op!r} has no field {name!r}")

    def __str__(self) -> str:
        parts = [f"M={self.m} N={self.n} K={self.k}", f"{self.dtype}->{self.outdtype}"]
        parts += [self.epilogue] if self.bias else []
        parts += [f"scale={self.scale}"] if self.scale != "none" else []
        parts += [f"layout={self.layout}"] if self.layout != "row" else []
        parts += [f"{name}={value}" for name, value in self.extra]
        return f"{self.op} {' '.join(parts)}"

    def with_m(self, m: int) -> Shape:
        """Return this shape with another M; three times as fast as validating a new one."""
        _size(self, _M, m)
        shape = _copy(self)
        _PUT_M(shape, m)
        return shape

    def with_extra(self, extra: tuple[tuple[str, int | str | bool], ...]) -> Shape:
        """Return this shape with another `extra`, sorted and not validated; as fast as `with_m`."""
        shape = _copy(self)
        _PUT_EXTRA(shape, extra)
        return shape

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict for JSON; `Shape.from_dict` is its inverse."""
        return {**attrs.asdict(self, filter=lambda a, _: a.name != "extra"), "extra": dict(self.extra)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Shape:
        """Rebuild a shape from the result of `to_dict`.

        Raises:
            ShapeError: a field is missing or invalid.
        """
        allowed = {field.name for field in attrs.fields(cls)}
        if (
            not isinstance(fields, dict)
            or not {"op", "m", "n", "k"} <= {*fields} <= allowed
            or not isinstance(fields.get("extra", {}), dict)
        ):
            raise ShapeError(f"a shape must be an object of {', '.join(sorted(allowed))} (got {str(fields)[:80]!r})")
        try:
            return cls(**fields)
        except TypeError as error:
            raise ShapeError(f"a shape has a value of another type: {str(error.args[0])[:80]}") from None


_M = attrs.fields(Shape).m
_NAMES = tuple(field.name for field in attrs.fields(Shape))
_KEPT = operator.attrgetter(*_NAMES)
_PUT = tuple(getattr(Shape, name).__set__ for name in _NAMES)
_PUT_M, _PUT_EXTRA = Shape.m.__set__, Shape.extra.__set__  # type: ignore[attr-defined]
#: The slot of the hash, which attrs fills on first use.
_FORGET = tuple(getattr(Shape, slot).__set__ for slot in Shape.__slots__ if slot not in {*_NAMES, "__weakref__"})  # type: ignore[attr-defined]


def _copy(shape: Shape) -> Shape:
    """Copy a shape without its cached hash, to set a field of the copy."""
    copy = object.__new__(Shape)
    for put, value in zip(_PUT, _KEPT(shape), strict=True):
        put(copy, value)
    for put in _FORGET:
        put(copy, None)
    return copy

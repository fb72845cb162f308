"""Solution: one launchable choice of one backend; Unsupported: the reason for a refusal."""

from __future__ import annotations

from typing import Any

import attrs

from tunedgemm.errors import PluginError
from tunedgemm.text.cell import MISSING, RULE, is_kept

#: Suffix of solutions with a split bias (`tunedgemm.backends.split_bias`); reserved to the core.
ADD = "+add"

_MARKS = frozenset("\r\n,\"'")
#: Largest integer in a table, since readers parse numbers as float64.
LARGEST = 2**53
_PAIRS = ([str, int], [str, str])


def _name(instance: Solution, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not _MARKS.isdisjoint(value):
        raise PluginError(
            f"libtype {instance.libtype!r}: {attribute.name!r} must be text without commas, quotes or newlines (got {value!r:.80})"
        )
    if value and value in MISSING:
        raise PluginError(f"libtype {instance.libtype!r}: {attribute.name!r} must not be a table's word for no name (got {value!r})")
    _kept(instance, attribute.name, value)


def _whole(instance: Solution, attribute: attrs.Attribute[int], value: int) -> None:
    if type(value) is not int or abs(value) > LARGEST:
        raise PluginError(f"libtype {instance.libtype!r}: {attribute.name!r} must be an int of at most 2**53 (got {value!r:.80})")


def _claim(instance: Solution, attribute: attrs.Attribute[bool], value: bool) -> None:
    if type(value) is not bool:
        raise PluginError(f"libtype {instance.libtype!r}: {attribute.name!r} must be True or False (got {value!r:.80})")


def _extra(instance: Solution, _: attrs.Attribute[Any], pairs: tuple[tuple[str, int | str], ...]) -> None:
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and list(map(type, pair)) in _PAIRS for pair in pairs):
        raise PluginError(f"libtype {instance.libtype!r}: 'extra' must be pairs of a name and an int or text (got {pairs!r:.80})")
    for name, value in pairs:
        if isinstance(value, str):
            _kept(instance, name, value)


def _kept(instance: Solution, name: str, value: str) -> None:
    if not is_kept(value):
        raise PluginError(f"libtype {instance.libtype!r}: {name!r} must be {RULE} (got {value!r:.80})")


@attrs.frozen(cache_hash=True)
class Solution:
    """One launchable choice of one backend.

    Its identity is (libtype, kernel_name, split_k), from which the plugin must be able to launch in
    any later process. Solutions with equal identity must be interchangeable.

    Attributes:
        libtype: the backend's name, or several joined by ``+`` if the stages of a row belong to
            several backends.
        kernel_name: CSV column ``kernelName``; must contain a revision if the kernel's source can
            change.
        split_k: CSV column ``splitK``; opaque to the core (a factor or a logarithm).
        solidx: CSV column ``solidx``; a hint for libraries that number their kernels, not part of
            the identity.
        deterministic: whether repeated runs are bitwise equal, as claimed by the backend and
            verified by the tuner.
        batch_invariant: whether the bits of a row are independent of M, claimed and verified alike.
        extra: further columns of the op, as sorted pairs.
        sum_order: name of the order in which the kernel adds products and rounds; "" for one that
            is unknown or depends on M. For one N, K, dtypes and epilogue, kernels of equal name
            give equal bits, whatever their backend, tile and M: a claim that the tuner verifies.
    """

    libtype: str = attrs.field(validator=attrs.validators.matches_re(r"[A-Za-z0-9_.+-]+"))
    kernel_name: str = attrs.field(default="", validator=_name)
    split_k: int = attrs.field(default=0, validator=_whole)
    solidx: int = attrs.field(default=0, validator=_whole, eq=False)
    deterministic: bool = attrs.field(default=True, validator=_claim, eq=False)
    batch_invariant: bool = attrs.field(default=False, validator=_claim, eq=False)
    extra: tuple[tuple[str, int | str], ...] = attrs.field(default=(), validator=_extra, eq=False)
    sum_order: str = attrs.field(default="", validator=_name, eq=False)

    def __str__(self) -> str:
        split = f" splitK={self.split_k}" if self.split_k else ""
        return f"{self.libtype}:{self.kernel_name}{split}"

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict for JSON; `Solution.from_dict` is its inverse."""
        return {**attrs.asdict(self), "extra": dict(self.extra)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Solution:
        """Rebuild a solution from the result of `to_dict`.

        Raises:
            ValueError, PluginError: a field is missing or invalid.
        """
        allowed = {field.name for field in attrs.fields(cls)}
        if not isinstance(fields, dict) or not {"libtype"} <= {*fields} <= allowed or not isinstance(fields.get("extra", {}), dict):
            raise ValueError(f"a solution must be an object of {', '.join(sorted(allowed))} (got {str(fields)[:80]!r})")
        try:
            return cls(**{**fields, "extra": tuple(sorted(fields.get("extra", {}).items()))})
        except TypeError as error:
            raise ValueError(f"a solution has a value of another type: {str(error.args[0])[:80]}") from None


@attrs.frozen
class Unsupported:
    """The reason for a refusal."""

    reason: str = attrs.field(validator=attrs.validators.instance_of(str))
    #: whether the cause is lack of memory, so that a later attempt may succeed
    passing: bool = attrs.field(default=False, kw_only=True)

    def __str__(self) -> str:
        return self.reason

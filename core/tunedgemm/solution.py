"""Solution: one launchable choice of one backend; Unsupported: a reason that is falsy."""

from __future__ import annotations

from typing import Any

import attrs

from tunedgemm.errors import PluginError

#: How the name of a solution ends that adds a bias after its kernel; see `tunedgemm.backends.split`. No kernel of a plugin is called so.
ADD = "+add"


def _name(instance: Solution, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or any(mark in value for mark in "\r\n,\"'"):
        raise PluginError(
            f"libtype {instance.libtype!r}: {attribute.name!r} must be text without commas, quotes or newlines (got {value!r})"
        )


@attrs.frozen(cache_hash=True)
class Solution:
    """One launchable choice of one backend.

    Its identity is (libtype, kernel_name, split_k): two solutions may share it only if they are
    interchangeable, and the plugin must be able to launch from it alone, in another process, on
    another day.

    Attributes:
        libtype: the backend's name; several joined by ``+`` in a table's row whose stages belong to
            several.
        kernel_name: the CSV column ``kernelName``; carries a revision of the kernel source where
            that can change.
        split_k: the CSV column ``splitK``; opaque to the core (a factor in some backends, a
            logarithm in others).
        solidx: the CSV column ``solidx``; a hint for libraries that number their kernels, no part
            of identity.
        deterministic: the backend's claim that repeated runs give the same bits; verified by the
            tuner.
        batch_invariant: the claim that a row's bits do not depend on M; verified by the tuner.
        extra: columns that an op declares beyond these, as sorted pairs.
    """

    libtype: str = attrs.field(validator=attrs.validators.matches_re(r"[A-Za-z0-9_.+-]+"))
    kernel_name: str = attrs.field(default="", validator=_name)
    split_k: int = attrs.field(default=0, validator=attrs.validators.instance_of(int))
    solidx: int = attrs.field(default=0, eq=False)
    deterministic: bool = attrs.field(default=True, eq=False)
    batch_invariant: bool = attrs.field(default=False, eq=False)
    extra: tuple[tuple[str, int | str], ...] = attrs.field(default=(), eq=False)

    def __str__(self) -> str:
        split = f" splitK={self.split_k}" if self.split_k else ""
        return f"{self.libtype}:{self.kernel_name}{split}"

    def to_dict(self) -> dict[str, Any]:
        """A plain dict for JSON; `Solution.from_dict` is its inverse."""
        return {**attrs.asdict(self), "extra": dict(self.extra)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Solution:
        """Rebuild a solution from `to_dict`'s result."""
        return cls(**{**fields, "extra": tuple(sorted(fields.get("extra", {}).items()))})


@attrs.frozen
class Unsupported:
    """Why something cannot be done here; falsy, so that ``if not supports(...)`` reads naturally."""

    reason: str = attrs.field(validator=attrs.validators.instance_of(str))

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.reason

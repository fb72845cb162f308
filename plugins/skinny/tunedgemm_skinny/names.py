"""Kernel parameters and their names, both ways: a name alone says what to compile, in any process, on any day.

``rows_r1_n4w2x2u4_s``: family, revision of the sources, rows of the weight a warp (n), warps of a block along N and along K (w, x),
steps whose loads are in flight together (u); ``s`` keeps x in shared memory. ``tiles_r1_n1w2x4u2a4_s_c``: n is 16-row tiles a warp,
the weight comes through a ring of four slots of u steps each (a), filled by asynchronous copies, so does x (s), and the splits of K
meet in a cluster of blocks (c). ``wgmma_r1_n1w2x1u2a4``: n is 64-row tiles a group of four warps, w and x are such groups, and both
operands come through the ring.

How many rows x has is no part of a name: that follows from the shape. So does the width of a load, from K.
"""

from __future__ import annotations

import functools
import re
from typing import Any, ClassVar

import attrs
from tunedgemm.plugin import PluginError

#: From the first release on raise it whenever the sources in ``kernels/`` change what a name means or how quick it is.
REVISION = 1

#: Warps of a block at most: 1024 threads of 32, which no architecture exceeds.
MAX_WARPS = 32

_STAGES = (0, 2, 3, 4, 6, 8)


def _among(*values: int, default: Any = attrs.NOTHING) -> Any:
    def check(instance: Any, attribute: attrs.Attribute[int], value: int) -> None:
        if value not in values:
            raise PluginError(f"skinny {instance.family}: {attribute.name} must be one of {', '.join(map(str, values))} (got {value})")

    return attrs.field(default=default, validator=check, metadata={"ladder": values})


class _Block:
    """What the families have in common: how a block's warps lie."""

    __slots__ = ()

    def __attrs_post_init__(self: Any) -> None:
        if self.warps > MAX_WARPS:
            raise PluginError(f"skinny {self.family}: a block has {MAX_WARPS} warps at most (got {self.warps})")

    @property
    def warps(self: Any) -> int:
        """Warps of a block."""
        return int(self.warps_n * self.warps_k)

    @property
    def each(self: Any) -> int:
        """Rows of the weight that a warp has."""
        return int(self.unit * self.n_each)

    @property
    def per_block(self: Any) -> int:
        """Rows of the weight that a block has."""
        return int(self.each * self.warps_n)

    @property
    def name(self: Any) -> str:
        """The text of ``kernelName``."""
        parts = f"{self.family}_r{REVISION}_n{self.n_each}w{self.warps_n}x{self.warps_k}u{self.unroll}"
        return parts + (f"a{self.stages}" if self.stages else "") + "_s" * self.x_shared + "_c" * self.cluster


@attrs.frozen(cache_hash=True)
class Rows(_Block):
    """Multiply and sum on the vector units: every lane has a piece of K of *n_each* rows of the weight, for all rows of x.

    Attributes:
        n_each: rows of the weight that a warp has.
        warps_n, warps_k: warps of a block along N, and along K.
        unroll: steps along K whose loads are in flight together.
        x_shared: whether x is copied to shared memory first.
        stages: slots of the ring in shared memory through which the weight comes; 0 loads it into registers.
        cluster: whether the splits of K meet in a cluster of blocks, through its shared memory, or in global memory.
    """

    family: ClassVar[str] = "rows"
    unit: ClassVar[int] = 1
    n_each: int = _among(1, 2, 4, 8)
    warps_n: int = _among(1, 2, 4, 8, 16)
    warps_k: int = _among(1, 2, 4, 8, 16)
    unroll: int = _among(1, 2, 4, 8)
    x_shared: bool = attrs.field(default=False, metadata={"ladder": (False, True)})
    stages: int = _among(*_STAGES, default=0)
    cluster: bool = attrs.field(default=False, metadata={"ladder": (False, True)})


@attrs.frozen(cache_hash=True)
class Tiles(_Block):
    """Products of the matrix units: the rows of the weight take the long side of the instruction.

    Attributes:
        n_each: tiles of 16 rows of the weight that a warp has.
        warps_n, warps_k, unroll, stages, cluster: as `Rows`.
        x_shared: whether x is in shared memory for all warps of a block: through the ring too, or, where there is none, all of the split's.
    """

    family: ClassVar[str] = "tiles"
    unit: ClassVar[int] = 16
    n_each: int = _among(1, 2, 4)
    warps_n: int = _among(1, 2, 4, 8, 16)
    warps_k: int = _among(1, 2, 4, 8, 16)
    unroll: int = _among(1, 2, 4, 8)
    stages: int = _among(*_STAGES, default=0)
    x_shared: bool = attrs.field(default=False, metadata={"ladder": (False, True)})
    cluster: bool = attrs.field(default=False, metadata={"ladder": (False, True)})


@attrs.frozen(cache_hash=True)
class Wgmma(_Block):
    """Products of Hopper's asynchronous matrix instructions: both operands in shared memory, through a ring.

    Attributes:
        n_each: tiles of 64 rows of the weight that a group of four warps has.
        warps_n, warps_k: groups of four warps of a block along N, and along K.
        unroll: steps of 128 bytes along K that a group has in each slot.
        stages, cluster: as `Rows`.
    """

    family: ClassVar[str] = "wgmma"
    unit: ClassVar[int] = 64
    x_shared: ClassVar[bool] = False
    n_each: int = _among(1, 2)
    warps_n: int = _among(1, 2, 4)
    warps_k: int = _among(1, 2, 4)
    unroll: int = _among(1, 2, 4)
    stages: int = _among(*_STAGES[1:], default=4)
    cluster: bool = attrs.field(default=False, metadata={"ladder": (False, True)})

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return 4 * self.warps_n * self.warps_k


Kernel = Rows | Tiles | Wgmma

_PATTERN = r"_n(?P<n_each>\d+)w(?P<warps_n>\d+)x(?P<warps_k>\d+)u(?P<unroll>\d+)(a(?P<stages>\d+))?(?P<x_shared>_s)?(?P<cluster>_c)?"
FAMILIES: tuple[type[Kernel], ...] = (Rows, Tiles, Wgmma)


@functools.lru_cache(maxsize=4096)
def kernel_of(name: str) -> Kernel:
    """The parameters behind a kernel name; the `name` of each family is its inverse.

    Raises:
        PluginError: no kernel of this plugin's present revision has that name; the message says why.
    """
    for kind in FAMILIES:
        found = re.fullmatch(rf"{kind.family}_r(?P<revision>\d+){_PATTERN}", name)
        if found:
            fields = {key: text for key, text in found.groupdict().items() if text is not None}
            revision = int(fields.pop("revision"))
            if revision != REVISION:
                raise PluginError(f"skinny kernel {name!r} is of revision {revision}; this version has {REVISION}: tune again")
            try:
                return kind(**{key: int(text) if text.isdecimal() else True for key, text in fields.items()})
            except TypeError:  # x of this family is in no memory of its own
                break
    raise PluginError(f"skinny has no kernel {name!r}; names look like {EXAMPLES}")


EXAMPLES = f"{Rows(4, 2, 2, 4).name}, {Tiles(1, 2, 4, 2, 4, True, True).name}"

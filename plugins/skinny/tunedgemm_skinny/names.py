"""Map solution names to kernel parameters and back: a name alone determines the program.

In ``rows_r1_n4w2x2u4_s``, ``rows`` is the family and ``r1`` the revision of the sources. ``n`` is
the weight rows of a warp; ``w`` and ``x`` are the warps of a block along N and along K. ``u`` is
the steps whose loads are in flight together; ``_s`` keeps x in shared memory.

In ``tiles_r1_n1w2x4u2a4_s_c``, ``n`` is the 16-row tiles of a warp. The weight comes through a ring
of four stages of u steps each (``a``), filled by asynchronous copies; with ``_s`` x does, too. The
splits of K meet in a cluster of blocks (``_c``).

In ``wgmma_r1_n1w2x1u2a4``, ``n`` is the 64-row tiles of a group of four warps; ``w`` and ``x``
count such groups. Both operands come through the ring.

In ``packed_r1_n2w2x4u2``, ``n`` is the 16-row tiles of a warp; x is always in shared memory.

M is not part of a name: it follows from the shape. The width of a load follows from K.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.tables import KernelName

#: Raise it, from the first release on, when ``kernels/`` changes what a name means or its speed.
REVISION = 1

#: Most warps of a block: 1024 threads in warps of 32, the limit of every architecture.
MAX_WARPS = 32

_STAGES = (0, 2, 3, 4, 6, 8)


def _among(*values: int, default: Any = attrs.NOTHING) -> Any:
    def check(instance: Any, attribute: attrs.Attribute[int], value: int) -> None:
        if value not in values:
            raise PluginError(f"skinny {instance.family}: {attribute.name} must be one of {', '.join(map(str, values))} (got {value})")

    return attrs.field(default=default, validator=check, metadata={"ladder": values})


class _Block:
    """Warps and weight rows of a block, the same for all families."""

    __slots__ = ()

    def __attrs_post_init__(self: Any) -> None:
        if self.warps > MAX_WARPS:
            raise PluginError(f"skinny {self.family}: warps of a block must be at most {MAX_WARPS} (got {self.warps})")

    @property
    def warps(self: Any) -> int:
        """Return the warps of a block."""
        return int(self.warps_n * self.warps_k)

    @property
    def rows_per_warp(self: Any) -> int:
        """Return the weight rows of a warp, or of a group of four in `Wgmma`."""
        return int(self.unit * self.n_each)

    @property
    def per_block(self: Any) -> int:
        """Return the weight rows of a block."""
        return int(self.rows_per_warp * self.warps_n)

    @property
    def name(self: Any) -> str:
        """Return the solution name, ``kernelName`` in a table."""
        return _FORMS[type(self)].write(self, revision=REVISION)


@attrs.frozen(cache_hash=True)
class Rows(_Block):
    """Products on the vector units; a lane has a piece of *n_each* weight rows.

    Attributes:
        n_each: weight rows of a warp.
        warps_n, warps_k: warps of a block along N, and along K.
        unroll: steps along K whose loads are in flight together.
        x_shared: whether x is copied to shared memory first.
        stages: stages of the weight's ring in shared memory; 0 loads it into registers.
        cluster: whether splits of K meet in the shared memory of a cluster, else in global memory.
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
    """Products of the matrix units, with the weight rows on the long side of the instruction.

    Attributes:
        n_each: tiles of 16 weight rows of a warp.
        warps_n, warps_k, unroll, stages, cluster: as `Rows`.
        x_shared: whether all warps of a block share x in shared memory. With a ring x comes through
            it; without one all x of the split is copied first.
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
    """Products of Hopper's asynchronous matrix instructions, with both operands in a ring.

    Attributes:
        n_each: tiles of 64 weight rows of a group of four warps.
        warps_n, warps_k: groups of four warps of a block along N, and along K.
        unroll: steps of 128 bytes along K of a group in each stage.
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
        """Return the warps of a block."""
        return 4 * self.warps_n * self.warps_k


@attrs.frozen(cache_hash=True)
class Packed(_Block):
    """Products of the matrix units with a weight of 4 bits, which a lane unpacks in registers.

    Attributes:
        n_each: tiles of 16 weight rows of a warp.
        warps_n, warps_k, cluster: as `Rows`.
        unroll: steps whose loads are in flight together, while as many are multiplied.
    """

    family: ClassVar[str] = "packed"
    unit: ClassVar[int] = 16
    x_shared: ClassVar[bool] = True
    stages: ClassVar[int] = 0
    n_each: int = _among(1, 2, 4)
    warps_n: int = _among(1, 2, 4, 8)
    warps_k: int = _among(1, 2, 4, 8, 16)
    unroll: int = _among(1, 2, 4)
    cluster: bool = attrs.field(default=False, metadata={"ladder": (False, True)})


#: Parameters that a solution name stands for.
KernelConfig = Rows | Tiles | Wgmma | Packed

FAMILIES: tuple[type[KernelConfig], ...] = (Rows, Tiles, Wgmma, Packed)
_RING, _SHARED = "[a{stages}]", "[_s?x_shared]"
_PARTS = {Rows: _RING + _SHARED, Tiles: _RING + _SHARED, Wgmma: _RING, Packed: ""}
_FORMS = {
    kind: KernelName(kind.family + "_r{revision}_n{n_each}w{warps_n}x{warps_k}u{unroll}" + parts + "[_c?cluster]", "revision")
    for kind, parts in _PARTS.items()
}


@functools.lru_cache(maxsize=4096)
def parse_name(name: str) -> KernelConfig:
    """Parse a solution name; the inverse of each family's `name`.

    Raises:
        PluginError: this revision has no kernel of that name; the message says why.
    """
    for family, form in _FORMS.items():
        if fields := form.parse(name):
            if (revision := fields.pop("revision")) != REVISION:
                raise PluginError(f"skinny kernel {name!r}: revision must be {REVISION} (got {revision}); tune again")
            without_ring = {"stages": 0} if "stages" in attrs.fields_dict(family) else {}
            return family(**without_ring | fields)
    raise PluginError(f"skinny has no kernel {name!r}; names look like {EXAMPLES}")


EXAMPLES = f"{Rows(4, 2, 2, 4).name}, {Tiles(1, 2, 4, 2, 4, True, True).name}"

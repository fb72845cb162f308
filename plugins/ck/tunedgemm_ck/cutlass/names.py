"""Map names to the template parameters of a CUTLASS kernel and back."""

from __future__ import annotations

import functools
from typing import Any

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.tables import KernelName

#: Raised whenever the code of the sources or the meaning of a name changes.
REVISION = 1

#: Schedule of the main loop -> its tile schedulers. CUTLASS's ping-pong kernel has no stream-K, and
#: its plain kernel has one block per tile.
SCHEDULES = {
    "cooperative": ("persistent", "streamk"),
    "pingpong": ("persistent",),
    "plain": ("single",),
    "multistage": ("single",),
    "1sm": ("persistent", "streamk"),
    "2sm": ("persistent", "streamk"),
}
#: Schedules whose sums are in tensor memory, not in registers.
TENSOR_MEMORY = ("1sm", "2sm")
SCHEDULERS = ("persistent", "streamk", "single")
#: Ladders of the parameters, along which `enumerate_neighbours` steps.
TILES_M = (64, 128, 256)
TILES_N = (16, 32, 64, 80, 96, 128, 160, 192, 224, 256)
TILES_K = (32, 64, 128, 256)
CLUSTERS = ((1, 1), (2, 1), (1, 2))
#: Warps of a block of sm_80 along M and along N; (0, 0) elsewhere, where the schedule implies them.
WARPS = ((0, 0), (2, 2), (2, 4), (4, 2))
#: Stages of the ring in shared memory on sm_80; 0 for as many as fit.
STAGES = (0, 3, 4, 5)

#: Maximum 32-bit accumulators per thread: twice as many would exceed its 255 registers.
MAX_ACCUMULATORS = 128


def _among(*values: Any, default: Any = attrs.NOTHING) -> Any:
    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in values:
            raise PluginError(f"cutlass: {attribute.name} must be one of {', '.join(map(_text, values))} (got {_text(value)})")

    return attrs.field(default=default, validator=check)


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@attrs.frozen(cache_hash=True)
class CutlassInstance:
    """Template parameters of one CUTLASS kernel.

    Attributes:
        tile_m, tile_n, tile_k: elements of a block's tile, of the product as CUTLASS sees it.
        cluster: blocks of a cluster along M and N, which share what they load.
        schedule: how warps share the work; see `SCHEDULES`. One instruction of ``2sm`` multiplies
            the tiles of two blocks along M, which CUTLASS counts as one tile.
        scheduler: how blocks get tiles. ``persistent`` blocks take several in turn, ``streamk``
            splits K
            too, ``single`` has one block per tile.
        swap: whether the product is out^T = weight x^T. M is then along the tile's N, which may be
            as
            small as 16.
        warps: warps along M and N, on sm_80 only.
        stages: stages of the ring in shared memory, on sm_80 only.
        fast: whether sums of fp8 stay in the tensor core, which keeps fewer bits than float32; on
            sm_90
            only.
        revision: that of the sources.
    """

    tile_m: int = _among(*TILES_M)
    tile_n: int = _among(*TILES_N)
    tile_k: int = _among(*TILES_K)
    cluster: tuple[int, int] = _among(*CLUSTERS, default=(1, 1))
    schedule: str = _among(*SCHEDULES, default="cooperative")
    scheduler: str = _among(*SCHEDULERS, default="persistent")
    swap: bool = _among(False, True, default=False)
    warps: tuple[int, int] = _among(*WARPS, default=(0, 0))
    stages: int = _among(*STAGES, default=0)
    fast: bool = _among(False, True, default=False)
    revision: int = REVISION

    def __attrs_post_init__(self) -> None:
        if self.scheduler not in SCHEDULES[self.schedule]:
            allowed = " or ".join(SCHEDULES[self.schedule])
            raise PluginError(f"cutlass: schedule {self.schedule} needs scheduler {allowed} (got {self.scheduler})")
        if self.revision != REVISION:
            raise PluginError(f"cutlass: revision must be {REVISION} (got {self.revision}); tune again")
        if self.schedule == "cooperative" and self.tile_m < 128:
            raise PluginError(f"cutlass: schedule cooperative needs tile_m of 128 or more (got {self.tile_m})")
        if self.accumulators > MAX_ACCUMULATORS:
            raise PluginError(f"cutlass: {self.accumulators} accumulators per thread exceed {MAX_ACCUMULATORS}")
        if (self.schedule == "multistage") != (self.warps != (0, 0)) or (self.schedule == "multistage") != (self.stages > 0):
            raise PluginError("cutlass: schedule multistage needs warps and stages, others have none")
        if self.schedule == "multistage":
            self._check_warps()
        if self.schedule in TENSOR_MEMORY:
            self._check_tensor_memory()

    def _check_warps(self) -> None:
        sides = (self.tile_m // self.warps[0], self.tile_n // self.warps[1])
        if self.cluster != (1, 1) or self.swap or self.fast:
            raise PluginError("cutlass: multistage does not support clusters, swapped operands or fast sums")
        if not all(32 <= side <= 64 for side in sides):
            raise PluginError(f"cutlass: a warp of multistage must have 32 to 64 rows and columns (got {_text(sides)})")

    def _check_tensor_memory(self) -> None:
        pair = self.schedule == "2sm"
        if self.fast or (pair and (self.tile_m, self.cluster) != (128, (2, 1))) or self.tile_m > 128:
            allowed = "tile_m of 128 and cluster 2x1" if pair else "tile_m of 64 or 128"
            raise PluginError(f"cutlass: schedule {self.schedule} needs {allowed}, and has no fast sums")
        if self.tile_n > 32 and self.tile_n % 64:  # the epilogue takes 32 or 64 columns at a time
            raise PluginError(f"cutlass: schedule {self.schedule} needs tile_n of 16, 32 or a multiple of 64 (got {self.tile_n})")

    @property
    def threads(self) -> int:
        """Return the threads that multiply one tile."""
        return 32 * self.warps[0] * self.warps[1] or (256 if self.schedule == "cooperative" else 128)

    @property
    def accumulators(self) -> int:
        """Return the 32-bit accumulators per thread; 0 where they are in tensor memory."""
        return 0 if self.schedule in TENSOR_MEMORY else self.tile_m * self.tile_n // self.threads

    @property
    def name(self) -> str:
        """Return ``kernelName``: ``128x128x64_2x1_pingpong_persistent_r1``.

        ``_w2x2_s4`` (warps, stages), ``_fast`` and ``_swap`` precede the revision.
        """
        return _NAME.write(self)


EXAMPLE = "128x256x64_2x1_cooperative_streamk_r1"
_NAME = KernelName(
    "{tile_m}x{tile_n}x{tile_k}_{cluster:x2}_{schedule:word}_{scheduler:word}[_w{warps:x2}_s{stages}][_fast?fast][_swap?swap]_r{revision}"
)


@functools.lru_cache(maxsize=4096)
def parse_name(name: str, op: str) -> CutlassInstance:
    """Return the instance of a name; `CutlassInstance.name` is the inverse, for every op.

    Raises:
        PluginError: this version has no instance of that name; the message names the unknown part.
    """
    fields = _NAME.parse(name)
    if fields is None:
        raise PluginError(f"cutlass has no kernel {name!r} for {op}; names look like {EXAMPLE}")
    try:
        return CutlassInstance(**fields)
    except PluginError as error:
        raise PluginError(f"cutlass has no kernel {name!r} for {op}: {error}") from None

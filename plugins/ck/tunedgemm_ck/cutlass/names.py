"""CutlassInstance: the template parameters of one kernel as a value, and its name, both ways."""

from __future__ import annotations

import functools
import re
from typing import Any

import attrs
from tunedgemm.plugin import PluginError

#: Raised whenever the sources or what a name means change.
REVISION = 1

#: Schedule of the main loop -> schedulers of tiles that it goes with. ``multistage`` is that of sm_80, the others are those of sm_90.
#: CUTLASS's ping-pong kernel takes no stream-K, and its plain kernel has a block for each tile.
SCHEDULES = {
    "cooperative": ("persistent", "streamk"),
    "pingpong": ("persistent",),
    "plain": ("single",),
    "multistage": ("single",),
}
SCHEDULERS = ("persistent", "streamk", "single")
#: Ladders of the parameters, which `near` goes along.
TILES_M = (64, 128, 256)
TILES_N = (16, 32, 64, 80, 96, 128, 160, 192, 224, 256)
TILES_K = (32, 64, 128, 256)
CLUSTERS = ((1, 1), (2, 1), (1, 2))
#: Warps of a block of sm_80 along M and along N; (0, 0) on sm_90, whose schedules say it.
WARPS = ((0, 0), (2, 2), (2, 4), (4, 2))
#: Slots of the ring in shared memory on sm_80; 0 for as many as there is room for.
STAGES = (0, 3, 4, 5)

#: 32-bit accumulators of a thread at most: with twice as many nothing is left of its 255 registers.
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
    """One kernel of CUTLASS.

    Attributes:
        tile_m, tile_n, tile_k: elements of a block's tile, of the product as CUTLASS sees it.
        cluster: blocks of a cluster along M and N, which share what they load.
        schedule: how warps share the work; see `SCHEDULES`.
        scheduler: how tiles come to blocks: ``persistent`` blocks take one after another, ``streamk`` cuts K too, ``single`` has one each.
        swap: whether the product is out^T = weight x^T, so that M lies along the tile's N, which may be as small as 16.
        warps: warps along M and N, on sm_80 only.
        stages: slots of the ring in shared memory, on sm_80 only.
        fast: whether sums of fp8 stay in the tensor core, on sm_90 only, which keeps fewer bits of them than float32 has.
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
            raise PluginError(f"cutlass: schedule {self.schedule} goes with scheduler {allowed}, not {self.scheduler}")
        if self.revision != REVISION:
            raise PluginError(f"cutlass: revision {self.revision} is not {REVISION}, that of this version: tune again")
        if self.schedule == "cooperative" and self.tile_m < 128:
            raise PluginError(f"cutlass: two cooperating groups of warps need tile_m of 128 or more (got {self.tile_m})")
        if self.accumulators > MAX_ACCUMULATORS:
            raise PluginError(f"cutlass: {self.accumulators} accumulators a thread are more than {MAX_ACCUMULATORS}")
        if (self.schedule == "multistage") != (self.warps != (0, 0)) or (self.schedule == "multistage") != (self.stages > 0):
            raise PluginError("cutlass: multistage has warps and stages, other schedules have not")
        if self.schedule == "multistage":
            self._check_warps()

    def _check_warps(self) -> None:
        sides = (self.tile_m // self.warps[0], self.tile_n // self.warps[1])
        if self.cluster != (1, 1) or self.swap or self.fast:
            raise PluginError("cutlass: multistage has neither clusters, swapped operands nor fast sums")
        if not all(32 <= side <= 64 for side in sides):
            raise PluginError(f"cutlass: a warp of multistage has 32 to 64 rows and columns (got {_text(sides)})")

    @property
    def threads(self) -> int:
        """Threads that multiply one tile."""
        return 32 * self.warps[0] * self.warps[1] or (256 if self.schedule == "cooperative" else 128)

    @property
    def accumulators(self) -> int:
        """32-bit accumulators of a thread."""
        return self.tile_m * self.tile_n // self.threads

    @property
    def name(self) -> str:
        """``kernelName``: ``128x128x64_2x1_pingpong_persistent_r1``, with ``_w2x2_s4`` (warps, stages), ``_fast``, ``_swap``."""
        warps = f"_w{_text(self.warps)}_s{self.stages}" if self.schedule == "multistage" else ""
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k}"
        ways = f"{warps}{'_fast' * self.fast}{'_swap' * self.swap}"
        return f"{tile}_{_text(self.cluster)}_{self.schedule}_{self.scheduler}{ways}_r{self.revision}"


EXAMPLE = "128x256x64_2x1_cooperative_streamk_r1"
_NAME = re.compile(
    r"(?P<tile_m>\d+)x(?P<tile_n>\d+)x(?P<tile_k>\d+)_(?P<cluster>\d+x\d+)_(?P<schedule>[a-z]+)_(?P<scheduler>[a-z]+)"
    r"(_w(?P<warps>\d+x\d+)_s(?P<stages>\d+))?(?P<fast>_fast)?(?P<swap>_swap)?_r(?P<revision>\d+)",
    re.ASCII,
)


@functools.lru_cache(maxsize=4096)
def parse(name: str, op: str) -> CutlassInstance:
    """The instance of a name; `CutlassInstance.name` is the inverse, whatever the op.

    Raises:
        PluginError: no instance of this version has that name; the message says which part is unknown.
    """
    found = _NAME.fullmatch(name)
    if not found:
        raise PluginError(f"cutlass has no kernel {name!r} for {op}; names look like {EXAMPLE}")
    fields: dict[str, Any] = {key: int(found[key] or 0) for key in ("tile_m", "tile_n", "tile_k", "stages", "revision")}
    pairs = {key: tuple(map(int, (found[key] or "0x0").split("x"))) for key in ("cluster", "warps")}
    try:
        said = {"swap": bool(found["swap"]), "fast": bool(found["fast"])}
        made = CutlassInstance(**fields, **pairs, **said, schedule=found["schedule"], scheduler=found["scheduler"])
    except PluginError as error:
        raise PluginError(f"cutlass has no kernel {name!r} for {op}: {error}") from None
    if made.name != name:
        raise PluginError(f"cutlass has no kernel {name!r} for {op}; it would be called {made.name}")
    return made

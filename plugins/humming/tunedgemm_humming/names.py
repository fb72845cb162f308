"""Map solution names (column ``kernelName``) to configurations of Humming's kernel and back.

``default_wgmma_64x128x64_warp64x32x64_stages4_streamk_tma_ws``: the instruction, then the tiles of
a block and of a warp along M, N and K. The stages of the pipeline and what is switched on follow.
"""

from __future__ import annotations

from typing import Any

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.tables import KernelName

_NAME = KernelName(
    "[default_?is_default]{mma:word}_{tile:x3}_warp{warp:x3}_stages{stages}[_streamk?stream_k][_tma?tma][_notmac?plain_c][_ws?specialised]"
    "[_wait?split_wait][_ctas{ctas=1}][_cast{cast=1}][_raster{raster=1}][_chunk{chunk}][_produce{produce}][_consume{consume}]"
    "[_reuse{reuse:word}][_sms{sms}]"
)
#: Field -> Humming's name of it and the value where it is absent.
_FIELDS: dict[str, tuple[str, Any]] = {
    "mma": ("mma_type", "wgmma"), "tile": ("block_shape", ()), "warp": ("warp_shape", ()), "stages": ("num_stages", 2),
    "stream_k": ("use_stream_k", True), "tma": ("use_tma", False), "specialised": ("use_warp_spec", False),
    "split_wait": ("wgmma_split_issue_wait", False), "ctas": ("num_ctas_per_sm", 1), "cast": ("multi_cast_size_a", 1),
    "raster": ("raster_group_m", 1), "chunk": ("output_chunk_rows", 0), "produce": ("producer_stage_unroll", 0),
    "consume": ("consumer_stage_unroll", 0), "sms": ("num_sms", 0),
}  # fmt: skip
#: Fields that the name states otherwise, or that have one value here.
_OTHERS = {"smem_reuse_mode", "use_tma_c", "use_f16_accum"}
_REUSE = {"": "all_stages", "last": "last_stage", "none": "none"}


@attrs.frozen
class Config:
    """One configuration of Humming's kernel.

    Attributes:
        mma: instruction: ``mma`` or ``wgmma``.
        tile, warp: tiles of a block and of a warp along M, N and K.
        stages: of the pipeline of loads.
        stream_k: whether blocks share tiles, parts of K each.
        tma: whether the TMA loads and stores.
        plain_c: whether the output is stored without the TMA.
        specialised: whether some warps load and others compute.
        split_wait: whether WGMMA's issue and wait are apart.
        ctas: blocks of a multiprocessor.
        cast: blocks that share a load of x.
        raster: tiles along M in a row of blocks' order.
        chunk: rows of a tile that are stored at once; 0 for all.
        produce, consume: stages that loops are unrolled by; 0 for all.
        reuse: stages whose shared memory the output takes: "" for all, ``last`` or ``none``.
        sms: multiprocessors that run; 0 for all.
        is_default: whether Humming chose it itself for the shape.
    """

    mma: str
    tile: tuple[int, ...]
    warp: tuple[int, ...]
    stages: int
    stream_k: bool = False
    tma: bool = False
    plain_c: bool = False
    specialised: bool = False
    split_wait: bool = False
    ctas: int = 1
    cast: int = 1
    raster: int = 1
    chunk: int = 0
    produce: int = 0
    consume: int = 0
    reuse: str = ""
    sms: int = 0
    is_default: bool = False

    @property
    def name(self) -> str:
        """Return the name in a table."""
        return _NAME.write(self)

    @property
    def locks(self) -> int:
        """Return how many groups of warps store a tile: each takes a lock."""
        groups = self.tile[0] // self.warp[0] * (self.tile[1] // self.warp[1]) // 4
        return max(groups, 1)

    def tuning(self) -> dict[str, Any]:
        """Return Humming's ``tuning_config``, without ``num_sms``, which belongs to a launch."""
        values = {theirs: getattr(self, ours) for ours, (theirs, _) in _FIELDS.items() if ours != "sms"}
        values = {name: value for name, value in values.items() if value or value is False}
        values["smem_reuse_mode"] = _REUSE[self.reuse]
        return values | ({"use_tma_c": False} if self.plain_c else {})


def config_of(tuning: dict[str, Any]) -> Config:
    """Return the configuration of Humming's ``tuning_config``.

    Raises:
        PluginError: it has a setting that a name cannot state.
    """
    unknown = set(tuning) - {theirs for theirs, _ in _FIELDS.values()} - _OTHERS
    if unknown or tuning.get("use_f16_accum"):
        raise PluginError(f"humming: no name for a configuration with {', '.join(sorted(unknown)) or 'use_f16_accum'}")
    given = {theirs: value for theirs, value in tuning.items() if value is not None}
    values = {ours: given.get(theirs, absent) for ours, (theirs, absent) in _FIELDS.items()}
    values |= {name: tuple(map(int, values[name])) for name in ("tile", "warp")}
    reuse = {theirs: ours for ours, theirs in _REUSE.items()}[tuning.get("smem_reuse_mode") or "all_stages"]
    return Config(**values, reuse=reuse, plain_c=bool(values["tma"]) and tuning.get("use_tma_c") is False)


def parse_name(name: str) -> Config:
    """Return the configuration of a name.

    Raises:
        PluginError: no kernel has that name.
    """
    fields = _NAME.parse(name)
    if fields is None or fields["mma"] not in ("mma", "wgmma") or fields.get("reuse", "") not in _REUSE:
        raise PluginError(f"humming: no kernel of that name (got {name!r}); tune the shape again")
    if not all((*fields["tile"], *fields["warp"], fields["stages"])):
        raise PluginError(f"humming: no kernel has a size of 0 (got {name!r}); tune the shape again")
    return Config(**fields)

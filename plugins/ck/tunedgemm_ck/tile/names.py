"""Map AITER's names to the template parameters of a CK Tile GEMM kernel and back."""

from __future__ import annotations

import functools
import math
import re

import attrs
from tunedgemm.plugin import PluginError

_SHUFFLED, _BLOCKSCALE = "a8w8_bpreshuffle_cktile", "a8w8_blockscale_cktile"

#: Op to the prefix of its names. AITER names the instances of both ops with block scales alike; the
#: op determines the weight's layout.
PREFIXES = {"a8w8_bpreshuffle": _SHUFFLED, "a8w8_blockscale": _BLOCKSCALE, "a8w8_blockscale_bpreshuffle": _BLOCKSCALE}

_SCHEDULERS = ("default", "intrawave", "interwave")
#: AITER's maximum of blocks per compute unit.
MOST_BLOCKS = 4
#: M, N and K of the matrix instruction; several of them make one step along K.
_WARP_TILES = ((16, 16, 32), (16, 16, 64), (16, 16, 128), (32, 32, 16), (32, 32, 32), (32, 32, 64))

_SIZES = "_".join(rf"(?P<{sizes}>\d{{1,4}}x\d{{1,4}}x\d{{1,4}})" for sizes in ("tile", "warps", "warp_tile"))
_PATTERNS = {
    _SHUFFLED: rf"(?P<traits>\d{{1,3}}(x\d{{1,3}}){{9}})_{_SIZES}_(?P<scheduler>[a-z]+)",
    _BLOCKSCALE: rf"{_SIZES}_(?P<scheduler>[a-z]+)_(?P<traits>[01]x[01]x[01])_(?P<blocks>\d)(?P<aqrm>_aqrm)?",
}
EXAMPLES = {
    _SHUFFLED: "a8w8_bpreshuffle_cktile_0x0x8x4x1x0x0x0x0x1_16x64x512_1x4x1_16x16x64_default",
    _BLOCKSCALE: "a8w8_blockscale_cktile_128x128x128_1x4x1_16x16x64_intrawave_0x1x0_1",
}


@attrs.frozen(cache_hash=True)
class TileInstance:
    """Template parameters of one kernel.

    Attributes:
        op: the op.
        tile: M, N and K of a block.
        warps: waves of a block along M, N and K.
        warp_tile: M, N and K of a wave's matrix instruction.
        scheduler: ``default``, ``intrawave`` or ``interwave``.
        blocks: minimum of blocks per compute unit, which bounds their registers.
        transpose_c: whether the kernel computes the transposed product.
        sparse: whether the weight has structured sparsity.
        group_num, m01: order of blocks that run together: groups along M, and blocks of a group.
        wave_groups: groups of waves that share a block.
        double_buffer: whether shared memory holds two tiles.
        pad: whether M, N and K may be other than multiples of the tile; () where the launch
            decides,
            as with block scales.
        permute_n: whether the order of N is permuted.
        persistent: whether blocks take several tiles.
        row_major_scales: whether eight waves read the scales of x row by row instead of by columns.

    Raises:
        PluginError: the parameters are inconsistent; the message names the part.
    """

    op: str
    tile: tuple[int, int, int]
    warps: tuple[int, int, int]
    warp_tile: tuple[int, int, int]
    scheduler: str
    blocks: int
    transpose_c: bool
    sparse: bool = False
    group_num: int = 8
    m01: int = 4
    wave_groups: int = 1
    double_buffer: bool = False
    pad: tuple[bool, ...] = ()
    permute_n: bool = False
    persistent: bool = False
    row_major_scales: bool = False

    def __attrs_post_init__(self) -> None:
        if self.op not in PREFIXES:
            raise PluginError(f"cktile has no instances of op {self.op!r}; supported: {', '.join(PREFIXES)}")
        for part, wrong in _faults(self):
            if wrong:
                raise PluginError(f"cktile {self.op}: {part}: {wrong}")

    @property
    def eight_waves(self) -> bool:
        """Return whether this is CK Tile's pipeline of eight waves.

        It needs gfx950's matrix instruction of 128 elements along K.
        """
        return self.op != "a8w8_bpreshuffle" and math.prod(self.warps) == 8 and self.warp_tile[2] == 128

    @property
    def name(self) -> str:
        """Return ``kernelName``."""
        sizes = ["x".join(map(str, sizes)) for sizes in (self.tile, self.warps, self.warp_tile)]
        if PREFIXES[self.op] == _SHUFFLED:
            traits = (self.transpose_c, self.sparse, self.group_num, self.m01, self.wave_groups, self.double_buffer, *self.pad, self.blocks)
            return "_".join([_SHUFFLED, "x".join(str(int(trait)) for trait in traits), *sizes, self.scheduler])
        switches = "x".join(str(int(trait)) for trait in (self.permute_n, self.transpose_c, self.persistent))
        return "_".join([_BLOCKSCALE, *sizes, self.scheduler, switches, str(self.blocks)]) + "_aqrm" * self.row_major_scales


def _faults(of: TileInstance) -> list[tuple[str, str]]:
    """Return the parts of the name, each with its fault or ""."""
    cut = all(whole > 0 for whole in (*of.tile, *of.warps)) and of.warp_tile in _WARP_TILES
    cut = cut and all(tile % (warps * wave) == 0 for tile, warps, wave in zip(of.tile, of.warps, of.warp_tile, strict=True))
    texts = ["x".join(map(str, sizes)) for sizes in (of.tile, of.warps, of.warp_tile)]
    return [
        ("warp tile", "" if of.warp_tile in _WARP_TILES else f"must be a matrix instruction (got {texts[2]})"),
        ("tile", "" if cut else f"{texts[0]} cannot be cut into {texts[1]} waves of {texts[2]}"),
        ("waves", "" if math.prod(of.warps) in (1, 2, 4, 8) else f"must be 1, 2, 4 or 8 per block (got {texts[1]})"),
        ("scheduler", "" if of.scheduler in _SCHEDULERS else f"must be one of {', '.join(_SCHEDULERS)} (got {of.scheduler!r})"),
        ("blocks per compute unit", "" if 1 <= of.blocks <= MOST_BLOCKS else f"must be 1 to {MOST_BLOCKS} (got {of.blocks})"),
        ("sparsity", "structured sparsity of weights is not supported" if of.sparse else ""),
        ("row-major scales", "supported only with eight waves" if of.row_major_scales and not of.eight_waves else ""),
    ]


@functools.lru_cache(maxsize=4096)
def parse_name(name: str, op: str) -> TileInstance:
    """Return the instance of *op* with this name; `TileInstance.name` is the inverse.

    Raises:
        PluginError: the op has no instance of that name; the message names the unknown part.
    """
    prefix = PREFIXES.get(op)
    if prefix is None:
        raise PluginError(f"cktile has no instances of op {op!r}; supported: {', '.join(PREFIXES)}")
    match = re.fullmatch(rf"{prefix}_{_PATTERNS[prefix]}", name)
    if not match:
        raise PluginError(f"cktile {op} has no kernel {name!r}: names look like {EXAMPLES[prefix]}")
    texts = match.groupdict()
    traits = tuple(map(int, texts["traits"].split("x")))
    tile, warps, warp_tile = (tuple(map(int, texts[sizes].split("x"))) for sizes in ("tile", "warps", "warp_tile"))
    if prefix == _BLOCKSCALE:
        permute_n, transpose_c, persistent = map(bool, traits)
        rest = {"permute_n": permute_n, "persistent": persistent, "row_major_scales": bool(texts["aqrm"]), "blocks": int(texts["blocks"])}
        return TileInstance(op, tile, warps, warp_tile, texts["scheduler"], transpose_c=transpose_c, **rest)  # type: ignore[arg-type]
    switches = (*traits[:2], *traits[5:9])
    if any(switch > 1 for switch in switches):
        raise PluginError(f"cktile {op} has no kernel {name!r}: switches must be 0 or 1 (got {texts['traits']!r})")
    return TileInstance(
        op,
        tile,  # type: ignore[arg-type]
        warps,  # type: ignore[arg-type]
        warp_tile,  # type: ignore[arg-type]
        texts["scheduler"],
        blocks=traits[9],
        transpose_c=bool(traits[0]),
        sparse=bool(traits[1]),
        group_num=traits[2],
        m01=traits[3],
        wave_groups=traits[4],
        double_buffer=bool(traits[5]),
        pad=tuple(map(bool, traits[6:9])),
    )

"""Map AITER's names to the template parameters of a CK Tile GEMM kernel and back."""

from __future__ import annotations

import functools
import math

import attrs
from tunedgemm.plugin import PluginError
from tunedgemm.tools.tables import KernelName

_SHUFFLED, _BLOCKSCALE = "a8w8_bpreshuffle_cktile", "a8w8_blockscale_cktile"

#: Op to the prefix of its names. AITER names the instances of both ops with block scales alike; the
#: op determines the weight's layout.
PREFIXES = {"a8w8_bpreshuffle": _SHUFFLED, "a8w8_blockscale": _BLOCKSCALE, "a8w8_blockscale_bpreshuffle": _BLOCKSCALE}

_SCHEDULERS = ("default", "intrawave", "interwave")
#: AITER's maximum of blocks per compute unit.
MOST_BLOCKS = 4
#: M, N and K of the matrix instruction; several of them make one step along K.
_WARP_TILES = ((16, 16, 32), (16, 16, 64), (16, 16, 128), (32, 32, 16), (32, 32, 32), (32, 32, 64))

_FORMS = {
    _SHUFFLED: KernelName(f"{_SHUFFLED}_{{traits:x9}}x{{blocks}}_{{tile:x3}}_{{warps:x3}}_{{warp_tile:x3}}_{{scheduler:word}}", "traits"),
    _BLOCKSCALE: KernelName(
        f"{_BLOCKSCALE}_{{tile:x3}}_{{warps:x3}}_{{warp_tile:x3}}_{{scheduler:word}}_{{traits:x3}}_{{blocks}}[_aqrm?row_major_scales]",
        "traits",
    ),
}
#: Fields behind the numbers of ``traits``, in order; three of `pad`.
_TRAITS = {
    _SHUFFLED: ("transpose_c", "sparse", "group_num", "m01", "wave_groups", "double_buffer", "pad_m", "pad_n", "pad_k"),
    _BLOCKSCALE: ("permute_n", "transpose_c", "persistent"),
}
_COUNTS = ("group_num", "m01", "wave_groups")
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
        for part, wrong in _faults(self):
            if wrong:
                raise PluginError(f"cktile {self.op}: {part}: {wrong}")

    @property
    def sides(self) -> tuple[int, int, int]:
        """Return M, N and the elements of K of a block's tile."""
        return self.tile

    @property
    def eight_waves(self) -> bool:
        """Return whether this is CK Tile's pipeline of eight waves.

        It needs gfx950's matrix instruction of 128 elements along K.
        """
        return self.op != "a8w8_bpreshuffle" and math.prod(self.warps) == 8 and self.warp_tile[2] == 128

    @property
    def name(self) -> str:
        """Return ``kernelName``."""
        prefix = PREFIXES[self.op]
        values = {
            **{name: getattr(self, name, 0) for name in _TRAITS[prefix]},
            **dict(zip(("pad_m", "pad_n", "pad_k"), self.pad, strict=False)),
        }
        return _FORMS[prefix].write(self, tuple(values[name] for name in _TRAITS[prefix]))


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
    fields = _FORMS[prefix].parse(name)
    if fields is None:
        raise PluginError(f"cktile {op} has no kernel {name!r}: names look like {EXAMPLES[prefix]}")
    traits = dict(zip(_TRAITS[prefix], fields.pop("traits"), strict=True))
    if wrong := [trait for trait, value in traits.items() if value > 1 and trait not in _COUNTS]:
        raise PluginError(f"cktile {op} has no kernel {name!r}: switches must be 0 or 1 (got {traits[wrong[0]]} for {wrong[0]})")
    values = {trait: value if trait in _COUNTS else bool(value) for trait, value in traits.items()}
    pad = tuple(values.pop(f"pad_{size}") for size in "mnk" if f"pad_{size}" in values)
    return TileInstance(op, **fields, **values, pad=pad)

"""Map solution names (column ``kernelName``) to algorithms of the library and back.

cuBLASLt's algorithms are configured:
``id66_tile20_stages36_reduce0_swizzle0_option0_inner0_cluster2``, with the column splitK.
hipBLASLt's are indexed: ``sol1234_v100200_a1b2c3d4``. An index belongs to one build of the library.
``Cijk_Alik_Bljk_…`` is hipBLASLt's name of a kernel or solution, as in AITER's files. ``heuristic``
is the library's first answer. The suffix ``fast`` sums fp8 products in a shorter
accumulator. The suffix ``after`` adds the bias after the product.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType

import attrs
from tunedgemm.plugin import PluginError, Solution
from tunedgemm.tools.tables import KernelName

from tunedgemm_hipblaslt.abi import Abi

#: Attributes of a cuBLASLt algorithm, except splitK: word in a name -> attribute in `Abi.config`.
CONFIG_WORDS = {
    "id": "id", "tile": "tile", "stages": "stages", "reduce": "reduction", "swizzle": "swizzle", "option": "option", "inner": "inner",
    "cluster": "cluster",
}  # fmt: skip
_CONFIG = KernelName("_".join(f"{word}{{{name}}}" for word, name in CONFIG_WORDS.items()))
FIRST = "heuristic"
#: Suffix of a name -> attribute of `SolutionName`, in the order in which they are written.
_SUFFIXES = {"fast": "fast_accum", "after": "bias_after"}
#: hipBLASLt's names, in Tensile's notation of the product; hand-written kernels have a prefix.
_NAMED = re.compile(r"\w*Cijk_\w+")
_INDEXED = re.compile(r"sol(\d+)_v(\d+)_([0-9a-zA-Z.+-]+)")

#: Sides of the tiles numbered 1 to 38, rows of D by columns of D (our N by our M).
_FIRST_TILES = (
    "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 64x256 128x128 256x64 "
    "64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 128x96 32x256 256x32 8x128 8x192 8x256"
)
#: Sides of the tiles from number 631.
_LAST_TILES = "256x512 256x1024 512x512 512x1024 4x1 8x1 16x1 24x1 32x1 40x1 48x1 64x1 128x1 192x1 256x1"
#: Hopper's tiles are between them: one side a multiple of 8, the other of 64, up to these sizes.
_LARGEST_SIDE, _TALL_ELEMENTS, _WIDE_ELEMENTS = 768, 49152, 65536
#: Cluster shapes from number 2. Number 0 lets the library choose.
_CLUSTERS = (
    "1x1 2x1 4x1 1x2 2x2 4x2 1x4 2x4 4x4 8x1 1x8 8x2 2x8 16x1 1x16 3x1 5x1 6x1 7x1 9x1 10x1 11x1 12x1 13x1 14x1 15x1 3x2 5x2 6x2 7x2 "
    "1x3 2x3 3x3 4x3 5x3 3x4 1x5 2x5 3x5 1x6 2x6 1x7 2x7 1x9 1x10 1x11 1x12 1x13 1x14 1x15"
)


@attrs.frozen
class KernelConfig:
    """Configuration of a cuBLASLt algorithm: the attributes in `CONFIG_WORDS` and ``split_k``."""

    id: int
    tile: int = 0
    stages: int = 0
    reduction: int = 0
    swizzle: int = 0
    option: int = 0
    inner: int = 0
    cluster: int = 0
    split_k: int = 1

    def __str__(self) -> str:
        return _CONFIG.write(self)


@attrs.frozen
class AlgorithmIndex:
    """Index of a hipBLASLt algorithm, with the version and revision that it belongs to."""

    index: int
    version: int
    revision: str

    def __str__(self) -> str:
        return f"sol{self.index}_v{self.version}_{self.revision}"


@attrs.frozen
class SolutionName:
    """Parsed name of a solution.

    Attributes:
        algorithm: the algorithm, as a text by hipBLASLt's own name of a kernel or solution, which
            holds in every build that has it; None for the library's first answer.
        fast_accum: whether fp8 products are summed in a shorter accumulator.
        bias_after: whether the bias is added after the product.
    """

    algorithm: KernelConfig | AlgorithmIndex | str | None
    fast_accum: bool = False
    bias_after: bool = False

    def __str__(self) -> str:
        suffixes = [suffix for suffix, attribute in _SUFFIXES.items() if getattr(self, attribute)]
        return "_".join([FIRST if self.algorithm is None else str(self.algorithm), *suffixes])


def is_library_name(text: str) -> bool:
    """Tell whether a text has the form of hipBLASLt's names."""
    return bool(_NAMED.fullmatch(text))


@functools.lru_cache(maxsize=4096)
def parse_name(text: str, split_k: int) -> SolutionName:
    """Parse the columns kernelName and splitK; `str` is the inverse.

    Raises:
        PluginError: the text has none of the four forms.
    """
    rest, flags = text, {}
    for suffix, attribute in reversed(_SUFFIXES.items()):
        flags[attribute] = rest.endswith(f"_{suffix}")
        rest = rest.removesuffix(f"_{suffix}")
    if rest == FIRST:
        return SolutionName(None, **flags)
    if indexed := _INDEXED.fullmatch(rest):
        return SolutionName(AlgorithmIndex(int(indexed[1]), int(indexed[2]), indexed[3]), **flags)
    if is_library_name(rest):
        return SolutionName(rest, **flags)
    if (numbers := _CONFIG.parse(rest)) is None:
        raise PluginError(f"kernelName: not a name of an Lt library (got {text!r}); use {FIRST}, sol…_v…_…, Cijk_… or id…_tile…_…")
    return SolutionName(KernelConfig(**numbers, split_k=split_k or 1), **flags)


def name_of(abi: Abi, solution: Solution) -> SolutionName:
    """Return the parsed name of a solution.

    Raises:
        PluginError: it has none, or one of no form that this library takes.
    """
    if not solution.kernel_name:
        raise PluginError(f"kernelName: empty, and algorithm {solution.solidx} is of an unknown {abi.libtype}; tune the shape again")
    name = parse_name(solution.kernel_name, solution.split_k)
    if abi.config and isinstance(name.algorithm, AlgorithmIndex | str):
        raise PluginError(f"kernelName: {abi.libtype} takes id…_tile…_… (got {name}, an algorithm of hipBLASLt)")
    if not abi.config and isinstance(name.algorithm, KernelConfig):
        raise PluginError(f"kernelName: {abi.libtype} takes sol…_v…_… or Cijk_… (got {name}, a configuration of cuBLASLt)")
    return name


@functools.cache
def tiles() -> Mapping[int, tuple[int, int]]:
    """Map each ``cublasLtMatmulTile_t`` to the (rows, columns) of its tile of D."""
    sides = dict.fromkeys(_parse_sides(_FIRST_TILES))
    fine, coarse = range(8, _LARGEST_SIDE + 1, 8), range(64, _LARGEST_SIDE + 1, 64)
    sides |= {(rows, columns): None for rows in fine for columns in coarse if rows * columns <= _TALL_ELEMENTS}
    sides |= {(rows, columns): None for rows in coarse for columns in fine if rows * columns <= _WIDE_ELEMENTS}
    return MappingProxyType(dict(enumerate([*sides, *_parse_sides(_LAST_TILES)], start=1)))


@functools.cache
def clusters() -> Mapping[int, tuple[int, int]]:
    """Map each ``cublasLtClusterShape_t`` to the (rows, columns) of its cluster of CTAs."""
    return MappingProxyType(dict(enumerate(_parse_sides(_CLUSTERS), start=2)))


def _parse_sides(text: str) -> list[tuple[int, int]]:
    return [(int(rows), int(columns)) for rows, _, columns in (size.partition("x") for size in text.split())]

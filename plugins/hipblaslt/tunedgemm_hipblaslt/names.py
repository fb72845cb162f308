"""Names of solutions: everything that makes one again, in a table's column ``kernelName``.

cuBLASLt's algorithms are configured: ``id66_tile20_stages36_reduce0_swizzle0_option0_inner0_cluster2``, with the column splitK.
hipBLASLt's are numbered, and the numbers hold for one build of the library: ``sol1234_v100200_a1b2c3d4``.
``heuristic`` is the library's own first answer. Endings: ``fast`` sums fp8 products in fewer bits, ``after`` adds the bias
after the product.
"""

from __future__ import annotations

import functools
import re

import attrs
from tunedgemm.plugin import PluginError

#: What configures an algorithm of cuBLASLt beside splitK: our word -> the attribute's name in `abi.Abi.config`.
PARTS = {
    "id": "id", "tile": "tile", "stages": "stages", "reduce": "reduction", "swizzle": "swizzle", "option": "option", "inner": "inner",
    "cluster": "cluster",
}  # fmt: skip
FIRST = "heuristic"
_ENDINGS = ("fast", "after")
_NUMBERED = re.compile(r"sol(\d+)_v(\d+)_([0-9a-zA-Z.+-]+)")


@attrs.frozen
class Algorithm:
    """One configuration of cuBLASLt: the numbers of its attributes, those of `PARTS` and ``split_k``."""

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
        return "_".join(f"{word}{getattr(self, name)}" for word, name in PARTS.items())


@attrs.frozen
class Numbered:
    """One algorithm of hipBLASLt: its number, and the version and revision of the library that it belongs to."""

    index: int
    version: int
    revision: str

    def __str__(self) -> str:
        return f"sol{self.index}_v{self.version}_{self.revision}"


@attrs.frozen
class Name:
    """A solution's name, taken apart.

    Attributes:
        chosen: the algorithm; None for the library's first answer.
        fast, after: see the module.
    """

    chosen: Algorithm | Numbered | None
    fast: bool = False
    after: bool = False

    def __str__(self) -> str:
        endings = [ending for ending in _ENDINGS if getattr(self, ending)]
        return "_".join([FIRST if self.chosen is None else str(self.chosen), *endings])


@functools.lru_cache(maxsize=4096)
def parse(text: str, split_k: int) -> Name:
    """A name from the columns kernelName and splitK; `str` is its inverse.

    Raises:
        PluginError: it is no name of this form.
    """
    rest, found = text, {}
    for ending in reversed(_ENDINGS):
        found[ending] = rest.endswith(f"_{ending}")
        rest = rest.removesuffix(f"_{ending}")
    if rest == FIRST:
        return Name(None, **found)
    if numbered := _NUMBERED.fullmatch(rest):
        return Name(Numbered(int(numbered[1]), int(numbered[2]), numbered[3]), **found)
    parts = [re.fullmatch(rf"{word}(\d+)", part) for word, part in zip(PARTS, rest.split("_"), strict=False)]
    if len(rest.split("_")) != len(PARTS) or not all(parts):
        raise PluginError(f"kernelName {text!r} is none of an Lt library: {FIRST}, sol… or id…_tile…_… is")
    numbers = {name: int(part[1]) for name, part in zip(PARTS.values(), parts, strict=True) if part}
    return Name(Algorithm(**numbers, split_k=split_k or 1), **found)

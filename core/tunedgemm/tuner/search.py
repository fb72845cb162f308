"""Search: how many solutions of a libtype the screen tries, and where it gets more.

A quick search compiles the beginning of each list first. It needs lists whose order was measured:
`tunedgemm.backends.platforms.Platform.ranked`. A replay of trial logs chose its numbers
(``tests/tuner/test_search.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import attrs

from tunedgemm.solution import Solution

#: Passes of refinement at most.
PASSES = 3


@attrs.frozen
class Search:
    """How far to search a libtype.

    Attributes:
        leaders: best solutions whose neighbours are tried.
        passes: by pass, how much slower than the fastest a libtype may be to get neighbours.
        first: solutions that are tried first; 0 for all.
        most: solutions of the list; 0 for all.
        behind: how much slower than the fastest a libtype may be for the rest of its list.
        near: most new neighbours in a pass; 0 for all. cuBLASLt's leaders have up to 90.
        finalists: most solutions that reach the accurate phase, in addition to the first guess; 0
            for the options' ``topk``.
    """

    leaders: int
    passes: tuple[float, float, float]
    first: int = 0
    most: int = 0
    behind: float = 1.0
    near: int = 0
    finalists: int = 0

    def split(self, listed: Sequence[Solution]) -> tuple[Sequence[Solution], Sequence[Solution]]:
        """Return the solutions of a list to try first, and the rest."""
        first = self.first or len(listed)
        return listed[:first], listed[first:]


#: Of 180 libtypes over 5 % slower, no neighbour came within 0.5 % of the winner (asm, skinny and
#: Triton, 306 shapes in bf16 and row-wise fp8, H100).
FULL = Search(leaders=5, passes=(1.1, 1.05, 1.05))
#: Chosen on logs of an H100 and an H200 for a mean loss of at most 0.3 % in each op. Later passes
#: refine the fastest libtype alone.
QUICK = Search(leaders=3, passes=(1.02, 1.0, 1.0), first=8, most=16, behind=1.1, near=32, finalists=4)
#: Most rounds of a race after a quick search; a last comparison of the fastest decides.
QUICK_ROUNDS = 32


def _none(_: Collection[str], __: Sequence[Solution]) -> Sequence[Solution]:
    return ()


@attrs.frozen
class Further:
    """Sources of more solutions; each function compiles and checks them, which is slow.

    Attributes:
        neighbours: leaders -> their neighbours.
        rest: libtypes, leaders -> the rest of their lists; the leaders' neighbours, which come
            next, compile meanwhile.
        quick: libtypes of a quick search.
    """

    neighbours: Callable[[Sequence[Solution]], Sequence[Solution]]
    rest: Callable[[Collection[str], Sequence[Solution]], Sequence[Solution]] = _none
    quick: frozenset[str] = frozenset()

    def search(self, libtype: str) -> Search:
        """Return how far to search a libtype."""
        return QUICK if libtype in self.quick else FULL

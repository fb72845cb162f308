"""Solutions of a shape: the library's answers, best guesses first, and what lies around a good one of cuBLASLt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution
from tunedgemm.tools import dtype_bits

from tunedgemm_hipblaslt.descriptors import Described, Found, asking
from tunedgemm_hipblaslt.launch import ALL, LIKED, answers_by_number
from tunedgemm_hipblaslt.library import Library, build
from tunedgemm_hipblaslt.names import Algorithm, Name, Numbered, parse
from tunedgemm_hipblaslt.problem import Problem, problem_of
from tunedgemm_hipblaslt.search import neighbours

#: Where fp8 products can be summed in fewer bits, and the outputs that this is exact enough for.
_FAST_GFX, _FAST_OUTPUTS = ("sm_89", "sm_90"), ("bf16",)
#: Rows beyond which no other number of them is asked about.
_MOST_ROWS = 1 << 20
#: Answers that are also offered with the bias added after.
_AFTER = 3


def enumerate_solutions(library: Library, shape: Shape, device: Device) -> Iterator[Solution]:
    """The library's answers on the present device: all that hipBLASLt has, the few that cuBLASLt guesses.

    An answer is listed with the bias within the product, and the first few also with the bias after it; all of those where the
    library does not add a bias of that dtype.
    """
    within = _answers(library, _problems(shape), device.index)
    for chosen in within:
        yield solution_of(library, Name(chosen))
    if sums_fast(library, shape, device):
        for chosen in _answers(library, _problems(shape, fast=True), device.index):
            yield solution_of(library, Name(chosen, fast=True))
    if problem_of(shape).bias_dtype:
        after = _answers(library, _problems(shape, after=True), device.index)
        for chosen in after[:_AFTER] if within else after:
            yield solution_of(library, Name(chosen, after=True))


def refine(library: Library, solution: Solution, shape: Shape, device: Device) -> Iterator[Solution]:
    """The neighbours of a configuration of cuBLASLt; hipBLASLt listed all that it has."""
    try:
        name = parse(solution.kernel_name, solution.split_k)
    except PluginError:
        return
    if not isinstance(name.chosen, Algorithm) or not library.abi.config:
        return
    problem = problem_of(shape, after=name.after, fast=name.fast)
    with asking(library, problem, device.index) as described:
        found = list(neighbours(described, name.chosen, library.abi.workspace))
    for algorithm, _ in found:
        yield solution_of(library, attrs.evolve(name, chosen=algorithm))


def sums_fast(library: Library, shape: Shape, device: Device) -> bool:
    """Whether fp8 products of the shape may be summed in fewer bits there."""
    fp8 = dtype_bits(shape.dtype) == 8 and shape.dtype != "int8"
    able = "fast_accum" in library.abi.desc and device.gfx in _FAST_GFX
    return able and fp8 and shape.outdtype in _FAST_OUTPUTS and shape.scale != "block" and not shape.op.startswith("batched_")


def solution_of(library: Library, name: Name) -> Solution:
    """The solution of a name; its number, where it has one, goes along as a hint."""
    parts = name.chosen.split_k if isinstance(name.chosen, Algorithm) else 0
    number = name.chosen.index if isinstance(name.chosen, Numbered) else 0
    return Solution(library.abi.libtype, str(name), split_k=parts, solidx=number)


def _problems(shape: Shape, **how: bool) -> list[Problem]:
    """The problem of a shape, and of as many rows halved, doubled and doubled again: what the library answers there may suit here."""
    rows = dict.fromkeys((shape.m, shape.m // 2, 2 * shape.m, 4 * shape.m))
    return [problem_of(attrs.evolve(shape, m=m), **how) for m in rows if m == shape.m or 0 < m <= _MOST_ROWS]


def _answers(library: Library, problems: Sequence[Problem], index: int) -> list[Algorithm | Numbered | None]:
    """The library's answers for the first of some problems, best guesses first; then those for the others that fit it.

    None stands for its first answer where its name would not make it again.
    """
    problem, *others = problems
    if not library.abi.config:
        present = build(library, index)
        return [Numbered(number, *present) for number in answers_by_number(library, problem, index, ALL)]
    limit = library.abi.workspace
    with asking(library, problem, index) as described:
        # Without scratch it answers with kernels that it otherwise ranks behind those that divide K.
        found = [*described.answers(LIKED, limit), *described.answers(LIKED, 0)]
        for other in others if found else ():
            found += Described(library, other, index).answers(LIKED, limit)
        algorithms = dict.fromkeys(described.configured(each.algo) for each in found)
        # Whatever an answer holds beside its attributes is lost by its name.
        checked = {algorithm: described.check(algorithm) for algorithm in algorithms}
        named = [algorithm for algorithm, answer in checked.items() if isinstance(answer, Found) and answer.workspace <= limit]
        lost = bool(found) and described.initialised(next(iter(algorithms))) != found[0].algo
    return [*((None,) if lost else ()), *named]

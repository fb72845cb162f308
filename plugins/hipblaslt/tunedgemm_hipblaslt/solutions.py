"""Solutions of a shape: the library's answers, best guesses first, and what lies around a good one of cuBLASLt."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from tunedgemm.plugin import Device, PluginError, Shape, Solution, dtype_bits

from tunedgemm_hipblaslt.descriptors import Found, asking
from tunedgemm_hipblaslt.launch import ALL, LIKED, answers_by_number
from tunedgemm_hipblaslt.library import Library, current, revision, version
from tunedgemm_hipblaslt.names import Algorithm, Name, Numbered, parse
from tunedgemm_hipblaslt.problem import Problem, problem_of
from tunedgemm_hipblaslt.search import neighbours

#: Where fp8 products can be summed in fewer bits, and the outputs that this is exact enough for.
_FAST_GFX, _FAST_OUTPUTS = ("sm_89", "sm_90"), ("bf16",)
#: Answers that are also offered with the bias added after.
_AFTER = 3


def enumerate_solutions(library: Library, shape: Shape, device: Device) -> Iterator[Solution]:
    """The library's answers on the present device: all that hipBLASLt has, the few that cuBLASLt guesses.

    An answer is listed with the bias within the product, and the first few also with the bias after it; all of those where the
    library does not add a bias of that dtype.
    """
    problem = problem_of(shape)
    within = _answers(library, problem, device.index)
    for chosen in within:
        yield solution_of(library, Name(chosen))
    if sums_fast(library, shape, device):
        for chosen in _answers(library, problem_of(shape, fast=True), device.index):
            yield solution_of(library, Name(chosen, fast=True))
    if problem.bias_dtype:
        after = _answers(library, problem_of(shape, after=True), device.index)
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


def _answers(library: Library, problem: Problem, index: int) -> list[Algorithm | Numbered]:
    """The library's answers for a problem, best guesses first."""
    if not library.abi.config:
        with current(index):
            present = (version(library, index), revision(library, index))
        return [Numbered(number, *present) for number in answers_by_number(library, problem, index, ALL)]
    limit = library.abi.workspace
    with asking(library, problem, index) as described:
        # Without scratch it answers with kernels that it otherwise ranks behind those that divide K.
        found = [*described.answers(LIKED, limit), *described.answers(LIKED, 0)]
        algorithms = dict.fromkeys(described.configured(each.algo) for each in found)
        # Whatever an answer holds beside its attributes is lost by its name: only what comes back right is listed.
        return [algorithm for algorithm in algorithms if isinstance(described.check(algorithm), Found)]

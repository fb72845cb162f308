"""Stages: a solution of fmoe is two instances, each a shared object of its own: n first and m second ones make n x m solutions."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from tunedgemm.plugin import PluginError, Shape

from tunedgemm_ck.family import Instance
from tunedgemm_ck.problem import Problem

#: Between the names of both stages, as in a table of fmoe.
JOIN = "+"


@attrs.frozen(cache_hash=True)
class Stages:
    """The instances of fmoe's two stages.

    Attributes:
        first: up to the quantised intermediate.
        second: from there to the output.
    """

    first: Instance
    second: Instance

    @property
    def name(self) -> str:
        """The text of ``kernelName``: AITER's ``kernelName1`` and ``kernelName2``."""
        return f"{self.first.name}{JOIN}{self.second.name}"


def parsed(name: str, libtype: str, parse: Callable[[str], Instance]) -> Stages:
    """The stages of a name, each read by *parse*.

    Raises:
        PluginError: these are not two names, or one of them is unknown.
    """
    names = name.split(JOIN)
    if len(names) != 2 or not all(names):
        raise PluginError(f"{libtype} has no kernel {name!r} for fmoe: two stages are two names with a {JOIN} between them")
    return Stages(*map(parse, names))


def parts(instance: Instance, problem: Problem) -> tuple[tuple[Instance, Problem], ...]:
    """What is compiled: the instance, or each of its stages for the problem that this stage knows of.

    Stage 1 knows no output, stage 2 no activation, nor where it is quantised the hidden states, so that one object serves all of them.
    """
    if not isinstance(instance, Stages):
        return ((instance, problem),)
    hidden = problem.dtype if problem.q_type == "No" else problem.outdtype
    first = attrs.evolve(problem, stage=1, outdtype=problem.dtype)
    return (instance.first, first), (instance.second, attrs.evolve(problem, stage=2, dtype=hidden, act="", gated=False))


def sizes_of(shape: Shape, split: int) -> tuple[int, ...]:
    """The sizes of ``TunedGemmMoe``, in its order."""
    return (shape.m, shape.n, shape.k, int(shape["expert"]), int(shape["topk"]), split)


_KINDS = {"No": "none", "per_Tensor": "tensor", "per_Token": "row", "per_1x128": "block", "per_1x32": "mx"}
_TYPES = {"bf16": "bf16", "fp16": "fp16", "int8": "int8", "fp8_e4m3fn": "e4m3fn", "fp8_e4m3fnuz": "e4m3fnuz", "fp4x2": "e2m1"}


def described(problem: Problem) -> str:
    """The constants of a stage for its source, which follow ``moe.h``."""
    return f"""
namespace tunedgemm::problem {{
inline constexpr int stage = {problem.stage};
inline constexpr moe::Kind kind = moe::Kind::{_KINDS[problem.q_type]};
inline constexpr moe::Type hidden = moe::Type::{_TYPES[problem.dtype]};       // of the hidden states
inline constexpr moe::Type quantised = moe::Type::{_TYPES[problem.q_dtype]};  // of the factors of both products
inline constexpr moe::Type output = moe::Type::{_TYPES[problem.outdtype]};
inline constexpr moe::Act act = moe::Act::{problem.act or "silu"};  // of stage 1
inline constexpr bool gated = {str(problem.gated).lower()};
inline constexpr bool weight_first = {str(problem.doweight_stage1).lower()};  // the routing's weights belong to stage 1
}}  // namespace tunedgemm::problem
"""

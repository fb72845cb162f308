"""Split a solution of fmoe into its two instances, each compiled into a shared object.

N first and M second instances make N x M solutions.
"""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Shape

from tunedgemm_ck.family import Instance
from tunedgemm_ck.names import Stages
from tunedgemm_ck.problem import Problem


def split_stages(instance: Instance, problem: Problem) -> tuple[tuple[Instance, Problem], ...]:
    """Return the compiled stages: the instance, or each of its stages with the problem of that stage.

    Stage 1 does not depend on the output, and stage 2 not on the activation. A quantised stage 2
    does
    not depend on the hidden states either. One object serves all of them.
    """
    if not isinstance(instance, Stages):
        return ((instance, problem),)
    hidden = problem.dtype if problem.q_type == "No" else problem.outdtype
    first = attrs.evolve(problem, stage=1, outdtype=problem.dtype)
    return (instance.first, first), (instance.second, attrs.evolve(problem, stage=2, dtype=hidden, act="", gated=False))


def sizes_of(shape: Shape, split: int) -> tuple[int, ...]:
    """Return the sizes of ``TunedGemmMoe``, in its order."""
    return (shape.m, shape.n, shape.k, int(shape["expert"]), int(shape["topk"]), split)


_KINDS = {"No": "none", "per_Tensor": "tensor", "per_Token": "row", "per_1x128": "block", "per_1x32": "mx"}
_TYPES = {"bf16": "bf16", "fp16": "fp16", "int8": "int8", "fp8_e4m3fn": "e4m3fn", "fp8_e4m3fnuz": "e4m3fnuz", "fp4x2": "e2m1"}


def render_constants(problem: Problem) -> str:
    """Return the constants of a stage for its source; they follow ``moe.h``."""
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

"""Check that CK's sources are reproducible and complete."""

from __future__ import annotations

import re

import attrs
from tunedgemm_ck.problem import Problem
from tunedgemm_ck.xdl.limits import ACCEPTS
from tunedgemm_ck.xdl.names import FORMS
from tunedgemm_ck.xdl.space import listed_instances
from tunedgemm_ck.xdl.template import DEVICE_OPS, flags, render


def problem_of(op: str, gfx: str = "gfx942", bias_dtype: str = "") -> Problem:
    """Return a problem of an op with a bf16 output."""
    accepted = ACCEPTS[op]
    dtype = "fp8_e4m3fnuz" if "fp8_e4m3fnuz" in accepted.dtypes else accepted.dtypes[0]
    return Problem(op, gfx, dtype, "bf16", bias_dtype, accepted.scale, accepted.layout)


def test_a_source_is_the_same_each_time_and_names_what_it_is() -> None:
    """Sources are reproducible, complete and distinct."""
    for op in sorted(FORMS):
        first, second = listed_instances(op)[:2]
        source = render(first, problem_of(op))
        assert source == render(attrs.evolve(first), problem_of(op))
        assert source != render(second, problem_of(op))
        assert source.splitlines()[0] == f"// {first.name}"
        assert '#include "call.h"' in source
        assert f'__has_include("ck/tensor_operation/gpu/device/impl/{DEVICE_OPS[op].header}' in source
        assert all(f"TUNED_GEMM_EXPORT {function}" in source for function in ("int tunedgemm_launch", "int64_t tunedgemm_workspace"))
        assert not re.search(r"hipMalloc|Synchronize|\{\{|\}\}\}\}", source)
        assert all(source.count(left) == source.count(right) for left, right in ("()", "{}", "[]"))


def test_a_bias_is_one_more_operand_of_the_epilogue() -> None:
    """Only a source with a bias has its pointer and type."""
    for op in [op for op in sorted(FORMS) if ACCEPTS[op].bias]:
        instance = listed_instances(op)[0]
        assert "call.bias" not in render(instance, problem_of(op))
        biased = render(instance, problem_of(op, bias_dtype="fp16"))
        assert "call.bias" in biased
        assert "ck::half_t" in biased


def test_the_kind_of_fp8_is_a_flag_of_the_architecture() -> None:
    """The flags select the architecture's fp8."""
    instance = listed_instances("a8w8")[0]
    assert "-DCK_USE_OCP_FP8=0" in flags(instance, problem_of("a8w8"))
    assert "-DCK_USE_OCP_FP8=1" in flags(instance, problem_of("a8w8", "gfx950"))

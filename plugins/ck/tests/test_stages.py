"""Check fmoe's stages: names, the problem of each stage, and unchanged texts of other ops."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.plugin import PluginError, Shape
from tunedgemm_ck import toolchain
from tunedgemm_ck.build import Target
from tunedgemm_ck.names import Stages, parse_stages
from tunedgemm_ck.native import MOE_POINTERS
from tunedgemm_ck.problem import Problem, problem_of
from tunedgemm_ck.stages import sizes_of, split_stages

EXTRA = {"expert": 8, "topk": 2, "act": "silu", "q_dtype_a": "fp8_e4m3fn", "q_dtype_w": "fp8_e4m3fn", "q_type": "per_Token"}
SHAPE = Shape("fmoe", 5, 64, 32, "fp16", "bf16", extra={**EXTRA, "g1u1": True, "doweight_stage1": False})


def test_names_are_joined_and_parsed(stand_in):
    """A pair's name is kernelName1+kernelName2 in both directions."""
    stages = Stages(stand_in.StandIn(64), stand_in.StandIn(128))
    assert stages.name == "tile64+tile128"
    assert stand_in.family("standin", "nvidia").parse(stages.name, "fmoe") == stages


def test_other_than_two_names_are_refused():
    """Anything but two names is refused with what is expected."""
    for name in ["", "tile64", "+", "tile64+", "+tile64", "tile64+tile64+tile64"]:
        with pytest.raises(PluginError, match=r"must be the names of two stages joined by \+"):
            parse_stages(name, "standin", lambda stage: stage)


def test_a_stage_has_only_what_its_object_depends_on(stand_in):
    """Each stage's problem has only what its object depends on."""
    stages = Stages(stand_in.StandIn(64), stand_in.StandIn(128))
    (first, one), (second, two) = split_stages(stages, problem_of(SHAPE, "sm_90"))
    assert (first.tile, second.tile) == (64, 128)
    assert (one.stage, one.dtype, one.outdtype, one.act, one.gated, one.q_type) == (1, "fp16", "fp16", "silu", True, "per_Token")
    assert (two.stage, two.dtype, two.outdtype, two.act, two.gated, two.q_dtype) == (2, "bf16", "bf16", "", False, "fp8_e4m3fn")
    plain = attrs.evolve(problem_of(SHAPE, "sm_90"), q_type="No", q_dtype="fp16")
    assert split_stages(stages, plain)[1][1].dtype == "fp16"


def test_other_ops_have_one_part(stand_in):
    """Other ops compile the instance itself."""
    problem = Problem("a16w16", "sm_90", "bf16", "bf16")
    assert split_stages(stand_in.StandIn(64), problem) == ((stand_in.StandIn(64), problem),)


def test_texts_of_other_ops_have_no_stages(target):
    """Texts of other ops, which are cache keys, have no fields of stages."""
    assert str(target.problem) == (
        "Problem(op='a16w16', gfx='sm_90', dtype='bf16', outdtype='bf16', bias_dtype='', scale='none', layout='row')"
    )
    assert target.source.partition("\n")[0] == (
        '// tunedgemm {"instance": "tile64", "op": "a16w16", "gfx": "sm_90", "dtype": "bf16", "outdtype": "bf16", "bias_dtype": "", '
        '"scale": "none", "layout": "row"}'
    )


def test_texts_state_the_whole_stage(stand_in):
    """A stage's text and source state the whole stage."""
    stages, family = Stages(stand_in.StandIn(64), stand_in.StandIn(128)), stand_in.family("standin", "nvidia")
    (first, one), _ = split_stages(stages, problem_of(SHAPE, "sm_90"))
    target = Target(family, first, one, toolchain.cuda)
    assert str(target) == "standin tile64 for stage 1 of fmoe fp16->fp16, per_Token fp8_e4m3fn, silu gated on sm_90"
    assert '"stage": 1, "act": "silu", "gated": true, "doweight_stage1": false, "q_type": "per_Token"' in target.source
    assert "struct TunedGemmMoe" in target.source
    assert "struct TunedGemmCall" not in target.source
    assert '#include "moe' not in target.source


def test_sizes_are_those_of_the_struct():
    """The sizes and the number of addresses are those of the struct."""
    assert sizes_of(SHAPE, 3) == (5, 64, 32, 8, 2, 3)
    assert MOE_POINTERS == 9 + 2

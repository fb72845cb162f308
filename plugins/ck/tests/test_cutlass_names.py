"""Check names of CUTLASS's instances in both directions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tunedgemm.plugin import PluginError
from tunedgemm_ck.cutlass.names import EXAMPLE, REVISION, CutlassInstance, parse_name
from tunedgemm_ck.cutlass.space import listed_instances

SPACES = [("sm_80", "int8", False), ("sm_80", "bf16", False), ("sm_90", "bf16", False), ("sm_90", "int8", False)]
SPACES += [(gfx, "fp8_e4m3fn", blocks) for gfx in ("sm_90", "sm_100", "sm_120") for blocks in (False, True)] + [("sm_100", "bf16", False)]


def test_names_read_as_they_are_documented() -> None:
    """Names have the documented order of parts and omit absent ones."""
    assert CutlassInstance(128, 256, 64, (2, 1), "cooperative", "streamk").name == EXAMPLE
    assert CutlassInstance(64, 16, 128, schedule="plain", scheduler="single", swap=True).name == "64x16x128_1x1_plain_single_swap_r1"
    fast = CutlassInstance(128, 256, 128, (2, 1), swap=True, fast=True)
    assert fast.name == "128x256x128_2x1_cooperative_persistent_fast_swap_r1"
    assert CutlassInstance(128, 256, 64, (2, 1), "2sm").name == "128x256x64_2x1_2sm_persistent_r1"
    ampere = CutlassInstance(128, 64, 32, schedule="multistage", scheduler="single", warps=(2, 2), stages=4)
    assert ampere.name == "128x64x32_1x1_multistage_single_w2x2_s4_r1"


def test_other_names_are_refused_with_what_is_unknown() -> None:
    """The error of an unknown name has the name, the op and the reason."""
    cases = [
        ("128x256x64_2x1_cooperative_streamk", "names look like"),
        ("128x256x64_2x1_cooperative_streamk_r1_x", "names look like"),
        ("128x40x64_1x1_pingpong_persistent_r1", "tile_n must be one of 16, 32, 64, 80, 96, 128, 160, 192, 224, 256 (got 40)"),
        ("128x128x64_4x1_pingpong_persistent_r1", "cluster must be one of 1x1, 2x1, 1x2 (got 4x1)"),
        ("128x128x64_1x1_sleepy_persistent_r1", "schedule must be one of cooperative, pingpong, plain, multistage, 1sm, 2sm (got sleepy)"),
        ("128x128x64_1x1_2sm_persistent_r1", "schedule 2sm needs tile_m of 128 and cluster 2x1, and has no fast sums"),
        ("256x128x64_1x1_1sm_persistent_r1", "schedule 1sm needs tile_m of 64 or 128, and has no fast sums"),
        ("128x96x64_1x1_1sm_persistent_r1", "tile_n of 16, 32 or a multiple of 64 (got 96)"),
        ("128x128x64_1x1_1sm_single_r1", "schedule 1sm needs scheduler persistent or streamk (got single)"),
        ("128x128x64_1x1_pingpong_streamk_r1", "schedule pingpong needs scheduler persistent (got streamk)"),
        ("64x128x64_1x1_cooperative_persistent_r1", "needs tile_m of 128 or more"),
        ("128x256x64_1x1_pingpong_persistent_r1", "256 accumulators per thread exceed 128"),
        (f"128x128x64_1x1_pingpong_persistent_r{REVISION + 1}", "tune again"),
        ("128x128x32_1x1_multistage_single_r1", "multistage needs warps and stages"),
        ("128x128x64_1x1_pingpong_persistent_w2x2_s3_r1", "multistage needs warps and stages"),
        ("128x128x32_1x1_multistage_single_w2x2_s3_swap_r1", "does not support clusters, swapped operands or fast sums"),
        ("0128x128x64_1x1_pingpong_persistent_r1", "names look like"),
        ("128x128x64_1x1_pingpong_persistent_w0x0_s0_r1", "names look like"),
    ]
    for name, reason in cases:
        with pytest.raises(PluginError) as caught:
            parse_name(name, "a8w8")
        assert reason in str(caught.value)
        assert repr(name) in str(caught.value)
        assert "a8w8" in str(caught.value)


@given(st.sampled_from(listed_instances("sm_90", "bf16", False, True)), st.data())
def test_a_changed_character_changes_the_instance(instance: CutlassInstance, data: st.DataObject) -> None:
    """A name with one character changed is refused or is the name of its instance."""
    place = data.draw(st.integers(0, len(instance.name) - 1))
    changed = instance.name[:place] + data.draw(st.sampled_from("0124678x_rkn")) + instance.name[place + 1 :]
    try:
        found = parse_name(changed, "a16w16")
    except PluginError:
        return
    assert found.name == changed

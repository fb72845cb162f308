"""names: names of configurations, Humming's settings, back and forth."""

from __future__ import annotations

from typing import Any

import pytest
from tunedgemm.plugin import PluginError
from tunedgemm_humming.names import config_of, parse_name

#: As Humming 0.1.20 returns them for Hopper, and each further setting of its heuristics.
MMA = {"mma_type": "mma", "block_shape": (8, 128, 128), "warp_shape": (8, 64, 32), "num_stages": 4, "use_stream_k": True}
WGMMA = {
    "mma_type": "wgmma",
    "block_shape": (176, 256, 64),
    "warp_shape": (176, 32, 64),
    "num_stages": 4,
    "use_tma": True,
    "use_warp_spec": True,
}
LISTED: list[tuple[dict[str, Any], str]] = [
    (MMA | {"use_tma": False, "num_ctas_per_sm": 1, "use_f16_accum": False}, "mma_8x128x128_warp8x64x32_stages4_streamk"),
    (MMA | {"use_stream_k": False, "num_ctas_per_sm": 2}, "mma_8x128x128_warp8x64x32_stages4_ctas2"),
    (WGMMA | {"multi_cast_size_a": 2}, "wgmma_176x256x64_warp176x32x64_stages4_streamk_tma_ws_cast2"),
    (WGMMA | {"use_tma_c": False, "wgmma_split_issue_wait": True}, "wgmma_176x256x64_warp176x32x64_stages4_streamk_tma_notmac_ws_wait"),
    (WGMMA | {"raster_group_m": 5, "output_chunk_rows": 32}, "wgmma_176x256x64_warp176x32x64_stages4_streamk_tma_ws_raster5_chunk32"),
    (
        WGMMA | {"producer_stage_unroll": 2, "consumer_stage_unroll": 1, "smem_reuse_mode": "none", "num_sms": 78},
        "wgmma_176x256x64_warp176x32x64_stages4_streamk_tma_ws_produce2_consume1_reusenone_sms78",
    ),
    (WGMMA | {"smem_reuse_mode": "last_stage"}, "wgmma_176x256x64_warp176x32x64_stages4_streamk_tma_ws_reuselast"),
]


@pytest.mark.parametrize(("tuning", "name"), LISTED)
def test_settings_survive_in_a_name(tuning: dict[str, Any], name: str) -> None:
    """A name states every setting: those that it gives back are Humming's own or its defaults."""
    config = config_of(tuning)
    assert config.name == name and parse_name(name) == config
    given = config.tuning() | ({"num_sms": config.sms} if config.sms else {})
    assert config_of(given) == config
    stated = {key: value for key, value in tuning.items() if key != "use_f16_accum"}
    assert {key: given[key] for key in stated} == stated
    assert parse_name(f"default_{name}").is_default


@pytest.mark.parametrize(
    "name",
    [
        "", "no-such-kernel", "mma_8x128x128_warp8x64x32", "umma_8x128x128_warp8x64x32_stages4", "mma_8x128_warp8x64x32_stages4",
        "mma_8x128x128_warp8x64x32_stages0", "mma_8x0x128_warp8x64x32_stages4", "mma_8x128x128_warp8x64x32_stages4_tma_streamk",
        "mma_8x128x128_warp8x64x32_stages4_ctas1", "mma_8x128x128_warp8x64x32_stages4_reuseall", "default_",
        "DEFAULT_mma_8x128x128_warp8x64x32_stages4",
    ],
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    """A name that this plugin did not write is a miss with a reason."""
    with pytest.raises(PluginError, match="humming: no kernel"):
        parse_name(name)


def test_settings_without_a_name() -> None:
    """A configuration of a later Humming with another setting is not listed as one without it."""
    for more in ({"cluster_shape": 2}, {"use_f16_accum": True}):
        with pytest.raises(PluginError, match=f"no name for a configuration with {next(iter(more))}"):
            config_of(MMA | more)

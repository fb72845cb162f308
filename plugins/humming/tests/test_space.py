"""space: Humming's own choice comes first, and the list is bounded."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Device, PluginError, Shape, Solution
from tunedgemm.tools.tables import op_named
from tunedgemm_humming import library, space
from tunedgemm_humming.names import config_of, parse_name

H200 = Device("sm_90", 132, "nvidia-h200")
PRESENT = attrs.evolve(H200, index=0)


def weights(m: int, w_format: str = "gptq_int4", group: int = 128, layout: str = "marlin", dtype: str = "bf16") -> Shape:
    """Return a shape of a weight."""
    extra: Any = {"w_format": w_format, "w_group": group}
    return Shape("a16wn", m, 4096, 1024, dtype, dtype, scale="block", layout=layout, extra=extra)


@pytest.mark.parametrize("m", [1, 16, 64, 1000, 100000])
def test_the_first_is_what_humming_would_run(fake: ModuleType, m: int) -> None:
    """It alone is named default; the others are its choices for other M and their neighbours."""
    shape = weights(m)
    listed = list(space.enumerate_solutions("humming", lambda: fake.library, shape, PRESENT))
    configs = [parse_name(solution.kernel_name) for solution in listed]
    assert attrs.evolve(configs[0], is_default=False) == config_of(fake.choose(space.layer_of(shape), m, 0))
    assert [config.is_default for config in configs] == [True] + [False] * (len(configs) - 1)
    assert 8 < len(configs) <= 32 and len({attrs.evolve(config, is_default=False) for config in configs}) == len(configs)
    assert {config.stream_k for config in configs} == {True, False} and len({config.stages for config in configs}) > 2
    assert {config.tile[0] for config in configs} > {configs[0].tile[0]}
    assert [solution.deterministic for solution in listed] == [not config.stream_k for config in configs]


def test_what_humming_refuses_is_not_listed(fake: ModuleType) -> None:
    """Its limits are asked for each configuration; a choice that fails or has no name is left out."""

    def check(config: dict[str, Any]) -> None:
        assert config["num_stages"] == 4

    def choose(layer: dict[str, Any], m: int, index: int) -> dict[str, Any]:
        assert m < 300
        return fake.choose(layer, m, index) | ({"cluster_shape": 2} if m > 100 else {})

    limited = attrs.evolve(fake.library, check=check, choose=choose)
    listed = list(space.enumerate_solutions("humming", lambda: limited, weights(1), PRESENT))
    assert listed and {parse_name(solution.kernel_name).stages for solution in listed} == {4}
    assert max(parse_name(solution.kernel_name).tile[0] for solution in listed) < 100


@pytest.mark.parametrize("fault", ["no name", "not possible"])
def test_only_its_own_choice_is_named_default(fake: ModuleType, fault: str) -> None:
    """Where its choice for M has no name, or cannot be, no other solution is named so."""

    def check(config: dict[str, Any]) -> None:
        assert fault == "no name" or config["block_shape"][0] != 8

    def choose(layer: dict[str, Any], m: int, index: int) -> dict[str, Any]:
        return fake.choose(layer, m, index) | ({"cluster_shape": 2} if fault == "no name" and m == 4 else {})

    limited = attrs.evolve(fake.library, check=check, choose=choose)
    listed = list(space.enumerate_solutions("humming", lambda: limited, weights(4), PRESENT))
    assert listed and not any(parse_name(solution.kernel_name).is_default for solution in listed)


def test_an_absent_device_has_no_list(fake: ModuleType) -> None:
    """Humming chooses by a present device; the backend says so."""
    assert not list(space.enumerate_solutions("humming", lambda: fake.library, weights(1), H200))
    assert fake.hooks.lacks(Solution("fakehumming"), weights(1), H200) == space.ABSENT


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        (weights(1), {"b_dtype": "uint4", "weight_scale_group_size": 128, "has_zero_point": False}),
        (
            weights(1, "awq_int4", 0, "humming", "fp16"),
            {"b_dtype": "uint4", "a_dtype": "float16", "weight_scale_group_size": 0, "has_zero_point": True},
        ),
        (weights(1, "int8_channel", 0, dtype="fp16"), {"b_dtype": "uint8", "c_dtype": "float16"}),
        (weights(1, "fp8_channel", 0, "humming"), {"b_dtype": "float8e4m3", "bs_dtype": None, "weight_scale_group_size": 0}),
        (weights(1, "mxfp8", 32, "humming"), {"b_dtype": "float8e4m3", "bs_dtype": "float8e8m0", "weight_scale_group_size": 32}),
        (weights(1, "mxfp4", 32, "humming"), {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0"}),
        (weights(1, "nvfp4", 16, "humming"), {"b_dtype": "float4e2m1", "bs_dtype": "float8e4m3", "weight_scale_2_type": "tensor"}),
        (attrs.evolve(weights(1, "fp8_block", 128, "humming"), k=128), {"weight_scale_group_size": 0}),
    ],
)
def test_layers(shape: Shape, fields: dict[str, Any]) -> None:
    """Each format has Humming's dtypes, groups and second scale; one group is a scale of the row."""
    layer = space.layer_of(shape)
    assert {name: layer.get(name) for name in fields} == fields
    assert (layer["shape_n"], layer["shape_k"], layer["sm_version"]) == (shape.n, shape.k, 90)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> library.Library:
    """Return the installed Humming; skip without one. It looks for the compilers of torch's CUDA."""
    monkeypatch.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
    if fault := library.installation().fault:
        pytest.skip(fault)
    try:
        return library.load()
    except PluginError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["gptq_int4", "fp8_channel", "mxfp8", "nvfp4"])
def test_the_installed_one_checks_without_a_device(installed: library.Library, fake: ModuleType, name: str) -> None:
    """Real limits accept the fake's choices, which are Humming's, and refuse a tile that N does not fit."""
    group = {"gptq_int4": 128, "fp8_channel": 0, "mxfp8": 32, "nvfp4": 16}[name]
    shape = weights(64, name, group, "marlin" if name == "gptq_int4" else "humming")
    config = config_of(fake.choose({"sm_version": 90}, 64, 0))
    installed.check(space.kernel_of(config, shape))
    for wrong in (attrs.evolve(config, tile=(64, 8192, 64)), attrs.evolve(config, ctas=8), attrs.evolve(config, stages=40)):
        with pytest.raises((AssertionError, ValueError)):
            installed.check(space.kernel_of(wrong, shape))


@pytest.mark.parametrize(
    ("name", "group"), [("ct_int4", 64), ("ct_int4", 0), ("ct_int4_zp", 64), ("fp8_channel", 0), ("mxfp8", 32), ("nvfp4", 16)]
)
def test_scales_and_zero_points_are_those_of_humming(installed: library.Library, name: str, group: int) -> None:
    """The core's order of both equals that of the installed Humming's functions."""
    from humming import dtypes
    from humming.transform import transform_humming_weight_scale, transform_humming_zero_point

    layout = "marlin" if name == "ct_int4" else "humming"
    extra: Any = {"w_format": name, "w_group": group}
    shape = Shape("a16wn", 1, 256, 512, scale="block", layout=layout, extra=extra)
    plain, packed = (op_named("a16wn").make_inputs(attrs.evolve(shape, layout=each), torch.device("cpu"), 0) for each in ("row", layout))
    kept = packed[2].element_size() == 1
    stored = plain[2].view(torch.uint8) if kept else plain[2].bfloat16()
    with library._some_device():
        theirs = transform_humming_weight_scale(stored, to_apply_on_c=packed[2].shape[0] == 1)
        assert torch.equal(theirs, packed[2].view(torch.uint8) if kept else packed[2])
        if name == "ct_int4_zp":
            zeros = torch.stack([plain[3] >> shift & 15 for shift in range(0, 32, 4)], 1).flatten(0, 1).to(torch.uint8)
            assert torch.equal(transform_humming_zero_point(zeros, dtypes.uint4), packed[3])

"""Check CK's two stages of fmoe: listed pairs fit, refusals have reasons, sources are complete."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tunedgemm.plugin import Device, PluginError, Shape
from tunedgemm.tools.tables import op_named
from tunedgemm_ck.names import Stages
from tunedgemm_ck.problem import problem_of
from tunedgemm_ck.stages import split_stages
from tunedgemm_ck.xdl import FAMILY
from tunedgemm_ck.xdl.moe.cut import lds, unrenderable
from tunedgemm_ck.xdl.moe.limits import instance_of
from tunedgemm_ck.xdl.moe.names import parse_moe
from tunedgemm_ck.xdl.moe.space import DEFAULTS, TILES, listed_stages

MI300X, MI355X = Device("gfx942", 304), Device("gfx950", 256)
FNUZ, OCP = "fp8_e4m3fnuz", "fp8_e4m3fn"
SOURCES = Path(__file__).parents[1] / "tunedgemm_ck"
#: Kinds of quantisation with a dtype of each.
KINDS = (("No", "bf16"), ("No", "fp16"), ("per_Tensor", FNUZ), ("per_Token", FNUZ), ("per_Token", "int8"), ("per_1x128", FNUZ))


def shape_of(kind: str = "No", q_dtype: str = "bf16", tokens: int = 64, sizes: tuple[int, int] = (7168, 512), **cells: str) -> Shape:
    """Return a gated shape of 64 experts with shuffled weights, 8 per token."""
    dtype = q_dtype if kind == "No" else "bf16"
    row = {"token": str(tokens), "model_dim": str(sizes[0]), "inter_dim": str(sizes[1]), "expert": "64", "topk": "8", "act_type": "Silu"}
    row |= {"dtype": dtype, "q_dtype_a": q_dtype, "q_dtype_w": q_dtype, "q_type": kind, "use_g1u1": "1", "doweight_stage1": "0"}
    return op_named("fmoe").columns.parse(row | cells)


def test_listed_pairs_fit_and_are_unique() -> None:
    """Listed pairs fit, are unique and parsed from their names, and do not claim to repeat bits."""
    for kind, q_dtype in KINDS:
        for tokens in [1, 64, 8192]:
            for full in [False, True]:
                shape = shape_of(kind, q_dtype, tokens)
                assert FAMILY.unsupported(shape, MI300X) is None
                offered = list(FAMILY.enumerate_instances(shape, MI300X, full))
                assert len(set(offered)) == len(offered) > 1
                assert all(FAMILY.unfit(pair, split, shape, MI300X) is None for pair, split in offered)
                assert all(FAMILY.parse(pair.name, "fmoe") == pair for pair, _ in offered)
                assert not any(FAMILY.deterministic(pair, split) for pair, split in offered)
                assert set(FAMILY.enumerate_instances(shape, MI300X, False)) <= set(FAMILY.enumerate_instances(shape, MI300X, True))


def test_the_default_space_has_sixteen_tiles() -> None:
    """The default lists have 16 tiles, and every listed tile is one that CK compiles."""
    assert sum(DEFAULTS.values()) == 16
    for kind, q_dtype in KINDS:
        for stage in (1, 2):
            stages = listed_stages(shape_of(kind, q_dtype), MI300X, stage)
            assert len({of.tile for of in stages}) == len(stages) >= 5
            assert all(unrenderable(of) == "" and lds(of) <= 64 << 10 for of in stages)
    assert all(len(TILES[key]) >= count for key, count in DEFAULTS.items())


def test_few_tokens_get_low_tiles_first() -> None:
    """One token gets tiles of 16 or 32 rows first, and many tokens tiles of 64."""
    few, many = (next(iter(FAMILY.enumerate_instances(shape_of("per_1x128", FNUZ, tokens), MI300X, False)))[0] for tokens in (1, 16384))
    assert isinstance(few, Stages)
    assert isinstance(many, Stages)
    assert max(few.first.m, few.second.m) <= 32  # type: ignore[attr-defined]
    assert max(many.first.m, many.second.m) == 64  # type: ignore[attr-defined]


def test_refused_shapes_have_reasons() -> None:
    """A refused shape has a reason."""
    cases = [
        (Device("gfx90a", 104), {}, "gfx942 or gfx950"),
        (MI300X, {"kind": "per_1x32", "q_dtype": "fp4x2"}, "per_1x128 .got per_1x32"),
        (MI300X, {"kind": "per_Token", "q_dtype": OCP}, "gfx942 multiplies"),
        (MI355X, {"kind": "per_Token", "q_dtype": FNUZ}, "gfx950 multiplies"),
        (MI300X, {"layout": "row"}, "aiter16x16"),
        (MI300X, {"use_g1u1": "0"}, "gated experts"),
        (MI300X, {"act_type": "Swiglu"}, "gelu or silu .got swiglu"),
        (MI300X, {"tokens": 1 << 21}, "pairs of a token"),
        (MI300X, {"expert": "256", "sizes": (7168, 2048)}, "elements of all experts' weights"),
        (MI300X, {"tokens": 1 << 18}, "hidden states"),
        (MI300X, {"sizes": (7168, 96)}, "no instance fits: inter_dim and model_dim must be multiples of 64 and 64"),
        (MI300X, {"kind": "per_1x128", "q_dtype": FNUZ, "sizes": (7168, 192)}, "multiples of 128"),
    ]
    for device, fields, reason in cases:
        shape = shape_of(**fields)  # type: ignore[arg-type]
        assert re.search(reason, FAMILY.unsupported(shape, device))


FIRST = "moe_ck2stages_gemm1_256x32x64x128_1x4_MulABScale_v1_Nswizzle0_Quant2_MulRoutedWeight0_silu_F8_F8_B16"
SECOND = "moe_ck2stages_gemm2_256x32x64x128_1x4_MulABScaleExpertWeight_v1_Nswizzle0_Quant2_MulRoutedWeight1_F8_F8_B16"


def test_an_instance_of_another_problem_or_tile_does_not_fit() -> None:
    """A stage of another problem, or with an invalid tile, is refused."""
    cases = [
        ("silu", "gelu", "stage 1: it is an instance for .*gelu.*, not for .*silu"),
        ("Quant2", "Quant1", "Quant1 .*, not for Quant2"),
        ("F8_F8_B16+", "I8_I8_B16+", "I8_I8_B16.*, not for .*F8_F8_B16"),
        ("Weight0_silu", "Weight1_silu", "weights of the routing"),
        ("Weight1_F8", "Weight0_F8", "stage 2: .*weights of the routing"),
        ("Nswizzle0_Quant2_MulRoutedWeight0", "Nswizzle1_Quant2_MulRoutedWeight0", "Nswizzle1"),
        ("MulABScale_v1", "MulABScaleWint4_v1", "epilogue MulABScaleWint4"),
        ("1x4_MulABScale_v1", "1x4_MulABScale_v2", "pipeline v2"),
        ("gemm1_256x32x64x128", "gemm1_256x32x64x96", "do not divide the rows"),
        ("gemm1_256x32x64x128", "gemm1_256x32x96x128", "waves"),
        ("gemm2_256x32x64x128", "gemm2_256x32x64x64", "stage 2: .*pieces of 8"),
        ("gemm1_256x32x64x128", "gemm1_256x32x64x4096", "131072 bytes of LDS"),
    ]
    for text, changed, reason in cases:
        shape, name = shape_of("per_Token", FNUZ, sizes=(4096, 512)), f"{FIRST}+{SECOND}"
        assert FAMILY.unfit(FAMILY.parse(name, "fmoe"), 0, shape, MI300X) is None
        assert text in name
        assert re.search(reason, FAMILY.unfit(FAMILY.parse(name.replace(text, changed), "fmoe"), 0, shape, MI300X))


def test_unsupported_stages_are_not_rendered() -> None:
    """Rendering an unsupported stage raises PluginError."""
    cases = [
        ("silu", "swiglu"),
        ("MulABScale_", "MulABScaleWint4_"),
        ("Nswizzle0", "Nswizzle1"),
        ("_v1_", "_v5_"),
        ("F8_F8_B16", "F8_F8_F8"),
        ("F8_F8_B16", "F8_I8_B16"),
        ("Quant2", "Quant3"),
        ("Quant2", "Quant0"),
        ("256x32x64x128", "256x48x64x128"),
    ]
    for text, changed in cases:
        ((_, problem), _) = split_stages(FAMILY.parse(f"{FIRST}+{SECOND}", "fmoe"), problem_of(shape_of("per_Token", FNUZ), "gfx942"))
        assert FAMILY.render(parse_moe(FIRST), problem)
        with pytest.raises(PluginError, match=r"not supported|do not divide"):
            FAMILY.render(parse_moe(FIRST.replace(text, changed)), problem)
        with pytest.raises(PluginError, match="is of stage 2, not 1"):
            FAMILY.render(parse_moe(SECOND), problem)


def test_stages_are_ordered_and_k_is_not_split() -> None:
    """Swapped stages, a single stage, and a splitK are refused."""
    shape = shape_of("per_Token", FNUZ)
    assert "is of stage 2, not 1" in FAMILY.unfit(FAMILY.parse(f"{SECOND}+{FIRST}", "fmoe"), 0, shape, MI300X)
    assert "got 2" in FAMILY.unfit(FAMILY.parse(f"{FIRST}+{SECOND}", "fmoe"), 2, shape, MI300X)
    with pytest.raises(PluginError, match="two stages"):
        FAMILY.parse(FIRST, "fmoe")


def test_neighbours_fit_and_change_one_stage() -> None:
    """Each neighbour fits and shares one stage."""
    shape = shape_of()
    pair = next(iter(FAMILY.enumerate_instances(shape, MI300X, False)))[0]
    neighbours = [other for other, _ in FAMILY.enumerate_neighbours(pair, 0, shape, MI300X)]
    assert len(set(neighbours)) == len(neighbours) > 8
    assert all((other.first == pair.first) != (other.second == pair.second) for other in neighbours)  # type: ignore[attr-defined]
    assert all(FAMILY.unfit(other, 0, shape, MI300X) is None for other in neighbours)


def test_gfx950_needs_128_elements_of_fp8() -> None:
    """A tile of 64 elements of K fits gfx942 and not gfx950."""
    for fp8, device, reason in ((FNUZ, MI300X, ""), (OCP, MI355X, "128 elements of fp8")):
        shape = shape_of("per_Token", fp8, sizes=(4096, 192))
        pair = Stages(
            *(instance_of(tile, shape, device.gfx, stage) for stage, tile in ((1, "256x32x64x256_1x4_v1"), (2, "64x16x64x64_1x1_v1")))
        )
        unfit = FAMILY.unfit(pair, 0, shape, device)
        assert reason in (unfit or "") and bool(reason) == bool(unfit)


def test_a_source_is_the_same_each_time_and_names_what_it_is() -> None:
    """Sources are complete and distinct, and name CK's header in an error."""
    for kind, q_dtype in KINDS:
        shape = shape_of(kind, q_dtype)
        pairs = [pair for pair, _ in FAMILY.enumerate_instances(shape, MI300X, True)]
        sources = {of: FAMILY.render(of, problem) for pair in pairs for of, problem in split_stages(pair, problem_of(shape, "gfx942"))}
        assert len(set(sources.values())) == len(sources)
        for of, source in sources.items():
            assert source.splitlines()[0] == f"// {of.name}"
            assert parse_moe(of.name) == of
            assert re.search(r'#error "Composable Kernel\'s .*device_moe_gemm(_blockscale)?.hpp is missing: ROCm 7.0', source)
            assert all(f"TUNED_GEMM_EXPORT {function}" in source for function in ("int tunedgemm_launch", "int64_t tunedgemm_workspace"))
            assert not re.search(r"hipMalloc|Synchronize", source)
            assert all(source.count(left) == source.count(right) for left, right in ("()", "{}", "[]"))


def test_headers_without_the_stages_are_named(tmp_path: Path) -> None:
    """The compiler's first error names the release that has the missing header."""
    if not shutil.which("c++"):
        pytest.skip("c++ not found")
    shape = shape_of()
    pair = next(iter(FAMILY.enumerate_instances(shape, MI300X, False)))[0]
    (tmp_path / "hip").mkdir()
    (tmp_path / "hip" / "hip_runtime.h").write_text("")
    (tmp_path / "one.cpp").write_text(FAMILY.render(*split_stages(pair, problem_of(shape, "gfx942"))[0]))
    command = ["c++", "-E", "-std=c++20", f"-I{tmp_path}", f"-I{SOURCES / 'sources'}", str(tmp_path / "one.cpp"), "-o", "/dev/null"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert "device_moe_gemm.hpp is missing: ROCm 7.0 or later has it" in errors[0]

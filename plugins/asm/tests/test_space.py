"""Test solution names, splitK, enumeration and the resolution of rows."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import PluginError, Shape, Solution
from tunedgemm_asm.names import auto_splits, resolve

both = pytest.mark.parametrize("asm", ["gfx942", "gfx950"], indirect=True)
gfx950 = pytest.mark.parametrize("asm", ["gfx950"], indirect=True)
PRODUCT = Shape("a16w16", 40, 128, 512)
INT8 = Shape("a8w8_bpreshuffle", 40, 256, 768, dtype="int8", outdtype="bf16", scale="row", layout="aiter16x16")
FP4 = Shape("a4w4_blockscale", 40, 272, 1024, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16")


def shapes(gfx: str) -> list[Shape]:
    """Return one product of each kind."""
    fp8 = {"gfx942": "fp8_e4m3fnuz", "gfx950": "fp8_e4m3fn"}[gfx]
    return [
        PRODUCT,
        attrs.evolve(PRODUCT, outdtype="fp32", epilogue="bias"),
        attrs.evolve(PRODUCT, outdtype="fp32", epilogue="bias", bias_dtype="fp32"),
        attrs.evolve(PRODUCT, m=33, layout="aiter16x16", epilogue="bias"),
        attrs.evolve(PRODUCT, m=1, n=100, k=320),
        INT8,
        attrs.evolve(INT8, epilogue="bias", bias_dtype="fp32"),
        Shape("a8w8_blockscale_bpreshuffle", 40, 256, 768, dtype=fp8, outdtype="bf16", scale="block", layout="aiter16x16"),
        *([FP4] if gfx == "gfx950" else []),
    ]


@both
def test_every_listed_solution_is_right(asm: Any, fake: ModuleType, over: ModuleType) -> None:
    """Every listed kernel with every split computes its product."""
    for shape in shapes(asm.host.gfx):
        listed = list(asm.solutions(shape, over.CPU))
        assert listed
        assert len(set(listed)) == len(listed)
        wrong = {str(each): over.fault(asm, fake, shape, each.kernel_name, each.split_k) for each in listed}
        assert not {name: text for name, text in wrong.items() if text}, shape


@gfx950
def test_split_k_is_written_as_aiter_does(asm: Any, over: ModuleType) -> None:
    """splitK is written as in AITER's rows, and claims of determinism are right."""
    bf16 = {(each.kernel_name, each.split_k): each for each in asm.solutions(PRODUCT, over.CPU)}
    assert {split for name, split in bf16 if "clean" in name} == set(range(2, 9))
    assert {split for name, split in bf16 if "_pf3_" in name} == {1}
    assert {split for (name, split), each in bf16.items() if "clean" in name and each.deterministic} == {2}
    assert {each.deterministic for (name, _), each in bf16.items() if "clean" not in name} == {True}
    assert {each.split_k for each in asm.solutions(INT8, over.CPU)} == {1, 2, 3, 6}
    assert {each.split_k for each in asm.solutions(FP4, over.CPU)} == {0, 1, 2, 3}


@gfx950
def test_the_best_guess_comes_first(asm: Any, over: ModuleType) -> None:
    """A kernel that fills the compute units comes first."""
    listed = list(asm.solutions(attrs.evolve(PRODUCT, m=16, n=4096, k=8192), over.CPU))
    kernel, splits = resolve(listed[0], attrs.evolve(PRODUCT, m=16, n=4096, k=8192), asm.host, asm.hooks.catalog("gfx950"))
    assert -(-16 // kernel.tile_m) * (4096 // kernel.tile_n) * splits == 256


@gfx950
def test_rows_without_a_split_follow_aiters_launcher(asm: Any, fake: ModuleType) -> None:
    """A missing or too large splitK means what AITER's launcher does."""
    found, device = asm.hooks.catalog("gfx950"), asm.host
    split, whole = fake.bf16(32, shuffled=False, splits=True)["knl_name"], fake.bf16(32, shuffled=False, prefetch=3)["knl_name"]

    def splits(name: str, shape: Shape, written: int) -> int:
        return resolve(Solution("asm", name, written), shape, device, found)[1]

    assert splits(split, PRODUCT, 0) == 8  # as many as K has steps
    assert splits(split, attrs.evolve(PRODUCT, k=8192), 0) == 16
    assert splits(split, attrs.evolve(PRODUCT, m=512, n=1024, k=8192), 0) == 2  # 256 tiles for 256 units
    assert splits(split, PRODUCT, 16) == 8
    assert splits(whole, PRODUCT, 0) == splits(whole, PRODUCT, 1) == 1
    int8, fp4 = fake.ROWS["i8gemm"][0]["knl_name"], fake.ROWS["f4gemm"][1]["knl_name"]
    assert [splits(int8, INT8, written) for written in (0, 1, 3)] == [1, 1, 3]
    assert [splits(fp4, FP4, written) for written in (0, 1, 3)] == [1, 2, 8]
    assert auto_splits(found.kernels[int8].kernel, INT8, device) == 1
    for name, shape, written, reason in (
        (split, PRODUCT, 1, "two splits or more"),
        (int8, INT8, 4, "cannot cut K=768 into 4 splits"),
        (fp4, FP4, 9, r"1 to 16 splits \(got 512\)"),
        (whole, PRODUCT, 2, "does not split K"),
        ("", PRODUCT, 0, "no pack for gfx950 has a kernel"),
    ):
        with pytest.raises(PluginError, match=reason):
            splits(name, shape, written)


@both
def test_a_name_of_another_architecture_is_a_miss(asm: Any, over: ModuleType, fake: ModuleType) -> None:
    """A kernel of another architecture is refused with that architecture's name."""
    fp4 = fake.ROWS["f4gemm"][0]["knl_name"]
    if asm.host.gfx == "gfx942":
        assert over.refused(asm, fp4, PRODUCT) == f"the packs have {fp4} for gfx950, not for gfx942"
    unknown = "_ZN5aiter37bf16gemm_fp32bf16_tn_16x64_pf3_splitkE"
    assert over.refused(asm, unknown, PRODUCT) == f"no pack for {asm.host.gfx} has a kernel {unknown}"


@both
def test_every_row_of_aiters_manifests_runs(asm: Any, fake: ModuleType, objects: ModuleType, over: ModuleType, tmp_path: Any) -> None:
    """Every kernel of AITER's manifests binds and computes its product."""
    rows = fake.published()
    if not rows:
        pytest.skip("AITER's manifests not found")
    gfx = asm.host.gfx
    theirs = over.backend(fake, fake.tree(tmp_path / "hsa", objects, rows), gfx)
    tried, wrong = set(), {}
    for shape in (
        *(
            attrs.evolve(PRODUCT, m=170, n=256, k=128, outdtype=out, layout=layout)
            for layout in ("row", "aiter16x16")
            for out in ("bf16", "fp32")
        ),
        attrs.evolve(INT8, m=130, k=256),
        attrs.evolve(shapes(gfx)[7], m=130, k=256),
        attrs.evolve(FP4, m=40, n=144, k=512),
    ):
        for name, loaded in theirs.hooks.catalog(gfx).kernels.items():
            if shape.op not in loaded.abi.ops or loaded.kernel.shuffled != (shape.layout != "row"):
                continue
            tried.add(name)
            written = (1 if shape.op == "a4w4_blockscale" else 2) if loaded.kernel.splits else 0
            if text := over.fault(theirs, fake, shape, name, written):
                wrong[name, written, str(shape)] = text
    listed = {row["knl_name"]: row for family in rows[gfx].values() for row in family}
    plain_fp4 = {name for name in listed if "noBpreShuffle" in name}
    assert not wrong
    assert tried == set(listed) - plain_fp4
    assert len(tried) == {"gfx942": 37, "gfx950": 72}[gfx]

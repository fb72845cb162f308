"""Test which shapes are unsupported, and the reasons."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Shape, Solution, Unsupported
from tunedgemm_asm import asm as plain
from tunedgemm_asm.limits import parts_of, unfit

gfx942 = pytest.mark.parametrize("asm", ["gfx942"], indirect=True)
gfx950 = pytest.mark.parametrize("asm", ["gfx950"], indirect=True)
MI300X, MI355X = Device("gfx942", 304, "amd-instinct-mi300x"), Device("gfx950", 256, "amd-instinct-mi355x")
PRODUCT = Shape("a16w16", 64, 512, 512)
INT8 = Shape("a8w8_bpreshuffle", 64, 512, 512, dtype="int8", outdtype="bf16", scale="row", layout="aiter16x16")
FP8 = Shape("a8w8_blockscale_bpreshuffle", 64, 512, 512, dtype="fp8_e4m3fn", outdtype="bf16", scale="block", layout="aiter16x16")
FP4 = Shape("a4w4_blockscale", 64, 512, 512, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16")


def test_without_packs_nothing_is_supported() -> None:
    """Without packs the reason says where kernels come from."""
    assert str(plain.refusal(PRODUCT, MI300X)) == (
        "no pack has kernels of a16w16 for gfx942: install AITER, or run `tunedgemm asm build --gfx gfx942 -o DIR`, "
        "and name folders of packs in TUNEDGEMM_ASM_PACKS"
    )
    assert "asm build" not in str(plain.refusal(INT8, MI300X))
    assert list(plain.solutions(PRODUCT, MI300X)) == []
    assert plain.heuristic_fallback(attrs.evolve(PRODUCT, layout="aiter16x16"), MI300X) is None
    assert plain.library_version(MI300X) == ""


def test_other_devices_have_no_code_objects(failing: Any) -> None:
    """Other architectures are unsupported."""

    def check(gfx: str) -> None:
        assert str(plain.refusal(PRODUCT, Device(gfx, 100, "other"))) == (
            f"{gfx} is not supported; code objects exist for gfx942 and gfx950, generated PTX for sm_90"
        )

    assert not failing(check, itertools.product(["sm_100", "gfx1100", "cpu-avx512"]))


@gfx950
def test_shapes_without_a_kernel(asm: Any, over: ModuleType, failing: Any) -> None:
    """An unsupported shape names limit and value."""

    def check(shape: Shape, reason: str) -> None:
        kernels = {name: loaded for name, loaded in asm.hooks.catalog("gfx950").kernels.items() if not name.startswith("tunedgemm")}
        theirs = attrs.evolve(
            asm, hooks=attrs.evolve(asm.hooks, catalog=lambda _: attrs.evolve(asm.hooks.catalog("gfx950"), kernels=kernels))
        )
        answer = theirs.refusal(shape, MI355X)
        assert isinstance(answer, Unsupported)
        assert re.search(reason, str(answer)), str(answer)
        assert theirs.heuristic_fallback(shape, MI355X) is None

    assert not failing(
        check,
        [
            (attrs.evolve(PRODUCT, m=0), "an empty batch needs no kernel"),
            (Shape("batched_bf16", 4, 64, 64, extra={"B": 2}), "op batched_bf16 is not covered"),
            (attrs.evolve(PRODUCT, dtype="fp16", outdtype="fp16"), "takes bf16, not fp16"),
            (attrs.evolve(PRODUCT, outdtype="fp16"), "writes bf16 or fp32, not fp16"),
            (attrs.evolve(PRODUCT, k=96), r"needs K % 64 = 0 \(K=96\)"),
            (attrs.evolve(PRODUCT, n=66), r"needs N % 64 = 0 \(N=66\)"),
            (attrs.evolve(PRODUCT, layout="aiter32x16"), "reads weights of layout aiter16x16, not aiter32x16"),
            (attrs.evolve(PRODUCT, scale="tensor"), "takes scales of kind none, not tensor"),
            (attrs.evolve(PRODUCT, epilogue="bias", bias_dtype="fp32"), "adds a bias in bf16, not fp32"),
            (attrs.evolve(PRODUCT, outdtype="fp32", epilogue="bias", bias_dtype="fp32"), "adds a bias in bf16, not fp32"),
            (attrs.evolve(INT8, outdtype="fp16"), "writes bf16, not fp16"),
            (attrs.evolve(INT8, k=192), r"needs K % 128 = 0 \(K=192\)"),
            (attrs.evolve(INT8, n=160), r"needs N % 128 = 0 \(N=160\)"),
            (attrs.evolve(INT8, scale="tensor"), "takes scales of kind row, not tensor"),
            (attrs.evolve(INT8, epilogue="bias", bias_dtype="bf16"), "adds a bias in fp32, not bf16"),
            (attrs.evolve(INT8, dtype="fp8_e4m3fn"), "takes int8, not fp8_e4m3fn"),
            (attrs.evolve(INT8, layout="aiter32x16"), "reads weights of layout aiter16x16"),
            (attrs.evolve(FP8, dtype="fp8_e4m3fnuz"), "gfx950 multiplies fp8_e4m3fn, not fp8_e4m3fnuz"),
            (attrs.evolve(FP8, n=192), r"needs N % 128 = 0"),
            (attrs.evolve(FP8, layout="row"), "reads weights of layout aiter16x16, not row$"),
            (attrs.evolve(FP4, k=384), r"needs K % 256 = 0"),
            (attrs.evolve(FP4, layout="row"), "reads scales in the order aiter32x8, not row"),
            (attrs.evolve(FP4, epilogue="bias"), "adds no bias"),
            (attrs.evolve(PRODUCT, m=1 << 22, n=512), "addresses 4294967296 bytes of x"),
            (attrs.evolve(INT8, m=1 << 21, n=1024), "addresses 4294967296 bytes of the output"),
        ],
    )


@gfx942
def test_an_architecture_has_the_fp8_that_it_multiplies(asm: Any) -> None:
    """gfx942 supports only FNUZ fp8."""
    assert asm.refusal(attrs.evolve(FP8, dtype="fp8_e4m3fnuz"), MI300X) is None
    assert str(asm.refusal(FP8, MI300X)) == "gfx942 multiplies fp8_e4m3fnuz, not fp8_e4m3fn"


@gfx950
def test_parts_of_k(asm: Any, fake: ModuleType) -> None:
    """Splits are limited by steps, counters and the kernel."""
    kernels = asm.hooks.catalog("gfx950").kernels
    split, whole = (
        kernels[fake.bf16(32, shuffled=False, splits=True)["knl_name"]],
        kernels[fake.bf16(32, shuffled=False, prefetch=3)["knl_name"]],
    )
    assert "needs two splits or more (got 1)" in unfit(split, 1, PRODUCT)
    assert unfit(split, 8, PRODUCT) is None
    assert "cannot cut K=512 into 9 splits of whole steps of 64" in unfit(split, 9, PRODUCT)
    assert "1 to 16 splits (got 17)" in unfit(split, 17, attrs.evolve(PRODUCT, k=4096))
    assert unfit(whole, 1, PRODUCT) is None
    assert "does not split K (got 2 splits)" in unfit(whole, 2, PRODUCT)
    exactly, over = attrs.evolve(PRODUCT, m=128 * 32, n=8 * 64), attrs.evolve(PRODUCT, m=128 * 32 + 1, n=8 * 64)
    assert unfit(split, 2, exactly) is None
    assert "1032 tiles with split-K; there are 1024 counters" in unfit(split, 2, over)
    assert unfit(whole, 1, over) is None
    int8 = kernels[fake.ROWS["i8gemm"][0]["knl_name"]]
    assert [splits for splits in range(1, 9) if not unfit(int8, splits, attrs.evolve(INT8, k=768))] == [1, 2, 3, 6]
    fp4 = kernels[fake.ROWS["f4gemm"][1]["knl_name"]]
    assert [splits for splits in range(1, 17) if not unfit(fp4, splits, FP4)] == [1, 2, 4, 8, 16]
    own = kernels["tunedgemm_bf16_64x64_pf2_splitk"]
    assert [splits for splits in range(1, 9) if not unfit(own, splits, attrs.evolve(PRODUCT, k=320))] == [2, 3, 5]
    assert parts_of(own.kernel, 4, attrs.evolve(PRODUCT, k=320)) == 3


@gfx950
def test_fp4_has_large_outputs(asm: Any) -> None:
    """fp4 outputs may exceed 4 GiB, operands may not."""
    assert asm.refusal(attrs.evolve(FP4, m=838784, n=5760, k=3584), MI355X) is None
    assert "bytes of x" in str(asm.refusal(attrs.evolve(FP4, m=1 << 22, k=2048), MI355X))


@gfx950
def test_ours_take_ragged_columns_and_large_operands(asm: Any) -> None:
    """The plugin's kernels support ragged N and operands above 4 GiB."""
    kernels = asm.hooks.catalog("gfx950").kernels
    plain_weight, shuffled = kernels["tunedgemm_bf16_64x64_pf2"], kernels["tunedgemm_bf16_64x64_bshuffle_pf2"]
    assert unfit(plain_weight, 1, attrs.evolve(PRODUCT, n=100)) is None
    biased = attrs.evolve(PRODUCT, outdtype="fp32", epilogue="bias")
    assert "adds a bias in fp32, not bf16" in unfit(plain_weight, 1, biased)
    assert unfit(plain_weight, 1, attrs.evolve(biased, bias_dtype="fp32")) is None
    assert "N % 4 = 0 (N=102)" in unfit(plain_weight, 1, attrs.evolve(PRODUCT, n=102))
    assert "N % 16 = 0 (N=100)" in unfit(shuffled, 1, attrs.evolve(PRODUCT, n=100, layout="aiter16x16"))
    assert unfit(plain_weight, 1, attrs.evolve(PRODUCT, m=1 << 23)) is None
    assert "addresses 2147483648 bytes of x" in unfit(plain_weight, 1, attrs.evolve(PRODUCT, k=1 << 24))
    assert "has 4194304 tiles along a grid axis" in unfit(plain_weight, 1, attrs.evolve(PRODUCT, m=1 << 20, n=1 << 14))


def test_packs_are_read_only_for_usable_architectures() -> None:
    """Packs are read only for architectures that can run them."""

    def never(gfx: str) -> Any:
        raise AssertionError(gfx)

    elsewhere = attrs.evolve(plain, hooks=attrs.evolve(plain.hooks, catalog=never))
    b200 = Device("sm_100", 148, "nvidia-b200")
    assert elsewhere.refusal(PRODUCT, b200)
    assert elsewhere.library_version(b200) == ""
    assert list(elsewhere.solutions(PRODUCT, b200)) == []
    assert elsewhere.heuristic_fallback(attrs.evolve(PRODUCT, layout="aiter16x16"), b200) is None
    assert isinstance(elsewhere.bind(Solution("asm", "any"), PRODUCT, b200), Unsupported)
    h200 = Device("sm_90", 132, "nvidia-h200")
    assert not elsewhere.refusal(PRODUCT, h200)
    assert list(elsewhere.solutions(PRODUCT, h200))
    assert elsewhere.heuristic_fallback(PRODUCT, h200) is not None


@gfx950
def test_a_packs_descriptor_may_narrow_its_layout(
    asm: Any, over: ModuleType, fake: ModuleType, objects: ModuleType, tmp_path: Path
) -> None:
    """A pack's descriptor may narrow the dtypes of its layout."""
    said = {"abi": "tunedgemm-bf16", "gfx": "gfx950", "manifest": "m.csv", "dtypes": {"out": ["fp32"], "bias": ["fp32"]}, "name": "narrow"}
    fake.write(tmp_path / "narrow", "m.csv", fake.OWN, objects, "gfx950", 96)
    (tmp_path / "narrow" / "pack.json").write_text(json.dumps(said))
    found = over.found_in("gfx950", tmp_path / "narrow")
    narrow = attrs.evolve(asm, hooks=attrs.evolve(asm.hooks, catalog=lambda _: found))
    assert narrow.refusal(PRODUCT, MI355X)
    wide = attrs.evolve(PRODUCT, outdtype="fp32")
    assert narrow.refusal(wide, MI355X) is None
    biased = attrs.evolve(wide, epilogue="bias", bias_dtype="fp32")
    assert narrow.refusal(biased, MI355X) is None
    own = found.kernels["tunedgemm_bf16_32x32_pf2"]
    for operand, shape, dtype in (("weight", wide, "bf16"), ("bias", biased, "fp32")):
        without = Named(own, {**own.dtypes, operand: ()})
        assert unfit(without, 1, shape) == f"{own.kernel.name} supports {operand} in no dtype (pack narrow), not {dtype}"
    assert unfit(Named(own, {**own.dtypes, "bias": ()}), 1, wide) is None


@gfx950
def test_a_reason_is_given_once_with_an_example_kernel(asm: Any) -> None:
    """Each reason appears once with an example kernel."""
    told = str(asm.refusal(attrs.evolve(PRODUCT, k=96), MI355X))
    assert told.startswith("no kernel of a16w16 supports the shape: ")
    reasons = [reason.split(" ", 1) for reason in told.removeprefix("no kernel of a16w16 supports the shape: ").split("; ")]
    assert sorted(text for _, text in reasons) == ["needs K % 64 = 0 (K=96)", "reads weights of layout aiter16x16, not row"]
    assert all(name in asm.hooks.catalog("gfx950").kernels for name, _ in reasons)


class Named:
    """A pack's kernel with other dtypes."""

    def __init__(self, loaded: Any, dtypes: Any) -> None:
        self.kernel, self.abi, self.pack, self.dtypes = loaded.kernel, loaded.abi, loaded.pack, dtypes

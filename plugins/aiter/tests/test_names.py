"""Kernel names of AITER's tables: what they need of AITER, and which shapes they refuse."""

from __future__ import annotations

import attrs
import pytest
from tunedgemm.plugin import Device, PluginError, Shape
from tunedgemm_aiter.names import parse, unfit

MI355X, MI300X, MI450 = Device("gfx950", 256), Device("gfx942", 304), Device("gfx1250", 256)
HGEMM = (
    "flydsl_gemm5_abf16_wbf16_bf16_t16x64x128_split_k2_block_m_warp1_block_n_warp2_block_k_warp1"
    "_async_copyTrue_b_to_ldsTrue_b_preshuffleFalse_c_to_ldsFalse_gfx950"
)
PRESHUFFLE = "flydsl_bpreshuflle_16x64x512_F8_F8_B16_0x3x0x1_default"
WAVES = "flydsl_bpreshuffle_8w_128x256x128_F8_F8_B16_2x4"
WMMA = "flydsl_bpreshuffle_wmma_t128x64x256_mw4_nw1_nb4_sk2_cm1_cn1"
WHOLE = "opus_gemm_512x128x256x64_2x4_16x16x32_0x0x0"
SPLIT = "opus_gemm_flatmm_splitk_256x32x32x128_2x1_16x16x32_0x0x0_wgpcu2"
COOPERATIVE = "opus_gemm_gfx942_wkc_512x16x16x64_1x1_16x16x16_0x0x0"
EVEN = "opus_gemm_gfx942_splitk_p1_256x64x64x64_2x2_16x16x16_0x0x0"


def refusal(libtype: str, name: str, shape: Shape, device: Device = MI355X, split: int = 0) -> str:
    """Return why a kernel of a name does not serve a shape."""
    return unfit(parse(libtype, shape.op, name), split, shape, device)


def product(m: int, n: int, k: int) -> Shape:
    """Return a bf16 product."""
    return Shape("a16w16", m, n, k)


def scaled(m: int, n: int, k: int, dtype: str = "fp8_e4m3fn") -> Shape:
    """Return an 8-bit product of a shuffled weight."""
    return Shape("a8w8_bpreshuffle", m, n, k, dtype=dtype, outdtype="bf16", scale="row", layout="aiter16x16")


@pytest.mark.parametrize(
    ("libtype", "op", "name", "since"),
    [
        ("flydsl", "a16w16", HGEMM, "0.1.16"),
        ("flydsl", "a8w8_bpreshuffle", PRESHUFFLE, "0.1.18"),
        ("flydsl", "a8w8_bpreshuffle", PRESHUFFLE.removesuffix("_default"), "0.1.13"),
        ("flydsl", "a8w8_bpreshuffle", WAVES, "0.1.20"),
        ("flydsl", "a8w8_bpreshuffle", WMMA, "0.1.16"),
        ("opus", "a16w16", SPLIT, "0.1.16"),
        ("gluon", "a16w16", "auto", "0.1.16"),
        ("aiter", "fmoe", "auto", "0.1.5"),
        ("flydsl", "fmoe", "flydsl_moe1_afp4+flydsl_moe2_afp4", "newer than 0.1.20.post1"),
    ],
)
def test_each_form_of_name_needs_a_version(libtype, op, name, since):
    """The version is that of AITER which has such names."""
    assert parse(libtype, op, name).need.since.startswith(since)


@pytest.mark.parametrize(
    ("libtype", "op", "name"),
    [
        ("flydsl", "a16w16", HGEMM.removesuffix("_gfx950")),
        ("flydsl", "a16w16", HGEMM.replace("abf16_wbf16", "abf16_wf16")),
        ("flydsl", "a16w16", HGEMM.replace("b_preshuffleFalse", "b_preshuffleTrue")),
        ("flydsl", "a16w16", PRESHUFFLE),
        ("flydsl", "a8w8_bpreshuffle", HGEMM),
        ("opus", "a16w16", "opus_gemm_a8w8_512x128x128x128_4x2_16x16x32_0x0x0"),
        ("gluon", "a16w16", "triton"),
        ("opus", "a8w8", WHOLE),
    ],
)
def test_another_name_is_refused(libtype, op, name):
    """The error says which name no kernel of the op has."""
    with pytest.raises(PluginError, match=f"{libtype}: no kernel of {op} has such a name"):
        parse(libtype, op, name)


def test_architectures():
    """A name has an architecture, or its family has."""
    assert refusal("flydsl", HGEMM, product(8, 64, 1280)) == ""
    assert refusal("flydsl", HGEMM, product(8, 64, 1280), MI300X).endswith("is compiled for gfx950 (got gfx942)")
    assert refusal("flydsl", WAVES, scaled(8, 64, 256), MI300X).endswith("(got gfx942)")
    assert refusal("flydsl", WMMA, scaled(8, 64, 2048), MI450) == ""
    assert refusal("flydsl", PRESHUFFLE, scaled(8, 64, 512), MI300X) == ""
    assert refusal("flydsl", PRESHUFFLE, scaled(8, 64, 512), MI450).endswith("(got gfx1250)")
    assert refusal("opus", COOPERATIVE, product(8, 64, 512), MI300X) == ""
    assert refusal("opus", WHOLE, product(8, 64, 512), MI300X).endswith("is compiled for gfx950 (got gfx942)")


def test_tiles_of_flydsl():
    """N and K are multiples of the tile, K for each split; any M is served."""
    assert "N in multiples of 64 and K in multiples of 256 (got N=96, K=256)" in refusal("flydsl", HGEMM, product(8, 96, 256))
    assert refusal("flydsl", HGEMM, product(8, 64, 128))
    assert refusal("flydsl", HGEMM, Shape("a16w16", 8, 64, 256, dtype="fp16", outdtype="fp16")).endswith("multiplies bf16 (got fp16)")
    assert refusal("flydsl", PRESHUFFLE, scaled(7, 64, 512, "int8")) == ""
    assert refusal("flydsl", WAVES, scaled(7, 16, 128, "int8")).endswith("multiplies fp8_e4m3fn (got int8)")
    assert "K in multiples of 512" in refusal("flydsl", WMMA, scaled(7, 64, 256), MI450)


def test_a_copy_that_gfx942_lacks_is_refused_there():
    """LLVM ends the process that compiles it."""
    copying = PRESHUFFLE.replace("_0x3x0x1_", "_1x3x0x1_")
    assert refusal("flydsl", copying, scaled(8, 64, 512)) == ""
    assert refusal("flydsl", copying, scaled(8, 64, 512), MI300X).endswith("is compiled for gfx950 (got gfx942)")


def test_limits_of_flydsls_kernels():
    """AITER or its kernel refuses these shapes before a launch."""
    assert refusal("flydsl", HGEMM, product(8, 64, 1024)).endswith("needs K of at least 1280 (got K=1024)")
    assert refusal("flydsl", HGEMM, product(4096, 64, 1280)) == ""
    assert refusal("flydsl", HGEMM, product(4112, 64, 1280)).endswith("splits K of 256 tiles at most (got 257)")
    one = HGEMM.replace("split_k2", "split_k1")
    assert refusal("flydsl", one, product(4095, 4096, 4096)) == ""
    assert refusal("flydsl", one, product(4096, 4096, 4096)).endswith("where M, N and K are 4096 or more")
    large = one.replace("gemm5", "gemm2").replace("16x64x128", "256x256x64").replace("m_warp1_block_n_warp2", "m_warp2_block_n_warp4")
    assert refusal("flydsl", large, product(4096, 4096, 4096)) == ""
    assert refusal("flydsl", one.replace("gemm5", "gemm9"), product(8, 64, 8192)).endswith("needs more LDS than gfx950 has")
    assert refusal("flydsl", one.replace("gemm5", "gemm8"), product(8, 64, 8192)) == ""
    eight = one.replace("gemm5", "gemm8").replace("n_warp2", "n_warp1")
    assert refusal("flydsl", eight, product(8, 64, 8192)).endswith("has more copies in flight than gfx950 counts")
    small = one.replace("_gfx950", "_small_m_nr2_gfx950")
    assert refusal("flydsl", small, product(4096, 4096, 4096)) == ""
    assert refusal("flydsl", WAVES, scaled(8, 16, 128)).endswith("needs K of at least 256 (got K=128)")
    assert refusal("flydsl", WAVES, attrs.evolve(scaled(8, 16, 256), outdtype="fp16")).endswith("writes bf16 (got fp16)")
    assert "less than 2 GiB" in refusal("flydsl", WAVES, scaled(1 << 20, 1024, 256))
    assert refusal("flydsl", WMMA, scaled(8, 64, 1536), MI450).endswith("needs K of at least 2048 (got K=1536)")


def test_sizes_of_opus():
    """The conditions of AITER's tuner, whose launchers do not check all: out of bounds they write."""
    assert refusal("opus", WHOLE, product(7, 48, 128)) == ""
    assert "even number of steps" in refusal("opus", WHOLE, product(7, 48, 192))
    assert "multiples of 16" in refusal("opus", WHOLE, product(7, 50, 128))
    assert refusal("opus", WHOLE, product(7, 48, 128), split=2).endswith("does not split K (got splitK 2)")
    assert refusal("opus", SPLIT, product(7, 50, 130), split=2) == ""
    assert "needs multiples of its tile 32x32x128" in refusal("opus", f"{SPLIT}_nooob", product(7, 64, 256), split=2)
    assert refusal("opus", f"{SPLIT}_nooob", product(32, 64, 256), split=2) == ""
    assert "K in multiples of 512" in refusal("opus", COOPERATIVE, product(7, 50, 256), MI300X)
    assert refusal("opus", EVEN, product(7, 50, 512), MI300X, split=2) == ""
    assert "in each of 3 splits" in refusal("opus", EVEN, product(7, 50, 512), MI300X, split=3)
    assert "less than 4 GiB" in refusal("opus", WHOLE, product(1 << 20, 1 << 12, 128))
    assert refusal("opus", f"{WHOLE}_4g_safe", product(1 << 20, 1 << 12, 128)) == ""

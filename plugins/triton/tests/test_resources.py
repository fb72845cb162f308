"""Resources: partial sums, and kernels that do not fit a shape or device."""

from __future__ import annotations

import attrs
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.tables import ops
from tunedgemm_triton.families import family_of
from tunedgemm_triton.names import Streamk
from tunedgemm_triton.resources import grid_of, partial_bytes, resident

MOE = ops()["fmoe"].examples


def test_streamk_keeps_partial_sums_for_every_program() -> None:
    """Each program has two slots; a multiprocessor has two programs where descriptors feed them and
    memory allows it.
    """
    device, small = Device("sm_90", 132), Streamk(128, 128, 64, 8, 4, 3)
    for kernel, k, programs in ((small, 8192, 264), (small, 8191, 132), (Streamk(128, 256, 64, 8, 8, 4), 8192, 132)):
        shape = Shape("a16w16", 4096, 1280, k)
        assert grid_of(kernel, 1, shape, device) == (programs, 1, 1)
        assert partial_bytes(kernel, 1, shape, device) == programs * 2 * kernel.block_m * kernel.block_n * 4


def test_two_programs_share_tensor_memory() -> None:
    """A program whose accumulators take all columns is alone, though shared memory has room."""
    shape = Shape("a16w16", 4096, 4096, 8192)
    for kernel, programs in ((Streamk(128, 128, 64, 8, 8, 3), 2), (Streamk(64, 256, 64, 8, 4, 2), 1)):
        assert [resident(kernel, shape, Device(gfx, 148)) for gfx in ("sm_100", "sm_90")] == [programs, 2]


WIDE = Shape("a16w16", 4096, 2112, 7168)
INT4 = Shape("a16wn", 64, 512, 512, scale="block", extra={"w_format": "gptq_int4", "w_group": 64})
BLOCKS = Shape("a8w8_blockscale", 64, 512, 512, "fp8_e4m3fn", "bf16", scale="block")
UNFIT = [
    # On an H200 five stages gave wrong sums as soon as a program had a second tile, and batches
    # wrong rows.
    ("tma_r2_m128n128k64_g8_w4s5_ws", 1, WIDE, "sm_90", "more than 4 stages"),
    ("tma_r2_m128n128k64_g8_w4s4_ws", 1, Shape("batched_bf16", 500, 512, 512, extra={"B": 4}), "sm_90", "batches"),
    ("tma_r2_m128n128k64_g8_w8s4_ws", 1, WIDE, "sm_90", "num_warps 4"),
    ("tma_r2_m128n128k64_g8_w4s4_ws", 2, WIDE, "sm_90", "do not split K"),
    ("tma_r2_m128n128k64_g8_w8s4_ws", 1, WIDE, "sm_120", "wgmma or tcgen05"),
    ("tma_r1_m128n128k64_g8_w4s4", 1, WIDE, "gfx942", "no tensor memory accelerator"),
    ("tma_r1_m128n128k64_g8_w4s4", 1, Shape("a16w16", 64, 512, 501), "sm_90", "multiple of 8"),
    ("gemm_r1_m64n64k256_g8_w4s3", 1, BLOCKS, "sm_90", "within one block of scales"),
    ("gemm_r1_m64n64k64_g8_w4s3_p2", 1, WIDE, "sm_90", "options of AMD's compiler"),
    ("gemm_r1_m64n64k64_g8_w4s3_p2", 1, WIDE, "gfx950", "packs K itself"),
    ("gemm_r1_m64n64k64_g8_w4s3_i16", 1, WIDE, "gfx1201", "one size"),
    ("gemm_r1_m16n16k64_g8_w4s3", 2, WIDE, "sm_90", "at most 1024 tiles"),
    ("gemm_r1_m64n64k64_g8_w4s3", 9, Shape("a16w16", 64, 64, 512), "sm_90", "fewer than splitK=9 steps of 64"),
    ("streamk_r1_m64n64k64_g8_w4s3", 2, WIDE, "sm_90", "splitK must be 0"),
    ("streamk_r1_m64n64k64_g8_w4s3", 1, BLOCKS, "sm_90", "streamk does not serve"),
    ("moe_r1_m16g1_n64k64w4s2_n64k64w4s2_d", 1, MOE[0], "sm_90", "decodes mxfp4"),
    ("moe_r1_m16g1_n64k64w4s2_n64k64w4s2", 1, MOE[14], "gfx942", "a kernel with _d"),
    ("moe_r1_m16g1_n64k256w4s2_n64k64w4s2", 1, MOE[11], "sm_90", "cannot be longer"),
    ("wn_r1_m16n64k128_g1_w4s4_t", 1, INT4, "sm_90", "a part of a group of 64, whose sums are scaled (got 128)"),
    ("wn_r1_m16n64k64_g1_w4s4_t", 9, INT4, "sm_90", "fewer than splitK=9 steps of 64"),
    ("wnv_r1_m1n32k4u1_w4", 1, INT4, "sm_90", "a thread must have a word of 8 codes"),
    ("wnv_r1_m1n128k32u16_w4", 1, INT4, "sm_90", "128 elements of a thread's reads must divide the group (got 64)"),
    ("wnv_r1_m1n4k2048u1_w1", 1, attrs.evolve(INT4, extra={"w_format": "ct_int4", "w_group": 64}), "sm_90", "2 to 16 bytes of ct_int4"),
    ("wnv_r1_m1n4k1024u1_w1", 1, attrs.evolve(INT4, k=528, extra={"w_format": "nvfp4", "w_group": 16}), "sm_90", "32 elements of a thread"),
    ("moe_r1_m16g1_n64k64w4s2_n64k64w4s2", 3, MOE[0], "sm_90", "fewer than splitK"),
]


def test_an_unfit_kernel_has_a_reason() -> None:
    """A row of another architecture, or one that Triton computes wrongly, is refused."""
    faults = []
    for name, split_k, shape, gfx, reason in UNFIT:
        family = family_of(shape.op)
        answer = family.unfit(family.parse_name(name), split_k, shape, Device(gfx, 132))
        if reason not in (answer or ""):
            faults.append((name, split_k, str(shape), gfx, answer))
    assert not faults


def test_padding_of_decoded_products_counts() -> None:
    """Two padded buffers of x and the decoded weight exceed 160 KiB of gfx950; half as many rows of
    x fit.
    """
    family, shape = family_of("a16wn"), attrs.evolve(INT4, m=1024, n=4096, k=4096, extra={"w_format": "gptq_int4", "w_group": 128})
    tiles = [family.parse_name(f"wn_r1_m{rows}n128k128_g8_w8s2") for rows in (256, 128)]
    assert [family.fits(tile, 1, shape, Device("gfx950", 256)) for tile in tiles] == [False, True]


def test_kernels_that_spill_are_left_out() -> None:
    """Numbers of zero points for 16 reads, and scales of 64 elements a thread, spill on sm_90; half
    as many fit.
    """
    family, device = family_of("a16wn"), Device("sm_90", 132)
    for name, spilling, fitting in (
        ("gptq_int4_zp", "wnv_r1_m1n128k32u16_w4", "wnv_r1_m1n128k32u4_w4"),
        ("gptq_int4_order", "wn_r1_m16n128k64_g1_w4s6_t", "wn_r1_m16n64k64_g1_w4s6_t"),
    ):
        shape = attrs.evolve(INT4, m=1, n=4096, k=4096, extra={"w_format": name, "w_group": 128})
        assert [family.fits(family.parse_name(kernel), 1, shape, device) for kernel in (spilling, fitting)] == [False, True]

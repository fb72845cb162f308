"""Launch plans: parameters, buffers, and on what a compile depends."""

from __future__ import annotations

import itertools

import attrs
import pytest
from tunedgemm.plugin import Device, Shape
from tunedgemm.tools.tables import ops
from tunedgemm_triton import moe
from tunedgemm_triton.families import FAMILIES, family_of
from tunedgemm_triton.moe.names import parse_name
from tunedgemm_triton.names import Gemm
from tunedgemm_triton.names import parse_name as parse_dense
from tunedgemm_triton.packed.names import Mx
from tunedgemm_triton.plan import plan_of
from tunedgemm_triton.resources import partial_bytes

pytest.importorskip("triton")

H200 = Device("sm_90", 132)
DEVICES = [H200, Device("gfx942", 304), Device("gfx950", 256)]
SHAPES = [shape for op in FAMILIES for shape in (*ops()[op].examples, *ops()[op].large)]


def test_every_step_of_a_plan_gives_its_function_what_it_takes() -> None:
    """Each parameter has one value, constants are last, numbers fit 32 bits, and buffers do not
    overlap.
    """
    for device, shape in itertools.product(DEVICES, SHAPES):
        family = family_of(shape.op)
        for solution in list(family.enumerate_solutions(shape, device))[:4]:
            plan = family.plan_of(family.parse_name(solution.kernel_name), max(solution.split_k, 1), shape, device)
            for step in plan.steps:
                values, constants = [name for name, _ in step.values], [name for name, _ in step.program.constants]
                names = list(step.program.source.arg_names)
                assert names[: len(values)] == values
                assert sorted(names[len(values) :]) == sorted(constants)
                assert all(abs(value) < 1 << 31 for _, value in step.values if isinstance(value, int))
            ends = sorted((start, start + size) for start, size in plan.buffers.values())
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
            assert all(start % 256 == 0 and end <= plan.nbytes for start, end in ends)


def test_a_program_is_compiled_for_the_divisors_of_its_rows() -> None:
    """Half of K in bytes and its scales are known to be multiples of a load, and no larger divisor
    is claimed.
    """
    for k, multiple in ((4096, 256), (7168, 256), (416, 32), (384, 128)):
        (step,) = family_of("a4w4_blockscale").plan_of(Mx(16, 32, 64, 1, 2, 5), 1, Shape("a4w4_blockscale", 16, 7168 + 64, k), H200).steps
        assert dict(step.program.multiples) == {"N": 64, "K": multiple}
    (step,) = family_of("a16w16").plan_of(Gemm(64, 128, 64, 8, 4, 3), 1, Shape("a16w16", 16, 36, 8192), H200).steps
    assert dict(step.program.multiples) == {"N": 4, "K": 16}


def test_a_dense_split_has_a_workspace_of_its_partial_sums() -> None:
    """An unsplit kernel has neither workspace nor counters."""
    shape, kernel = Shape("a16w16", 16, 1280, 8192), Gemm(16, 64, 128, 1, 4, 5)
    split, whole = (family_of("a16w16").plan_of(kernel, split_k, shape, H200) for split_k in (4, 1))
    assert split.nbytes == partial_bytes(kernel, 4, shape, H200) > 0
    assert split.counters >= 20
    assert (whole.nbytes, whole.counters) == (0, 0)


def test_one_compile_serves_every_m_of_a_class() -> None:
    """A program does not depend on M, nor on N and K beyond their divisors."""
    shapes = [Shape("a16w16", m, n, k) for m in (1, 16, 17, 4096) for n, k in ((1280, 8192), (4096, 64))]
    assert len({family_of("a16w16").plan_of(Gemm(64, 128, 64, 8, 4, 3), 1, shape, H200).steps[0].program for shape in shapes}) == 1
    kernel, shape = parse_name("moe_r1_m64g8_n64k128w4s4_n128k128w4s4"), ops()["fmoe"].large[2]
    programs = [{step.program for step in moe.plan.plan_of(kernel, 1, attrs.evolve(shape, m=m), H200).steps} for m in (200, 333, 500)]
    assert programs[0] == programs[1] == programs[2]


def test_orders_of_scales_are_constants_of_the_program() -> None:
    """Each order of x's block scales compiles its address, and a name stands for all of them."""
    seen = {}
    for kernel in ("gemv_r1_m2n8k128u2_w1s1", "gemm_r1_m64n64k128_g1_w4s3", "tma_r1_m64n64k128_g8_w4s3"):
        for m, order in ((61, "row"), (61, "m_major"), (61, "m_major_padded"), (64, "m_major_padded"), (1, "m_major")):
            extra = {} if order == "row" else {"scale_order": order}
            shape = Shape("a8w8_blockscale", m, 2112, 7168, "fp8_e4m3fn", "bf16", scale="block", extra=extra)
            [step] = plan_of(parse_dense(kernel), 1, shape, H200).steps
            seen[kernel.partition("_")[0], m, order] = dict(step.program.constants)["SCALE"]
    wanted = {(61, "row"): "block", (61, "m_major"): "column", (61, "m_major_padded"): "padded"}
    wanted |= {(64, "m_major_padded"): "column", (1, "m_major"): "block"}
    assert seen == {(family, *key): scale for family in ("gemv", "gemm", "tma") for key, scale in wanted.items()}

"""The space: unique, stable, within limits, nothing without work; and neighbours."""

from __future__ import annotations

import subprocess
import sys

import attrs
import pytest
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm_skinny import skinny
from tunedgemm_skinny.cost import cost_of
from tunedgemm_skinny.fit import grid_of, per_split, refusal, registers, shared_bytes, span_of, vec_of
from tunedgemm_skinny.limits import ARCHITECTURES
from tunedgemm_skinny.names import REVISION, Rows, Tiles, Wgmma, kernel_of
from tunedgemm_skinny.solutions import MOST, SPLITS

DEVICES = [Device(gfx, 120) for gfx in ARCHITECTURES]
ROWS = (1, 2, 5, 8, 9, 16, 33, 64)
SHAPES = [Shape("a16w16", m, n, k) for m in ROWS for n, k in ((1280, 8192), (57344, 8192), (256, 7168), (333, 501), (1, 1), (7, 40))]
#: Of the other ops.
OTHERS = [
    Shape(op, m, n, k, dtype=dtype, outdtype="bf16", scale=scale, extra=extra)
    for op, dtype, scale, extra in (
        ("a8w8", "int8", "row", ()), ("a8w8", "fp8", "tensor", ()), ("a8w8_blockscale", "fp8", "block", ()),
        ("batched_bf16", "bf16", "none", {"B": 8}), ("batched_a8w8", "int8", "row", {"B": 8}),
    )
    for m in (1, 8, 64) for n, k in ((2112, 7168), (128, 512), (33, 77))
]  # fmt: skip
H200 = Device("sm_90", 132)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.gfx)
def test_what_is_listed_fits(device: Device) -> None:
    """Each solution once, named, within shared memory and registers, and no warp, block or split is without work."""
    architecture = ARCHITECTURES[device.gfx]
    others = [
        attrs.evolve(shape, dtype=architecture.fp8) if shape.dtype.startswith("fp8") else shape
        for shape in OTHERS
        if architecture.fp8 or "fp8" not in shape.dtype
    ]
    for shape in SHAPES + others:
        found = list(skinny.enumerate_solutions(shape, device))
        assert 0 < len(found) <= MOST
        assert len({(solution.kernel_name, solution.split_k) for solution in found}) == len(found)
        for solution in found:
            kernel, splits = kernel_of(solution.kernel_name), solution.split_k or 1
            assert solution.deterministic
            assert solution.batch_invariant
            assert solution.split_k != 1, "one split has one name"
            assert not refusal(kernel, splits, shape, device.gfx)
            assert shared_bytes(kernel, splits, shape, device.gfx) <= architecture.shared_bytes
            assert registers(kernel, shape, device.gfx) <= architecture.registers
            share, span = per_split(kernel, splits, shape, device.gfx), span_of(kernel, shape.dtype, device.gfx)
            assert (splits - 1) * share < shape.k <= splits * share
            assert share % vec_of(shape.k, shape.dtype) == 0
            assert (kernel.warps_k - 1) * span < share
            assert (grid_of(kernel, splits, shape)[0] - 1) * kernel.per_block < shape.n


def test_real_shapes_have_a_few_dozen_solutions_of_every_kind() -> None:
    """Enough to choose from, few enough to time; both families for few rows, splits where N is small, rings where there are any."""
    for m in ROWS:
        shape = Shape("a16w16", m, 1280, 8192)
        names = [solution.kernel_name for solution in skinny.enumerate_solutions(shape, H200)]
        assert 30 <= len(names) <= MOST
        assert any(name.startswith("tiles") for name in names)
        assert any(name.startswith("rows") for name in names) == (m <= 8)
        assert {bool(kernel_of(name).stages) for name in names} == {True, False}
        amd = [kernel_of(solution.kernel_name) for solution in skinny.enumerate_solutions(shape, Device("gfx942", 304))]
        assert not any(kernel.stages for kernel in amd)
    narrow = Shape("a16w16", 16, 256, 7168)
    assert any(solution.split_k > 1 for solution in skinny.enumerate_solutions(narrow, H200))


def test_one_row_goes_to_the_vector_units_first() -> None:
    """A matrix instruction would multiply seven rows that are not there."""
    first = next(iter(skinny.enumerate_solutions(Shape("a16w16", 1, 8192, 8192), H200)))
    assert first.kernel_name.startswith("rows")


def test_the_list_is_the_same_in_another_process() -> None:
    """Order and names do not depend on the hash seed."""
    source = (
        "from tunedgemm.plugin import Device, Shape\nfrom tunedgemm_skinny import skinny\n"
        "print([str(s) for s in skinny.enumerate_solutions(Shape('a16w16', 4, 1280, 8192), Device('sm_90', 132))])"
    )
    child = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7", "PATH": ""}
    )
    here = [str(solution) for solution in skinny.enumerate_solutions(Shape("a16w16", 4, 1280, 8192), H200)]
    assert child.stdout.strip() == str(here)


def test_importing_loads_neither_torch_nor_a_library() -> None:
    """The plugin answers for absent devices without torch."""
    code = (
        "import sys, tunedgemm_skinny\nfrom tunedgemm.plugin import Device, Shape\n"
        "list(tunedgemm_skinny.skinny.enumerate_solutions(Shape('a16w16', 4, 64, 64), Device('sm_90', 132)))\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("device", [H200, Device("gfx942", 304)], ids=lambda device: device.gfx)
def test_neighbours_differ_in_one_parameter_and_fit(device: Device) -> None:
    """refine moves one parameter, or splitK, by one step, and proposes nothing that cannot run; every parameter moves somewhere."""
    moved = set()
    for shape in (Shape("a16w16", 4, 7168, 8192), Shape("a16w16", 16, 1280, 8192)):
        for solution in skinny.enumerate_solutions(shape, device):
            mine, near = kernel_of(solution.kernel_name), list(skinny.refine(solution, shape, device))
            assert near
            assert len(set(near)) == len(near)
            for other in near:
                kernel = kernel_of(other.kernel_name)
                assert type(kernel) is type(mine)
                changed = [field.name for field in attrs.fields(type(mine)) if getattr(mine, field.name) != getattr(kernel, field.name)]
                changed += ["splits"] if other.split_k != solution.split_k else []
                assert len(changed) == 1
                assert not refusal(kernel, other.split_k or 1, shape, device.gfx)
                moved.update(changed)
    assert moved == {"n_each", "warps_n", "warps_k", "unroll", "x_shared", "splits"} | ({"stages", "cluster"} if device is H200 else set())


def test_no_neighbours_of_what_is_not_ours() -> None:
    """A name of another revision, and a shape beyond the limits, have none."""
    shape = Shape("a16w16", 4, 7168, 8192)
    assert not list(skinny.refine(Solution("skinny", f"rows_r{REVISION + 1}_n4w2x2u4"), shape, H200))
    assert not list(skinny.refine(Solution("skinny", Rows(4, 2, 2, 4).name), attrs.evolve(shape, m=65), H200))


@pytest.mark.parametrize(
    ("kernel", "splits", "shape", "gfx", "reason"),
    [
        (Rows(1, 1, 1, 1), 1, Shape("a16w16", 9, 64, 64), "sm_90", "for M <= 8 (M=9)"),
        (Rows(1, 1, 1, 1), 65, Shape("a16w16", 1, 64, 1 << 20), "sm_90", "splitK must be in 0..64 (got 65)"),
        (Rows(1, 1, 1, 1), 2, Shape("a16w16", 1, 64, 256), "sm_90", "fewer than splitK=2 parts of whole steps of 256"),
        (Rows(1, 1, 1, 1), 2, Shape("a16w16", 1, 64, 512), "gfx942", "whole steps of 512"),
        (Tiles(1, 1, 1, 2), 3, Shape("a16w16", 1, 64, 128), "sm_90", "whole steps of 64"),
        (Tiles(4, 4, 4, 1), 1, Shape("a16w16", 64, 4096, 4096), "sm_90", "266240 bytes of shared memory; sm_90 has 232448"),
        (Tiles(1, 1, 1, 1, cluster=True), 9, Shape("a16w16", 4, 64, 4096), "sm_90", "needs splitK in 2..8 (got 9)"),
        (Rows(1, 1, 1, 1, cluster=True), 1, Shape("a16w16", 4, 64, 4096), "sm_90", "needs splitK in 2..8 (got 1)"),
        (Rows(1, 1, 1, 1, cluster=True), 2, Shape("a16w16", 4, 64, 4096), "sm_80", "needs clusters; sm_80 has none"),
        (Wgmma(1, 1, 1, 1), 1, Shape("a16w16", 4, 64, 4096), "sm_100", "made of instructions that sm_100 has not"),
        (Wgmma(1, 1, 1, 1), 1, Shape("a16w16", 4, 64, 4095), "sm_90", "need K in wholes of 2 (K=4095)"),
        (Wgmma(2, 4, 1, 4, 4), 1, Shape("a16w16", 4, 64, 4096), "sm_90", "bytes of shared memory"),
        (Rows(1, 1, 1, 1, True), 1, Shape("a16w16", 8, 4096, 16384), "sm_90", "shared memory"),
        (Rows(1, 1, 1, 1, stages=2), 1, Shape("a16w16", 1, 64, 64), "gfx942", "gfx942 cannot"),
        (Tiles(1, 1, 1, 1, stages=2), 1, Shape("a16w16", 1, 64, 63), "sm_90", "K in wholes of 2 (K=63)"),
        (Tiles(1, 1, 1, 1, stages=2), 1, Shape("a8w8", 1, 64, 66, dtype="int8", scale="row"), "sm_90", "K in wholes of 4 (K=66)"),
        (
            Rows(1, 1, 1, 1),
            1,
            Shape("a8w8_blockscale", 1, 64, 256, dtype="fp8", scale="block"),
            "sm_90",
            "scales of blocks need products of 128",
        ),
    ],
)
def test_what_cannot_serve_has_a_reason(kernel: Rows | Tiles, splits: int, shape: Shape, gfx: str, reason: str) -> None:
    """A refusal names the value that is wrong and the limit."""
    assert reason in refusal(kernel, splits, shape, gfx)


def test_splits_share_k_in_whole_spans() -> None:
    """Each split but the last has as many whole spans as the others, so that only the last has a ragged end."""
    kernel = Rows(1, 1, 2, 4)
    even = Shape("a16w16", 1, 64, 8192)
    assert [per_split(kernel, splits, even, "sm_90") for splits in (1, 2, 3, 4, 8)] == [8192, 4096, 3072, 2048, 1024]
    assert per_split(kernel, 1, attrs.evolve(even, k=501), "sm_90") == 501
    assert per_split(Tiles(1, 1, 1, 1), 3, attrs.evolve(even, k=100), "gfx942") == 64
    eight = Shape("a8w8", 1, 64, 8192, dtype="int8", scale="row")
    assert [per_split(kernel, splits, eight, "sm_90") for splits in (1, 2, 3, 4)] == [8192, 4096, 4096, 2048]


def test_the_guess_knows_what_starves_and_what_overlaps() -> None:
    """More bytes in flight cost less on a shape too small for the device; a split costs more than it brings on a large one."""
    small, large = Shape("a16w16", 1, 256, 7168), Shape("a16w16", 1, 57344, 8192)
    assert cost_of(Rows(1, 1, 8, 2), 1, small, H200) < cost_of(Rows(1, 1, 1, 1), 1, small, H200)
    assert cost_of(Rows(4, 4, 1, 2), 1, large, H200) < cost_of(Rows(4, 4, 1, 2), SPLITS[-1], large, H200)

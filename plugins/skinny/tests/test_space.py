"""Solution space: unique, stable and useful kernels in the order of their cost; neighbours."""

from __future__ import annotations

import time

import attrs
import pytest
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm.tools.launching import ARCHITECTURES
from tunedgemm_skinny import skinny
from tunedgemm_skinny.limits import TILED
from tunedgemm_skinny.names import REVISION, Rows, Tiles, Wgmma, parse_name
from tunedgemm_skinny.resources import grid_of, per_split, registers, shared_bytes, span_of, unfit, vec_of
from tunedgemm_skinny.space import MOST, order_of, solution_of, spread

DEVICES = [Device(gfx, 120) for gfx in TILED]
ROWS = (1, 2, 5, 8, 9, 16, 33, 64)
SHAPES = [Shape("a16w16", m, n, k) for m in ROWS for n, k in ((1280, 8192), (57344, 8192), (256, 7168), (333, 501), (1, 1), (7, 40))]
#: Shapes of other ops.
OTHERS = [
    Shape(op, m, n, k, dtype=dtype, outdtype="bf16", scale=scale, extra=extra)
    for op, dtype, scale, extra in (
        ("a8w8", "int8", "row", ()), ("a8w8", "fp8", "tensor", ()), ("a8w8_blockscale", "fp8", "block", ()),
        ("batched_bf16", "bf16", "none", {"B": 8}), ("batched_a8w8", "int8", "row", {"B": 8}),
    )
    for m in (1, 8, 64) for n, k in ((2112, 7168), (128, 512), (33, 77))
]  # fmt: skip
H200 = Device("sm_90", 132)
#: N and K of shapes timed on the H200.
TIMED = ((1280, 8192), (7168, 8192), (8192, 1024), (8192, 3584))


@pytest.mark.cases("device", DEVICES)
def test_every_solution_fits(device: Device) -> None:
    """Solutions are unique, fit the device, and leave no warp, block or split idle."""
    architecture = ARCHITECTURES[device.gfx]
    others = [
        attrs.evolve(shape, dtype=architecture.fp8) if shape.dtype.startswith("fp8") else shape
        for shape in OTHERS
        if architecture.fp8 or "fp8" not in shape.dtype
    ]
    for shape in (SHAPES + others)[DEVICES.index(device) % 3 :: 3]:
        solutions = list(skinny.solutions(shape, device))
        assert 0 < len(solutions) <= MOST
        assert len({(solution.kernel_name, solution.split_k) for solution in solutions}) == len(solutions)
        for solution in (*solutions[:9], *solutions[9::7]):
            kernel, splits = parse_name(solution.kernel_name), solution.split_k or 1
            assert solution.deterministic
            assert solution.batch_invariant
            assert solution.split_k != 1, "one split has one name"
            assert not unfit(kernel, splits, shape, device.gfx)
            assert shared_bytes(kernel, splits, shape, device.gfx) <= architecture.shared_bytes
            assert registers(kernel, shape, device.gfx) <= architecture.registers
            share, span = per_split(kernel, splits, shape, device.gfx), span_of(kernel, shape, device.gfx)
            assert (splits - 1) * share < shape.k <= splits * share
            assert share % vec_of(shape) == 0
            assert (kernel.warps_k - 1) * span < share
            assert (grid_of(kernel, splits, shape)[0] - 1) * kernel.per_block < shape.n


def test_real_shapes_have_a_few_dozen_solutions_of_every_kind() -> None:
    """Real shapes have dozens of solutions: all families, splits, and rings on NVIDIA."""
    for m in ROWS:
        shape = Shape("a16w16", m, 1280, 8192)
        names = [solution.kernel_name for solution in skinny.solutions(shape, H200)]
        assert 30 <= len(names) <= MOST
        assert any(name.startswith("tiles") for name in names)
        assert any(name.startswith("rows") for name in names) == (m <= 8)
        assert {bool(parse_name(name).stages) for name in names} == {True, False}
        amd = [parse_name(solution.kernel_name) for solution in skinny.solutions(shape, Device("gfx942", 304))]
        assert not any(kernel.stages for kernel in amd)
    narrow = Shape("a16w16", 16, 256, 7168)
    assert any(solution.split_k > 1 for solution in skinny.solutions(narrow, H200))


@pytest.mark.cases(
    ("shape", "device", "families"),
    [
        *((Shape("a16w16", 1, n, k), H200, "rows") for n, k in TIMED),
        *((Shape("a16w16", m, 1280, 8192), H200, "rows tiles") for m in (2, 4)),
        *((Shape("a16w16", m, n, k), H200, "wgmma") for m in (16, 32, 64) for n, k in TIMED),
        (Shape("a8w8", 16, 7168, 8192, dtype="fp8", outdtype="bf16", scale="row"), H200, "wgmma"),
        *((Shape("a16w16", 16, n, k), Device(gfx, 108), "tiles") for gfx in ("sm_80", "sm_100") for n, k in TIMED),
        (Shape("a16w16", 1, 8192, 8192), Device("gfx942", 304), "rows"),
    ],
)
def test_the_first_solution_is_of_the_fastest_family(shape: Shape, device: Device, families: str) -> None:
    """The first solution is of the fastest family measured on an H200.

    Without wgmma it is of tiles.
    """
    first = next(iter(skinny.solutions(shape, device)))
    assert parse_name(first.kernel_name).family in families.split()


def test_every_family_is_listed() -> None:
    """The list has at least six solutions of each family and ten ways to load."""
    for m, n, k in ((1, 7168, 8192), (8, 128, 512), (4, 57344, 8192)):
        kernels = [parse_name(solution.kernel_name) for solution in skinny.solutions(Shape("a16w16", m, n, k), H200)]
        assert all(sum(kernel.family == family for kernel in kernels) >= 6 for family in ("rows", "tiles", "wgmma"))
        assert len({(kernel.family, kernel.n_each, kernel.x_shared, kernel.stages > 0, kernel.cluster) for kernel in kernels}) >= 10


def test_spread_separates_similar_kernels() -> None:
    """A kernel similar to a cheaper one comes after others of nearly the same cost."""
    alike = [(Tiles(1, 1, 1, unroll), 1) for unroll in (1, 2, 4, 8)]
    costs = {chosen: 0.001 * rank for rank, chosen in enumerate([*alike, (Rows(2, 1, 1, 1), 1), (Rows(4, 1, 1, 1), 1)])}
    costs[Rows(8, 1, 1, 1), 1] = 1.0
    ordered = spread(costs)
    assert sorted(ordered, key=costs.__getitem__) == list(costs)
    assert ordered[:3] == [alike[0], (Rows(2, 1, 1, 1), 1), (Rows(4, 1, 1, 1), 1)]
    assert ordered[-1] == (Rows(8, 1, 1, 1), 1)


@pytest.mark.timing
def test_a_shape_is_listed_quickly() -> None:
    """A shape is listed within 300 ms of CPU time; it takes 10 to 35 ms."""
    for shape in SHAPES:
        started = time.process_time()
        list(skinny.solutions(shape, H200))
        assert time.process_time() - started < 0.3


@pytest.mark.cases("device", [H200, Device("gfx942", 304)])
def test_neighbours_differ_in_one_parameter_and_fit(device: Device) -> None:
    """Neighbours fit and differ in one parameter or splitK, and every one moves.

    From no split to a cluster of two is one step.
    """
    moved = set()
    for shape in (Shape("a16w16", 4, 7168, 8192), Shape("a16w16", 16, 1280, 8192)):
        for solution in skinny.solutions(shape, device):
            own, near = parse_name(solution.kernel_name), list(skinny.refine(solution, shape, device))
            assert near
            assert len(set(near)) == len(near)
            for other in near:
                kernel = parse_name(other.kernel_name)
                assert type(kernel) is type(own)
                changed = [field.name for field in attrs.fields(type(own)) if getattr(own, field.name) != getattr(kernel, field.name)]
                changed += ["splits"] if other.split_k != solution.split_k else []
                assert len(changed) == 1 or (changed == ["cluster", "splits"] and (solution.split_k, other.split_k) == (0, 2))
                assert not unfit(kernel, other.split_k or 1, shape, device.gfx)
                moved.update(changed)
    assert moved == {"n_each", "warps_n", "warps_k", "unroll", "x_shared", "splits"} | ({"stages", "cluster"} if device is H200 else set())


def test_neighbours_reach_clusters_and_every_parameter_of_wgmma() -> None:
    """Neighbours of neighbours reach clusters of every size, and every parameter of wgmma."""
    shape, start = Shape("a16w16", 16, 7168, 8192), Solution("skinny", Wgmma(1, 2, 2, 2, 4).name, batch_invariant=True)
    reached, fresh = {start}, [start]
    for _ in range(8):
        fresh = list({other for solution in fresh for other in skinny.refine(solution, shape, H200)} - reached)
        reached.update(fresh)
    kernels = [(parse_name(solution.kernel_name), solution.split_k) for solution in reached]
    assert {splits for kernel, splits in kernels if kernel.cluster} == {2, 3, 4, 5, 6, 7, 8}
    for name in ("n_each", "warps_n", "warps_k", "unroll", "stages"):
        ladder = attrs.fields_dict(Wgmma)[name].metadata["ladder"]
        assert {getattr(kernel, name) for kernel, _ in kernels} == set(ladder)


def test_foreign_solutions_have_no_neighbours() -> None:
    """A name of another revision and an unsupported shape have no neighbours."""
    shape = Shape("a16w16", 4, 7168, 8192)
    assert not list(skinny.refine(Solution("skinny", f"rows_r{REVISION + 1}_n4w2x2u4"), shape, H200))
    assert not list(skinny.refine(Solution("skinny", Rows(4, 2, 2, 4).name), attrs.evolve(shape, m=65), H200))


@pytest.mark.parametrize(
    ("kernel", "splits", "shape", "order"),
    [
        (Wgmma(1, 2, 1, 2, 4), 1, Shape("a16w16", 8, 1280, 8192), "wgmma-k16"),
        (Wgmma(1, 2, 1, 2, 4), 4, Shape("a16w16", 8, 1280, 8192), "wgmma-k16-s2048"),
        (Wgmma(1, 2, 2, 2, 4), 1, Shape("a16w16", 8, 1280, 8192), "wgmma-x2u2a"),
        (Wgmma(2, 1, 1, 1, 4), 1, Shape("a8w8_blockscale", 8, 2112, 7168, "fp8_e4m3fn", "bf16", scale="block"), "wgmma-k32-p128"),
        (Rows(4, 2, 2, 4), 1, Shape("a16w16", 1, 1280, 8192), "rows-x2u4"),
        (Rows(1, 2, 2, 4, x_shared=True), 1, Shape("a16w16", 1, 1280, 8192), "rows-x2u4"),
        (Tiles(1, 2, 4, 2, 4), 2, Shape("a8w8", 8, 128, 4096, "fp8_e4m3fn", "bf16", "bias", scale="row"), "tiles-x4u2a-s2048-x-w-fma"),
        (Tiles(1, 2, 4, 2), 2, Shape("a8w8", 8, 128, 4096, "int8", "bf16", scale="row"), "exact-x-w"),
        (Tiles(1, 2, 4, 2), 1, Shape("a16w4_blockscale", 8, 128, 4096, "bf16", "bf16", scale="block"), ""),
    ],
    ids=str,
)
def test_the_name_of_an_order_has_what_changes_bits(kernel: Rows | Tiles | Wgmma, splits: int, shape: Shape, order: str) -> None:
    """Turns of warps along K, parts, scales and a fused bias; one group of wgmma warps has asm's order."""
    assert order_of(kernel, splits, shape, H200.gfx) == order
    assert solution_of("skinny", kernel, splits, shape, H200).sum_order == order

"""Space: which kernels are enumerated, in which order, and their neighbours."""

from __future__ import annotations

import itertools
import math
from typing import Any

import attrs
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm.tools.launching import ARCHITECTURES
from tunedgemm.tools.tables import ops
from tunedgemm_triton import tiles
from tunedgemm_triton.cost import packed_us
from tunedgemm_triton.families import DENSE, FAMILIES, family_of, unsupported
from tunedgemm_triton.names import Tma, parse_name
from tunedgemm_triton.space import MOST

enumerate_solutions, refine = DENSE.enumerate_solutions, DENSE.refine

H200 = Device("sm_90", 132)
DEVICES = [Device(gfx, 120) for gfx in ARCHITECTURES]
#: (M, N, K): a vector, few rows and many; aligned and ragged; deep and wide.
SIZES = [(1, 1280, 8192), (3, 333, 501), (4, 8192, 1024), (16, 1280, 8192), (33, 333, 501), (100, 8192, 1024), (4096, 1280, 8192)]


def _shapes(m: int, n: int, k: int, fp8: str) -> list[Shape]:
    """Return shapes of all dense ops, with shuffled weights where the sizes allow them."""
    blocks, layouts = {"dtype": fp8, "outdtype": "bf16", "scale": "block"}, ("aiter16x16", "aiter32x16") if n % 32 == k % 32 == 0 else ()
    shuffled = [Shape("a8w8_blockscale_bpreshuffle", m, n, k, layout=layout, **blocks) for layout in layouts]
    shuffled += [Shape("a8w8_bpreshuffle", m, n, k, "int8", "bf16", scale="tensor", layout=layout) for layout in layouts]
    shuffled += [Shape("a16w16", m, n, k, layout=layout) for layout in layouts]
    batched = [Shape("batched_bf16", m, n, k, extra={"B": 7}), Shape("batched_a8w8", m, n, k, fp8, "fp32", scale="row", extra={"B": 100})]
    rows = [Shape("a8w8", m, n, k, dtype, outdtype, scale="row") for dtype in ("int8", fp8) for outdtype in ("bf16", "fp32")]
    return [Shape("a16w16", m, n, k), *rows, Shape("a8w8_blockscale", m, n, k, **blocks), *batched, *shuffled]


def test_solutions_are_distinct_and_fit_and_their_names_are_parsed() -> None:
    """Of every op on every architecture: no two are equal, all fit, and each name rebuilds its
    kernel.
    """
    faults = []
    for number, device in enumerate(DEVICES):
        fp8 = ARCHITECTURES[device.gfx].fp8 or "fp8_e4m3fn"
        dense = [shape for sizes in SIZES for shape in _shapes(*sizes, fp8)]
        others = [shape for op in FAMILIES for shape in (*ops()[op].examples, *ops()[op].large)]
        for shape in (*dense, *others)[number % 2 :: 2]:
            family, most = family_of(shape.op), MOST if family_of(shape.op) is family_of("a16w16") else 48
            solutions = list(family.enumerate_solutions(shape, device))
            kernels = [(family.parse_name(solution.kernel_name), max(solution.split_k, 1)) for solution in solutions]
            is_sound = len(set(kernels)) == len(kernels) <= most and bool(kernels) is not bool(unsupported(shape, device))
            names = [kernel.name for kernel, _ in kernels] == [solution.kernel_name for solution in solutions]
            if not is_sound or not names or not all(family.fits(kernel, split_k, shape, device) for kernel, split_k in kernels):
                faults.append(f"{shape} on {device.gfx}: {len(kernels)} kernels")
    assert not faults


def test_the_space_of_aiter_for_block_scales_is_listed_on_amd() -> None:
    """All that is listed for many rows is among the 5832 of AITER's guide."""
    space = tiles.BLOCKSCALE_OF_AITER
    assert math.prod(map(len, space.values())) * len(tiles.SPLITS_OF_AITER) == 5832
    for gfx, kpack in (("gfx942", 2), ("gfx950", 1)):
        shape = Shape("a8w8_blockscale", 1024, 7168, 2048, ARCHITECTURES[gfx].fp8, "bf16", scale="block")
        solutions = list(enumerate_solutions(shape, Device(gfx, 304)))
        kernels = [parse_name(solution.kernel_name) for solution in solutions]
        assert len(solutions) == MOST
        assert all(getattr(kernel, field) in values for kernel in kernels for field, values in space.items())
        assert {(kernel.block_k, kernel.nonkdim, kernel.kpack) for kernel in kernels} == {(128, 16, kpack)}
        assert {max(solution.split_k, 1) for solution in solutions} <= set(tiles.SPLITS_OF_AITER)


def test_real_shapes_have_a_few_dozen_solutions() -> None:
    """Every class of M has enough solutions to choose from, and few enough to time."""
    counts = [len(list(enumerate_solutions(Shape("a16w16", m, 7168, 8192), H200))) for m in (1, 4, 16, 64, 256, 1024, 4096)]
    assert all(15 <= count <= MOST for count in counts), counts


def test_uneven_waves_list_streamk_early() -> None:
    """streamk is among the first 16 where tiles leave a tenth of the waves idle; later or absent
    where they do not.
    """
    for m, n, k, early in ((4096, 1280, 8192, True), (4096, 2112, 7168, True), (4096, 4096, 4096, False)):
        solutions = list(enumerate_solutions(Shape("a16w16", m, n, k), H200))
        assert any(solution.kernel_name.startswith("streamk") for solution in solutions[:16]) == early


def test_dense_neighbours_differ_in_one_parameter_and_fit() -> None:
    """`refine` moves one parameter, or splitK, and proposes only kernels that fit."""
    shape = Shape("a16w16", 16, 7168, 8192)
    for solution in list(enumerate_solutions(shape, H200))[:5]:
        near, own = list(refine(solution, shape, H200)), parse_name(solution.kernel_name)
        assert near
        for other in near:
            kernel = parse_name(other.kernel_name)
            changed = [name for name in own.__slots__ if not name.startswith("_") and getattr(own, name) != getattr(kernel, name)]
            assert len(changed) + (other.split_k != solution.split_k) == 1
            assert not family_of(shape.op).unfit(kernel, max(other.split_k, 1), shape, H200)


def test_neighbours_of_plans_are_distinct() -> None:
    """`refine` proposes other solutions than its own, each once; none for an unknown name."""
    for op in ("fmoe", "a4w4_blockscale", "a16w4_blockscale", "a16wn"):
        shape, family = ops()[op].large[0], family_of(op)
        first = next(iter(family.enumerate_solutions(shape, H200)))
        near = list(family.refine(first, shape, H200))
        assert len(set(near)) == len(near) >= 5
        assert first not in near
        assert not list(family.refine(Solution("triton", "sol0"), shape, H200))


def _int4(m: int, n: int = 4096, k: int = 4096) -> Shape:
    return Shape("a16wn", m, n, k, scale="block", extra={"w_format": "gptq_int4", "w_group": 128})


def _parsed(solution: Solution) -> tuple[Any, int]:
    return family_of("a16wn").parse_name(solution.kernel_name), max(solution.split_k, 1)


def _first(shape: Shape) -> tuple[Any, int]:
    """Return the first listed kernel of a weight-only format and its parts of K."""
    return _parsed(next(iter(family_of("a16wn").enumerate_solutions(shape, H200))))


def test_predicted_times_of_weights_alone_grow_with_the_product() -> None:
    """The best prediction does not fall with M, N or K."""
    family = family_of("a16wn")
    for field, sizes in (("m", (1, 2, 4, 16, 64, 256, 1024)), ("n", (512, 2048, 8192, 32768)), ("k", (512, 2048, 8192))):
        best = []
        for shape in (attrs.evolve(_int4(1), **{field: size}) for size in sizes):
            best.append(min(packed_us(*_parsed(each), shape, H200) for each in family.enumerate_solutions(shape, H200)))
        assert all(later > 0.99 * earlier for earlier, later in itertools.pairwise(best)), (field, best)


def test_few_columns_are_split_further() -> None:
    """The fewer tiles along N, the more parts of K the first tile has; a wide weight is not split."""
    parts = [_first(_int4(16, n))[1] for n in (1024, 4096, 32768)]
    assert parts == sorted(parts, reverse=True)
    assert parts[0] > parts[-1] == 1


def test_vector_units_come_first_for_one_row_alone() -> None:
    """One row of a large weight is multiplied on the vector units, 16 rows on the matrix units."""
    assert [_first(_int4(m, 28672))[0].family for m in (1, 16)] == ["wnv", "wn"]


def test_a_group_larger_than_the_tiles_makes_no_other_solution() -> None:
    """With one tile along M, or eight, a larger group is the same kernel under another name; a
    smaller one is not.
    """
    kernel = Tma(128, 128, 64, 8, 4, 5)

    def groups(m: int) -> set[int]:
        near = (parse_name(near.kernel_name) for near in refine(Solution("triton", kernel.name), Shape("a16w16", m, 4096, 4096), H200))
        return {neighbour.group_m for neighbour in near if isinstance(neighbour, Tma)}

    assert groups(128) == {8}
    assert groups(1024) == {4, 8}
    assert groups(4096) == {4, 8, 16}

"""Names and the space: round trips, stability, limits, neighbours."""

from __future__ import annotations

import hashlib
import io
import math
import subprocess
import sys
import tokenize
from importlib.util import find_spec
from pathlib import Path

import pytest
from tunedgemm.plugin import Device, PluginError, Shape, Solution, Unsupported
from tunedgemm_triton import spaces
from tunedgemm_triton.fit import grid_of, partial_bytes, refusal, shared_bytes
from tunedgemm_triton.limits import ARCHITECTURES, supports
from tunedgemm_triton.names import REVISIONS, Gemm, Gemv, Kernel, Streamk, Tma, kernel_of
from tunedgemm_triton.solutions import MOST, enumerate_solutions, refine

DEVICES = [Device(gfx, 120) for gfx in ARCHITECTURES]
ROWS = (1, 2, 3, 4, 5, 16, 33, 64, 100, 300, 4096)
SHAPES = [Shape("a16w16", m, n, k) for m in ROWS for n, k in ((1280, 8192), (8192, 1024), (333, 501))]


def _others(m: int, n: int, k: int, fp8: str) -> list[Shape]:
    """The other ops of the same sizes, weights shuffled where the sizes allow it."""
    blocks, layouts = {"dtype": fp8, "outdtype": "bf16", "scale": "block"}, ("aiter16x16", "aiter32x16") if n % 32 == k % 32 == 0 else ()
    shuffled = [Shape("a8w8_blockscale_bpreshuffle", m, n, k, layout=layout, **blocks) for layout in layouts]
    shuffled += [Shape("a8w8_bpreshuffle", m, n, k, "int8", "bf16", scale="tensor", layout=layout) for layout in layouts]
    shuffled += [Shape("a16w16", m, n, k, layout=layout) for layout in layouts]
    batched = [Shape("batched_bf16", m, n, k, extra={"B": 7}), Shape("batched_a8w8", m, n, k, fp8, "fp32", scale="row", extra={"B": 100})]
    rows = [Shape("a8w8", m, n, k, dtype, outdtype, scale="row") for dtype in ("int8", fp8) for outdtype in ("bf16", "fp32")]
    return [*rows, Shape("a8w8_blockscale", m, n, k, **blocks), *batched, *shuffled]


KERNELS = Path(str(find_spec("tunedgemm_triton").origin)).parent / "kernels"  # type: ignore[union-attr]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.gfx)
def test_names_are_unique_and_lead_back_to_their_parameters(device: Device) -> None:
    """kernelName alone rebuilds the parameters, and no two solutions of a shape share an identity."""
    fp8 = ARCHITECTURES[device.gfx].fp8
    others = [other for shape in SHAPES for other in _others(shape.m, shape.n, shape.k, fp8 or "fp8_e4m3fn")]
    for shape in [*SHAPES, *others]:
        found = list(enumerate_solutions(shape, device))
        if shape.dtype.startswith("fp8") and not fp8:
            assert not found
            continue
        assert 0 < len(found) <= MOST
        assert len({(solution.kernel_name, solution.split_k) for solution in found}) == len(found)
        for solution in found:
            kernel = kernel_of(solution.kernel_name)
            assert kernel.name == solution.kernel_name
            assert not refusal(kernel, max(solution.split_k, 1), shape, device)
            assert shared_bytes(kernel, shape, device.gfx) <= ARCHITECTURES[device.gfx].shared_bytes


def test_aiters_space_of_blockscale_is_listed_on_amd() -> None:
    """All that is listed for many rows lies in the 5832 of AITER's guide."""
    space = spaces.BLOCKSCALE_OF_AITER
    assert math.prod(map(len, space.values())) * len(spaces.SPLITS_OF_AITER) == 5832
    for gfx, kpack in (("gfx942", 2), ("gfx950", 1)):
        shape = Shape("a8w8_blockscale", 1024, 7168, 2048, ARCHITECTURES[gfx].fp8, "bf16", scale="block")
        found = list(enumerate_solutions(shape, Device(gfx, 304)))
        kernels = [kernel_of(solution.kernel_name) for solution in found]
        assert len(found) == MOST
        assert all(getattr(kernel, field) in values for kernel in kernels for field, values in space.items())
        assert {(kernel.block_k, kernel.nonkdim, kernel.kpack) for kernel in kernels} == {(128, 16, kpack)}
        assert {max(solution.split_k, 1) for solution in found} <= set(spaces.SPLITS_OF_AITER)


def test_real_shapes_have_a_few_dozen_solutions() -> None:
    """Enough to choose from, few enough to time."""
    for m in (1, 4, 16, 64, 256, 1024, 4096):
        assert 15 <= len(list(enumerate_solutions(Shape("a16w16", m, 7168, 8192), Device("sm_90", 132)))) <= MOST


def test_uneven_rounds_list_shared_tiles_early() -> None:
    """Where tiles leave a tenth of the multiprocessors' rounds idle, streamk is among the first 16; where they do not, later or absent."""
    for m, n, k, early in ((4096, 1280, 8192, True), (4096, 2112, 7168, True), (4096, 4096, 4096, False)):
        found = list(enumerate_solutions(Shape("a16w16", m, n, k), Device("sm_90", 132)))
        assert any(solution.kernel_name.startswith("streamk") for solution in found[:16]) == early


def test_streamk_keeps_its_partial_sums_for_every_program() -> None:
    """Two programs a multiprocessor where shared memory allows it and descriptors feed them, with two slots of sums each."""
    device, small = Device("sm_90", 132), Streamk(128, 128, 64, 8, 4, 3)
    for kernel, k, programs in ((small, 8192, 264), (small, 8191, 132), (Streamk(128, 256, 64, 8, 8, 4), 8192, 132)):
        shape = Shape("a16w16", 4096, 1280, k)
        assert grid_of(kernel, 1, shape, device) == (programs, 1, 1)
        assert partial_bytes(kernel, 1, shape, device) == programs * 2 * kernel.block_m * kernel.block_n * 4


def test_the_list_is_the_same_in_another_process() -> None:
    """Order and names do not depend on the hash seed."""
    source = (
        "from tunedgemm.plugin import Device, Shape\nfrom tunedgemm_triton.solutions import enumerate_solutions\n"
        "print([str(s) for s in enumerate_solutions(Shape('a16w16', 16, 1280, 8192), Device('sm_90', 132))])"
    )
    child = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7", "PATH": ""}
    )
    here = [str(solution) for solution in enumerate_solutions(Shape("a16w16", 16, 1280, 8192), Device("sm_90", 132))]
    assert child.stdout.strip() == str(here)


EVERY_FIELD = [
    Gemv(3, 2, 1024, 7, 4, 3),
    Gemm(64, 128, 64, 8, 4, 3, True, 16, 2, 3),
    Gemm(16, 32, 64, 1, 2, 5),
    Gemm(64, 128, 64, 8, 4, 3, False, 16, 2, 3, True),
    Tma(128, 128, 64, 8, 4, 3, True, False),
    Tma(128, 128, 64, 8, 4, 3, False, True),
    Streamk(128, 128, 64, 8, 4, 3),
]


@pytest.mark.parametrize("kernel", EVERY_FIELD, ids=lambda kernel: kernel.name)
def test_every_field_survives_the_name(kernel: Kernel) -> None:
    """No parameter is left out of the name."""
    assert kernel_of(kernel.name) == kernel


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemm_r1_m17n64k64_g8_w4s3", "power of two"),
        ("gemv_r1_m9n2k1024u2_w4s1", "in 1..4"),
        ("gemm_r99_m16n64k64_g8_w4s3", "revision"),
        ("gemm_r1_m16n64k64_g8_w4s3_x", "no kernel"),
        ("sol0", "names look like"),
    ],
)
def test_a_foreign_name_is_an_error_that_says_why(name: str, reason: str) -> None:
    """A name of another version, or one that no kernel has, never runs something else."""
    with pytest.raises(PluginError, match=reason):
        kernel_of(name)


def test_neighbours_differ_in_one_parameter_and_fit() -> None:
    """refine moves one parameter, or splitK, and proposes nothing that cannot run."""
    device, shape = Device("sm_90", 132), Shape("a16w16", 16, 7168, 8192)
    for solution in list(enumerate_solutions(shape, device))[:5]:
        near = list(refine(solution, shape, device))
        assert near
        mine = kernel_of(solution.kernel_name)
        for other in near:
            kernel = kernel_of(other.kernel_name)
            changed = [name for name in mine.__slots__ if not name.startswith("_") and getattr(mine, name) != getattr(kernel, name)]
            assert len(changed) + (other.split_k != solution.split_k) == 1
            assert not refusal(kernel, max(other.split_k, 1), shape, device)


@pytest.mark.parametrize(
    ("shape", "gfx", "reason"),
    [
        (Shape("a16w16", 1, 16, 16), "cpu-avx2", "CPU"),
        (Shape("a16w16", 1, 16, 16), "gfx906", "known"),
        (Shape("a16w16", 0, 16, 16), "sm_90", "empty"),
        (Shape("a16w16", 1, 16, 16, dtype="fp32"), "sm_90", "fp32"),
        (Shape("a16w16", 1, 16, 16, outdtype="fp8"), "sm_90", "output"),
        (Shape("a16w16", 1, 16, 16, scale="tensor"), "sm_90", "scale"),
        (Shape("a8w8", 1, 16, 32, "fp8_e4m3fnuz", "bf16", scale="row"), "sm_90", "fp8_e4m3fn,"),
        (Shape("a8w8", 1, 16, 32, "fp8_e4m3fn", "bf16", scale="row"), "gfx90a", "no fp8"),
        (Shape("a8w8", 1, 16, 1 << 17, "int8", "bf16", scale="row"), "sm_90", "K=131071"),
        (Shape("a8w8_blockscale", 1, 16, 32, "int8", "bf16", scale="block"), "sm_90", "int8"),
        (Shape("batched_bf16", 1, 16, 16, extra={"B": 1 << 16}), "sm_90", "65535"),
        (Shape("a8w8", 1, 16, 32, dtype="int8", scale="row", layout="aiter16x16"), "gfx942", "layout"),
    ],
)
def test_what_is_not_covered_has_a_reason(shape: Shape, gfx: str, reason: str) -> None:
    """supports names what stands in the way, and nothing is enumerated."""
    answer = supports(shape, Device(gfx, 100))
    assert isinstance(answer, Unsupported)
    assert reason in answer.reason
    assert not list(enumerate_solutions(shape, Device(gfx, 100)))


def test_groups_of_more_tiles_than_there_are_make_no_other_solution() -> None:
    """With one tile along M, or eight, a larger group is the same kernel under another name; a smaller one is not."""
    device = Device("sm_90", 132)
    kernel = Tma(128, 128, 64, 8, 4, 5)

    def groups(m: int) -> set[int]:
        found = (kernel_of(near.kernel_name) for near in refine(Solution("triton", kernel.name), Shape("a16w16", m, 4096, 4096), device))
        return {near.group_m for near in found if isinstance(near, Tma)}

    assert groups(128) == {8}
    assert groups(1024) == {4, 8}
    assert groups(4096) == {4, 8, 16}


def test_unknown_compiler_options_are_refused() -> None:
    """Triton ignores an option that it does not know, so a misspelt one must not reach it."""
    pytest.importorskip("triton")
    from tunedgemm_triton.compile import checked_options, target_of

    assert checked_options({"num_warps": 4, "num_stages": 3}, target_of("sm_90")) == {"num_warps": 4, "num_stages": 3}
    with pytest.raises(PluginError, match="waves_per_eu"):
        checked_options({"waves_per_eu": 2}, target_of("sm_90"))
    assert checked_options({"waves_per_eu": 2}, target_of("gfx942"))


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("tma_r1_m128n128k64_g8_w4s5_ws", Shape("a16w16", 4096, 2112, 7168), "more than 4 stages"),
        ("tma_r1_m128n128k64_g8_w4s4_ws", Shape("batched_bf16", 500, 512, 512, extra={"B": 4}), "batches"),
        ("tma_r1_m128n128k64_g8_w8s4_ws", Shape("a16w16", 4096, 2112, 7168), "4 of them only"),
    ],
    ids=lambda given: given if isinstance(given, str) else str(given),
)
def test_what_triton_does_wrongly_with_specialised_warps_is_refused(name: str, shape: Shape, reason: str) -> None:
    """Found on an H200: five stages gave wrong sums as soon as a program had a second tile, and batches other rows."""
    assert reason in refusal(kernel_of(name), 1, shape, Device("sm_90", 132))


def test_one_build_serves_every_m_of_a_class() -> None:
    """A compile does not depend on M, nor on N and K beyond what they divide by."""
    pytest.importorskip("triton")
    from tunedgemm_triton.compile import build_of

    device, kernel = Device("sm_90", 132), Gemm(64, 128, 64, 8, 4, 3)
    builds = {build_of(kernel, 1, Shape("a16w16", m, n, k), device) for m in (1, 16, 17, 4096) for n, k in ((1280, 8192), (4096, 64))}
    assert len(builds) == 1


#: SHA-256 of a family's code without comments and docstrings, by (family, revision).
DIGESTS = {
    ("gemv", 1): "9edea323eb6f2b5c",
    ("gemm", 1): "5e933ca8bbc33549",
    ("tma", 1): "7d3510601cae0310",
    ("streamk", 1): "5dde237959f0fa1b",
}


def _digest(*files: str) -> str:
    text = []
    for file in files:
        tokens = tokenize.generate_tokens(io.StringIO((KERNELS / file).read_text()).readline)
        skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        text += [token.string for token in tokens if token.type not in skip and not token.string.startswith('"""')]
    return hashlib.sha256(" ".join(text).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("family", "files"),
    [
        ("gemv", ("arrival.py", "gemv.py")),
        ("gemm", ("arrival.py", "tile.py", "gemm.py")),
        ("tma", ("arrival.py", "tile.py", "persistent.py")),
        ("streamk", ("arrival.py", "tile.py", "gemm.py", "streamk.py")),
    ],
)
def test_a_changed_kernel_has_a_new_revision(family: str, files: tuple[str, ...]) -> None:
    """A tuned row names a revision: the source behind it may not change under it. Raise REVISIONS, then note the digest."""
    assert DIGESTS.get((family, REVISIONS[family])) == _digest(*files)


@pytest.mark.parametrize("sizes", [(1, 64, 5376), (1, 16, 70000), (3, 16, 5376)], ids=str)
def test_a_small_product_is_not_left_without_kernels(sizes: tuple[int, int, int]) -> None:
    """What leaves a part of K without work does not take the places of what does not."""
    device = Device("sm_90", 132)
    for fields in ({}, {"op": "a8w8", "dtype": "fp8_e4m3fn", "outdtype": "bf16", "scale": "row"}):
        assert len(list(enumerate_solutions(Shape(**{"op": "a16w16", **fields}, m=sizes[0], n=sizes[1], k=sizes[2]), device))) >= 8

"""Plans, names and spaces of the ops that are launched from plans."""

from __future__ import annotations

import hashlib
import io
import itertools
import tokenize
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, PluginError, Shape, Solution, Unsupported
from tunedgemm.tools import ops
from tunedgemm_triton import moe, mx
from tunedgemm_triton.planned import PLANNED

DEVICES = [Device("sm_90", 132), Device("gfx942", 304), Device("gfx950", 256), Device("gfx1201", 64), Device("sm_80", 108)]
SHAPES = [shape for op in PLANNED for shape in (*ops()[op].examples, *ops()[op].large)]
KERNELS = Path(str(find_spec("tunedgemm_triton").origin)).parent / "kernels"  # type: ignore[union-attr]


def _solutions(shape: Shape, device: Device) -> list[tuple[Any, int]]:
    family = PLANNED[shape.op]
    return [(family.kernel_of(one.kernel_name), max(one.split_k, 1)) for one in family.enumerate_solutions(shape, device)]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.gfx)
def test_listed_solutions_are_distinct_and_possible_and_their_names_lead_back(device: Device) -> None:
    """A name alone rebuilds the parameters, no two solutions are the same, and none is refused."""
    for shape in SHAPES:
        family, found = PLANNED[shape.op], _solutions(shape, device)
        assert len(set(found)) == len(found) <= 48
        assert bool(found) is bool(family.supports(shape, device))
        for kernel, split in found:
            assert family.kernel_of(kernel.name) == kernel
            assert not family.refusal(kernel, split, shape, device)


@pytest.mark.parametrize("kernel", [mx.Mx(64, 128, 256, 8, 4, 3, True, True), mx.Mx(16, 32, 64, 1, 2, 5)], ids=lambda kernel: kernel.name)
def test_every_field_of_a_product_survives_its_name(kernel: mx.Mx) -> None:
    """No parameter is left out of the name."""
    assert mx.kernel_of(kernel.name) == kernel


@pytest.mark.parametrize(("k", "multiple"), [(4096, 256), (7168, 256), (416, 32), (384, 128)])
def test_a_program_is_compiled_for_what_divides_its_rows(k: int, multiple: int) -> None:
    """Half of K in bytes and its scales must be known to be multiples of what a load takes, and no more than is true is told."""
    (step,) = mx.plan_of(mx.Mx(16, 32, 64, 1, 2, 5), 1, Shape("a4w4_blockscale", 16, 7168 + 64, k)).steps

    assert dict(step.program.multiples) == {"N": 64, "K": multiple}


@pytest.mark.parametrize("flags", [(True, False, False), (False, True, False), (False, False, True)])
def test_every_field_of_a_mixture_survives_its_name(flags: tuple[bool, bool, bool]) -> None:
    """No parameter is left out of the name."""
    kernel = moe.Moe(64, 8, moe.Tile(32, 128, 2, 5), moe.Tile(256, 64, 8, 3), *flags)
    assert moe.kernel_of(kernel.name) == kernel


@pytest.mark.parametrize(
    ("op", "name", "reason"),
    [
        ("fmoe", "moe_r99_m64g8_n128k64w8s4_n128k64w8s4", "revision"),
        ("fmoe", "moe_r1_m48g8_n128k64w8s4_n128k64w8s4", "power of two"),
        ("fmoe", "gemm_r1_m64n128k64_g8_w4s3", "names look like"),
        ("fmoe", "moe_r1_m16g1_n64k128w4s9_n64k128w4s3", "stages must be in 1..8"),
        ("a4w4_blockscale", "mx_r1_m64n128k128_g8_w4s9", "stages must be in 1..8"),
        ("a4w4_blockscale", "mx_r99_m64n128k128_g8_w4s3", "revision"),
        ("a4w4_blockscale", "mx_r1_m64n128k32_g8_w4s3", "power of two"),
        ("a4w4_blockscale", "mx_r1_m64n128k128_g8_w4s3_x", "names look like"),
    ],
)
def test_a_foreign_name_is_an_error_that_says_why(op: str, name: str, reason: str) -> None:
    """A name of another version, or one that no kernel has, never runs something else."""
    with pytest.raises(PluginError, match=reason):
        PLANNED[op].kernel_of(name)


@pytest.mark.parametrize(
    ("shape", "gfx", "reason"),
    [
        (ops()["fmoe"].examples[0], "cpu-avx2", "CPU"),
        (ops()["fmoe"].examples[0], "gfx906", "known"),
        (ops()["fmoe"].examples[-1], "sm_90", "empty"),
        (ops()["fmoe"].examples[10], "sm_90", "fp8_e4m3fnuz"),
        (ops()["fmoe"].examples[6], "sm_80", "fp8"),
        (ops()["a16w4_blockscale"].examples[2], "sm_90", "range"),
        (attrs.evolve(ops()["a4w4_blockscale"].examples[0], layout="aiter32x16"), "sm_90", "layout"),
    ],
)
def test_what_is_not_covered_has_a_reason(shape: Shape, gfx: str, reason: str) -> None:
    """supports names what stands in the way, and nothing is listed."""
    answer = PLANNED[shape.op].supports(shape, Device(gfx, 100))
    assert isinstance(answer, Unsupported)
    assert reason in answer.reason
    assert not list(PLANNED[shape.op].enumerate_solutions(shape, Device(gfx, 100)))


@pytest.mark.parametrize(
    ("place", "name", "split_k", "gfx", "reason"),
    [
        (0, "moe_r1_m16g1_n64k64w4s2_n64k64w4s2_d", 1, "sm_90", "decodes mxfp4"),
        (14, "moe_r1_m16g1_n64k64w4s2_n64k64w4s2", 1, "gfx942", "a kernel with _d does"),
        (11, "moe_r1_m16g1_n64k256w4s2_n64k64w4s2", 1, "sm_90", "cannot be longer"),
        (0, "moe_r1_m16g1_n64k64w4s2_n64k64w4s2", 3, "sm_90", "fewer than splitK"),
    ],
)
def test_a_kernel_that_cannot_serve_is_refused_with_a_reason(place: int, name: str, split_k: int, gfx: str, reason: str) -> None:
    """A row of another architecture or kind of quantisation is not run."""
    assert reason in moe.refusal(moe.kernel_of(name), split_k, ops()["fmoe"].examples[place], Device(gfx, 100))


def test_neighbours_differ_and_fit() -> None:
    """refine proposes other solutions than the one it starts from, and nothing that cannot run."""
    device = Device("sm_90", 132)
    for op in PLANNED:
        shape, family = ops()[op].large[0], PLANNED[op]
        first = next(iter(family.enumerate_solutions(shape, device)))
        near = list(family.refine(first, shape, device))
        assert len(set(near)) == len(near) >= 5
        assert first not in near
        assert not list(family.refine(Solution("triton", "sol0"), shape, device))


def test_every_step_of_a_plan_gives_its_function_what_it_takes() -> None:
    """Each parameter has one value, constants are last, numbers fit 32 bits, and buffers do not overlap."""
    pytest.importorskip("triton")
    for device in DEVICES[:3]:
        for shape in SHAPES:
            for kernel, split in _solutions(shape, device)[:6]:
                plan = PLANNED[shape.op].plan_of(kernel, split, shape)
                for step in plan.steps:
                    values, constants = [name for name, _ in step.values], [name for name, _ in step.program.constants]
                    names = list(step.program.source.arg_names)
                    assert names[: len(values)] == values
                    assert sorted(names[len(values) :]) == sorted(constants)
                    assert all(abs(value) < 1 << 31 for _, value in step.values if isinstance(value, int))
                ends = sorted((start, start + size) for start, size in plan.buffers.values())
                assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
                assert all(end <= plan.nbytes for _, end in ends)


def test_one_compile_serves_every_number_of_tokens() -> None:
    """The programs of a plan do not depend on M beyond the class of what one program sorts."""
    pytest.importorskip("triton")
    kernel, shape = moe.kernel_of("moe_r1_m64g8_n64k128w4s4_n128k128w4s4"), ops()["fmoe"].large[2]
    programs = [{step.program for step in PLANNED["fmoe"].plan_of(kernel, 1, attrs.evolve(shape, m=m)).steps} for m in (200, 333, 500)]
    assert programs[0] == programs[1] == programs[2]


#: Kernels that other families have, too.
SHARED = ("arrival.py", "gemm.py", "tile.py")
#: SHA-256 of the code of a family's files without comments and docstrings, by (family, revision).
DIGESTS = {("mx", 1): "54cfee1c0314ae78", ("moe", 1): "92d3f5d487bb28c7"}


@pytest.mark.parametrize(
    ("family", "revision", "files"),
    [("mx", mx.REVISION, ("mx.py", *SHARED)), ("moe", moe.REVISION, ("mx.py", "moe.py", "moe_quantise.py", "moe_sort.py", *SHARED))],
)
def test_a_changed_kernel_has_a_new_revision(family: str, revision: int, files: tuple[str, ...]) -> None:
    """A tuned row names a revision: the source behind it may not change under it. Raise REVISION, then note the digest."""
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    texts = [
        token.string
        for file in files
        for token in tokenize.generate_tokens(io.StringIO((KERNELS / file).read_text()).readline)
        if token.type not in skip and not token.string.startswith('"""')
    ]
    assert DIGESTS.get((family, revision)) == hashlib.sha256(" ".join(texts).encode()).hexdigest()[:16]

"""Test the backend on Hopper over a fake driver that runs kernels on the emulator."""

from __future__ import annotations

import contextlib
import csv
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Backend, Device, Launcher, LaunchError, Shape, Solution, Unsupported
from tunedgemm.testing.launching import without_extension
from tunedgemm.tools.tables import ops
from tunedgemm_asm import Asm, asm
from tunedgemm_asm.driver import CUDA
from tunedgemm_asm.ptx import build
from tunedgemm_asm.ptx import launch as ptx_launch
from tunedgemm_asm.ptx.cost import cost_of
from tunedgemm_asm.ptx.names import KernelConfig, Variant, parse_name
from tunedgemm_asm.ptx.space import MOST, enumerate_candidates, refine

H200 = Device("sm_90", 132, "nvidia-h200")
CPU = Device("cpu-avx2", 2, "cpu")
SMALL = Shape("a16w16", 37, 72, 200, epilogue="bias")
ROWS = Shape("a8w8", 37, 72, 272, "fp8_e4m3fn", "bf16", "bias", scale="row")
BLOCKS = Shape("a8w8_blockscale", 37, 136, 272, "fp8_e4m3fn", "bf16", scale="block")


@pytest.fixture
def cuda(ptx: ModuleType) -> Any:
    """Return the fake driver."""
    return ptx.Cuda()


@pytest.fixture
def backend(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Return the backend on a CPU that stands for a Hopper GPU with three SMs."""
    monkeypatch.setattr(build, "ptxas", lambda: None)
    library = cuda.driver()
    return attrs.evolve(asm, hooks=Asm(driver=lambda interface: library), host=Device("sm_90", 3, "small"))


def operands(shape: Shape, seed: int = 0) -> tuple[Any, ...]:
    """Return random operands, without an absent bias."""
    return tuple(each for each in ops()[shape.op].make_inputs(shape, torch.device("cpu"), seed) if each is not None)


def check(out: torch.Tensor, given: tuple[Any, ...], shape: Shape) -> None:
    """Check that an output is within the op's tolerance."""
    op = ops()[shape.op]
    wanted = op.reference(shape, given).double()
    error = (out.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert error.max().item() < op.tolerance(shape).row_error


#: A kernel of each kind: its configuration, splits and a shape.
SOLUTIONS = {
    "plain": (KernelConfig(64, 32, 3, 1), 1, SMALL),
    "split": (KernelConfig(128, 32, 3), 2, attrs.evolve(SMALL, outdtype="fp32", bias_dtype="fp32")),
    "swapped": (KernelConfig(40, 64, 3, 1, swapped=True), 4, attrs.evolve(SMALL, dtype="fp16", outdtype="fp16", bias_dtype="fp16")),
    "cluster": (KernelConfig(64, 16, 3, 1, 2), 1, attrs.evolve(SMALL, m=70, epilogue="none", bias_dtype="")),
    "turns": (KernelConfig(64, 16, 3, turns=True), 2, attrs.evolve(SMALL, m=70)),
    "scaled rows": (KernelConfig(64, 32, 3, 1, promoted=True), 1, ROWS),
    "scaled tensors": (KernelConfig(40, 64, 3, 1, swapped=True), 2, attrs.evolve(ROWS, scale="tensor", outdtype="fp16", bias_dtype="fp32")),
    "int8": (KernelConfig(48, 64, 3, 1, swapped=True), 2, attrs.evolve(ROWS, dtype="int8")),
    "scaled blocks": (KernelConfig(64, 96, 3, 1, promoted=True, staged=True), 1, BLOCKS),
    "swapped blocks": (KernelConfig(40, 64, 3, 1, swapped=True, promoted=True, staged=True), 2, BLOCKS),
    "M-major blocks": (KernelConfig(64, 96, 3, 1, promoted=True, staged=True), 2, attrs.evolve(BLOCKS, extra={"scale_order": "m_major"})),
    "padded blocks": (
        KernelConfig(40, 64, 3, 1, swapped=True, promoted=True, staged=True),
        1,
        attrs.evolve(BLOCKS, extra={"scale_order": "m_major_padded"}),
    ),
    "panels": (KernelConfig(64, 64, 3, 1, panels=1), 1, SMALL),
    "panels split": (KernelConfig(128, 32, 3, panels=1), 2, attrs.evolve(SMALL, dtype="fp16", outdtype="fp16", bias_dtype="fp16")),
    "panels of rows": (KernelConfig(64, 16, 3, 1, panels=1, promoted=True), 1, ROWS),
    "panels of blocks": (KernelConfig(64, 96, 3, 1, panels=2, promoted=True, staged=True), 2, BLOCKS),
    "stream": (KernelConfig(64, 32, 3, 1, stream=True), 1, SMALL),
    "stream of turns": (KernelConfig(64, 32, 3, turns=True, stream=True), 1, attrs.evolve(SMALL, m=100)),
    "stream of blocks": (KernelConfig(64, 96, 3, 1, promoted=True, staged=True, stream=True), 1, BLOCKS),
}
#: Those that run without `sweep`: each way to pass operands once.
QUICK = ("plain", "swapped", "scaled tensors", "scaled blocks", "padded blocks", "panels", "stream")


def check_solution(backend: Backend, cuda: Any, name: str) -> None:
    """Check that a kernel bound by its name computes its product, twice with the same bits."""
    config, splits, shape = SOLUTIONS[name]
    launcher = backend.bind(Solution("asm", config.name, splits), shape, CPU)
    assert isinstance(launcher, Launcher), launcher
    given = operands(shape)
    cuda.seed = 0
    first = launcher.call(*given)
    cuda.seed = 1
    assert torch.equal(first, launcher.call(*given))
    assert cuda.faults == []
    check(first, given, shape)
    assert (launcher.workspace_bytes > 0) == (splits > 1 or config.stream)


def test_a_solution_computes_its_product(backend: Backend, cuda: Any, failing: Any) -> None:
    """A solution's name and splits are enough to launch its kernel through the C extension."""
    assert not failing(lambda name: check_solution(backend, cuda, name), itertools.product(QUICK))


def test_ctypes_launches_the_same(backend: Backend, cuda: Any, failing: Any) -> None:
    """Without the C extension ctypes launches the kernel."""
    with without_extension():
        assert not failing(lambda name: check_solution(backend, cuda, name), [("plain",), ("swapped",)])


def test_rows_of_x_share_code(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is written once for all M, also where M-major scales are padded at some."""
    written: list[Variant] = []
    monkeypatch.setattr(build, "code", lambda variant, code=build.code: written.append(variant) or code(variant))
    config = KernelConfig(64, 48, 3, 1, promoted=True, staged=True)
    for m, order in ((41, "m_major_padded"), (40, "m_major"), (44, "m_major")):
        shape = attrs.evolve(BLOCKS, m=m, extra={"scale_order": order})
        assert isinstance(backend.bind(Solution("asm", config.name, 1), shape, CPU), Launcher)
    assert len(written) == 1


@pytest.mark.nightly
def test_every_kind_of_solution_computes_its_product(backend: Backend, cuda: Any, failing: Any) -> None:
    """Every kind of kernel computes its product, through the C extension and through ctypes."""
    assert not failing(lambda name: check_solution(backend, cuda, name), itertools.product(SOLUTIONS))
    with without_extension():
        assert not failing(lambda name: check_solution(backend, cuda, name), itertools.product(SOLUTIONS))


def test_a_launch_that_fails_says_so(backend: Backend, cuda: Any) -> None:
    """A failed launch names kernel, driver function and message."""
    launcher = backend.bind(Solution("asm", KernelConfig(64, 32, 3, 1).name, 1), SMALL, CPU)
    cuda.failing = 719
    with pytest.raises(LaunchError, match="asm ptx_64x32_s3_c1_x1_g8_r1: cuLaunchKernel: fake status 719"):
        launcher.call(*operands(SMALL))


@pytest.mark.parametrize("extension", [True, False], ids=["extension", "ctypes"])
def test_an_operand_that_no_descriptor_is_made_of_says_so(backend: Backend, cuda: Any, extension: bool) -> None:
    """An unaligned operand raises, and the next call works."""
    with contextlib.nullcontext() if extension else without_extension():
        launcher = backend.bind(Solution("asm", KernelConfig(64, 32, 3, 1).name, 1), SMALL, CPU)
    x, *others = operands(SMALL)
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    with pytest.raises(LaunchError, match="cuTensorMapEncodeTiled: fake status 1"):
        launcher.call(moved, *others)
    check(launcher.call(x, *others), (x, *others), SMALL)


def test_shapes_without_a_kernel_are_refused(failing: Any) -> None:
    """Unsupported shapes are refused everywhere with the reason."""

    def check(shape: Shape, reason: str) -> None:
        assert reason in str(asm.refusal(shape, H200))
        assert reason in str(asm.bind(Solution("asm", KernelConfig(64, 32, 3, 1).name, 1), shape, H200))
        asm.prepare(Solution("asm", KernelConfig(64, 32, 3, 1).name, 1), shape, H200)
        assert list(asm.refine(Solution("asm", KernelConfig(64, 32, 3, 1).name, 1), shape, H200)) == []

    assert not failing(
        check,
        [
            (attrs.evolve(SMALL, m=0), "an empty batch needs no kernel"),
            (attrs.evolve(SMALL, k=201), r"K % 8 = 0 (K=201)"),
            (attrs.evolve(ROWS, k=264), r"K % 16 = 0 (K=264)"),
            (attrs.evolve(BLOCKS, m=0), "an empty batch needs no kernel"),
            (attrs.evolve(BLOCKS, dtype="fp8_e4m3fnuz"), "operands must be fp8_e4m3fn, not fp8_e4m3fnuz"),
            (attrs.evolve(BLOCKS, m=1 << 30, k=1 << 12), "x has 34359738368 scales; the limit is 4294967295"),
            (attrs.evolve(SMALL, dtype="fp32", outdtype="fp32"), "operands must be bf16 or fp16, not fp32"),
            (attrs.evolve(SMALL, layout="aiter16x16"), "row or columns128, not scale none and layout aiter16x16"),
            (Shape("a4w4_blockscale", 40, 256, 768, "fp4x2", "bf16", scale="block"), "unsupported op a4w4_blockscale"),
        ],
    )


def test_names_and_parts_that_do_not_fit_are_refused(backend: Backend) -> None:
    """Foreign names, other revisions, too many splits and absent devices are refused."""
    for name, splits, reason in (
        ("tunedgemm_bf16_64x64_pf2", 1, "is not a kernel"),
        ("ptx_64x32_s3_c1_x1_g8_r7", 1, "revision 7"),
        (KernelConfig(64, 32, 3, 1).name, 9, "into 9 splits"),
    ):
        answer = backend.bind(Solution("asm", name, splits), SMALL, CPU)
        assert isinstance(answer, Unsupported) and reason in str(answer)
    assert "is not a kernel" in asm.lacks(Solution("asm", "any"), SMALL, H200)
    assert asm.lacks(Solution("asm", KernelConfig(64, 32, 3, 1).name), SMALL, H200) == ""


#: Tuning profiles of an H200 and an H100: day, and a shape of the op.
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
PROFILES = [
    ("h200-2026-11-22", Shape("a16w16", 1, 1, 1)),
    ("h200-2026-11-23", Shape("a16w16", 1, 1, 1)),
    ("h200-2026-11-23", Shape("a8w8", 1, 1, 1, "fp8_e4m3fn", "bf16", scale="row")),
    ("h100-2026-11-25", Shape("a8w8_blockscale", 1, 1, 1, "fp8_e4m3fn", "bf16", scale="block")),
]
SHAPES = [
    Shape("a16w16", m, n, k)
    for m, n, k in (
        (1, 1280, 8192),
        (16, 7168, 16384),
        (64, 2112, 7168),
        (256, 1280, 8192),
        (1024, 7168, 16384),
        (4096, 7168, 8192),
        (5, 8, 8),
    )
]
EIGHT_BITS = [
    attrs.evolve(like, m=m, n=n, k=k)
    for like in (attrs.evolve(ROWS, epilogue="none", bias_dtype=""), attrs.evolve(ROWS, dtype="int8", scale="tensor"), BLOCKS)
    for m, n, k in ((1, 1280, 8192), (37, 7168, 16384), (100, 2112, 7168), (1024, 7168, 2048), (4096, 7168, 8192), (5, 8, 16))
]


def test_the_list_of_a_shape(failing: Any) -> None:
    """A list has at most 64 distinct solutions that resolve by name."""

    def check(shape: Shape) -> None:
        listed = list(asm.solutions(shape, H200))
        assert 0 < len(listed) <= MOST
        assert len(set(listed)) == len(listed)
        assert [(parse_name(each.kernel_name), each.split_k) for each in listed] == enumerate_candidates(shape, H200)
        assert listed == list(asm.solutions(shape, H200))
        for near in refine("asm", listed[0], shape, H200):
            assert asm.lacks(near, shape, H200) == "" and near != listed[0]

    assert not failing(check, itertools.product([*SHAPES, *EIGHT_BITS]))


@pytest.mark.parametrize(("day", "like"), PROFILES, ids=str)
def test_the_first_eight_are_near_the_best(day: str, like: Shape) -> None:
    """Of each timed shape, the first eight listed contain one within 8 % of the best."""
    times: dict[Shape, dict[Solution, float]] = {}
    with (RESULTS / day / "asm" / f"{like.op}-profile.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["libtype"] == "asm" and float(row["us"]) > 0:
                shape = attrs.evolve(like, m=int(row["M"]), n=int(row["N"]), k=int(row["K"]))
                shape = attrs.evolve(shape, extra={"scale_order": row["scale_order"]} if row.get("scale_order") else ())
                times.setdefault(shape, {})[Solution("asm", row["kernelName"], int(row["splitK"]))] = float(row["us"])
    assert len(times) in (8, 9, 12, 31)
    lost = []
    for shape, timed in times.items():
        known = [timed[solution] for solution in asm.solutions(shape, H200) if solution in timed]
        lost.append(min(known[:8]) / min(timed.values()))
    assert max(lost) <= 1.08 and sum(lost) / len(lost) <= 1.025


def test_promotion_costs_time() -> None:
    """The model hides part of promotion behind another consumer."""
    like, blocks = attrs.evolve(EIGHT_BITS[4], n=128, m=64), attrs.evolve(EIGHT_BITS[-2], n=128, m=64)

    def shown(config: KernelConfig) -> float:
        """Microseconds that promotion costs a shape of one tile."""
        return cost_of(attrs.evolve(config, promoted=True), 1, like, 132) - cost_of(config, 1, like, 132)

    shared = KernelConfig(128, 128, 6)
    assert shown(KernelConfig(64, 128, 6, 1)) > 2 * shown(shared) > 0
    promoted = attrs.evolve(shared, promoted=True)
    assert cost_of(promoted, 1, blocks, 132) - cost_of(promoted, 1, like, 132) > shown(shared)


def test_sums_of_fp8_are_added_in_float32() -> None:
    """Promotion is listed for all fp8 shapes and never for integers."""
    shapes = [*EIGHT_BITS, attrs.evolve(EIGHT_BITS[0], outdtype="fp32"), attrs.evolve(EIGHT_BITS[0], outdtype="fp16")]
    found = [{config.promoted for config, _ in enumerate_candidates(shape, H200)} for shape in shapes]
    assert found == [*[{True, False}] * 6, *[{False}] * 6, *[{True}] * 8]
    assert not any(enumerate_candidates(shape, H200)[0][0].promoted for shape in EIGHT_BITS[:6])
    near = {
        parse_name(each.kernel_name).promoted
        for each in refine("asm", Solution("asm", KernelConfig(64, 96, 4, 1).name, 1), EIGHT_BITS[4], H200)
    }
    assert near == {True, False}


def test_details_name_the_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plugins -v` names the assembler."""
    monkeypatch.setattr(build, "ptxas", lambda: None)
    assert asm.details(H200) == ("generated PTX of revision 1, assembled by the driver, when it loads them: ptxas not found",)
    assert "revision 1" in ptx_launch.details()[0]
    assert CUDA.kind == "nvidia"

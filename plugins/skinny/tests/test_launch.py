"""Bound launchers over the fake GPUs: numbers, threads, repeated bits, refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import Backend, LaunchError, OutOfResources, PluginError, Shape, Solution
from tunedgemm.tools.launching import ARCHITECTURES, semaphores
from tunedgemm_skinny.launch import ALIASES
from tunedgemm_skinny.names import REVISION, KernelConfig, Rows, Tiles, parse_name
from tunedgemm_skinny.space import enumerate_kernels

both = pytest.mark.parametrize("skinny", ["nvidia", "amd"], indirect=True)
families = pytest.mark.cases("kernel", [Rows(1, 2, 2, 1), Tiles(1, 1, 2, 1)])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Set torch to one thread, which is faster for operands this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def splitting(kernel: KernelConfig, skinny: Backend) -> tuple[int, int]:
    """Return (K, splits) of a product in three splits, the last of them ragged."""
    assert skinny.host is not None
    span = kernel.unroll * 8 * ({"nvidia": 32, "amd": 64}[skinny.host.kind] if isinstance(kernel, Rows) else 4)
    return 2 * span + 8, 3


def faults_of(skinny: Backend, over: ModuleType, shape: Shape, solutions: Iterable[Solution]) -> list[str]:
    """List the solutions whose output is wrong."""
    faults = [(solution, over.fault(skinny, shape, solution.kernel_name, solution.split_k)) for solution in solutions]
    return [f"{shape}: {solution}: {fault}" for solution, fault in faults if fault]


CORNERS = [
    Shape("a16w16", 1, 1, 1),
    Shape("a16w16", 2, 17, 501, epilogue="bias"),
    Shape("a16w16", 5, 33, 76, dtype="fp16", outdtype="fp16", epilogue="bias"),
    Shape("a16w16", 4, 31, 66, epilogue="bias", bias_dtype="fp32", outdtype="fp32"),
    Shape("a16w16", 7, 40, 1032, outdtype="fp16"),
]


@both
def test_corners(skinny: Any, over: ModuleType) -> None:
    """The first and the last solution of small, odd and mixed-dtype shapes are right."""
    faults = []
    for shape in CORNERS:
        solutions = list(skinny.solutions(shape, over.CPU))
        faults += faults_of(skinny, over, shape, (solutions[0], solutions[-1]))
    assert not faults


#: One shape of each other op, with all operands that it can have.
OTHERS = [
    Shape("a8w8", 3, 21, 272, dtype="int8", outdtype="fp32", scale="row", epilogue="bias", bias_dtype="bf16"),
    Shape("a8w8_bpreshuffle", 3, 32, 192, dtype="fp8", outdtype="bf16", scale="tensor", layout="aiter16x16"),
    Shape("a8w8_blockscale", 3, 150, 272, dtype="fp8", outdtype="bf16", scale="block"),
    Shape("a8w8_blockscale", 5, 150, 272, dtype="fp8", outdtype="bf16", scale="block", extra={"scale_order": "m_major"}),
    Shape("a8w8_blockscale", 5, 150, 272, dtype="fp8", outdtype="bf16", scale="block", extra={"scale_order": "m_major_padded"}),
    Shape("a8w8_blockscale_bpreshuffle", 3, 144, 256, dtype="fp8", outdtype="bf16", scale="block", layout="aiter16x16"),
    Shape("a4w4_blockscale", 3, 32, 256, dtype="fp4x2", outdtype="bf16", scale="block", layout="aiter16x16"),
    Shape("a16w4_blockscale", 3, 21, 256, outdtype="bf16", scale="block"),
    Shape("batched_bf16", 3, 21, 264, epilogue="bias", extra={"B": 3}),
    Shape("batched_a8w8", 3, 21, 272, dtype="int8", outdtype="bf16", scale="row", extra={"B": 3}),
]


@both
def test_other_ops(skinny: Any, over: ModuleType) -> None:
    """The first solution of every other op is right, split or not."""
    faults = []
    for shape in OTHERS:
        fp8 = ARCHITECTURES[skinny.host.gfx].fp8
        native = attrs.evolve(shape, dtype=fp8) if shape.dtype.startswith("fp8") else shape
        solutions = list(skinny.solutions(native, over.CPU))
        split = next((solution for solution in solutions if solution.split_k and not parse_name(solution.kernel_name).cluster), None)
        faults += faults_of(skinny, over, native, filter(None, (solutions[0], split)))
    assert not faults


def test_rings(backends: dict[str, Any], over: ModuleType) -> None:
    """A weight through a ring of stages gives the same output; AMD refuses rings."""
    shape = Shape("a16w16", 3, 20, 700, epilogue="bias")
    for kernel in (Rows(2, 1, 2, 1, stages=3), Rows(1, 2, 1, 2, True, stages=2), Tiles(1, 1, 2, 2, stages=4)):
        assert not over.fault(backends["nvidia"], shape, kernel.name)
        assert "asynchronous copies need an NVIDIA GPU (got gfx942)" in over.refused(backends["amd"], kernel.name, shape)


@both
@families
def test_splits_reset_their_counters(skinny: Any, over: ModuleType, kernel: KernelConfig) -> None:
    """Split outputs are right, counters return to zero, and the workspace is stated."""
    k, splits = splitting(kernel, skinny)
    shape = Shape("a16w16", 3, 37, k, epilogue="bias")
    launcher, case = over.bound(skinny, kernel.name, shape, splits), over.case(shape)
    assert launcher.workspace_bytes == 4 * splits * 3 * 37
    assert launcher.graph_safe
    assert over.bound(skinny, kernel.name, shape).workspace_bytes == 0
    for _ in range(3):
        assert not case.launched(launcher)
        assert not semaphores(-(-37 // kernel.per_block), torch.device("cpu")).any()


@both
def test_threads_bind_at_the_same_time(skinny: Any, over: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads that compile and load one kernel concurrently all get a working launcher."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    shape = Shape("a16w16", 2, 21, 72)
    case, faults = over.case(shape), []
    threads = [threading.Thread(target=lambda: faults.append(over.fault(skinny, shape, Rows(1, 1, 1, 2).name, 0, case))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [""] * 8


@both
def test_large_sums_overflow_once(skinny: Any, over: ModuleType) -> None:
    """Sums are float32: only a final result beyond fp16 becomes infinite."""
    shape = Shape("a16w16", 1, 8, 64, dtype="fp16", outdtype="fp16")
    x, weight = torch.full((1, 64), 60000.0, dtype=torch.float16), torch.ones(8, 64, dtype=torch.float16)
    weight[0, 1::2] = -1
    weight[0, 0] = 2
    for kernel in (Rows(1, 1, 1, 1), Tiles(1, 1, 1, 1)):
        out = over.bound(skinny, kernel.name, shape).call(x, weight)
        assert float(out[0, 0]) == 60000
        assert out[0, 1:].isposinf().all()


@both
def test_names_that_do_not_bind(skinny: Any, over: ModuleType) -> None:
    """A wrong revision, kernel, split or shape is refused with its reason."""
    shape = Shape("a16w16", 9, 21, 72)
    assert f"revision must be {REVISION} (got {REVISION + 1})" in over.refused(skinny, f"tiles_r{REVISION + 1}_n1w1x1u1", shape)
    assert "M must be at most 8 (got 9)" in over.refused(skinny, Rows(1, 1, 1, 1).name, shape)
    assert "splitK must leave each split a step of 32 of K=72 (got 9)" in over.refused(skinny, Tiles(1, 1, 1, 1).name, shape, 9)
    assert "splitK must be in 0..64 (got -1)" in over.refused(skinny, Tiles(1, 1, 1, 1).name, shape, -1)
    assert "no kernel" in over.refused(skinny, "_ZN5aiter3foo", shape)
    assert "M must be in 1..64 (got 65)" in over.refused(skinny, Tiles(1, 1, 1, 1).name, attrs.evolve(shape, m=65))


@both
@pytest.mark.cases("alias", ALIASES)
def test_aiter_names_mean_the_first_solution(skinny: Any, over: ModuleType, alias: str) -> None:
    """Every kernel name of AITER's rows binds the first solution."""
    shape = Shape("a16w16", 2, 24, 64)
    kernel, splits = next(enumerate_kernels(shape, skinny.host))
    case = over.case(shape)
    named, aliased = over.bound(skinny, kernel.name, shape, splits), over.bound(skinny, alias, shape, 7)
    assert torch.equal(named.call(*case.plain), aliased.call(*case.plain))


@both
def test_a_compiler_that_fails_is_a_launch_error(skinny: Any, over: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed compilation raises LaunchError with the compiler's log."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    monkeypatch.setenv("FAKE_RTC_FAIL", "nothing works")
    with pytest.raises(LaunchError, match="nothing works"):
        skinny.functions["bind"](Solution("skinny", Rows(1, 1, 1, 1).name), Shape("a16w16", 1, 8, 64), over.CPU.limiting(skinny.host))


@both
def test_missing_libraries_are_a_reason(skinny: Any, over: ModuleType) -> None:
    """Without a compiler or a driver bind is refused, and the reason says what to install."""

    def missing(_: object) -> Any:
        raise PluginError("libnvrtc.so cannot be used: pip install nvidia-cuda-nvrtc")

    shape, name = Shape("a16w16", 1, 8, 64), Rows(1, 1, 1, 1).name
    for backend in (
        attrs.evolve(skinny, hooks=attrs.evolve(skinny.hooks, compiler=missing)),
        attrs.evolve(skinny, hooks=attrs.evolve(skinny.hooks, driver=missing)),
    ):
        assert "pip install nvidia-cuda-nvrtc" in over.refused(backend, name, shape)
    with pytest.raises(PluginError, match="pip install"):
        attrs.evolve(skinny, hooks=attrs.evolve(skinny.hooks, compiler=missing)).prepare(Solution("skinny", name), shape, over.CPU)


def test_too_few_resources_name_the_kernel(fake: ModuleType, over: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bind raises OutOfResources for too few registers and too little shared memory."""
    skinny, shape = over.backend(fake, "nvidia"), Shape("a16w16", 8, 64, 4096)
    large = Rows(8, 8, 2, 1, True)
    with monkeypatch.context() as less:
        less.setenv("FAKE_SHARED_BYTES", "50000")
        with pytest.raises(OutOfResources, match=f"skinny {large.name} on sm_90: shared memory of .* bytes refused: cuFuncSetAttribute"):
            skinny.functions["bind"](Solution("skinny", large.name), shape, over.CPU.limiting(skinny.host))
    with monkeypatch.context() as less:
        less.setenv("FAKE_REGISTERS", "200")
        wide = Rows(1, 16, 1, 1)
        with pytest.raises(OutOfResources, match=f"skinny {wide.name} on sm_90: .*200 registers each must be at most 320 .got 512"):
            skinny.functions["bind"](Solution("skinny", wide.name), attrs.evolve(shape, m=7), over.CPU.limiting(skinny.host))


def test_large_shared_memory_is_used(backends: dict[str, Any], over: ModuleType) -> None:
    """x of 72 KiB fits the shared memory of an H200; an MI300X refuses it."""
    shape, name = Shape("a16w16", 8, 9, 4608), Rows(1, 2, 1, 1, True).name
    assert not over.fault(backends["nvidia"], shape, name)
    assert "shared memory on gfx942 must be at most 65536 bytes (got 73728)" in over.refused(backends["amd"], name, shape)


def test_shapes_that_share_a_kernel_keep_their_shared_memory(backends: dict[str, Any], over: ModuleType) -> None:
    """A launcher with less shared memory, bound later, does not shrink the grant of another."""
    skinny, name = backends["nvidia"], Rows(1, 1, 1, 1, True).name
    shapes = [Shape("a16w16", 7, 9, k) for k in (6144, 4096, 64)]
    launchers = [over.bound(skinny, name, shape) for shape in shapes]
    for shape, launcher in zip(shapes, launchers, strict=True):
        assert not over.case(shape).launched(launcher)

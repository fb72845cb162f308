"""A bound launcher: right in every corner, shared by threads, the same bits each time, refused with a reason."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import LaunchError, OutOfResources, PluginError, Shape, Solution, semaphores
from tunedgemm_skinny import Skinny
from tunedgemm_skinny.launch import ALIASES
from tunedgemm_skinny.names import REVISION, KernelConfig, Rows, Tiles
from tunedgemm_skinny.space import enumerate_kernels

both = pytest.mark.parametrize("skinny", ["nvidia", "amd"], indirect=True)
families = pytest.mark.parametrize("kernel", [Rows(1, 2, 2, 1), Tiles(1, 1, 2, 1)], ids=["rows", "tiles"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's own threads take longer over what is so small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def splitting(kernel: KernelConfig, skinny: Skinny) -> tuple[int, int]:
    """(K, splits) of a product that the kernel splits in three, with a ragged end."""
    assert skinny.host is not None
    span = kernel.unroll * 8 * ({"nvidia": 32, "amd": 64}[skinny.host.kind] if isinstance(kernel, Rows) else 4)
    return 2 * span + 8, 3


CORNERS = [
    Shape("a16w16", 1, 1, 1),
    Shape("a16w16", 3, 5, 7),
    Shape("a16w16", 8, 1, 130),
    Shape("a16w16", 2, 17, 501, epilogue="bias"),
    Shape("a16w16", 5, 33, 76, dtype="fp16", outdtype="fp16", epilogue="bias"),
    Shape("a16w16", 4, 31, 66, epilogue="bias", bias_dtype="fp32", outdtype="fp32"),
    Shape("a16w16", 7, 40, 1032, outdtype="fp16"),
]


@both
@pytest.mark.parametrize("shape", CORNERS, ids=str)
def test_corners(skinny: Any, over: ModuleType, shape: Shape) -> None:
    """One row, one column, one element, odd sizes, every dtype: the first, the last and some between of the list are right."""
    solutions = list(skinny.enumerate_solutions(shape, over.CPU))
    for solution in solutions[:: max(len(solutions) // 5, 1)]:
        assert not over.fault(skinny, shape, solution.kernel_name, solution.split_k), solution


@both
@pytest.mark.parametrize("m", [9, 16, 33, 64])
def test_many_rows(skinny: Any, over: ModuleType, m: int) -> None:
    """Matrix instructions serve up to 64 rows, also such as fill none."""
    shape = Shape("a16w16", m, 50, 72, epilogue="bias")
    for kernel in (Tiles(1, 1, 1, 1), Tiles(2, 2, 2, 1)):
        assert not over.fault(skinny, shape, kernel.name)


def test_rings(backends: dict[str, Any], over: ModuleType) -> None:
    """The weight through a ring of slots is the same weight; AMD's architectures say that they have none."""
    shape = Shape("a16w16", 3, 20, 700, epilogue="bias")
    for kernel in (Rows(2, 1, 2, 1, stages=3), Rows(1, 2, 1, 2, True, stages=2), Tiles(1, 1, 2, 2, stages=4)):
        assert not over.fault(backends["nvidia"], shape, kernel.name)
        assert "asynchronous copies need an NVIDIA GPU (got gfx942)" in over.refused(backends["amd"], kernel.name, shape)


@both
@families
def test_splits_are_right_and_leave_nothing_behind(skinny: Any, over: ModuleType, kernel: KernelConfig) -> None:
    """Partial sums are added with the bias, and the counters are zero again; the launcher tells its scratch."""
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
@families
def test_a_hundred_runs_give_the_same_bits(skinny: Any, over: ModuleType, kernel: KernelConfig) -> None:
    """Whatever the order in which blocks and threads run, split or not."""
    k, splits = splitting(kernel, skinny)
    shape, native = Shape("a16w16", 2, 19, k, outdtype="fp32"), over.native(skinny)
    case = over.case(shape)
    for number in (0, splits):
        launcher = over.bound(skinny, kernel.name, shape, number)
        first = launcher.call(*case.plain)
        for seed in range(100):
            native.fake_seed(seed)
            assert torch.equal(launcher.call(*case.plain), first)
    native.fake_seed(1)


@both
@families
def test_a_row_has_the_same_bits_alone_as_among_others(skinny: Any, over: ModuleType, kernel: KernelConfig) -> None:
    """A solution means the same order of sums for every M."""
    k, splits = splitting(kernel, skinny)
    wide = Shape("a16w16", 8, 19, k, outdtype="fp32")
    x, weight = over.case(wide).plain
    for number in (0, splits):
        among = over.bound(skinny, kernel.name, wide, number).call(x, weight)
        for m in (1, 3, 7):
            alone = over.bound(skinny, kernel.name, attrs.evolve(wide, m=m), number).call(x[:m].contiguous(), weight)
            assert torch.equal(alone, among[:m])


@both
@families
def test_eight_threads_share_launchers(skinny: Any, over: ModuleType, kernel: KernelConfig) -> None:
    """Each has operands of its own and gets its own results, split or not."""
    k, splits = splitting(kernel, skinny)
    shape = Shape("a16w16", 2, 19, k, epilogue="bias")
    launchers = [over.bound(skinny, kernel.name, shape, number) for number in (0, splits)]
    cases, start, wrong = [over.case(shape, seed) for seed in range(8)], threading.Barrier(8), []

    def work(case: Any) -> None:
        start.wait(timeout=60)
        wrong.extend(case.wrong(launchers[turn % 2].call(*case.plain)) for turn in range(20))

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(wrong) == {""}


@both
def test_threads_bind_at_the_same_time(skinny: Any, over: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads that compile and load one kernel at once all get a launcher that works."""
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
@families
def test_operands_at_an_offset(skinny: Any, over: ModuleType, kernel: KernelConfig) -> None:
    """Addresses that are multiples of 16 bytes and no more, with bytes 0xFF on either side; x in three dimensions."""
    shape = Shape("a16w16", 4, 23, 88, epilogue="bias")
    case = over.case(shape)

    def placed(operand: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((operand.nbytes + 256,), 0xFF, dtype=torch.uint8)
        start = 64 + -buffer.data_ptr() % 64 + 16
        return buffer[start : start + operand.nbytes].view(operand.dtype).view(operand.shape).copy_(operand)

    x, weight, bias = map(placed, case.plain)
    assert x.data_ptr() % 32 == 16
    launcher = over.bound(skinny, kernel.name, shape)
    assert not attrs.evolve(case, plain=(x, weight, bias)).launched(launcher)
    out = launcher.call(x.view(2, 2, 88), weight, bias)
    assert out.shape == (2, 2, 23)
    assert not case.wrong(out.view(4, 23))


@both
@families
@pytest.mark.parametrize("splits", [0, 3])
def test_infinities_and_nans_go_where_torch_lets_them_go(skinny: Any, over: ModuleType, kernel: KernelConfig, splits: int) -> None:
    """An infinity or a NaN of x marks its row, one of the weight its column, one of the bias its column, and nothing else."""
    k, _ = splitting(kernel, skinny)
    shape = Shape("a16w16", 4, 21, k, epilogue="bias")
    x, weight, bias = (operand.abs() + 0.5 for operand in over.case(shape).plain)
    x[1, 3], x[2, k - 1], weight[5, 1], weight[20, k - 2], bias[7] = torch.inf, torch.nan, -torch.inf, torch.nan, torch.inf
    found = over.bound(skinny, kernel.name, shape, splits).call(x, weight, bias).float()
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(found), kind(wanted))


@both
@families
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_denormals_count(skinny: Any, over: ModuleType, kernel: KernelConfig, dtype: str) -> None:
    """Operands and outputs below the smallest normal number are no zeros."""
    shape = Shape("a16w16", 2, 16, 32, dtype=dtype, outdtype=dtype)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    tiny = torch.finfo(kind).smallest_normal
    x, weight = torch.zeros(2, 32, dtype=kind), torch.zeros(16, 32, dtype=kind)
    x[0, :4], x[1, :4], weight[:, :4] = tiny / 8, 0.5, torch.tensor([1, 2, 0.5, 4.0], dtype=kind)
    weight[3, :4] = tiny / 4
    found = over.bound(skinny, kernel.name, shape).call(x, weight)
    wanted = torch.nn.functional.linear(x.double(), weight.double()).to(kind)
    assert torch.equal(found, wanted)
    assert 0 < float(found[0, 0]) < tiny
    assert 0 < float(found[1, 3]) < tiny


@both
def test_large_sums_overflow_once(skinny: Any, over: ModuleType) -> None:
    """Sums are float32: what fp16 cannot hold on the way comes out right, and what it cannot hold in the end is infinite."""
    shape = Shape("a16w16", 1, 8, 64, dtype="fp16", outdtype="fp16")
    x, weight = torch.full((1, 64), 60000.0, dtype=torch.float16), torch.ones(8, 64, dtype=torch.float16)
    weight[0, 1::2] = -1
    weight[0, 0] = 2
    for kernel in (Rows(1, 1, 1, 1), Tiles(1, 1, 1, 1)):
        found = over.bound(skinny, kernel.name, shape).call(x, weight)
        assert float(found[0, 0]) == 60000
        assert found[0, 1:].isposinf().all()


@both
def test_names_that_do_not_bind(skinny: Any, over: ModuleType) -> None:
    """Another revision, a kernel that cannot serve the shape, a split that K has not: each with its reason."""
    shape = Shape("a16w16", 9, 21, 72)
    assert f"revision must be {REVISION} (got {REVISION + 1})" in over.refused(skinny, f"tiles_r{REVISION + 1}_n1w1x1u1", shape)
    assert "M must be at most 8 (got 9)" in over.refused(skinny, Rows(1, 1, 1, 1).name, shape)
    assert "splitK must leave each split a step of 32 of K=72 (got 9)" in over.refused(skinny, Tiles(1, 1, 1, 1).name, shape, 9)
    assert "splitK must be in 0..64 (got -1)" in over.refused(skinny, Tiles(1, 1, 1, 1).name, shape, -1)
    assert "no kernel" in over.refused(skinny, "_ZN5aiter3foo", shape)
    assert "M must be in 1..64 (got 65)" in over.refused(skinny, Tiles(1, 1, 1, 1).name, attrs.evolve(shape, m=65))


@both
@pytest.mark.parametrize("alias", ALIASES)
def test_aiters_names_stand_for_the_first_guess(skinny: Any, over: ModuleType, alias: str) -> None:
    """A row of AITER's says no more than that a kernel for few rows is meant."""
    shape = Shape("a16w16", 2, 24, 64)
    kernel, splits = next(enumerate_kernels(shape, skinny.host))
    case = over.case(shape)
    named, aliased = over.bound(skinny, kernel.name, shape, splits), over.bound(skinny, alias, shape, 7)
    assert torch.equal(named.call(*case.plain), aliased.call(*case.plain))


@both
def test_a_compiler_that_fails_is_a_launch_error(skinny: Any, over: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core notes it as what went wrong with that solution."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", str(tmp_path))
    monkeypatch.setenv("FAKE_RTC_FAIL", "nothing works")
    with pytest.raises(LaunchError, match="nothing works"):
        skinny.bind(Solution("skinny", Rows(1, 1, 1, 1).name), Shape("a16w16", 1, 8, 64), over.CPU)


@both
def test_missing_libraries_are_a_reason(skinny: Any, over: ModuleType) -> None:
    """Without a compiler or a driver nothing binds, and the reason is the one that tells how to get it."""

    def missing(_: object) -> Any:
        raise PluginError("libnvrtc.so cannot be used: pip install nvidia-cuda-nvrtc")

    shape, name = Shape("a16w16", 1, 8, 64), Rows(1, 1, 1, 1).name
    for backend in (attrs.evolve(skinny, compiler=missing), attrs.evolve(skinny, driver=missing)):
        assert "pip install nvidia-cuda-nvrtc" in over.refused(backend, name, shape)
    with pytest.raises(PluginError, match="pip install"):
        attrs.evolve(skinny, compiler=missing).prepare(Solution("skinny", name), shape, over.CPU)


def test_too_few_resources_are_told_with_the_kernels_name(fake: ModuleType, over: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers and shared memory that the device turns out not to have are OutOfResources, from bind."""
    skinny, shape = over.backend(fake, "nvidia"), Shape("a16w16", 8, 64, 4096)
    large = Rows(8, 8, 2, 1, True)
    with monkeypatch.context() as less:
        less.setenv("FAKE_SHARED_BYTES", "50000")
        with pytest.raises(OutOfResources, match=f"skinny {large.name} on sm_90: shared memory of .* bytes refused: cuFuncSetAttribute"):
            skinny.bind(Solution("skinny", large.name), shape, over.CPU)
    with monkeypatch.context() as less:
        less.setenv("FAKE_REGISTERS", "200")
        wide = Rows(1, 16, 1, 1)
        with pytest.raises(OutOfResources, match=f"skinny {wide.name} on sm_90: .*200 registers each must be at most 320 .got 512"):
            skinny.bind(Solution("skinny", wide.name), attrs.evolve(shape, m=7), over.CPU)


def test_large_shared_memory_is_used(backends: dict[str, Any], over: ModuleType) -> None:
    """x of 72 KiB lies in shared memory on an H200; an MI300X has no room for it, and says so."""
    shape, name = Shape("a16w16", 8, 9, 4608), Rows(1, 2, 1, 1, True).name
    assert not over.fault(backends["nvidia"], shape, name)
    assert "shared memory on gfx942 must be at most 65536 bytes (got 73728)" in over.refused(backends["amd"], name, shape)


def test_shapes_that_share_a_kernel_keep_their_shared_memory(backends: dict[str, Any], over: ModuleType) -> None:
    """A launcher that needs less, bound later, takes nothing from one that needs more."""
    skinny, name = backends["nvidia"], Rows(1, 1, 1, 1, True).name
    shapes = [Shape("a16w16", 7, 9, k) for k in (6144, 4096, 64)]
    launchers = [over.bound(skinny, name, shape) for shape in shapes]
    for shape, launcher in zip(shapes, launchers, strict=True):
        assert not over.case(shape).launched(launcher)

"""Check the installed library on a Hopper GPU: numbers, graphs, threads, state of the process."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tunedgemm.plugin import Device, Launcher, Shape, Solution, device_of
from tunedgemm.testing.launching import bind_launcher, draw_operands, fault_of, poisoned_output
from tunedgemm.testing.sharing import differing_calls, fault_of_graphs
from tunedgemm_deepgemm import deepgemm

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU found", allow_module_level=True)
pytestmark = pytest.mark.gpu

GPU = device_of(torch.cuda.current_device())
ORDERS = ("", "m_major", "m_major_padded")
#: Their overlapping launches are no other kernels.
COMPILED = ("native", "n32", "n128_mnk", "s96")
NAMES = (*COMPILED, "pdl", "s96_pdl")
SEED = 20


def scaled(m: int, n: int, k: int, order: str = "") -> Shape:
    return Shape("a8w8_blockscale", m, n, k, "fp8_e4m3fn", "bf16", scale="block", extra={"scale_order": order} if order else {})


if answer := deepgemm.refusal(scaled(8, 128, 128), GPU):
    pytest.skip(f"deepgemm: {answer}", allow_module_level=True)

#: Copies that multiply bf16 by cuBLASLt serve none of these.
PLAIN = tuple(
    shape for shape in (Shape("a16w16", 64, 2112, 1024), Shape("a16w16", 7, 136, 200, outdtype="fp32")) if not deepgemm.refusal(shape, GPU)
)
SHAPES = (*PLAIN, *(scaled(77, 576, 1024, order) for order in ORDERS))


def drawn(seed: int) -> Iterator[Shape]:
    """Yield shapes of random sizes, with tails in all dimensions."""
    draw = random.Random(seed)
    for index in range(8):
        m, n, k = draw.choice((1, 2, 5, 63, 64, 129, 1000)), 8 * draw.randint(1, 200), draw.randint(1, 200)
        yield scaled(m, n, 16 * k, ORDERS[index % 3]) if index % 2 else Shape("a16w16", m, n, 8 * k, outdtype=("bf16", "fp32")[index // 4])


RANDOM = tuple(shape for shape in drawn(SEED) if not deepgemm.refusal(shape, GPU))


@pytest.fixture(scope="module", autouse=True)
def compiled(kept_cache: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Compile all kernels of this file together, into a cache for the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEDGEMM_CACHE", kept_cache or str(tmp_path_factory.mktemp("deepgemm-kernels")))
        tasks = [(name, shape) for shape in SHAPES for name in COMPILED] + [("native", shape) for shape in RANDOM]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda task: deepgemm.prepare(Solution("deepgemm", task[0]), task[1], GPU), tasks))
        yield os.environ["TUNEDGEMM_CACHE"]


@pytest.fixture(autouse=True)
def in_cache(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the session's cache in each test."""
    monkeypatch.setenv("TUNEDGEMM_CACHE", compiled)


def kernels() -> set[Path]:
    """Return the kernels of the library's cache."""
    return set(Path(os.environ["TUNEDGEMM_CACHE"]).joinpath("deepgemm", "cache").iterdir())


def bound(name: str, shape: Shape) -> Launcher:
    return bind_launcher(deepgemm, Solution("deepgemm", name), shape, GPU)


def operands(shape: Shape, seed: int = 0) -> tuple[Any, ...]:
    return draw_operands(shape, GPU, seed)


def test_prepared_kernels_are_right_and_compile_nothing() -> None:
    """Outputs in poisoned memory are right, bits repeat, and `bind` and calls add no kernel to the cache."""
    before = kernels()
    for shape in SHAPES:
        given = operands(shape)
        for name in NAMES:
            launcher = bound(name, shape)
            assert not (fault := fault_of(shape, poisoned_output(launcher, given), given)), f"{name}: {fault}"
            assert not differing_calls(launcher, given, 50), f"{name} {shape}"
    assert kernels() == before


@pytest.mark.parametrize("shape", RANDOM, ids=str)
def test_random_products_are_right(shape: Shape) -> None:
    """Sizes with tails in all dimensions are right, also with more dimensions of x."""
    call, given = bound("native", shape).call, operands(shape, 1)
    out = call(*given)
    assert not fault_of(shape, out, given)
    folded = call(given[0].view(1, shape.m, shape.k), *given[1:])
    assert torch.equal(folded[0], out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_graphs_on_two_streams_read_new_inputs(shape: Shape) -> None:
    """Each replay on two streams has the bits of a plain call, with and without overlapping launches."""
    given = [operands(shape, seed) for seed in range(4)]
    for name in ("native", "pdl"):
        assert not (fault := fault_of_graphs(bound(name, shape), given, replays=40)), f"{name}: {fault}"


def test_threads_share_a_copy_with_different_settings() -> None:
    """Eight fresh threads, each on its stream, call kernels of different settings."""
    shape, faults = SHAPES[-1], list[str]()
    calls = {name: bound(name, shape).call for name in NAMES}
    wanted = {name: call(*operands(shape)).clone() for name, call in calls.items()}
    given, streams = operands(shape), [torch.cuda.Stream() for _ in range(8)]
    torch.cuda.synchronize()

    def run(index: int) -> None:
        name = NAMES[index % len(NAMES)]
        with torch.cuda.stream(streams[index]):
            outs = [calls[name](*given) for _ in range(50)]
            streams[index].synchronize()
        faults.extend(name for out in outs if not torch.equal(out, wanted[name]))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@pytest.fixture
def users_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the package as a user does, and restore its settings."""
    spec = importlib.util.spec_from_file_location("deep_gemm", deepgemm.hooks.access.find().folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "deep_gemm", package)
    spec.loader.exec_module(package)
    before = package.get_num_sms(), package.get_pdl()
    yield package
    package.set_num_sms(before[0])
    package.set_pdl(before[1])


def test_the_users_deep_gemm_keeps_its_settings(users_own: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings, variables and cache of the user's own import stay; ours do not follow them."""
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    if not PLAIN:
        pytest.skip("this copy has no bf16 kernels, which take the fewest arguments")
    shape, given = PLAIN[0], operands(PLAIN[0])
    users_own.set_num_sms(64)
    users_own.set_pdl(True)
    before = dict(os.environ)
    wanted = {name: bound(name, shape).call(*given) for name in NAMES}
    assert (users_own.get_num_sms(), users_own.get_pdl()) == (64, True)
    assert dict(os.environ) == before
    theirs = torch.empty(shape.m, shape.n, dtype=torch.bfloat16, device=GPU.torch_device)
    users_own.bf16_gemm_nt(*given, theirs)
    assert list(tmp_path.glob("cache/kernel.*")), "the user's kernel is in the user's folder"
    faults = [fault_of(shape, out, given) for out in (theirs, *wanted.values())]
    assert not any(faults), faults


def test_a_described_device_of_other_sms_compiles_too() -> None:
    """`prepare` compiles for a device that is absent, here with fewer SMs."""
    other, shape = Device("sm_90", 114, "nvidia-h100-pcie"), SHAPES[0]
    before = kernels()
    deepgemm.prepare(Solution("deepgemm", "native"), shape, other)
    assert kernels() >= before
    assert not deepgemm.lacks(Solution("deepgemm", "native"), shape, other)

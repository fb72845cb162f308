"""cuBLASLt on a GPU: edge sizes, views, threads and streams, graphs, several devices."""

from __future__ import annotations

import itertools

import pytest
import torch
import tunedgemm
from torch.nn.functional import linear
from tunedgemm.plugin import Launcher, Shape, device_of
from tunedgemm.testing.launching import bind_launcher
from tunedgemm_hipblaslt import cublaslt
from tunedgemm_hipblaslt.descriptors import locked_descriptors
from tunedgemm_hipblaslt.launch import TOP_RESULTS
from tunedgemm_hipblaslt.library import load_library
from tunedgemm_hipblaslt.limits import make_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None, reason="cuBLASLt is NVIDIA's"),
]
BF16 = torch.bfloat16


def bind_first(shape: Shape, index: int = 0) -> Launcher:
    """Bind a shape's first solution."""
    solutions = list(cublaslt.solutions(shape, device_of(index)))
    return bind_launcher(cublaslt, solutions[0], shape, device_of(index))


def draw(*sizes: int, device: str = "cuda:0") -> torch.Tensor:
    """Draw normal numbers in bf16."""
    return torch.randn(*sizes, device=device, dtype=BF16)


def is_close(out: torch.Tensor, *operands: torch.Tensor) -> bool:
    """Return whether an output is the product of its operands."""
    exact = linear(*(operand.float() for operand in operands))
    return bool((out.float() - exact).norm() <= 2**-7 * exact.norm() + 1e-6)


def test_edge_sizes() -> None:
    """Each listed solution of sizes that fit no vector is right, and some are listed."""
    device = device_of(0)
    sizes = [(3, 1, 64), (5, 64, 1), (1, 1, 1), (16, 256, 8190), (7, 129, 511), (1, 8192, 1024)]
    for (m, n, k), epilogue in itertools.product(sizes, ("none", "bias")):
        shape = Shape("a16w16", m, n, k, epilogue=epilogue)
        operands = (draw(m, k), draw(n, k), *((draw(n),) if shape.bias else ()))
        solutions = list(cublaslt.solutions(shape, device))
        assert solutions, shape
        for solution in solutions:
            launcher = bind_launcher(cublaslt, solution, shape, device)
            assert is_close(launcher.call(*operands), *operands), f"{shape}: {solution}"


def test_views_at_an_offset() -> None:
    """Operands at an offset of 16 or 2 bytes give the right numbers through dispatch."""
    for offset in (8, 1):
        x, weight = draw(16 * 512 + offset)[offset:].view(16, 512), draw(256 * 512 + offset)[offset:].view(256, 512)
        assert is_close(tunedgemm.TunedGemm().gemm_a16w16(x, weight), x, weight)
    shape = Shape("a16w16", 16, 256, 512)
    x, weight = draw(16 * 512 + 8)[8:].view(16, 512), draw(256 * 512 + 8)[8:].view(256, 512)
    assert is_close(bind_first(shape).call(x, weight), x, weight)


def test_more_than_two_to_the_31_elements() -> None:
    """An output of more than 2^31 elements is right at both ends."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free memory")
    m, n, k = 36_000, 61_440, 64
    x, weight = draw(m, k), draw(n, k)
    out = bind_first(Shape("a16w16", m, n, k)).call(x, weight)
    for rows in (slice(0, 64), slice(m - 64, m)):
        assert is_close(out[rows], x[rows], weight)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_in_one_process() -> None:
    """Launchers of two devices give the right numbers, whichever device is current."""
    shape = Shape("a16w16", 16, 512, 1024)
    launchers = [bind_first(shape, index=index) for index in (0, 1)]
    for current, index in itertools.product((0, 1), (0, 1)):
        with torch.cuda.device(current):
            x, weight = draw(16, 1024, device=f"cuda:{index}"), draw(512, 1024, device=f"cuda:{index}")
            out = launchers[index].call(x, weight)
            assert out.device.index == index
            assert is_close(out, x, weight)


def test_names_reproduce_the_results() -> None:
    """The library's results, configured from their names, are the same bytes."""
    for m in (1, 16, 256, 4096):
        with locked_descriptors(load_library(cublaslt.hooks.abi), make_problem(Shape("a16w16", m, 7168, 2048)), 0) as descriptors:
            for result in descriptors.heuristic_results(TOP_RESULTS, cublaslt.hooks.abi.workspace):
                assert descriptors.init_algo(descriptors.read_config(result.algo)) == result.algo

"""Lists of solutions."""

from __future__ import annotations

import pytest
from tunedgemm.plugin import Device, Shape, Solution
from tunedgemm_quack.names import KernelConfig, parse_name
from tunedgemm_quack.space import _own, enumerate_solutions

H200 = Device("sm_90", 132, "nvidia-h200")


def listed(m: int, n: int, k: int) -> list[tuple[KernelConfig, int]]:
    """Return the solutions of a shape in bf16."""
    solutions = list(enumerate_solutions("quack", Shape("a16w16", m, n, k), H200))
    assert all(isinstance(solution, Solution) and solution.libtype == "quack" for solution in solutions)
    return [(parse_name(solution.kernel_name), solution.split_k) for solution in solutions]


@pytest.mark.parametrize("shape", [(1, 1280, 8192), (16, 8192, 1024), (64, 7168, 8192), (512, 4096, 4096), (4096, 7168, 16384), (3, 8, 8)])
def test_lists_are_short_and_their_names_valid(shape: tuple[int, int, int]) -> None:
    """A shape has 10 to 36 solutions, of which 12 split K."""
    found = listed(*shape)
    assert 10 <= len(found) == len(set(found)) <= 36
    assert sum(splits > 0 for _, splits in found) <= 12


def test_few_rows_are_the_kernels_columns() -> None:
    """The best guesses for 16 rows multiply the weight by x with a tile of 16; a tile of 128 would idle."""
    found = listed(16, 8192, 1024)
    assert all(kernel.swapped and kernel.tile_n == 16 for kernel, _ in found[:4])
    assert not any(kernel.tile_n in (32, 64) for kernel, _ in found)


def test_many_rows_take_quacks_own_configurations() -> None:
    """Prefill has the largest tiles first, without splits."""
    found = listed(4096, 7168, 8192)
    assert all(splits == 0 for _, splits in found)
    assert found[0][0].tile_m * found[0][0].tile_n >= 128 * 256
    assert {kernel for kernel, _ in found} <= set(_own())


def test_splits_fill_idle_multiprocessors_only() -> None:
    """A narrow weight is split; one with more tiles than multiprocessors is not."""
    assert any(splits for _, splits in listed(1, 1280, 8192))
    assert not any(splits for _, splits in listed(16, 57344, 8192) if _.tile_m < 256)


def test_quacks_own_configurations_are_those_of_the_installed_one() -> None:
    """The list equals the one that QuACK's autotuner times on Hopper."""
    config = pytest.importorskip("quack.gemm_config", reason="QuACK is not installed")
    theirs = [each for each in config.get_all_configs() if each.device_capacity == 9]
    assert all(each.tile_k is None and each.cluster_k == 1 and not each.is_dynamic_persistent for each in theirs)
    assert {(each.tile_m, each.tile_n, each.cluster_m, each.cluster_n, each.pingpong, each.swap_ab) for each in theirs} == {
        (each.tile_m, each.tile_n, each.cluster_m, each.cluster_n, each.pingpong, each.swapped) for each in _own()
    }

"""hipBLASLt's own names of kernels and solutions, as AITER's tables have them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Shape, Solution
from tunedgemm_hipblaslt import descriptors, launch, limits
from tunedgemm_hipblaslt.names import parse_name

amd = pytest.mark.parametrize("lt", ["hipblaslt"], indirect=True)
PLAIN = Shape("a16w16", 4, 48, 64)
KERNEL = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT16x16x"


@amd
def test_names_of_the_library(lt: Any, harness: Any) -> None:
    """A kernel's or solution's name binds the algorithm that has it; the product is right."""
    case = harness.make_case(PLAIN)
    for name in (f"{KERNEL}3", f"{KERNEL}3_SN_WGM7", "Cijk_22", "Cijk_22_SN_WGM5", "Cijk_000_SN_WGM1"):
        assert not harness.fault(lt, PLAIN, name, case=case), name
        assert lt.lacks(Solution("hipblaslt", name), PLAIN, harness.CPU) == ""


@amd
def test_a_name_of_several_algorithms(lt: Any, harness: Any) -> None:
    """The number of a row selects among the algorithms of a kernel; else the best one runs."""
    library, problem = lt.hooks.load(lt.hooks.abi), limits.make_problem(PLAIN)
    indices = launch.indices_by_name(library, problem, -1)[f"{KERNEL}3"]
    assert sorted(indices) == [1006, 1007]
    results = launch.results_by_index(library, problem, -1, launch.ALL_RESULTS)
    with descriptors.locked_descriptors(library, problem, -1) as shared:
        for hint, index in ((1006, 1006), (1007, 1007), (4711, indices[0])):
            assert launch.find_algorithm(shared, parse_name(f"{KERNEL}3", 0), -1, hint) == results[index]


@amd
def test_unknown_names_of_the_library(lt: Any, harness: Any) -> None:
    """A name that the library does not list is refused, by bind and lacks with one reason."""
    for shape, name in ((PLAIN, f"{KERNEL}99"), (PLAIN, "Cijk_invented"), (attrs.evolve(PLAIN, k=72), f"{KERNEL}10_SN_WGM20")):
        reason = harness.refusal(lt, name, shape)
        assert reason == f"kernelName: the library lists no algorithm {name} for this shape"
        assert lt.lacks(Solution("hipblaslt", name), shape, harness.CPU) == reason


def test_a_library_without_names(backends: dict[str, Any], harness: Any) -> None:
    """An older hipBLASLt has no functions of names: such rows are misses with the reason and the remedy."""
    lt = backends["hipblaslt"]
    older = attrs.evolve(lt, hooks=attrs.evolve(lt.hooks, load=lambda abi: attrs.evolve(lt.hooks.load(abi), namers=())))
    assert "this hipBLASLt (100200) tells no names (got Cijk_2); tune the shape again" in harness.refusal(older, "Cijk_2", PLAIN)


def test_rows_without_a_name(backends: dict[str, Any], harness: Any) -> None:
    """A number without a name or a version is refused on every device, and the reason gives the number."""
    for libtype, lt in backends.items():
        solution = Solution(libtype, solidx=4711)
        reason = f"kernelName: empty, and algorithm 4711 is of an unknown {libtype}; tune the shape again"
        assert str(lt.bind(solution, PLAIN, harness.CPU)) == reason
        assert {lt.lacks(solution, PLAIN, device) for device in (harness.CPU, lt.host)} == {reason}

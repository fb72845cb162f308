"""The list of a shape's solutions: in which order, which variants, and that each of them binds."""

from __future__ import annotations

import ctypes
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Device, Launcher, Shape, Solution
from tunedgemm_hipblaslt import LtBackend, launch
from tunedgemm_hipblaslt.descriptors import ProblemDescriptors
from tunedgemm_hipblaslt.limits import SHUFFLED_LAYOUT, make_problem
from tunedgemm_hipblaslt.names import parse
from tunedgemm_hipblaslt.space import allows_fast_accum

both = pytest.mark.parametrize("lt", ["cublaslt", "hipblaslt"], indirect=True)
nvidia = pytest.mark.parametrize("lt", ["cublaslt"], indirect=True)
amd = pytest.mark.parametrize("lt", ["hipblaslt"], indirect=True)
PLAIN = Shape("a16w16", 5, 48, 512)
BIASED = attrs.evolve(PLAIN, epilogue="bias", bias_dtype="bf16")
FP8 = Shape("a8w8", 5, 48, 512, dtype="fp8_e4m3fn", outdtype="bf16", scale="row")
#: The fake's guesses in its order (fake/algos_cublas.c): what a first word of the name says, and the parts of K.
GUESSES = [
    ("id66_tile20_stages15_reduce0", 1), ("id66_tile20_stages14_reduce0", 1), ("id66_tile23_stages15_reduce0", 1),
    ("id66_tile20_stages15_reduce2", 2), ("id71_tile20_stages35_reduce0", 1), ("id71_tile23_stages35_reduce0", 1),
    ("id66_tile20_stages15_reduce2", 4), ("id21_tile20_stages8_reduce0", 1),
]  # fmt: skip


def listed(lt: LtBackend, over: Any, shape: Shape) -> list[Solution]:
    """The solutions of a shape."""
    return list(lt.enumerate_solutions(shape, over.CPU))


def endings(solutions: list[Solution]) -> list[str]:
    """The ending of each, "" for none."""
    return [next((end for end in ("fast", "after") if solution.kernel_name.endswith(end)), "") for solution in solutions]


@nvidia
def test_the_guesses_come_first(lt: LtBackend, over: Any) -> None:
    """cuBLASLt's answers within the scratch in their order, then what it answers without any; none twice."""
    found = listed(lt, over, PLAIN)
    named = [("_".join(each.kernel_name.split("_")[:4]), each.split_k) for each in found]
    assert named[: len(GUESSES)] == GUESSES
    assert len(named) > len(GUESSES), "those that the limit of eight hid behind the parts of K"
    assert all(parts == 1 for _, parts in named[len(GUESSES) :])
    assert len(set(found)) == len(found)
    assert all(each.kernel_name.endswith(("cluster0", "cluster2", "cluster3")) for each in found)


@amd
def test_all_numbers_are_listed(lt: LtBackend, over: Any) -> None:
    """hipBLASLt's own answers first, then all that support the shape, with version and revision, and the number as a hint."""
    found = listed(lt, over, PLAIN)
    numbers = [each.solidx for each in found]
    assert numbers[:8] == list(range(1000, 1008))
    assert numbers == sorted(numbers)
    assert 1022 in numbers
    assert [each.kernel_name for each in found] == [f"sol{number}_v100200_fake0001" for number in numbers]
    assert {each.split_k for each in found} == {0}


@both
def test_stable(lt: LtBackend, over: Any, fake_library: Any) -> None:
    """A second call, and another backend over the same library, list the same in the same order."""
    for shape in (PLAIN, BIASED):
        assert listed(lt, over, shape) == listed(lt, over, shape)
        assert listed(over.backend(fake_library(lt.abi.libtype), lt.abi.libtype), over, shape) == listed(lt, over, shape)


@both
def test_a_bias_after_the_product(lt: LtBackend, over: Any) -> None:
    """The first three answers are offered with the bias after them, too; without a bias none is."""
    assert "after" not in endings(listed(lt, over, PLAIN))
    found = listed(lt, over, BIASED)
    assert endings(found)[-3:] == ["after"] * 3
    assert endings(found).count("after") == 3
    assert [each.kernel_name for each in found[-3:]] == [f"{each.kernel_name}_after" for each in listed(lt, over, PLAIN)[:3]]


@pytest.mark.parametrize(("lt", "dtype"), [("cublaslt", "fp32"), ("hipblaslt", "fp16")], indirect=["lt"])
def test_a_bias_that_the_library_does_not_add(lt: LtBackend, over: Any, dtype: str) -> None:
    """Then every answer is offered with the bias after it, and none with the bias within."""
    found = listed(lt, over, attrs.evolve(BIASED, bias_dtype=dtype))
    assert [each.kernel_name for each in found] == [f"{each.kernel_name}_after" for each in listed(lt, over, PLAIN)]


@nvidia
def test_fast_sums(lt: LtBackend, over: Any) -> None:
    """fp8 products with a bf16 output are offered summed in fewer bits as well, after those that are not."""
    found = listed(lt, over, FP8)
    plain = [each for each, end in zip(found, endings(found), strict=True) if not end]
    fast = [each for each, end in zip(found, endings(found), strict=True) if end == "fast"]
    assert [each.kernel_name for each in fast] == [f"{each.kernel_name}_fast" for each in plain]
    assert found.index(fast[0]) == len(plain)


@pytest.mark.parametrize(
    ("shape", "device", "fast"),
    [
        (FP8, "sm_90", True),
        (FP8, "sm_89", True),
        (FP8, "sm_100", False),
        (attrs.evolve(FP8, outdtype="fp32"), "sm_90", False),
        (attrs.evolve(FP8, dtype="int8"), "sm_90", False),
        (PLAIN, "sm_90", False),
        (attrs.evolve(FP8, op="a8w8_blockscale", scale="block"), "sm_90", False),
        (attrs.evolve(FP8, op="batched_a8w8", extra={"B": 3}), "sm_90", False),
    ],
    ids=str,
)
def test_where_sums_may_be_fast(shape: Shape, device: str, fast: bool, backends: dict[str, LtBackend]) -> None:
    """Only on Ada and Hopper, only fp8, only into bf16, and not where blocks or batches are scaled; hipBLASLt has none."""
    where = Device(device, 132)
    assert allows_fast_accum(backends["cublaslt"].load(backends["cublaslt"].abi), shape, where) is fast
    assert not allows_fast_accum(backends["hipblaslt"].load(backends["hipblaslt"].abi), shape, where)


@nvidia
@pytest.mark.parametrize("fast", [False, True])
def test_the_descriptor_says_how_to_sum(lt: LtBackend, over: Any, fast: bool) -> None:
    """Attribute 25, CUBLASLT_MATMUL_DESC_FAST_ACCUM of one byte, is set for the fast variants alone."""
    described = ProblemDescriptors(lt.load(lt.abi), make_problem(FP8, fast_accum=fast), -1)
    value, written = ctypes.c_int8(-1), ctypes.c_size_t()
    ask = ctypes.CDLL(described.library.path).cublasLtMatmulDescGetAttribute
    status = ask(ctypes.c_void_p(described.desc.address), 25, ctypes.byref(value), ctypes.c_size_t(1), ctypes.byref(written))
    assert (status, value.value) == (0, int(fast))


SHAPES = {
    "cublaslt": [PLAIN, BIASED, FP8, attrs.evolve(FP8, epilogue="bias", bias_dtype="bf16"), attrs.evolve(FP8, dtype="int8")],
    "hipblaslt": [
        PLAIN, BIASED, attrs.evolve(FP8, dtype="fp8_e4m3fnuz"), attrs.evolve(FP8, dtype="int8"), attrs.evolve(PLAIN, layout=SHUFFLED_LAYOUT),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("lt", "shape"), [(libtype, shape) for libtype, shapes in SHAPES.items() for shape in shapes], indirect=["lt"], ids=str
)
def test_what_is_listed_binds(lt: LtBackend, over: Any, shape: Shape) -> None:
    """Every solution that is listed binds, from its identity alone, and its name is read again."""
    found = listed(lt, over, shape)
    assert len(found) > 5
    for solution in found:
        again = Solution(solution.libtype, solution.kernel_name, solution.split_k)
        assert isinstance(lt.bind(again, shape, over.CPU), Launcher), solution
        assert str(parse(solution.kernel_name, solution.split_k)) == solution.kernel_name


@both
def test_an_answer_that_is_a_refusal(lt: LtBackend, over: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer has a status of its own: one that the library itself calls unsupported is not listed, and the others are."""
    shape = attrs.evolve(PLAIN, n=80)
    with_all = listed(lt, over, shape)
    monkeypatch.setenv("FAKE_LT_REFUSED", "0")
    launch.results_by_index.cache_clear()
    without = listed(lt, over, shape)
    launch.results_by_index.cache_clear()
    assert with_all[0] not in without
    assert set(without) < set(with_all)
    assert with_all[1] in without


@amd
def test_a_shape_without_answers(lt: LtBackend, over: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that knows no algorithm for a shape lists nothing."""
    monkeypatch.setenv("FAKE_LT_SOLUTIONS", "0")
    assert listed(lt, over, attrs.evolve(BIASED, n=56)) == []


@both
def test_solutions_claim_no_more_than_they_keep(lt: LtBackend, over: Any) -> None:
    """The first answer of an untuned call is offered for shuffled weights on an MI300 alone."""
    answer = lt.heuristic_fallback(attrs.evolve(PLAIN, layout=SHUFFLED_LAYOUT), over.CPU)
    assert answer == (Solution("hipblaslt", "heuristic") if lt.abi.libtype == "hipblaslt" else None)
    assert lt.heuristic_fallback(PLAIN, over.CPU) is None
    assert lt.heuristic_fallback(attrs.evolve(PLAIN, layout=SHUFFLED_LAYOUT), over.MI350) is None


def test_what_names_lose_is_listed_as_the_first_answer(over: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an answer holds more than its name says, the library's own first answer is listed before all, and binds."""
    lt, shape = over.backend(fake_library("cublaslt"), "cublaslt"), Shape("a16w16", 16, 256, 512)
    assert over.FIRST not in {solution.kernel_name for solution in lt.enumerate_solutions(shape, over.CPU)}
    monkeypatch.setenv("FAKE_LT_ALIGNED", "1")
    first, *others = lt.enumerate_solutions(shape, over.CPU)
    assert first.kernel_name == over.FIRST
    assert others
    assert not over.case(shape).launched(over.bound(lt, first.kernel_name, shape))


def test_answers_for_other_numbers_of_rows_are_listed_where_they_fit(over: Any, fake_library: Any) -> None:
    """The library is asked about half, twice and four times the rows, too; what it says there comes last and fits."""
    lt, shape = over.backend(fake_library("cublaslt"), "cublaslt"), Shape("a16w16", 16, 256, 512)
    before = over.calls(lt, "MatmulAlgoGetHeuristic")
    found = list(lt.enumerate_solutions(shape, over.CPU))
    assert over.calls(lt, "MatmulAlgoGetHeuristic") - before == 2 + 3
    for solution in found:
        over.bound(lt, solution.kernel_name, shape, split_k=solution.split_k)

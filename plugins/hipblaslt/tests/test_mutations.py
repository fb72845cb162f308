"""Single changes in tables, problems and calls, each of which the fakes must detect.

A change is detected by a refusal, a wrong number, or another list of solutions.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import pytest
import torch
from tunedgemm.plugin import PluginError, Shape, Solution
from tunedgemm_hipblaslt import descriptors, launch, library, limits, native
from tunedgemm_hipblaslt.abi import CUBLASLT, HIPBLASLT, Abi
from tunedgemm_hipblaslt.limits import Matrix, Problem, make_problem
from tunedgemm_hipblaslt.names import parse_name

pytestmark = pytest.mark.nightly
both = pytest.mark.parametrize("libtype", ["cublaslt", "hipblaslt"])
ABIS = {"cublaslt": CUBLASLT, "hipblaslt": HIPBLASLT}
TABLES = ("dtypes", "compute", "operation", "layout", "order", "desc", "epilogue", "scale", "preference", "config", "capability")
#: Statuses that the fakes return.
RETURNED = ("INVALID_VALUE", "EXECUTION_FAILED", "NOT_SUPPORTED")
#: Undetectable changes. B is not transposed by default. The attribute set instead gets its default
#: (0 in cuBLASLt). Or it is the dtype of a bias, which is set again where there is one.
EQUIVALENT = {("cublaslt", "desc", "transpose_b"): {2, 5, 26, 31, 32}, ("hipblaslt", "desc", "transpose_b"): {4}}

_BIAS = {"epilogue": "bias"}
SHAPES = {
    "cublaslt": [
        Shape("a16w16", 5, 48, 64, **_BIAS),
        Shape("a16w16", 5, 48, 64, dtype="fp16", outdtype="fp16", **_BIAS),
        Shape("a16w16", 5, 48, 64, outdtype="fp32", epilogue="bias", bias_dtype="fp32"),
        Shape("a16w16", 5, 48, 64, dtype="fp32", outdtype="fp32"),
        Shape("a8w8", 5, 48, 64, dtype="fp8_e4m3fn", outdtype="bf16", scale="row", **_BIAS),
        Shape("a8w8", 5, 48, 64, dtype="fp8_e4m3fn", outdtype="bf16", scale="tensor", **_BIAS),
        Shape("a8w8", 5, 48, 64, dtype="int8", outdtype="bf16", scale="row"),
        Shape("batched_bf16", 5, 48, 64, extra={"B": 3}),
        Shape("a8w8_blockscale", 5, 144, 272, dtype="fp8_e4m3fn", outdtype="bf16", scale="block"),
    ],
    "hipblaslt": [
        Shape("a16w16", 5, 48, 64, **_BIAS),
        Shape("a16w16", 5, 48, 64, dtype="fp16", outdtype="fp16", **_BIAS),
        Shape("a16w16", 5, 48, 64, epilogue="bias", bias_dtype="fp32"),
        Shape("a16w16", 5, 48, 64, dtype="fp32", outdtype="fp32"),
        Shape("a8w8", 5, 48, 64, dtype="fp8_e4m3fnuz", outdtype="bf16", scale="row", **_BIAS),
        Shape("a8w8", 5, 48, 64, dtype="fp8_e4m3fnuz", outdtype="bf16", scale="tensor", **_BIAS),
        Shape("a8w8", 5, 48, 64, dtype="int8", outdtype="bf16", scale="row"),
        Shape("batched_bf16", 5, 48, 64, extra={"B": 3}),
        Shape("a16w16", 5, 48, 128, layout=limits.SHUFFLED_LAYOUT),
        Shape("a8w8_bpreshuffle", 5, 48, 128, dtype="fp8_e4m3fnuz", outdtype="bf16", scale="row", layout=limits.SHUFFLED_LAYOUT),
    ],
}
#: Starting points of searches: one of each other kind of algorithm.
STARTS = {
    "cublaslt": [
        "id11_tile17_stages0_reduce0_swizzle0_option0_inner0_cluster0", "id21_tile20_stages8_reduce0_swizzle0_option0_inner0_cluster0",
        "id71_tile20_stages35_reduce0_swizzle0_option0_inner0_cluster2",
    ],
    "hipblaslt": [],
}  # fmt: skip
#: Solution with a workspace, then names that fail at the launch and at the bind.
SEARCHED = Shape("a16w16", 200, 256, 512)
WITH_WORKSPACE = {
    "cublaslt": (Shape("a16w16", 4, 48, 512), "id66_tile20_stages15_reduce2_swizzle0_option0_inner0_cluster0", 2),
    "hipblaslt": (Shape("a16w16", 5, 48, 64), "sol1004_v100200_fake0001", 0),
}
FAILING = {"cublaslt": "id71_tile20_stages35_reduce0_swizzle0_option0_inner0_cluster6", "hipblaslt": "sol1017_v100200_fake0001"}
FOREIGN = {
    "cublaslt": [
        "id12_tile20_stages15_reduce0_swizzle0_option0_inner0_cluster0", "id66_tile99_stages15_reduce0_swizzle0_option0_inner0_cluster0",
    ],
    "hipblaslt": [],
}  # fmt: skip


class RecordingTable(Mapping[str, int]):
    """Table that records which of its numbers were read."""

    def __init__(self, table: Mapping[str, int], read: set[str]) -> None:
        self.table, self.read = table, read

    def __getitem__(self, name: str) -> int:
        number = self.table[name]
        self.read.add(name)
        return number

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


@pytest.fixture(autouse=True)
def strict_fakes(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let results use all promised alignment, and give outputs room for writes of a wrong size."""
    monkeypatch.setenv("FAKE_LT_ALIGNED", "1")
    monkeypatch.setattr(f"{harness.Poisoned.__module__}._GUARD", 1 << 14)


def yield_product_faults(lt: Any, harness: Any) -> Iterator[Any]:
    """Yield what is wrong with the products of all shapes."""
    libtype = lt.hooks.abi.libtype
    for shape in SHAPES[libtype]:
        yield harness.fault(lt, shape)
    # torch aligns outputs to 64 bytes: of several live ones not all are at multiples of 256.
    launcher, case = harness.bind(lt, "heuristic", SHAPES[libtype][0]), harness.cached_case(SHAPES[libtype][0])
    yield [case.output_fault(out) for out in [launcher.call(*case.operands) for _ in range(8)]]
    yield harness.fault(lt, *WITH_WORKSPACE[libtype])


def yield_answers(lt: Any, harness: Any) -> Iterator[Any]:
    """Yield the lists, and the errors of failing launches and foreign names."""
    libtype = lt.hooks.abi.libtype
    biased, scaled = SHAPES[libtype][0], SHAPES[libtype][4]
    yield [[str(solution) for solution in lt.solutions(shape, harness.CPU)] for shape in (biased, scaled)]
    yield harness.fault(lt, SHAPES[libtype][3], FAILING[libtype])
    yield [harness.fault(lt, biased, name, 1) for name in FOREIGN[libtype]]
    yield harness.launch_error(harness.bind(lt, "heuristic", biased), *harness.cached_case(biased).operands[:2])
    x, *rest = harness.cached_case(scaled).operands
    yield harness.launch_error(harness.bind(lt, "heuristic", scaled), harness.padded(x, 8), *rest)


def yield_search(lt: Any, harness: Any) -> Iterator[Any]:
    """Yield the neighbours of each of `STARTS`, their costs, and the number of checks."""
    listed = [solution for solution in lt.solutions(SEARCHED, harness.CPU) if solution.kernel_name != harness.FIRST]
    for start in (listed[0], *(Solution(lt.hooks.abi.libtype, name, split_k=1) for name in STARTS[lt.hooks.abi.libtype])):
        before = harness.count_calls(lt, "MatmulAlgoCheck")
        solutions = [start, *lt.refine(start, SEARCHED, harness.CPU)]
        yield [str(solution) for solution in solutions], harness.count_calls(lt, "MatmulAlgoCheck") - before
        for solution in solutions:
            name = parse_name(solution.kernel_name, solution.split_k)
            result = launch.find_algorithm(
                descriptors.ProblemDescriptors(lt.hooks.load(lt.hooks.abi), make_problem(SEARCHED), -1), name, -1
            )
            yield harness.cost(lt, result.algo), result.workspace


VIEWS: dict[str, Callable[[Any, Any], Iterator[Any]]] = {
    "products": yield_product_faults,
    "answers": yield_answers,
    "search": yield_search,
}
#: View that detects a changed number of a table soonest; by default the products.
SOONEST = {"config": "answers", "capability": "search", "preference": "answers", "statuses": "answers"}
_baseline: dict[str, dict[str, list[Any]]] = {}


def baseline(harness: Any, libtype: str, fake_library: Any) -> dict[str, list[Any]]:
    """Return what each view yields for the unchanged plugin."""
    if libtype not in _baseline:
        lt = harness.make_backend(fake_library(libtype), libtype)
        _baseline[libtype] = {name: list(view(lt, harness)) for name, view in VIEWS.items()}
    return _baseline[libtype]


def is_detected(lt: Any, harness: Any, expected: dict[str, list[Any]], soonest: str = "products") -> bool:
    """Return whether a view of a backend differs from the baseline, and drop its cached objects."""
    try:
        for name in dict.fromkeys((soonest, *VIEWS)):
            if any(got != unchanged for got, unchanged in itertools.zip_longest(VIEWS[name](lt, harness), expected[name])):
                return True
        return False
    except Exception:  # a wrong table may raise anything
        return True
    finally:
        for cached in (descriptors._shared_descriptors, launch.results_by_index, library.library_handle):
            cached.cache_clear()


@both
def test_the_unchanged_plugin(libtype: str, harness: Any, fake_library: Any) -> None:
    """The unchanged plugin has no fault, and its errors are as expected."""
    expected = baseline(harness, libtype, fake_library)
    shapes = len(SHAPES[libtype])
    assert expected["products"] == [*[""] * shapes, [""] * 8, ""]
    listed, failing, foreign, *messages = expected["answers"]
    assert [len(names) > 5 for names in listed] == [True, True]
    assert [text.removeprefix(f"{libtype}: {ABIS[libtype].prefix}Matmul: ") for text in (failing, *messages)] == [
        "EXECUTION_FAILED",
        "INVALID_VALUE",
        "NOT_SUPPORTED",
    ]
    if libtype == "cublaslt":
        assert foreign == ["cublasLtMatmulAlgoInit: INVALID_VALUE", "cublasLtMatmulAlgoCheck: NOT_SUPPORTED"]
        assert min(cost for cost, _ in expected["search"][1:20] if isinstance(cost, float)) < expected["search"][1][0]
    assert not is_detected(harness.make_backend(fake_library(libtype), libtype), harness, expected), "a second run yields the same"


@both
def test_every_number_is_used(libtype: str, harness: Any, fake_library: Any) -> None:
    """Each number of the tables is read."""
    read: dict[str, set[str]] = {table: set() for table in TABLES}
    abi = ABIS[libtype]
    recording = attrs.evolve(abi, **{table: RecordingTable(getattr(abi, table), read[table]) for table in TABLES})
    lt = harness.make_backend(fake_library(libtype), libtype, abi=recording)
    assert not is_detected(lt, harness, baseline(harness, libtype, fake_library))
    unread = {table: set(getattr(abi, table)) - read[table] for table in TABLES}
    if libtype == "hipblaslt":
        unread["dtypes"] -= {"fp8_e4m3fn"}  # used on a gfx950
    else:
        unread["desc"] -= {"fast_accum"}  # used where fp8 is tuned
    assert not any(unread.values()), unread


def change_number(abi: Abi, table: str, name: str, number: int) -> Abi:
    """Return the tables with one number changed."""
    return attrs.evolve(abi, **{table: {**getattr(abi, table), name: number}})


@both
def test_numbers_of_the_tables(libtype: str, harness: Any, fake_library: Any) -> None:
    """Another number of the table, a neighbouring or an unknown one is detected."""
    abi, expected, missed = ABIS[libtype], baseline(harness, libtype, fake_library), []
    names = [(table, name) for table in TABLES for name in getattr(abi, table) if (libtype, name) != ("hipblaslt", "fp8_e4m3fn")]
    for table, name in [*names, *(("statuses", name) for name in RETURNED)]:
        numbers = getattr(abi, table)
        own = numbers[name]
        others = {*numbers.values(), own - 1, own + 1, own + 1000} - {own} - EQUIVALENT.get((libtype, table, name), set())
        for number in sorted(others):
            lt = harness.make_backend(fake_library(libtype), libtype, abi=change_number(abi, table, name, number))
            missed += [] if is_detected(lt, harness, expected, SOONEST.get(table, "products")) else [(table, name, own, number)]
    assert not missed


def test_the_number_of_ocp_fp8(harness: Any, fake_library: Any) -> None:
    """Another number of OCP fp8 is detected on a gfx950."""
    shape = Shape("a8w8", 5, 48, 64, dtype="fp8_e4m3fn", outdtype="bf16", scale="row")
    for number in (28, 27, 29, 1000, 1001, 0, 14):
        abi = change_number(HIPBLASLT, "dtypes", "fp8_e4m3fn", number)
        lt = harness.make_backend(fake_library("hipblaslt"), "hipblaslt", harness.MI350, abi)
        assert bool(harness.fault(lt, shape)) == (number != 28), number


@both
def test_sizes_of_structures(libtype: str, harness: Any, fake_library: Any) -> None:
    """A larger structure is detected; the library would write past a smaller one."""
    abi = ABIS[libtype]
    for name, more in itertools.product(("algo_bytes", "result_bytes"), (4, 8, 32)):
        lt = harness.make_backend(fake_library(libtype), libtype, abi=attrs.evolve(abi, **{name: getattr(abi, name) + more}))
        assert is_detected(lt, harness, baseline(harness, libtype, fake_library)), (name, more)


#: Attributes that are set.
SET_ATTRIBUTES = {
    "cublaslt": [*CUBLASLT.desc, "batch_count", "batch_offset", "max_workspace", "align_a", "align_b", "align_c", "align_d"],
    "hipblaslt": [*HIPBLASLT.desc, "batch_count", "batch_offset", "max_workspace", "order"],
}


@both
def test_sizes_of_attributes(libtype: str, harness: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller or larger attribute is detected."""
    formats, faults = library._FORMATS, []
    for name, form in itertools.product(SET_ATTRIBUTES[libtype], ("b", "i", "q")):
        expected = baseline(harness, libtype, fake_library)
        with monkeypatch.context() as patched:
            patched.setattr(library, "_FORMATS", {**formats, name: form})
            detected = is_detected(harness.make_backend(fake_library(libtype), libtype), harness, expected)
        changed = struct.calcsize(form) != struct.calcsize(formats.get(name, "i"))
        faults += [] if detected == changed else [(name, form)]
    assert not faults


def test_sizes_of_configuration_attributes(harness: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller or larger attribute of an algorithm is detected."""
    formats, faults = descriptors._CONFIG_FORMATS, []
    for name, form in itertools.product(CUBLASLT.config, ("H", "i", "q")):
        expected = baseline(harness, "cublaslt", fake_library)
        with monkeypatch.context() as patched:
            patched.setattr(descriptors, "_CONFIG_FORMATS", {**formats, name: form})
            detected = is_detected(harness.make_backend(fake_library("cublaslt"), "cublaslt"), harness, expected, "answers")
        changed = struct.calcsize(form) != struct.calcsize(formats.get(name, "i"))
        faults += [] if detected == changed else [(name, form)]
    assert not faults


def _change_matrix(matrix: Matrix, batch: int) -> Iterator[Matrix]:
    """Yield copies of a matrix with one change."""
    names = ("rows", "columns", "ld", "stride") if batch > 1 else ("rows", "columns", "ld")
    for name in names:
        number = getattr(matrix, name)
        yield from (attrs.evolve(matrix, **{name: other}) for other in (number - 1, number + 1, 2 * number, 0))
    for dtype in ("bf16", "fp16", "fp32", "int8", "int32", "fp8_e4m3fn", "fp8_e4m3fnuz"):
        if dtype != matrix.dtype:
            yield attrs.evolve(matrix, dtype=dtype)
    for order in ("col", "shuffled8", "shuffled16"):
        if order != matrix.order:
            yield attrs.evolve(matrix, order=order)


def _change_problem(problem: Problem) -> Iterator[Problem]:
    """Yield copies of a problem with one change."""
    for name in ("a", "b", "d"):
        yield from (attrs.evolve(problem, **{name: other}) for other in _change_matrix(getattr(problem, name), problem.batch))
    yield from (attrs.evolve(problem, batch=problem.batch + more) for more in ((1, 2) if problem.batch == 1 else (-1, 1, 3)))
    yield attrs.evolve(problem, compute="32f" if problem.compute == "32i" else "32i")
    for name in ("a_scale", "b_scale"):
        kinds = ("", "tensor", "row", "block", "square")
        yield from (attrs.evolve(problem, **{name: other}) for other in kinds if other != getattr(problem, name))
    yield from (attrs.evolve(problem, bias_dtype=other) for other in ("", "bf16", "fp16", "fp32") if other != problem.bias_dtype)
    remainders = ("", "bias", "scales") if problem.a_scale or problem.remainder == "scales" else ("", "bias")
    remainders = () if problem.b_scale == "block" else remainders  # block scales have none
    yield from (attrs.evolve(problem, remainder=other) for other in remainders if other != problem.remainder)
    yield attrs.evolve(problem, a=problem.b, b=problem.a)
    yield attrs.evolve(problem, a=attrs.evolve(problem.a, rows=problem.a.columns, columns=problem.a.rows))


@both
def test_parts_of_a_problem(libtype: str, harness: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed size, order, dtype, batch, computation, scale or bias of a problem is detected."""
    lt, missed = harness.make_backend(fake_library(libtype), libtype), []
    for shape in SHAPES[libtype]:
        original = make_problem(shape)
        assert harness.fault(lt, shape) == ""
        for problem in _change_problem(original):
            with monkeypatch.context() as patched:
                patched.setattr(launch, "make_problem", lambda shape, problem=problem, **_: problem)
                try:
                    missed += [] if harness.fault(lt, shape) else [(shape, problem)]
                except (KeyError, TypeError, ValueError, AssertionError, PluginError):
                    continue  # a name that the tables lack, or missing operands
    assert not missed


#: Arguments of Matmul in order.
ARGUMENTS = (
    "handle", "desc", "alpha", "a", "a_layout", "b", "b_layout", "beta", "c", "c_layout", "d", "d_layout", "algo", "workspace", "bytes",
    "stream",
)  # fmt: skip
#: Arguments with equal values: C is D, and workspace and stream are null.
SAME = [{"c", "d"}, {"c_layout", "d_layout"}, {"workspace", "bytes"}, {"workspace", "stream"}, {"bytes", "stream"}]


def replace_matmul(lt: Any, harness: Any, change: Callable[..., tuple[Any, ...]]) -> Any:
    """Return a backend whose Matmul gets changed arguments, with padding around alpha and beta."""
    functions = lt.hooks.load(lt.hooks.abi).functions
    kept = []

    def matmul(*given: Any) -> int:
        arguments = list(given)
        for position in (2, 7):
            kept.append(harness.padded(torch.frombuffer(bytearray(bytes(given[position]._obj)), dtype=torch.uint8)))
            arguments[position] = kept[-1].data_ptr()
        return int(functions["Matmul"](*change(*arguments)))

    changed = attrs.evolve(lt.hooks.load(lt.hooks.abi), functions={**functions, "Matmul": matmul})
    return attrs.evolve(lt, hooks=attrs.evolve(lt.hooks, load=lambda _: changed))


@both
def test_the_order_of_arguments(libtype: str, harness: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two swapped arguments of the launch, or a null one, are detected."""
    monkeypatch.setattr(native, "_extension", None)
    plain, missed = harness.make_backend(fake_library(libtype), libtype), []
    shape = SHAPES[libtype][0]
    square = attrs.evolve(shape, m=48, k=48)  # A and B have the same sizes
    launches = ((shape, "heuristic"), (square, "heuristic"), (SHAPES[libtype][3], FAILING[libtype]))

    def list_faults(change: Callable[..., tuple[Any, ...]]) -> list[str]:
        lt = replace_matmul(plain, harness, change)
        return [harness.fault(lt, shape, name, case=harness.make_case(shape)) for shape, name in launches]

    expected = list_faults(lambda *given: given)
    assert expected == ["", "", f"{libtype}: {ABIS[libtype].prefix}Matmul: EXECUTION_FAILED"]
    for i, j in itertools.combinations(range(len(ARGUMENTS)), 2):
        if {ARGUMENTS[i], ARGUMENTS[j]} in SAME:
            continue

        def swap(*given: Any, i: int = i, j: int = j) -> tuple[Any, ...]:
            arguments = list(given)
            arguments[i], arguments[j] = arguments[j], arguments[i]
            return tuple(arguments)

        try:
            missed += [] if list_faults(swap) != expected else [(ARGUMENTS[i], ARGUMENTS[j])]
        except ctypes.ArgumentError:  # a pointer in the place of a number
            continue
    for i, name in enumerate(ARGUMENTS[:12]):
        missed += [] if list_faults(lambda *given, i=i: (*given[:i], None, *given[i + 1 :])) != expected else [(name, None)]
    assert not missed


@both
@pytest.mark.parametrize(("position", "number"), [(2, 2), (2, 0), (7, 1000)], ids=["alpha-2", "alpha-0", "beta-1000"])
def test_alpha_and_beta(libtype: str, position: int, number: int, harness: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another alpha, a beta other than 0, or an alpha of another type gives wrong numbers."""
    monkeypatch.setattr(native, "_extension", None)
    plain = harness.make_backend(fake_library(libtype), libtype)

    def replace_scalar(scalar: torch.Tensor) -> Any:
        return replace_matmul(plain, harness, lambda *given: (*given[:position], scalar.data_ptr(), *given[position + 1 :]))

    for shape, dtype in ((SHAPES[libtype][0], torch.float32), (SHAPES[libtype][6], torch.int32)):
        assert "numbers are wrong" in harness.fault(replace_scalar(torch.tensor([number], dtype=dtype)), shape)
        other_type = torch.tensor([int(position == 2)], dtype=torch.int32 if dtype is torch.float32 else torch.float32)
        detected = bool(harness.fault(replace_scalar(other_type), shape))
        assert detected == (position == 2), "a zero beta is the same in both types"


@both
def test_the_workspace(libtype: str, harness: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing, smaller or misaligned workspace is detected."""
    monkeypatch.setattr(native, "_extension", None)
    plain = harness.make_backend(fake_library(libtype), libtype)
    assert harness.fault(replace_matmul(plain, harness, lambda *given: given), *WITH_WORKSPACE[libtype]) == ""
    changes = (lambda w, n: (0, n), lambda w, n: (w, n - 1), lambda w, n: (w, 0), lambda w, n: (w + 8, n))
    for change in changes:
        lt = replace_matmul(plain, harness, lambda *given, change=change: (*given[:13], *change(*given[13:15]), given[15]))
        assert "INVALID_VALUE" in harness.fault(lt, *WITH_WORKSPACE[libtype])


@both
def test_the_order_of_bias_and_scales(libtype: str, harness: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped pointers of bias and scales are detected."""
    lt, shape, pointers = harness.make_backend(fake_library(libtype), libtype), SHAPES[libtype][4], native._POINTERS
    for names, extension in itertools.product(itertools.permutations(pointers), (native._extension, None)):
        monkeypatch.setattr(native, "_extension", extension)
        monkeypatch.setattr(native, "_POINTERS", names)
        assert bool(harness.fault(lt, shape)) == (names != pointers), names

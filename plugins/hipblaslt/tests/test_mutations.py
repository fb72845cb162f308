"""One thing changed at a time, in the plugin's tables, problems and calls: over the fakes each change must show.

What shows is a refusal, a wrong number, or another list of solutions.
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
from tunedgemm_hipblaslt.names import parse

ABIS = {"cublaslt": CUBLASLT, "hipblaslt": HIPBLASLT}
TABLES = ("dtypes", "compute", "operation", "layout", "order", "desc", "epilogue", "scale", "preference", "config", "capability")
#: Statuses that the fakes give.
GIVEN = ("INVALID_VALUE", "EXECUTION_FAILED", "NOT_SUPPORTED")
#: Changes that cannot show: B is not transposed unless said otherwise, and what is set in its place is the default (0 in cuBLASLt), or
#: the dtype of a bias, which is set again where there is one.
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
#: Where searches start: one of each other kind of algorithm.
STARTS = {
    "cublaslt": [
        "id11_tile17_stages0_reduce0_swizzle0_option0_inner0_cluster0", "id21_tile20_stages8_reduce0_swizzle0_option0_inner0_cluster0",
        "id71_tile20_stages35_reduce0_swizzle0_option0_inner0_cluster2",
    ],
    "hipblaslt": [],
}  # fmt: skip
#: Scratch, and what the fakes refuse at the bind and at the launch: shape, name, parts of K.
SEARCHED = Shape("a16w16", 200, 256, 512)
SCRATCH = {
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


class Watched(Mapping[str, int]):
    """A table that remembers which of its numbers were asked for."""

    def __init__(self, table: Mapping[str, int], asked: set[str]) -> None:
        self.table, self.asked = table, asked

    def __getitem__(self, name: str) -> int:
        number = self.table[name]
        self.asked.add(name)
        return number

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


@pytest.fixture(autouse=True)
def careful(over: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers use the alignment that they are promised; what a wrong size writes past an output hurts nobody."""
    monkeypatch.setenv("FAKE_LT_ALIGNED", "1")
    monkeypatch.setattr("tunedgemm.tuner.verify._GUARD", 1 << 14)


def multiplied(lt: Any, over: Any) -> Iterator[Any]:
    """What is wrong with the products of all shapes."""
    libtype = lt.abi.libtype
    for shape in SHAPES[libtype]:
        yield over.fault(lt, shape)
    # Outputs lie where torch puts them, at multiples of 64: of several at once not all are at multiples of 256.
    first, operands = over.bound(lt, "heuristic", SHAPES[libtype][0]), over.same(SHAPES[libtype][0])
    yield [operands.wrong(out) for out in [first.call(*operands.plain) for _ in range(8)]]
    yield over.fault(lt, *SCRATCH[libtype])


def told(lt: Any, over: Any) -> Iterator[Any]:
    """What is listed, and what is said of a failure, of foreign names, of a bias that is missing and of an odd address."""
    libtype = lt.abi.libtype
    biased, scaled = SHAPES[libtype][0], SHAPES[libtype][4]
    yield [[str(solution) for solution in lt.enumerate_solutions(shape, over.CPU)] for shape in (biased, scaled)]
    yield over.fault(lt, SHAPES[libtype][3], FAILING[libtype])
    yield [over.fault(lt, biased, name, 1) for name in FOREIGN[libtype]]
    yield over.message(over.bound(lt, "heuristic", biased), *over.same(biased).plain[:2])
    x, *rest = over.same(scaled).plain
    yield over.message(over.bound(lt, "heuristic", scaled), over.roomy(x, 8), *rest)


def searched(lt: Any, over: Any) -> Iterator[Any]:
    """What the search around each of `STARTS` finds, at which costs, and how many questions it asks."""
    listed = [solution for solution in lt.enumerate_solutions(SEARCHED, over.CPU) if solution.kernel_name != over.FIRST]
    for start in (listed[0], *(Solution(lt.abi.libtype, name, split_k=1) for name in STARTS[lt.abi.libtype])):
        before = over.calls(lt, "MatmulAlgoCheck")
        found = [start, *lt.refine(start, SEARCHED, over.CPU)]
        yield [str(solution) for solution in found], over.calls(lt, "MatmulAlgoCheck") - before
        for solution in found:
            name = parse(solution.kernel_name, solution.split_k)
            answer = launch.find_algorithm(descriptors.ProblemDescriptors(lt.load(lt.abi), make_problem(SEARCHED), -1), name, -1)
            yield over.cost(lt, answer.algo), answer.workspace


VIEWS: dict[str, Callable[[Any, Any], Iterator[Any]]] = {"multiplied": multiplied, "told": told, "searched": searched}
#: Where the numbers of a table show soonest; of the others, in the products.
SOONEST = {"config": "told", "capability": "searched", "preference": "told", "statuses": "told"}
_baseline: dict[str, dict[str, list[Any]]] = {}


def baseline(over: Any, libtype: str, fake_library: Any) -> dict[str, list[Any]]:
    """All that one sees of the plugin as it is, by view."""
    if libtype not in _baseline:
        lt = over.backend(fake_library(libtype), libtype)
        _baseline[libtype] = {name: list(view(lt, over)) for name, view in VIEWS.items()}
    return _baseline[libtype]


def shows(lt: Any, over: Any, wanted: dict[str, list[Any]], soonest: str = "multiplied") -> bool:
    """Whether a backend differs from what it should be; what it made is gone afterwards."""
    try:
        for name in dict.fromkeys((soonest, *VIEWS)):
            if any(seen != unchanged for seen, unchanged in itertools.zip_longest(VIEWS[name](lt, over), wanted[name])):
                return True
        return False
    except Exception:  # a wrong table may raise anything
        return True
    finally:
        for remembered in (descriptors._shared_descriptors, launch.results_by_index, library.library_handle):
            remembered.cache_clear()


both = pytest.mark.parametrize("libtype", ["cublaslt", "hipblaslt"])


@both
def test_unchanged_all_is_right(libtype: str, over: Any, fake_library: Any) -> None:
    """The plugin as it is: nothing is wrong, and what fails says how."""
    seen = baseline(over, libtype, fake_library)
    shapes = len(SHAPES[libtype])
    assert seen["multiplied"] == [*[""] * shapes, [""] * 8, ""]
    listed, failing, foreign, *messages = seen["told"]
    assert [len(names) > 5 for names in listed] == [True, True]
    assert [text.removeprefix(f"{libtype}: {ABIS[libtype].prefix}Matmul: ") for text in (failing, *messages)] == [
        "EXECUTION_FAILED",
        "INVALID_VALUE",
        "NOT_SUPPORTED",
    ]
    if libtype == "cublaslt":
        assert foreign == ["cublasLtMatmulAlgoInit: INVALID_VALUE", "cublasLtMatmulAlgoCheck: NOT_SUPPORTED"]
        assert min(cost for cost, _ in seen["searched"][1:20] if isinstance(cost, float)) < seen["searched"][1][0]
    assert not shows(over.backend(fake_library(libtype), libtype), over, seen), "and the same again"


@both
def test_every_number_is_used(libtype: str, over: Any, fake_library: Any) -> None:
    """Each number of the tables is asked for somewhere."""
    asked: dict[str, set[str]] = {table: set() for table in TABLES}
    plain = ABIS[libtype]
    watched = attrs.evolve(plain, **{table: Watched(getattr(plain, table), asked[table]) for table in TABLES})
    assert not shows(over.backend(fake_library(libtype), libtype, abi=watched), over, baseline(over, libtype, fake_library))
    idle = {table: set(getattr(plain, table)) - asked[table] for table in TABLES}
    if libtype == "hipblaslt":
        idle["dtypes"] -= {"fp8_e4m3fn"}  # a gfx950's
    else:
        idle["desc"] -= {"fast_accum"}  # asked for where fp8 is tuned
    assert not any(idle.values()), idle


def _numbers() -> Iterator[tuple[str, str, str]]:
    for libtype, abi in ABIS.items():
        for table in TABLES:
            for name in getattr(abi, table):
                if (libtype, name) != ("hipblaslt", "fp8_e4m3fn"):
                    yield libtype, table, name
        yield from ((libtype, "statuses", name) for name in GIVEN)


def changed(abi: Abi, table: str, name: str, number: int) -> Abi:
    """The tables with one number changed."""
    return attrs.evolve(abi, **{table: {**getattr(abi, table), name: number}})


@pytest.mark.parametrize(("libtype", "table", "name"), _numbers())
def test_a_number_of_a_table(libtype: str, table: str, name: str, over: Any, fake_library: Any) -> None:
    """Each number of each table matters: another of the same table, the next, the one before, or an unknown one shows."""
    abi, wanted = ABIS[libtype], baseline(over, libtype, fake_library)
    own = getattr(abi, table)[name]
    others = {*getattr(abi, table).values(), own - 1, own + 1, own + 1000} - {own} - EQUIVALENT.get((libtype, table, name), set())
    unseen = [
        number
        for number in sorted(others)
        if not shows(
            over.backend(fake_library(libtype), libtype, abi=changed(abi, table, name, number)),
            over,
            wanted,
            SOONEST.get(table, "multiplied"),
        )
    ]
    assert not unseen, f"{table}[{name!r}] may be {unseen} instead of {own}"


@both
@pytest.mark.parametrize("name", ["algo_bytes", "result_bytes"])
def test_a_size_of_a_structure(libtype: str, name: str, over: Any, fake_library: Any) -> None:
    """Structures of other sizes show; smaller ones would be written past."""
    abi = ABIS[libtype]
    for more in (4, 8, 32):
        lt = over.backend(fake_library(libtype), libtype, abi=attrs.evolve(abi, **{name: getattr(abi, name) + more}))
        assert shows(lt, over, baseline(over, libtype, fake_library)), more


#: Attributes that are set -> the formats of 32 bits and of others, where they are not of 32 bits.
WIDTHS = {
    "cublaslt": [
        *CUBLASLT.desc, "batch_count", "batch_offset", "max_workspace",
        "align_a", "align_b", "align_c", "align_d",
    ],
    "hipblaslt": [
        *HIPBLASLT.desc, "batch_count", "batch_offset", "max_workspace",
        "order",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("libtype", "name"), [(libtype, name) for libtype, names in WIDTHS.items() for name in names])
def test_a_width_of_an_attribute(libtype: str, name: str, over: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attribute has its bytes: more or fewer of them show."""
    own = struct.calcsize(library._FORMATS.get(name, "i"))
    for form in ("b", "i", "q"):
        monkeypatch.setattr(library, "_FORMATS", {**library._FORMATS, name: form})
        differs = shows(over.backend(fake_library(libtype), libtype), over, baseline(over, libtype, fake_library))
        assert differs == (struct.calcsize(form) != own), form


@pytest.mark.parametrize("name", list(CUBLASLT.config))
def test_a_width_of_a_configuration(name: str, over: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So has each attribute of an algorithm."""
    own = struct.calcsize(descriptors._CONFIG_FORMATS.get(name, "i"))
    for form in ("H", "i", "q"):
        monkeypatch.setattr(descriptors, "_CONFIG_FORMATS", {**descriptors._CONFIG_FORMATS, name: form})
        differs = shows(over.backend(fake_library("cublaslt"), "cublaslt"), over, baseline(over, "cublaslt", fake_library), "told")
        assert differs == (struct.calcsize(form) != own), form


def test_the_standard_fp8_of_hipblaslt(over: Any, fake_library: Any) -> None:
    """On a gfx950 the number of the standard fp8 matters, too."""
    shape = Shape("a8w8", 5, 48, 64, dtype="fp8_e4m3fn", outdtype="bf16", scale="row")
    for number in (28, 27, 29, 1000, 1001, 0, 14):
        lt = over.backend(fake_library("hipblaslt"), "hipblaslt", over.MI350, changed(HIPBLASLT, "dtypes", "fp8_e4m3fn", number))
        assert bool(over.fault(lt, shape)) == (number != 28), number


def _of_matrix(matrix: Matrix, batch: int) -> Iterator[Matrix]:
    """A matrix with one thing changed."""
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


def _of_problem(problem: Problem) -> Iterator[Problem]:
    """A problem with one thing changed."""
    for name in ("a", "b", "d"):
        yield from (attrs.evolve(problem, **{name: other}) for other in _of_matrix(getattr(problem, name), problem.batch))
    yield from (attrs.evolve(problem, batch=problem.batch + more) for more in ((1, 2) if problem.batch == 1 else (-1, 1, 3)))
    yield attrs.evolve(problem, compute="32f" if problem.compute == "32i" else "32i")
    for name in ("a_scale", "b_scale"):
        kinds = ("", "tensor", "row", "block", "square")
        yield from (attrs.evolve(problem, **{name: other}) for other in kinds if other != getattr(problem, name))
    yield from (attrs.evolve(problem, bias_dtype=other) for other in ("", "bf16", "fp16", "fp32") if other != problem.bias_dtype)
    remainders = ("", "bias", "scales") if problem.a_scale or problem.remainder == "scales" else ("", "bias")
    remainders = () if problem.b_scale == "block" else remainders  # that op has none
    yield from (attrs.evolve(problem, remainder=other) for other in remainders if other != problem.remainder)
    yield attrs.evolve(problem, a=problem.b, b=problem.a)
    yield attrs.evolve(problem, a=attrs.evolve(problem.a, rows=problem.a.columns, columns=problem.a.rows))


@pytest.mark.parametrize(("libtype", "shape"), [(libtype, shape) for libtype in ABIS for shape in SHAPES[libtype]], ids=str)
def test_a_part_of_a_problem(libtype: str, shape: Shape, over: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size, order, dtype, batch, computation, kind of scale and bias of a problem matters for the numbers."""
    lt, right, unseen = over.backend(fake_library(libtype), libtype), make_problem(shape), []
    assert over.fault(lt, shape) == ""
    for problem in _of_problem(right):
        monkeypatch.setattr(launch, "make_problem", lambda shape, problem=problem, **_: problem)
        try:
            unseen += [] if over.fault(lt, shape) else [problem]
        except (KeyError, TypeError, ValueError, AssertionError, PluginError):
            continue  # another name than those of the tables, or operands that are missing
    assert not unseen, [attrs.asdict(problem, filter=lambda field, value: value != getattr(right, field.name)) for problem in unseen]


#: Arguments of Matmul by their places, and those that may change places: C is D.
ARGUMENTS = (
    "handle", "desc", "alpha", "a", "a_layout", "b", "b_layout", "beta", "c", "c_layout", "d", "d_layout", "algo", "workspace", "bytes",
    "stream",
)  # fmt: skip
#: Neither scratch nor a stream is asked for, so they are all null.
SAME = [{"c", "d"}, {"c_layout", "d_layout"}, {"workspace", "bytes"}, {"workspace", "stream"}, {"bytes", "stream"}]


def by_ctypes(lt: Any, over: Any, change: Callable[..., tuple[Any, ...]]) -> Any:
    """A backend whose library gets other arguments for Matmul; alpha and beta have room around them."""
    functions = lt.load(lt.abi).functions
    kept = []

    def matmul(*arguments: Any) -> int:
        places = list(arguments)
        for place in (2, 7):
            kept.append(over.roomy(torch.frombuffer(bytearray(bytes(places[place]._obj)), dtype=torch.uint8)))
            places[place] = kept[-1].data_ptr()
        return int(functions["Matmul"](*change(*places)))

    other = attrs.evolve(lt.load(lt.abi), functions={**functions, "Matmul": matmul})
    return attrs.evolve(lt, load=lambda _: other)


@both
def test_the_order_of_pointers(libtype: str, over: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two arguments of the launch that change places show, and so does one that is null."""
    monkeypatch.setattr(native, "_extension", None)
    plain, unseen = over.backend(fake_library(libtype), libtype), []
    shape = SHAPES[libtype][0]
    square = attrs.evolve(shape, m=48, k=48)  # no size tells A from B
    asked = ((shape, "heuristic"), (square, "heuristic"), (SHAPES[libtype][3], FAILING[libtype]))

    def seen(change: Callable[..., tuple[Any, ...]]) -> list[str]:
        lt = by_ctypes(plain, over, change)
        return [over.fault(lt, shape, name, operands=over.case(shape)) for shape, name in asked]

    wanted = seen(lambda *given: given)
    assert wanted == ["", "", f"{libtype}: {ABIS[libtype].prefix}Matmul: EXECUTION_FAILED"]
    for i, j in itertools.combinations(range(len(ARGUMENTS)), 2):
        if {ARGUMENTS[i], ARGUMENTS[j]} in SAME:
            continue

        def swapped(*given: Any, i: int = i, j: int = j) -> tuple[Any, ...]:
            places = list(given)
            places[i], places[j] = places[j], places[i]
            return tuple(places)

        try:
            unseen += [] if seen(swapped) != wanted else [(ARGUMENTS[i], ARGUMENTS[j])]
        except ctypes.ArgumentError:  # a pointer in the place of a number
            continue
    for i, name in enumerate(ARGUMENTS[:12]):
        unseen += [] if seen(lambda *given, i=i: (*given[:i], None, *given[i + 1 :])) != wanted else [(name, None)]
    assert not unseen


@both
@pytest.mark.parametrize(("place", "number"), [(2, 2), (2, 0), (7, 1000)], ids=["alpha-2", "alpha-0", "beta-1000"])
def test_alpha_and_beta(libtype: str, place: int, number: int, over: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another alpha, or a beta that is not 0, gives wrong numbers, of floats and of whole numbers; so does one of the other kind."""
    monkeypatch.setattr(native, "_extension", None)
    plain = over.backend(fake_library(libtype), libtype)
    for shape, dtype in ((SHAPES[libtype][0], torch.float32), (SHAPES[libtype][6], torch.int32)):
        value = torch.tensor([number], dtype=dtype)
        lt = by_ctypes(plain, over, lambda *given, value=value: (*given[:place], value.data_ptr(), *given[place + 1 :]))
        assert "numbers are wrong" in over.fault(lt, shape)
        one = torch.tensor([int(place == 2)], dtype=torch.int32 if dtype is torch.float32 else torch.float32)
        other = by_ctypes(plain, over, lambda *given, one=one: (*given[:place], one.data_ptr(), *given[place + 1 :]))
        assert bool(over.fault(other, shape)) == (place == 2), "nothing is nothing in both"


@both
@pytest.mark.parametrize("change", [lambda w, n: (0, n), lambda w, n: (w, n - 1), lambda w, n: (w, 0), lambda w, n: (w + 8, n)])
def test_scratch(
    libtype: str, change: Callable[[int, int], tuple[int, int]], over: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An algorithm that wants scratch gets all of it, at an address for it."""
    monkeypatch.setattr(native, "_extension", None)
    plain = over.backend(fake_library(libtype), libtype)
    assert over.fault(by_ctypes(plain, over, lambda *given: given), *SCRATCH[libtype]) == ""
    other = by_ctypes(plain, over, lambda *given: (*given[:13], *change(*given[13:15]), given[15]))
    assert "INVALID_VALUE" in over.fault(other, *SCRATCH[libtype])


@both
@pytest.mark.parametrize("names", [names for names in itertools.permutations(native._POINTERS) if names != native._POINTERS], ids="-".join)
def test_the_order_of_bias_and_scales(
    libtype: str, names: tuple[str, ...], over: Any, fake_library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bias, scales of the weight and scales of x reach their own attributes."""
    lt, shape = over.backend(fake_library(libtype), libtype), SHAPES[libtype][4]
    for extension in (native._extension, None):
        monkeypatch.setattr(native, "_extension", extension)
        monkeypatch.setattr(native, "_POINTERS", names)
        assert over.fault(lt, shape)

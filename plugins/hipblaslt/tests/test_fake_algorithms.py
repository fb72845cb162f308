"""The algorithms of the fake Lt libraries: listing, configuration, checks and simulated times."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.nightly  # tests of a test double
BF16, FP32, FN = torch.bfloat16, torch.float32, torch.float8_e4m3fn
both = pytest.mark.parametrize("library", ["cublaslt", "hipblaslt"], indirect=True)
nvidia = pytest.mark.parametrize("library", ["cublaslt"], indirect=True)
amd = pytest.mark.parametrize("library", ["hipblaslt"], indirect=True)

#: Indices of the fake hipBLASLt: wrong numbers, failing launch, the fastest.
WRONG, FAILS, WINNER = 1012, 1017, 1022
MIB = 1 << 20
#: Attributes of cuBLASLt's algorithms.
ID, TILE, SPLIT_K, REDUCTION, SWIZZLE, OPTION, STAGES, INNER, CLUSTER = range(9)
REDUCE_COMPUTE = 2


def index(algo: bytes) -> int:
    """Return the index of a hipBLASLt algorithm."""
    return int.from_bytes(algo[:4], "little", signed=True)


def error(product: Any) -> float:
    """Return the largest difference from float64."""
    expected = product.tensors["b"].double() @ product.tensors["a"].double().mT
    return (product.tensors["d"].double() - expected).abs().max().item()


class Configured:
    """Configuration of a cuBLASLt algorithm for a product."""

    def __init__(self, product: Any, algo: bytes) -> None:
        self.product, self.library, self.content = product, product.library, ctypes.create_string_buffer(algo, 64)

    @classmethod
    def initial(cls, product: Any, number: int) -> Configured:
        """Return an algorithm as the library initialises it."""
        library, content = product.library, ctypes.create_string_buffer(64)
        types = (product.compute, product.scale_type, *(product.layouts[name][0] for name in "abcd"))
        library.check(library.call("MatmulAlgoInit", library.handle, *types, number, content))
        return cls(product, content.raw)

    def put(self, attribute: int, value: int) -> Configured:
        """Return a copy with one attribute changed."""
        copy, size = Configured(self.product, self.content.raw), 2 if attribute >= INNER else 4
        content = value.to_bytes(size, "little", signed=True)
        self.library.check(self.library.call("MatmulAlgoConfigSetAttribute", copy.content, attribute, content, ctypes.c_size_t(size)))
        return copy

    def get(self, attribute: int) -> int:
        """Return the value of an attribute."""
        size = 2 if attribute >= INNER else 4
        value, written = ctypes.create_string_buffer(size), ctypes.c_size_t()
        given = (self.content, attribute, value, ctypes.c_size_t(size), ctypes.byref(written))
        self.library.check(self.library.call("MatmulAlgoConfigGetAttribute", *given))
        assert written.value == size
        return int.from_bytes(value.raw, "little", signed=True)

    def capability(self, attribute: int) -> list[int]:
        """Return the 32-bit values of a capability."""
        written = ctypes.c_size_t()
        ask = self.library.native.cublasLtMatmulAlgoCapGetAttribute
        self.library.check(ask(self.content, attribute, None, ctypes.c_size_t(0), ctypes.byref(written)))
        values = (ctypes.c_int32 * (written.value // 4))()
        if len(values):
            self.library.check(ask(self.content, attribute, values, ctypes.c_size_t(ctypes.sizeof(values)), ctypes.byref(written)))
        return list(values)

    def check(self) -> tuple[str, int, float]:
        """Return the status, bytes of workspace and waves."""
        result = ctypes.create_string_buffer(b"\x55" * 96, 96)
        with self.product.descriptors() as (desc, layouts):
            status = self.library.call("MatmulAlgoCheck", self.library.handle, desc, *layouts, self.content, result)
        assert result.raw[:64] == b"\x55" * 64, "the result's algorithm is not written"
        assert int.from_bytes(result.raw[72:76], "little") == status
        return self.library.named(status), int.from_bytes(result.raw[64:72], "little"), ctypes.c_float.from_buffer(result, 76).value

    def cost(self) -> float:
        """Return the simulated microseconds beyond the product."""
        return float(self.library.cost(self.content))


@both
def test_attributes_have_their_sizes(fake: Any, library: Any) -> None:
    """Each attribute has its documented size; other sizes and unknown attributes are refused."""
    created: dict[str, ctypes.c_void_p] = {}
    for kind, arguments in (("MatrixLayout", (14, *map(ctypes.c_uint64, (8, 4)), ctypes.c_int64(8))), ("MatmulDesc", (2, 0))):
        created[kind] = ctypes.c_void_p()
        library.check(library.call(f"{kind}Create", ctypes.byref(created[kind]), *arguments))
    attributes = [("MatrixLayout", *x) for x in fake.LAYOUT.values()] + [("MatmulDesc", *x) for x in fake.DESC.values()]
    for kind, *numbers in attributes:
        attribute, size, thing = numbers[library.amd], numbers[-1 if library.amd else 2], created[kind]
        value = bytes(range(1, size + 1))
        for wrong in {1, 2, 4, 8, 0, 16} - {size}:
            status = library.call(f"{kind}SetAttribute", thing, attribute, bytes(16), ctypes.c_size_t(wrong))
            assert library.named(status) == "INVALID_VALUE"
            assert f"takes {size} bytes" in library.reason()
        assert library.call(f"{kind}SetAttribute", thing, attribute, None, ctypes.c_size_t(size))
        library.check(library.call(f"{kind}SetAttribute", thing, attribute, value, ctypes.c_size_t(size)))
        found, written = ctypes.create_string_buffer(size), ctypes.c_size_t()
        library.check(library.call(f"{kind}GetAttribute", thing, attribute, found, ctypes.c_size_t(size), ctypes.byref(written)))
        assert (found.raw, written.value) == (value, size)
        assert library.call(f"{kind}GetAttribute", thing, attribute, found, ctypes.c_size_t(size + 1), ctypes.byref(written))
    for kind, thing in created.items():
        assert library.named(library.call(f"{kind}SetAttribute", thing, 999, bytes(4), ctypes.c_size_t(4))) == "INVALID_VALUE"
        assert "no attribute 999" in library.reason()
        assert library.call("MatmulPreferenceSetAttribute", thing, 1, bytes(8), ctypes.c_size_t(8)), "an object of another kind"
        library.check(library.call(f"{kind}Destroy", thing))
        assert library.named(library.call(f"{kind}Destroy", thing)) == "INVALID_VALUE"
        assert "no live" in library.reason()


@both
def test_foreign_algorithms(fake: Any, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed algorithm, or one of another version or other types, is refused."""
    product, workspace = fake.linear(library, BF16), fake.aligned(MIB)
    status, [(algo, _), *_] = product.heuristic()
    library.check(status)
    library.check(product.run(algo, workspace))
    product.tensors["d"].fill_(-77)
    for place in (0, 4, 12):
        changed = bytearray(algo)
        changed[place] ^= 1
        assert library.named(product.run(bytes(changed), workspace)) == "INVALID_VALUE"
        assert "not made by this library" in library.reason()
    other = fake.linear(library, BF16, FP32)
    assert library.named(other.run(algo, workspace)) == "INVALID_VALUE"
    assert "was made for" in library.reason()
    monkeypatch.setenv("FAKE_LT_VERSION", "90000")
    assert library.named(product.run(algo, workspace)) == "INVALID_VALUE"
    assert (product.tensors["d"] == -77).all()


@both
def test_workspace(fake: Any, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm writes its workspace alone; a smaller, missing or misaligned one is refused."""
    product = fake.linear(library, BF16)
    _, found = product.heuristic(100)
    algo, size = next((algo, size) for algo, size in found if size)
    content, align = fake.aligned(size + 64), 16 if library.amd else 256
    for change, reason in (
        ({"workspace_bytes": size - 1}, "wants a workspace of"),
        ({"workspace": None}, f"not at a multiple of {align}"),
        ({"workspace": content.data_ptr() + align // 2}, f"not at a multiple of {align}"),
    ):
        product.arguments = change
        assert library.named(product.run(algo, content)) == "INVALID_VALUE"
        assert reason in library.reason()
    product.arguments = {}
    library.check(product.run(algo, content))
    assert (content[:size] == 0xA5).all()
    assert (content[size:] == 0).all()
    monkeypatch.setenv("FAKE_LT_WORKSPACE_ALIGN", "64")
    library.check(product.run(algo, content[64:]))
    assert (content == 0xA5).all()
    product.max_workspace = 0
    assert not [size for _, size in product.heuristic(100)[1] if size]


@both
def test_a_shared_workspace_is_detected(fake: Any, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two concurrent calls with one workspace at least one fails."""
    product = fake.linear(library, BF16, m=64, n=256, k=1024)
    _, found = product.heuristic(100)
    algo = next(algo for algo, size in found if size)
    content, statuses = fake.aligned(MIB * 2), []

    def work() -> None:
        mine = fake.linear(library, BF16, m=64, n=256, k=1024)
        statuses.extend(mine.run(algo, content) for _ in range(8))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert library.status["EXECUTION_FAILED"] in statuses
    assert "workspace changed" in library.reason()


@both
def test_faulty_heuristic_calls(fake: Any, library: Any) -> None:
    """A faulty call of the heuristic returns a status and no result."""
    product = fake.linear(library, BF16)
    assert library.named(product.heuristic(0)[0]) == "INVALID_VALUE"
    with product.descriptors() as (desc, layouts):
        content, returned = ctypes.create_string_buffer(library.result_bytes), ctypes.c_int(7)
        status = library.call("MatmulAlgoGetHeuristic", library.handle, desc, *layouts, None, 1, content, ctypes.byref(returned))
    assert (library.named(status), returned.value) == ("INVALID_VALUE", 0)
    product.layouts["a"][3] = 1
    status, found = product.heuristic()
    assert (library.named(status), found) == ("INVALID_VALUE", [])


@amd
def test_all_solutions_of_hipblaslt(fake: Any, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heuristic's eight results come first, then all others that fit, each once."""
    product = fake.linear(library, BF16)
    hits = [index(algo) for algo, _ in product.heuristic(8)[1]]
    assert hits == [index(algo) for algo, _ in product.heuristic(100)[1]][:8]
    assert len(hits) == 8
    assert [index(algo) for algo, _ in product.heuristic(3)[1]] == hits[:3]
    every = {index(algo): size for algo, size in product.heuristic(100)[1]}
    assert len(every) == len(product.heuristic(100)[1]) == 36, "40 minus the four that the heuristic omits"
    assert {number for number, size in every.items() if size == MIB} == {number for number in every if number % 5 == 4}
    narrow = [index(algo) for algo, _ in fake.linear(library, BF16, k=72).heuristic(100)[1]]
    assert not [number for number in narrow if (number - 1000) % 7 == 6]
    assert WINNER in narrow
    monkeypatch.setenv("FAKE_LT_SOLUTIONS", "24")
    assert max(index(algo) for algo, _ in product.heuristic(100)[1]) == 1023
    monkeypatch.setenv("FAKE_LT_SOLUTIONS", "0")
    assert library.named(product.heuristic(100)[0]) == "NOT_SUPPORTED"


@amd
def test_costs_of_hipblaslt(fake: Any, library: Any) -> None:
    """The heuristic omits the fastest correct solution; a wrong and a failing one are faster."""
    product, workspace = fake.linear(library, BF16), fake.aligned(MIB)
    found = product.heuristic(100)[1]
    costs = {index(algo): library.cost(algo) for algo, _ in found}
    assert sorted(costs, key=costs.__getitem__)[:3] == [WRONG, FAILS, WINNER]
    assert min(costs[index(algo)] for algo, _ in found[:8]) > 2 * costs[WINNER]
    for algo, _ in found:
        product.tensors["d"].fill_(-77)
        status = product.run(algo, workspace)
        if index(algo) == FAILS:
            assert library.named(status) == "EXECUTION_FAILED"
        else:
            library.check(status)
            assert (error(product) > 1) == (index(algo) == WRONG), index(algo)


@amd
def test_a_hipblaslt_algorithm_belongs_to_its_problem(fake: Any, library: Any) -> None:
    """An algorithm of one size or epilogue is refused for another."""
    product, workspace = fake.linear(library, BF16), fake.aligned(MIB)
    algo = product.heuristic(1)[1][0][0]
    bias = torch.zeros(48, dtype=BF16)
    others = [
        fake.linear(library, BF16, m=6),
        fake.linear(library, BF16, k=128),
        fake.linear(library, BF16, epilogue=4, bias=bias.data_ptr()),
    ]
    for other in others:
        assert library.named(other.run(algo, workspace)) == "INVALID_VALUE"
        assert "made for another problem" in library.reason()


@nvidia
def test_the_heuristic_of_cublaslt_stops_at_eight(fake: Any, library: Any) -> None:
    """The heuristic returns at most eight valid results, best first; each runs and is right."""
    product, workspace = fake.linear(library, BF16), fake.aligned(MIB)
    _, found = product.heuristic(100)
    assert len(found) == 8
    costs = [library.cost(algo) for algo, _ in found]
    assert costs[0] == min(costs) == 430
    for algo, size in found:
        assert Configured(product, algo).check()[:2] == ("SUCCESS", size)
        library.check(product.run(algo, workspace))
        assert error(product) < 0.1
    odd = fake.linear(library, BF16, k=71, n=33)
    assert {Configured(odd, algo).get(ID) for algo, _ in odd.heuristic()[1]} == {11}, "no other takes odd rows"


@nvidia
@pytest.mark.parametrize("dtype", [BF16, FN, FP32], ids=str)
def test_the_winner_of_cublaslt_is_some_steps_away(fake: Any, library: Any, dtype: torch.dtype) -> None:
    """Single changes in any order lead from the first result to the fastest configuration."""
    product = fake.linear(library, dtype)
    here = Configured(product, product.heuristic(1)[1][0][0])
    assert (here.get(ID), here.get(TILE), here.get(STAGES), here.get(SWIZZLE), here.get(OPTION)) == (66, 20, 15, 0, 0)
    steps = [(TILE, 18), (STAGES, 16), (SWIZZLE, 1), (OPTION, 1), (OPTION, 2)]
    for order in ([0, 1, 2, 3, 4], [3, 4, 2, 1, 0], [2, 3, 0, 4, 1]):
        there = here
        for attribute, value in (steps[i] for i in order):
            before, there = there, there.put(attribute, value)
            assert there.check()[0] == "SUCCESS", library.reason()
            assert there.cost() < before.cost()
        assert there.cost() == 150
    here = there
    assert here.content.raw not in [algo for algo, _ in product.heuristic(100)[1]]
    everywhere = []
    for number in (66, 71) if dtype is FN else (11, 21, 66, 71):
        first = Configured.initial(product, number)
        tiles, stages = first.capability(6), first.capability(13) or [0]
        for tile, stage, swizzle, option in itertools.product(tiles, stages, range(2), range(6)):
            if swizzle <= first.capability(2)[0] and option <= first.capability(7)[0]:
                there = first.put(TILE, tile).put(STAGES, stage).put(SWIZZLE, swizzle).put(OPTION, option)
                everywhere += [there.cost()] if there.check()[0] == "SUCCESS" else []
    assert sorted(everywhere)[:2] == [150, 190]


@nvidia
def test_rules_of_configurations(fake: Any, library: Any) -> None:
    """Values beyond the capabilities are refused; split K needs a reduction and a workspace."""
    product = fake.linear(library, BF16, m=128, n=256, k=512)
    first = Configured.initial(product, 66).put(TILE, 20).put(STAGES, 15)
    assert first.check() == ("SUCCESS", 0, pytest.approx(2 / 132))
    split = first.put(SPLIT_K, 4)
    assert split.put(REDUCTION, REDUCE_COMPUTE).check()[:2] == ("SUCCESS", 4 * 128 * 256 * 4)
    assert split.put(REDUCTION, 4).check()[:2] == ("SUCCESS", 4 * 128 * 256 * 2)
    simple = Configured.initial(product, 11).put(TILE, 15).put(SPLIT_K, 2)
    assert simple.put(REDUCTION, 1).check()[:2] == ("SUCCESS", 2 * 4 * 4), "a counter for each of 8 tiles"
    cluster = Configured.initial(product, 71).put(TILE, 20).put(STAGES, 35)
    refused = [
        split, split.put(REDUCTION, 1), split.put(REDUCTION, 6), first.put(REDUCTION, 2), first.put(TILE, 0), first.put(TILE, 11),
        first.put(STAGES, 0), first.put(STAGES, 8), first.put(TILE, 24).put(STAGES, 21), first.put(SWIZZLE, 2), first.put(OPTION, 4),
        first.put(CLUSTER, 2), first.put(INNER, 1), first.put(SPLIT_K, 0), first.put(SPLIT_K, 64).put(REDUCTION, 2),
        cluster.put(SPLIT_K, 2).put(REDUCTION, 2), cluster.put(CLUSTER, 7), Configured.initial(product, 66),
    ]  # fmt: skip
    for configured in refused:
        assert configured.check()[0] == "NOT_SUPPORTED"
        assert library.named(product.run(configured.content.raw, fake.aligned(MIB))) == "NOT_SUPPORTED"
    failing = cluster.put(CLUSTER, 6)
    assert failing.check()[0] == "SUCCESS"
    assert library.named(product.run(failing.content.raw)) == "EXECUTION_FAILED"
    assert library.call("MatmulAlgoConfigSetAttribute", first.content, ID, bytes(4), ctypes.c_size_t(4)), "the id cannot be set"
    assert library.call("MatmulAlgoConfigSetAttribute", first.content, CLUSTER, bytes(4), ctypes.c_size_t(4)), "it has two bytes"


@nvidia
def test_ids_are_those_of_the_types(fake: Any, library: Any) -> None:
    """Ids depend on the types; a missing id is not initialised."""

    def ids(compute: int, scale: int, dtype: int, out: int, room: int = 32) -> list[int]:
        found, count = (ctypes.c_int * 32)(), ctypes.c_int()
        library.call("MatmulAlgoGetIds", library.handle, compute, scale, dtype, dtype, out, out, room, found, ctypes.byref(count))
        return found[: count.value]

    assert ids(68, 0, 14, 14) == ids(77, 0, 0, 0) == [11, 21, 66, 71]
    assert ids(72, 10, 3, 10) == [21, 66, 71]
    assert ids(68, 0, 28, 14) == [66, 71]
    assert ids(68, 0, 14, 14, room=2) == [11, 21]
    assert ids(77, 0, 14, 14) == ids(68, 0, 14, 2) == []
    content = ctypes.create_string_buffer(64)
    init = (library.handle, 68, 0, 28, 28, 14, 14)
    assert library.named(library.call("MatmulAlgoInit", *init, 11, content)) == "NOT_SUPPORTED"
    assert library.named(library.call("MatmulAlgoInit", *init, 12, content)) == "INVALID_VALUE"


@both
def test_costs_are_spent(fake: Any, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes at least its algorithm's simulated time."""
    monkeypatch.setenv("FAKE_LT_COST", "10")
    product = fake.linear(library, BF16)
    for algo, _ in product.heuristic(3)[1]:
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            library.check(product.run(algo))
            seconds.append(time.perf_counter() - start)
        assert library.cost(algo) * 10e-6 <= min(seconds)


@both
def test_calls_are_counted_from_all_threads(fake: Any, library: Any) -> None:
    """Calls from several threads are counted by either name; an unknown name has no count."""

    def work() -> None:
        product = fake.linear(library, BF16)
        for _ in range(50):
            library.check(product.run())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert library.counted("Matmul") == library.counted(f"{library.prefix}Matmul") == 200
    assert library.counted("MatmulDescCreate") == library.counted("MatmulDescDestroy") == 200
    assert library.counted("MatMul") == -1
    library.native.fake_reset()
    assert library.counted("Matmul") == 0
    assert library.reason() == ""


@both
def test_version_and_revision(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version and revision come from the environment."""

    def read_version() -> tuple[int, str, str]:
        if not library.amd:
            library.native.cublasLtGetVersion.restype = ctypes.c_size_t
            return library.native.cublasLtGetVersion(), "", ""
        number, text, name = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_char_p()
        library.check(library.call("GetVersion", library.handle, ctypes.byref(number)))
        library.check(library.call("GetGitRevision", library.handle, text))
        library.check(library.call("GetArchName", ctypes.byref(name)))
        return number.value, text.value.decode(), (name.value or b"").decode()

    assert read_version() == ((100200, "fake0001", "gfx942") if library.amd else (130100, "", ""))
    for name, value in (("VERSION", "100300"), ("REVISION", "0a1b2c3d"), ("ARCH", "gfx950")):
        monkeypatch.setenv(f"FAKE_LT_{name}", value)
    assert read_version() == ((100300, "0a1b2c3d", "gfx950") if library.amd else (100300, "", ""))


def test_a_missing_compiler(fake: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `cc` the error names the remedy; with it a library is compiled once."""
    built = fake.build("cublaslt", tmp_path)
    before = built.stat().st_mtime_ns
    assert fake.build("cublaslt", tmp_path) == built
    assert built.stat().st_mtime_ns == before
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(fake.NoCompilerError, match="install a C compiler"):
        fake.build("hipblaslt", tmp_path)

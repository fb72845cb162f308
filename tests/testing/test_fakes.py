"""testing.fakes: backends made of functions behave like installed ones under the conformance suite."""

import itertools
import json
import os
import re
import time

import pytest
import torch
from tunedgemm.backends.hookspecs import hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.device import device_of
from tunedgemm.errors import OutOfResources, PluginError
from tunedgemm.process.process_state import kept_switches
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.fakes import FakeHooks, exact, fake_backend, with_hooks
from tunedgemm.testing.launching import DrawnCache
from tunedgemm.testing.shapes import shapes_of

ORDERED = Solution("fake", "ordered", sum_order="k16")
SMALL = (Shape("a16w16", 4, 32, 64), Shape("a16w16", 0, 32, 64, epilogue="bias"), Shape("a16w16", 3, 16, 24, outdtype="fp32"))


class InProcess(BackendConformance):
    """The suite over hooks that no distribution brings; checks in other processes are left out."""

    hooks: FakeHooks

    @classmethod
    def backend(cls):
        return fake_backend(cls.libtype, hooks=cls.hooks)

    test_other_processes_list_the_same_solutions = None
    test_loading_needs_no_device_and_no_other_plugin = None


class TestFake(InProcess):
    """A fake backend passes the suite."""

    libtype, shapes = "fake", SMALL
    hooks = FakeHooks("fake", solutions=("one", "two"), heuristic="two", invariant=lambda *_: ORDERED)


def suite(**answers):
    """An instance of the suite over a fake backend with these answers."""
    return type(
        "Suite", (InProcess,), {"libtype": "fake", "shapes": SMALL[:1], "device": device_of(-1), "hooks": FakeHooks("fake", **answers)}
    )()


def _writes(solution, shape, x, weight, *rest):
    weight.zero_()
    return exact(solution, shape, x, weight, *rest)


def _half(solution, shape, *operands):
    out = torch.empty(shape.m, shape.n, dtype=torch.bfloat16)
    out[: shape.m // 2] = exact(solution, shape, *operands)[: shape.m // 2]
    return out


_COUNT = itertools.count()


def _flip(shape, device):
    return None if next(_COUNT) % 2 else Unsupported("only every other time")


def _noisy(solution, shape, *operands):
    out = exact(solution, shape, *operands)
    return out + torch.randn_like(out) * 1e-3


def _shuffled(shape, device):
    return ["a", "b"] if next(_COUNT) % 2 else ["b", "a"]


def _numbered():
    return Solution("fake", f"{next(_COUNT)}", sum_order="k16")


def _halved(solution, shape, *operands):
    return exact(solution, shape, *operands) / (2 if solution.kernel_name == "half" else 1)


def _first_row_wrong(solution, shape, *operands):
    out = exact(solution, shape, *operands)
    out[0] = 0
    return out


def _beyond(solution, shape, x, weight, *rest):
    out = torch.empty(*x.shape[:-1], shape.n, dtype=x.dtype)
    longer = out.as_strided((out.numel() + 1,), (1,), out.storage_offset())
    longer.fill_(0)
    return out.copy_(exact(solution, shape, x, weight, *rest))


def _sets_a_variable(*arguments):
    os.environ["PLANTED"] = "1"
    return exact(*arguments)


class BindsWithVariables(FakeHooks):
    """A backend whose `bind` sets a variable."""

    @hookimpl
    def bind(self, solution, shape, device):
        os.environ["PLANTED"] = "1"
        return super().bind(solution, shape, device)


OUTPUTS, IDENTITY = "test_outputs_match_the_reference", "test_a_solution_is_rebuilt_from_its_identity"
SUPPORTS, LISTED = "test_supports_is_pure_quick_and_gives_reasons", "test_solutions_are_unique_and_stable"
FAULTS = {
    "out of bounds": (OUTPUTS, {"call": _beyond}, "fake:fake writes outside its output"),
    "a row wrong": (OUTPUTS, {"call": _first_row_wrong}, "error ratio"),
    "half unwritten": (OUTPUTS, {"call": _half}, "error ratio 1"),
    "raises": (OUTPUTS, {"call": lambda s, shape, *o: 1 // 0}, r"M=4 .*: fake:fake raised ZeroDivisionError for \(4, 64\)"),
    "another dtype": (OUTPUTS, {"call": lambda *a: exact(*a).double()}, "torch.float64 on cpu instead of"),
    "transposed memory": (OUTPUTS, {"call": lambda *a: exact(*a).mT.contiguous().mT}, "not contiguous instead of"),
    "flattened": (OUTPUTS, {"call": lambda *a: exact(*a).flatten(0, -2)}, r"\(4, 32\).* instead of \(2, 2, 32\)"),
    "sets a variable": (OUTPUTS, {"call": _sets_a_variable}, "fake:fake changes PLANTED of the process"),
    "writes to operands": (OUTPUTS, {"call": _writes}, "fake:fake writes to weight"),
    "not deterministic": (OUTPUTS, {"call": _noisy}, "fake:fake claims to be deterministic"),
    "not batch invariant": (
        OUTPUTS,
        {"call": lambda s, shape, *o: exact(s, shape, *o) + shape.m, "solutions": [Solution("fake", "fake", batch_invariant=True)]},
        "claims to be batch invariant",
    ),
    "orders of sums": (
        OUTPUTS,
        {"call": _halved, "solutions": [Solution("fake", name, sum_order="k16") for name in ("fake", "half")]},
        "fake:half: its rows of M=4 differ from those of fake:fake; both have the sum_order k16",
    ),
    "order by M": (
        OUTPUTS,
        {"call": lambda s, shape, *o: exact(s, shape, *o) * (shape.m == 4), "invariant": lambda *_: ORDERED},
        "fake:ordered: its rows of M=1 differ from those of fake:ordered",
    ),
    "own choice wrong": (
        "test_a_row_without_a_name_is_served",
        {"heuristic": "x", "call": lambda *a: exact(*a) * 0},
        "fake:x of the backend's choice: error",
    ),
    "foreign": (LISTED, {"solutions": [Solution("other", "kernel")]}, r"enumerate_solutions\(\) returned a foreign solution"),
    "nameless": (LISTED, {"solutions": [""]}, "is not a named solution"),
    "listed twice": (LISTED, {"solutions": ["a", "b", "a"]}, "listed more than once: fake:a"),
    "unstable": (LISTED, {"solutions": _shuffled}, "a second call lists other solutions"),
    "impure": (SUPPORTS, {"supports": _flip}, "then"),
    "no reason": (SUPPORTS, {"supports": lambda *_: False}, "not None or a reason"),
    "empty reason": (SUPPORTS, {"supports": lambda *_: Unsupported(" ")}, "not None or a reason"),
    "slow": (SUPPORTS, {"supports": lambda *_: time.sleep(2e-3)}, r"takes \d+\.\d\d ms"),
    "foreign in the mode": (LISTED, {"invariant": lambda *_: Solution("other", "x")}, r"invariant_fallback\(\) returned Solution"),
    "no order": (LISTED, {"invariant": lambda *_: Solution("fake", "x")}, "must name one sum_order for every M"),
    "none for some M": (LISTED, {"invariant": lambda shape, _: ORDERED if shape.m > 1 else None}, r"must name one .*M=1 None"),
    "unstable in the mode": (LISTED, {"invariant": lambda *_: _numbered()}, r"invariant_fallback\(\) is not stable"),
    "foreign heuristic": (LISTED, {"heuristic": Solution("other", "x")}, r"heuristic_fallback\(\) returned Solution"),
}


def test_the_suite_finds_what_bind_changes():
    """Variables that a `bind` changes are named."""
    changing = suite()
    changing.hooks.__class__ = BindsWithVariables
    with kept_switches(), pytest.raises(AssertionError, match=r"bind\(\) changes PLANTED of the process"):
        getattr(changing, IDENTITY)("a16w16")


def test_the_suite_finds_each_fault():
    """Each fault of a backend fails the check that is meant for it, with the reason."""
    missed = []
    for fault, (check, answers, message) in FAULTS.items():
        try:
            getattr(suite(**answers), check)("a16w16")
            missed.append(f"{fault}: {check} passed")
        except AssertionError as error:
            missed += [] if re.search(message, str(error)) else [f"{fault}: {error}"]
    assert not missed


def test_a_check_lists_the_faults_of_all_shapes():
    """One failure lists and counts the faults by shape and solution; operands are restored in between."""
    wrong = {"a": lambda out: out * 2, "b": lambda out: out, "c": lambda out: out + 1}

    def call(solution, shape, x, weight, *rest):
        out = wrong[solution.kernel_name](exact(solution, shape, x, weight, *rest))
        weight.fill_(float("nan")) if solution.kernel_name == "a" else None
        return out

    found = suite(solutions=tuple("abc"), call=call)
    type(found).shapes = (SMALL[0], SMALL[2])
    with pytest.raises(AssertionError) as failure:
        found.test_outputs_match_the_reference("a16w16")
    text = str(failure.value)
    faulty = {(line.split(": fake:")[0].strip(), line.split(": fake:")[1][0]) for line in text.splitlines()[1:] if ": fake:" in line}
    assert faulty == {(str(shape), name) for shape in (SMALL[0], SMALL[2]) for name in "ac"}
    assert "writes to weight" in text


def test_the_suite_finds_bind_that_takes_any_name():
    """A bind that accepts a kernel that does not exist fails."""

    class Any_(FakeHooks):
        @hookimpl
        def bind(self, solution, shape, device):
            return Launcher(lambda *operands: exact(solution, shape, *operands))

    found = suite()
    type(found).hooks = Any_("fake")
    with pytest.raises(AssertionError, match="bind\\(\\) of a kernel that does not exist returned Launcher"):
        found.test_a_solution_is_rebuilt_from_its_identity("a16w16")


def test_the_suite_finds_contradictions_of_lacks_and_bind():
    """A lacks() that refuses too much, too little or with another reason fails."""

    class Judging(FakeHooks):
        @hookimpl
        def lacks(self, solution):
            return self._answers(solution)

    bound = "is refused by bind(): \"fake has no kernel 'no-such-kernel' with splitK 0\""
    found, cases = suite(), {
        "fake:fake is accepted by bind() and refused by lacks(): no": lambda _: "no",
        f"fake:no-such-kernel {bound}, by lacks(): ''": lambda _: "",
        f"fake:no-such-kernel {bound}, by lacks(): 'no'": lambda solution: "no" * (solution.kernel_name != "fake"),
    }  # fmt: skip
    with pytest.raises(pytest.skip.Exception, match=r"fake has no lacks\(\)"):
        found.test_lacks_refuses_what_bind_refuses("a16w16")
    hooks = type(found).hooks = Judging("fake")
    for fault, answers in cases.items():
        hooks._answers = answers
        with pytest.raises(AssertionError, match=re.escape(fault)):
            found.test_lacks_refuses_what_bind_refuses("a16w16")


def test_the_suite_finds_state_shared_by_threads():
    """A launcher that keeps its operands in a shared place gives another thread's result."""
    held = {}

    def shared(solution, shape, *operands):
        held["operands"] = operands
        time.sleep(2e-2)  # in which the other thread calls, however busy the machine is
        return exact(solution, shape, *held["operands"])

    with pytest.raises(AssertionError, match="error ratio"):
        suite(call=shared).test_launchers_serve_two_threads("a16w16")


def test_the_suite_skips_what_is_not_supported_with_the_reason():
    """Launching checks skip an op of which the backend supports no shape here, or binds no solution."""
    with pytest.raises(pytest.skip.Exception, match=r"fake on cpu-.*: needs wings"):
        suite(supports=lambda *_: Unsupported("needs wings")).test_outputs_match_the_reference("a16w16")
    for check in (OUTPUTS, IDENTITY, "test_launchers_serve_two_threads"):
        with pytest.raises(pytest.skip.Exception, match=r"no solution of fake binds on .*: it lists none"):
            getattr(suite(solutions=()), check)("a16w16")


def test_operands_and_references_are_drawn_once_within_a_bound():
    """The cache gives the same tensors again, and drops the least recently used ones beyond its bytes."""
    cpu, small = device_of(-1), SMALL[0]
    each = DrawnCache().draw(small, cpu, 0).nbytes
    cache = DrawnCache(limit=2 * each)
    first, second = cache.draw(small, cpu, 0), cache.draw(small, cpu, 1)
    assert cache.draw(small, cpu, 0) is first
    cache.draw(small, cpu, 2)
    assert cache.draw(small, cpu, 0) is first
    assert cache.draw(small, cpu, 1) is not second


def test_a_fake_backend_passes_the_registry_checks():
    """A fake backend is refused for the same faults as a plugin."""
    with pytest.raises(PluginError, match="ops must name at least one op"):
        fake_backend("mine", ops=())
    with pytest.raises(TypeError):
        fake_backend("mine", kernels=())


def test_conformance_shapes_are_expressible_and_awkward():
    """Every shape of the suite can be stored in its op's table; the list has the sizes that break kernels."""
    shapes = shapes_of("a16w16", large=True)
    assert len(set(shapes)) == len(shapes) == len({json.dumps(shape.to_dict()) for shape in shapes})
    assert {0, 1, 127} <= {shape.m for shape in shapes}
    assert any(shape.n == 16 for shape in shapes)
    assert any(shape.k % 8 for shape in shapes)
    assert any(shape.bias for shape in shapes)
    assert any(shape.outdtype == "fp32" for shape in shapes)
    assert set(shapes_of("a16w16")) < set(shapes)


def test_out_of_resources_is_the_one_exception_that_bind_may_raise() -> None:
    """A solution whose bind raises it is a refused one, for the suite as for the tuner."""

    def bind(solution, shape, device):
        raise OutOfResources("needs 300 KiB of shared memory")

    tight = fake_backend("tight")
    tight = with_hooks(tight, bind=bind)

    class Suite(BackendConformance):
        libtype = "tight"

        @classmethod
        def backend(cls):
            return tight

    case = Suite._case(Shape("a16w16", 4, 32, 64))

    assert case.launchers == ()
    assert "300 KiB" in str(case.refusals[0][1])

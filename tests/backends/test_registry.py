"""registry: plugins are found, guarded, bound and ranked; a bad one is skipped with its reason."""

import asyncio
import functools
import itertools
from importlib.metadata import EntryPoint

import attrs
import pytest
from tunedgemm.backends import backend as backend_module
from tunedgemm.backends import registry as registry_module
from tunedgemm.backends.backend import Backend
from tunedgemm.backends.hookspecs import hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry, tie_order
from tunedgemm.device import Device
from tunedgemm.errors import LibtypeError, PluginError
from tunedgemm.libtypes import BUILTIN, owners
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.testing.conformance import BackendConformance
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks
from tunedgemm.testing.shapes import shapes_of

BAD = {
    "fake_unimportable": "fake-plugin cannot be imported: ModuleNotFoundError: No module named 'a_library_that_nobody_has'",
    "fake_absent": "AttributeError: module 'fake_plugin.bad' has no attribute 'no_such_object'",
    "fake_misspelt": "unknown hook 'enumerate_solution'",
    "fake_other_arguments": "hook 'supports'",
    "fake_defaults": "hook supports(shape, device=None): 'device' may not have a default",
    "fake_stars": "hook supports(*arguments): '*arguments'",
    "fake_hookless": "lacks the hook supports(); implemented: none",
    "fake_unmarked": "lack() is public and no hook; mark it with hookimpl; the hooks are supports, ",
    "fake_launchless": "lacks the hook run(); implemented: supports, enumerate_solutions",
    "fake_opless": "ops must name at least one op (got none); choose from a16w16",
    "fake_zeroth": "contract must be 1 (got 0); install the versions of both that belong together",
    "fake_future": "contract must be 1 (got 99)",
    "fake_misspelt_field": "got an unexpected keyword argument 'platform'",
    "fake_module": "the entry point must name a tunedgemm.plugin.Backend (got fake_plugin.bad:module, a module)",
    "fake_renamed": "the entry point and its backend must have one name (got 'another')",
}


class TestInstalledPlugins:
    """Two distributions that pip never saw, with every mistake a plugin can make at load."""

    @pytest.mark.parametrize(("libtype", "reason"), BAD.items())
    def test_a_bad_plugin_is_named_with_its_reason(self, fake_plugins, libtype, reason):
        """It is listed with the reason, and requesting it by name is an error."""
        registry = Registry()
        answer = registry.get(libtype)
        assert isinstance(answer, Unsupported)
        assert reason in answer.reason
        assert "fake-plugin" in answer.reason
        with pytest.raises(LibtypeError) as caught:
            registry.select(libtype)
        assert reason in str(caught.value)
        assert libtype in str(caught.value)

    def test_bad_plugins_leave_the_others_working(self, fake_plugins, shape, cpu):
        """``all`` is every backend that loads, in order of rank, the built-in one last."""
        selected = [backend.libtype for backend in Registry().select("all")]
        assert set(BAD).isdisjoint(selected)
        assert {"fake", "fake_raising", BUILTIN} <= set(selected)
        assert selected[-1] == BUILTIN

    def test_a_plugin_is_described_by_its_distribution(self, fake_plugins):
        """A backend knows which distribution and version it came from."""
        backend = Registry().get("fake")
        assert (backend.libtype, backend.distribution, backend.version, backend.ops) == ("fake", "fake-plugin", "1", ("a16w16",))

    def test_only_requested_backends_are_imported(self, fake_plugins, child):
        """Selecting one libtype imports no other plugin."""
        source = (
            "import sys\nfrom tunedgemm.backends.registry import Registry\n"
            "registry = Registry()\nprint(len([b for b in registry.select('torch')]), 'fake_plugin' in sys.modules)\n"
            "registry.select('fake')\nprint('fake_plugin.bad' in sys.modules, 'fake_plugin_rival' in sys.modules)\n"
        )
        assert child(source, fake_plugins) == "1 False\nFalse False"

    def test_the_first_distribution_keeps_a_libtype(self, fake_plugins):
        """Of two claimants one keeps the libtype, always the same, and the other is named as a problem."""
        registry = Registry()
        assert registry.get("fake").distribution == "fake-plugin"
        assert registry.problems("fake") == ("fake-plugin-rival also claims libtype 'fake'; fake-plugin keeps it",)

    def test_our_libtypes_cannot_be_taken(self, fake_plugins):
        """The built-in libtype and those of our own distributions stay with them."""
        registry = Registry()
        assert registry.get(BUILTIN).distribution == "tunedgemm"
        assert registry.problems(BUILTIN) == ("fake-plugin-rival also claims libtype 'torch'; tunedgemm keeps it",)
        assert all("fake-plugin-rival also claims" in problem for problem in registry.problems("triton"))


class TestGuards:
    """Faults of a plugin after loading."""

    @pytest.fixture
    def backend(self, fake_plugins):
        return lambda libtype: Registry().select(libtype)[0]

    @pytest.mark.parametrize("libtype", ["fake_foreign", "fake_not_solutions"])
    def test_foreign_solutions_are_refused(self, backend, libtype, shape, cpu):
        """A solution of another libtype, or something else than a solution, is the plugin's error."""
        with pytest.raises(PluginError, match=rf"'{libtype}'.*returned a foreign solution"):
            backend(libtype).solutions(shape, cpu)

    def test_raising_hooks_become_reasons(self, backend, shape, cpu):
        """An exception in supports or bind is a refusal, in the heuristic None, in the list a PluginError."""
        raising, row = backend("fake_raising"), Shape("a16w16", 1, 32, 64)
        assert raising.refusal(shape, cpu) == Unsupported("its supports() raised ZeroDivisionError: of supports")
        assert raising.heuristic_fallback(row, cpu) is None
        assert raising.bind(Solution("fake_raising", "kernel"), row, cpu) == Unsupported("its bind() raised ZeroDivisionError: of bind")
        with pytest.raises(PluginError, match=r"'fake_raising': enumerate_solutions\(\) raised ZeroDivisionError"):
            raising.solutions(row, cpu)

    def test_an_unknown_version_is_empty(self, backend, cpu):
        """A library_version that raises or returns anything but text is an unknown version."""
        assert backend("fake_raising").library_version(cpu) == ""
        assert backend("fake_vague").library_version(cpu) == ""

    def test_vague_answers_become_reasons(self, backend, shape, cpu):
        """True for None, a number for a launcher and a text for a solution are all refused."""
        vague = backend("fake_vague")
        assert "returned True instead of None or Unsupported" in str(vague.refusal(shape, cpu))
        assert "returned 42 instead of a Launcher" in str(vague.bind(Solution("fake_vague", "kernel"), Shape("a16w16", 1, 32, 64), cpu))
        assert vague.heuristic_fallback(Shape("a16w16", 1, 32, 64), cpu) is None

    def test_refusals_pass_through(self, backend, shape, cpu):
        """A reason given by bind reaches the caller, as PluginError where it asked to run."""
        refusing, solution = backend("fake_refusing"), Solution("fake_refusing", "kernel")
        assert refusing.bind(solution, shape, cpu) == Unsupported("no workspace is large enough")
        with pytest.raises(PluginError, match=r"fake_refusing:kernel cannot run a16w16 M=4.*no workspace is large enough"):
            refusing.run(solution, shape, cpu, ())


class TestFakeConformance(BackendConformance):
    """Hooks that take a subset of the arguments, in another order, pass the suite."""

    libtype, shapes = "fake", shapes_of("a16w16")[:7]

    @pytest.fixture(autouse=True)
    def found(self, fake_plugins):
        """The distributions are on the path in every test."""


class TestNames:
    """What a plugin states must be what tables and the command line can name."""

    @pytest.mark.parametrize(
        "libtype", ["all", "both", "hipblast", "rocblas", "a,b", "has space", "a+b", "", "ätsch", "٣", "x\n", "-x", "a:b"]
    )
    def test_a_libtype_that_cannot_be_asked_for_is_refused(self, libtype):
        """Words of --libtype, aliases, commas, spaces, joints and non-ASCII letters are refused."""
        with pytest.raises(PluginError, match="rename the entry point"):
            fake_backend(libtype)
        assert fake_backend("My_lib-2.x").libtype == "My_lib-2.x"

    @pytest.mark.parametrize("stated", ["a16w16", 7, ("a16w16", 7), {"a16w16": 1}])
    def test_ops_must_be_a_tuple_of_names(self, stated):
        """A text would be read as its letters; the message shows how to write it."""
        with pytest.raises(PluginError, match=r"libtype 'mine': ops must be a tuple of names \(got .*; write "):
            fake_backend("mine", ops=stated)

    def test_a_list_that_never_ends_is_refused(self, shape, cpu, monkeypatch):
        """An endless list is a PluginError that names the hook."""
        monkeypatch.setattr(backend_module, "MOST_SOLUTIONS", 99)
        endless = with_hooks(fake_backend("mine"), enumerate_solutions=lambda: itertools.repeat(Solution("mine", "k")))
        with pytest.raises(PluginError, match=r"'mine': enumerate_solutions\(\) lists more than 99 solutions"):
            endless.solutions(shape, cpu)


@pytest.mark.parametrize(
    "error", [SystemExit(0), GeneratorExit(), MemoryError(), RecursionError(), asyncio.CancelledError(), StopIteration()]
)
def test_whatever_a_hook_raises_is_a_reason(shape, cpu, error):
    """Exits and errors that are not an Exception become refusals, as others do."""

    def raises():
        raise error

    sound, name = fake_backend("mine"), type(error).__name__
    backend = with_hooks(sound, enumerate_solutions=raises, bind=raises, heuristic_fallback=raises)
    assert f"its supports() raised {name}" in str(with_hooks(sound, supports=raises).refusal(shape, cpu))
    assert f"its bind() raised {name}" in str(backend.bind(Solution("mine"), shape, cpu))
    with pytest.raises(PluginError, match=rf"enumerate_solutions\(\) raised {name}"):
        backend.solutions(shape, cpu)
    assert backend.heuristic_fallback(shape, cpu) is None


@pytest.mark.parametrize("attribute", ["__class__", "__repr__"])
def test_an_answer_that_raises_is_a_reason(shape, cpu, attribute):
    """An answer of a hook whose class or text raises is refused, as an exception of the hook is."""

    def raises(_):
        raise ValueError("of the answer")

    answer = type("Answer", (), {attribute: property(raises) if attribute == "__class__" else raises})()
    sound = fake_backend("mine")
    backend = with_hooks(sound, bind=lambda: answer, heuristic_fallback=lambda: answer, enumerate_solutions=lambda: [answer])
    assert "its supports() raised ValueError: of the answer" in str(with_hooks(sound, supports=lambda: answer).refusal(shape, cpu))
    assert "its bind() raised ValueError: of the answer" in str(backend.bind(Solution("mine"), shape, cpu))
    with pytest.raises(PluginError, match=r"enumerate_solutions\(\) raised ValueError: of the answer"):
        backend.solutions(shape, cpu)
    assert backend.heuristic_fallback(shape, cpu) is None


@pytest.mark.skipif(not owners(), reason="tunedgemm is not installed: its extras are unknown")
def test_a_libtype_of_ours_that_is_missing_gets_the_pip_command():
    """An unknown name lists what is installed; one of ours names the package to install."""
    registry = fake_registry()
    with pytest.raises(LibtypeError, match=r"libtype 'nosuch': no backend of that name; installed: torch"):
        registry.select("nosuch")
    with pytest.raises(LibtypeError, match=r"libtype 'cublaslt': not installed; pip install tunedgemm\[cublaslt\]"):
        registry.select("torch,cublaslt")


def test_a_backend_that_is_left_out_of_all_is_named_once(caplog):
    """Name each installed backend that does not load, where all of them are meant, once in a process."""
    registry = Registry([EntryPoint("evil", "nosuchlib_of_evil", "tunedgemm.backends")])
    for _ in range(2):
        assert [backend.libtype for backend in registry.select()] == ["torch"]
        registry.runners("a16w16", "other")
    (line,) = [record.message for record in caplog.records if "nosuchlib_of_evil" in record.message]
    assert line.startswith("libtype 'evil': left out: ")


def test_selection_keeps_the_order_of_the_list():
    """A comma list selects in its own order, each once; ``all`` anywhere in it means all."""
    registry = fake_registry(fake_backend("b"), fake_backend("a"))
    assert [backend.libtype for backend in registry.select(" torch, b ,b")] == ["torch", "b"]
    assert [backend.libtype for backend in registry.select("b,all")] == ["a", "b", "torch"]
    assert [backend.libtype for backend in registry.select("")] == ["a", "b", "torch"]
    assert registry.libtypes == ("a", "b", "torch")


def test_ties_follow_the_list_then_the_rank():
    """Places: those named first, in their order, then the others by rank."""
    backends = [fake_backend(libtype) for libtype in ("torch", "mine", "triton", "asm")]
    assert list(tie_order(backends, "all")) == ["asm", "triton", "mine", "torch"]
    assert list(tie_order(backends, "torch,mine")) == ["torch", "mine", "asm", "triton"]


def test_optional_hooks_are_optional(shape, cpu):
    """Without refine there are no neighbours, without prepare no work; the other answers are empty."""
    backend = fake_backend("plain")
    (solution,) = backend.solutions(shape, cpu)
    assert backend.refine(solution, shape, cpu) == []
    assert backend.prepare(solution, shape, cpu) is None
    assert backend.library_version(cpu) == ""
    assert backend.details(cpu) == ()
    assert backend.lacks(solution, shape, cpu) == ""


def test_details_that_raise_are_reported(cpu):
    """The lines come one by one, so an exception among them replaces them all."""

    def details():
        yield "one"
        raise ZeroDivisionError("of details")

    assert with_hooks(fake_backend("fake"), details=details).details(cpu) == ("its details() raised ZeroDivisionError: of details",)


class Bare:
    """Hooks without `bind`."""

    @hookimpl
    def supports(self):
        return None

    @hookimpl
    def enumerate_solutions(self):
        return [Solution("mine", "a"), Solution("mine", "a"), Solution("mine", "b")]

    @hookimpl
    def run(self, solution, operands):
        return (solution.kernel_name, *map(type, operands))


def test_optional_hooks_are_bound(shape):
    """Each optional hook reaches the plugin's function, with the arguments that it takes."""
    seen, sm_90 = [], Device("sm_90", 132, index=0)
    backend = with_hooks(
        Backend("mine", Bare(), ops=("a16w16",)),
        refine=lambda solution: [Solution("mine", solution.kernel_name + "_wider")],
        prepare=lambda device, solution: seen.append((solution.kernel_name, device.gfx)),
        library_version=lambda device: f"on {device.gfx}",
        details=lambda device: [f"one file\nfor {device.gfx}"],
        lacks=lambda solution, device: f"no {solution.kernel_name} for {device.gfx}",
        source_of=lambda shape: f"a file for M={shape.m}",
    )
    first, second = backend.solutions(shape, sm_90)
    assert [str(found) for found in backend.refine(second, shape, sm_90)] == ["mine:b_wider"]
    backend.prepare(first, shape, sm_90)
    assert seen == [("a", "sm_90")]
    assert backend.library_version(sm_90) == "on sm_90"
    assert backend.details(sm_90) == ("one file for sm_90",), "a line each"
    assert backend.lacks(first, shape, sm_90) == "no a for sm_90"
    assert backend.source_of(first, shape, sm_90) == "a file for M=4"
    launcher = backend.bind(first, shape, sm_90)
    assert isinstance(launcher, Launcher)
    assert launcher.call(1, 2) == ("a", int, int) == backend.run(first, shape, sm_90, (1, 2))
    assert not launcher.graph_safe, "nothing is known of a plain run"


def test_the_core_asks_first(shape, cpu):
    """No hook but supports gets a shape that it refuses, and bind no absent device.

    The hooks get the device that a CPU emulates, which is then present.
    """
    host, asked = Device("sm_90", 132, "h200"), []
    hooks = ("enumerate_solutions", "heuristic_fallback", "bind", "prepare", "refine", "lacks", "source_of")

    def noting(name):
        return lambda device: asked.append((name, device)) or []

    backend = with_hooks(
        fake_backend("mine", host=host),
        supports=lambda shape: Unsupported("odd") if shape.m % 2 else None,
        **{name: noting(name) for name in hooks},
    )
    solution, odd, absent = Solution("mine", "k"), attrs.evolve(shape, m=3), host
    for device, met in ((cpu, hooks), (absent, [name for name in hooks if name != "bind"])):
        for refused in (True, False):
            asked.clear()
            wanted = odd if refused else shape
            backend.solutions(wanted, device), backend.heuristic_fallback(wanted, device)
            answer = backend.bind(solution, wanted, device)
            backend.prepare(solution, wanted, device), backend.refine(solution, wanted, device)
            assert (backend.lacks(solution, wanted, device) == "odd") is refused
            backend.source_of(solution, wanted, device)
            assert [name for name, _ in asked] == ([] if refused else list(met))
            assert str(answer) == "odd" if refused else "not present" in str(answer) or device is cpu
            assert all(given == host and given.is_present is (device is cpu) for _, given in asked)
            assert all(given.torch_device.type == "cpu" for _, given in asked if device is cpu)


def test_a_plugin_error_of_a_hook_is_a_refusal(shape, cpu):
    """Its text is the reason; supports, bind and lacks need not catch it."""

    def refuses():
        raise PluginError("no library")

    sound, solution = fake_backend("mine"), Solution("mine", "fake")
    assert with_hooks(sound, supports=refuses).refusal(shape, cpu) == Unsupported("no library")
    assert with_hooks(sound, bind=refuses).bind(solution, shape, cpu) == Unsupported("no library")
    assert with_hooks(sound, lacks=refuses).lacks(solution, shape, cpu) == "no library"


def test_launchers_of_bind_get_shuffled_weights_plain_and_a_bare_run_as_they_are():
    """With a bound shape the bytes are known to be shuffled; without one the type has the layout."""
    import torch
    from tunedgemm.ops.formats.shuffle import ShuffledWeight, shuffle_weight

    device, solution = Device("cpu-avx2", 1), Solution("mine", "a")
    row, tiled = Shape("a16w16", 2, 32, 64), Shape("a16w16", 2, 32, 64, layout="aiter16x16")
    bound = fake_backend("bound", solutions=("k",), call=lambda solution, shape, *operands: [type(operand) for operand in operands])
    x, weight = torch.zeros(2, 64), shuffle_weight(torch.zeros(32, 64))

    for shape in (row, tiled):
        launcher = bound.bind(Solution("bound", "k"), shape, device)
        assert launcher.call(x, x) == [torch.Tensor, torch.Tensor]
    assert launcher.call(x, weight, None) == [torch.Tensor, torch.Tensor, type(None)]
    found = Backend("mine", Bare(), ops=("a16w16",)).bind(solution, tiled, device).call(x, weight)
    assert found[1] is torch.Tensor and issubclass(found[2], ShuffledWeight)


def test_a_module_that_exits_is_a_reason(importable):
    """What a module raises as its attributes are read costs that plugin alone."""
    (importable / "exits.py").write_text("def __getattr__(name): raise SystemExit(name)\n")
    registry = Registry([EntryPoint("mine", "exits:backend", registry_module.GROUP)])
    assert "cannot be imported: SystemExit: backend" in str(registry.get("mine"))
    assert [backend.libtype for backend in registry.select("all")] == [BUILTIN]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"variables": ("mine_dir",)}, "variables must be names of capitals, digits and '_' (got 'mine_dir')"),
        ({"variables": ("MINE-DIR",)}, "variables must be names of capitals, digits and '_' (got 'MINE-DIR')"),
        ({"variables": "MINE_DIR"}, "variables must be a tuple of names (got 'MINE_DIR'); write ('MINE_DIR',)"),
        ({"scale_orders": ("m_majer",)}, "scale_orders must be among row, m_major, m_major_padded, aiter32x8, 128x4, 8x4 (got 'm_majer')"),
        ({"rows": ("fmoe:ck",)}, "rows must be op:libtype of its ops and other libtypes (got 'fmoe:ck')"),
        ({"ops": ("a16w16", "a16w16")}, "ops must be a tuple of names (got ('a16w16', 'a16w16'))"),
        ({"contract": True}, "contract must be 1 (got True)"),
        ({"contract": "1"}, "contract must be 1 (got '1')"),
    ],
)
def test_a_wrong_field_is_an_error(fields, fault):
    """The error names the libtype, the field and its value."""
    with pytest.raises(PluginError) as caught:
        fake_backend("mine", **fields)
    assert str(caught.value).startswith(f"libtype 'mine': {fault}")


@pytest.mark.parametrize("field", ["PLATFORMS", "platform", "OPTION", "option", "scale_order", "row", "variable", "op", "library_version"])
def test_a_misspelt_field_is_a_type_error(field):
    """No field is accepted in silence."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{field}'"):
        Backend("mine", Bare(), **{"ops": ("a16w16",), field: ()})


class _Slotted(Bare):
    __slots__ = ("library_version",)

    def __init__(self):
        self.library_version = hookimpl(lambda device: "1")


class _Computed(Bare):
    @functools.cached_property
    def limits(self):
        raise AssertionError("evaluated")

    @hookimpl
    @staticmethod
    def library_version(device):
        return "1"


@pytest.mark.parametrize("kind", [_Slotted, _Computed, attrs.frozen(_Computed)], ids=["slot", "property", "attrs"])
def test_a_hook_is_found_without_running_code(kind, cpu):
    """It may be in a slot, or a marked staticmethod; properties are not evaluated."""
    assert Backend("mine", kind(), ops=("a16w16",)).library_version(cpu) == "1"


@pytest.mark.parametrize(
    "value",
    [hookimpl(functools.cache(lambda device: "1")), functools.partial(lambda device: "1"), property(id), "1"],
    ids=lambda v: type(v).__name__,
)
def test_a_hook_that_is_not_a_function_is_an_error(value):
    """It is not ignored in silence."""
    with pytest.raises(PluginError, match=f"library_version must be a function marked with hookimpl .got a {type(value).__name__}"):
        Backend("mine", type("Wrong", (Bare,), {"library_version": value})(), ops=("a16w16",))


@pytest.mark.parametrize("hook", ["library_verson", "lack", "suports", "detail"])
@pytest.mark.parametrize("marked", [True, False])
def test_a_misspelt_hook_is_an_error(hook, marked):
    """The error names it, whether or not it is marked."""
    hooks = type("Misspelt", (Bare,), {hook: hookimpl(lambda self: None) if marked else lambda self: None})
    with pytest.raises(PluginError, match=rf"libtype 'mine': .*{hook}"):
        Backend("mine", hooks(), ops=("a16w16",))

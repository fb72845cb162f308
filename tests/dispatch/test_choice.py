"""Choice: the row that serves, parts of kernel names, and reasons why a row cannot run."""

from __future__ import annotations

import logging

import attrs
import pytest
import torch
from tunedgemm.backends.hookspecs import hookimpl
from tunedgemm.backends.launcher import Launcher
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, device_of
from tunedgemm.dispatch.choice import Explanation, choose, offers
from tunedgemm.dispatch.offer import NATIVE, Offer, examine, resolve
from tunedgemm.dispatch.tuned_gemm import TunedGemm
from tunedgemm.errors import PluginError
from tunedgemm.ops import op_named
from tunedgemm.ops.formats.shuffle import shuffle_weight
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row
from tunedgemm.testing.fakes import FakeHooks, exact, fake_backend, fake_registry, with_hooks
from tunedgemm.testing.listed import listed

OP = op_named("a16w16")
SHAPE = Shape("a16w16", 8, 64, 128)
MI300X = Device("gfx942", 304)


def row(solution: Solution, us: float = 5.0, *, gfx: str = "", cu_num: int = 0) -> Row:
    return Row(shape=SHAPE, gfx=gfx, cu_num=cu_num, device="", solution=solution, us=us)


def chosen(registry: Registry, *rows: Row, device: Device = MI300X, untuned: tuple[str, ...] = ()) -> Explanation:
    found = offers(SHAPE, device, Table(OP, [rows]), registry, untuned)
    return choose(found, SHAPE, device, registry, lambda _: "")[0]


def chosen_on_cpu(registry: Registry, *rows: Row) -> Explanation:
    return chosen(registry, *rows, device=Device("cpu-avx2", 4))


def told(explanation: Explanation) -> list[str]:
    return [reason for _, reason in explanation.passed_over]


class TestPartOfAName:
    """Rows that name no device, as the short form has them."""

    registry = fake_registry(
        fake_backend("mine", solutions=("tn_96x64_splitk", "tn_96x64", "tn_128x64", Solution("mine", "tn_128x64", 4)), heuristic="tn_96x64")
    )

    @listed(
        ("given", "meant"),
        [
            (Solution("mine", "128x"), Solution("mine", "tn_128x64")),
            (Solution("mine", "tn_96x64"), Solution("mine", "tn_96x64")),
            (Solution("mine", "splitk"), Solution("mine", "tn_96x64_splitk")),
            (Solution("mine", "128x", 4), Solution("mine", "tn_128x64", 4)),
            (Solution("mine", ""), Solution("mine", "tn_96x64")),
        ],
    )
    def test_means_the_one_kernel_that_has_it(self, given, meant):
        """A part selects the one kernel that contains it, a whole name wins over longer ones, and
        no name means the heuristic."""
        explanation = chosen(self.registry, row(given))
        assert explanation.offer.solution == meant
        assert explanation.tuned
        assert ("mine's own choice" in explanation.offer.why) is not given.kernel_name

    def test_of_several_kernels_is_a_miss_that_names_them(self):
        """Two kernels have the part: the row is passed over and both are named."""
        explanation = chosen(self.registry, row(Solution("mine", "96x64_")), row(Solution("mine", "64"), us=1.0))
        assert explanation.offer.solution.kernel_name == "tn_96x64_splitk"
        assert told(explanation) == ["3 kernels of mine have '64' in their names: tn_96x64_splitk, tn_96x64, tn_128x64"]

    def test_of_no_kernel_is_a_miss(self):
        """No kernel has the part, or none with that splitK."""
        explanation = chosen(self.registry, row(Solution("mine", "256")), row(Solution("mine", "tn_96x64", 2), us=6.0))
        assert explanation.offer.solution == NATIVE
        assert told(explanation) == [
            "no kernel of mine for this shape has '256' in its name", "no kernel of mine for this shape has 'tn_96x64' in its name"
        ]  # fmt: skip

    def test_of_an_alias_stays(self):
        """A name that is in no list and that the backend accepts is bound unchanged."""

        def lacks(solution, shape, device):
            return "" if solution.kernel_name == "auto" else "unknown"

        registry = fake_registry(with_hooks(fake_backend("mine"), lacks=lacks))
        explanation = chosen(registry, row(Solution("mine", "auto")), row(Solution("mine", "aut"), us=1.0))
        assert explanation.offer.solution == Solution("mine", "auto")
        assert told(explanation) == ["no kernel of mine for this shape has 'aut' in its name"]

    def test_without_a_heuristic_means_the_first_of_the_list(self):
        """An empty name asks a backend whose heuristic leaves the shape to torch; without a list it is a miss."""
        explanation = chosen(fake_registry(fake_backend("mine", solutions=("a", "b"))), row(Solution("mine")))
        assert explanation.offer.solution.kernel_name == "a" and "mine's own choice" in explanation.offer.why
        nothing = chosen(fake_registry(fake_backend("mine", solutions=())), row(Solution("mine")))
        assert nothing.offer.solution == NATIVE
        assert told(nothing) == ["mine lists no kernel for this shape"]

    def test_means_a_solution_that_is_there(self):
        """An empty name passes over a heuristic's choice that is not compiled, if another one is."""
        missing = {"a", "b"}

        def lacks(solution, shape, device):
            return f"{solution.kernel_name} is not compiled" if solution.kernel_name in missing else ""

        registry = fake_registry(with_hooks(fake_backend("mine", solutions=("b", "c"), heuristic="a"), lacks=lacks))
        assert chosen(registry, row(Solution("mine"))).offer.solution.kernel_name == "c"
        missing.add("c")
        assert told(chosen(registry, row(Solution("mine")))) == ["mine refuses: a is not compiled"]

    def test_of_a_device_is_the_backends_choice_without_a_number(self):
        """A row of a device without name and number means the choice; with a number it means that solution."""
        registry = fake_registry(fake_backend("mine", solutions=("a", "b")))
        for solidx, libtype in ((0, "mine"), (-1, "mine"), (7, "torch")):
            explanation = chosen(registry, row(Solution("mine", solidx=solidx), gfx="gfx942", cu_num=304))
            assert explanation.libtype == "mine", solidx
            assert chosen_on_cpu(registry, row(Solution("mine", solidx=solidx), gfx="cpu-avx2", cu_num=4)).libtype == libtype

    def test_a_backend_that_fails_is_a_miss(self):
        """What its enumeration raises is the reason."""

        def broken(shape: Shape, device: Device):
            raise RuntimeError("no library")

        explanation = chosen(fake_registry(fake_backend("mine", solutions=broken)), row(Solution("mine", "x")))
        assert explanation.offer.solution == NATIVE and "no library" in told(explanation)[0]

    def test_many_are_counted(self):
        """Of very many kernels some are named."""
        registry = fake_registry(fake_backend("mine", solutions=[f"k{number}" for number in range(9)]))
        [reason] = told(chosen(registry, row(Solution("mine", "k"))))
        assert reason == "9 kernels of mine have 'k' in their names: k0, k1, k2, k3, k4 and 4 more"

    def test_a_row_of_a_device_says_its_whole_name(self):
        """A tuned row's name is bound exactly, not as a part of another name."""
        offer = Offer(Solution("mine", "96x64_"), "table", "")
        backend = self.registry.get("mine")
        assert resolve(offer, backend, SHAPE, MI300X) is offer
        assert resolve(attrs.evolve(offer, partial=True), backend, SHAPE, MI300X).solution.kernel_name == "tn_96x64_splitk"
        named = Table(OP, [[row(offer.solution, gfx="gfx942", cu_num=304)]])
        found = next(offers(SHAPE, MI300X, named, self.registry, ()))
        assert not found.partial

    def test_a_row_with_only_a_cu_num_has_its_whole_name(self):
        """A row of any architecture with this number of compute units was tuned, too."""
        table = Table(OP, [[row(Solution("mine", "96x64_"), cu_num=304)]])
        assert not next(offers(SHAPE, MI300X, table, self.registry, ())).partial


@listed(
    ("libtype", "reason"),
    [
        ("asm", "not installed; pip install tunedgemm[asm]"),
        ("asm+ck", "its stages belong to asm and ck: no installed backend runs both; pip install tunedgemm[aiter]"),
        ("flydsl+ck", "its stages belong to flydsl and ck: no installed backend runs both; pip install tunedgemm[aiter]"),
        ("nosuch", "no backend of that name; installed: torch"),
    ],
)
def test_a_libtype_that_is_not_installed(libtype, reason, monkeypatch):
    """A row of it is a miss with the pip command, or why nothing can be installed; torch serves the call."""
    extras = {"asm": "tunedgemm-asm", "aiter": "tunedgemm-aiter"}
    monkeypatch.setattr("tunedgemm.libtypes.owners", lambda: extras)
    registry = Registry(())
    explanation = chosen(registry, row(Solution(libtype, "k"), gfx="gfx942", cu_num=304))
    assert explanation.libtype == "torch"
    assert told(explanation) == [f"libtype {libtype!r}: {reason}"]
    assert f"not {libtype}:k: libtype {libtype!r}: {reason}" in str(explanation)


class AnyRow(FakeHooks):
    """Hooks that run rows of any libtype."""

    @hookimpl
    def bind(self, solution, shape):
        """Bind a solution of any libtype."""
        return Launcher(lambda *operands: exact(solution, shape, *operands))


def any_row(*rows, **answers):
    """Return a backend that runs rows of other libtypes: by default ``one+two`` and ``busy``."""
    return fake_backend("anyrow", hooks=AnyRow("anyrow", **answers), rows=rows or ("a16w16:one+two", "a16w16:busy"))


class TestRowsOfOthers:
    """``rows`` of a backend: it runs rows of other libtypes, where their own backends do not."""

    def chosen(self, libtype, *others):
        registry = fake_registry(*others)
        registry.add(any_row())
        return chosen(registry, row(Solution(libtype, "k"), gfx="gfx942", cu_num=304))

    def test_the_stated_libtypes_run(self):
        """A joint libtype and an absent one find it; the row keeps its libtype."""
        assert self.chosen("one+two").libtype == "one+two"
        assert self.chosen("busy").libtype == "busy"

    def test_other_ops_and_libtypes_do_not(self):
        """A libtype that it does not state for this op is a miss."""
        assert self.chosen("one").libtype == self.chosen("two+one").libtype == "torch"

    def test_the_rows_own_backend_comes_first(self):
        """It is asked only where the row's own backend refuses the shape."""
        registry = fake_registry(fake_backend("busy", solutions=("k",)))
        registry.add(any_row())
        offer = Offer(Solution("busy", "k"), "table", "")
        assert examine(offer, SHAPE, MI300X, registry) is registry.get("busy")
        registry.add(fake_backend("busy", solutions=("k",), supports=lambda shape, device: Unsupported("too wide")))
        assert examine(offer, SHAPE, MI300X, registry) is registry.get("anyrow")

    def test_other_plugins_are_imported_at_the_first_refusal(self, monkeypatch):
        """A row that its own backend serves imports that one alone; later refusals import none."""
        registry = fake_registry(
            fake_backend("busy", solutions=("k",), supports=lambda shape, device: None if shape.m < 9 else Unsupported("M"))
        )
        registry.add(any_row())
        asked, get = [], Registry.get
        monkeypatch.setattr(Registry, "get", lambda registry, libtype: asked.append(libtype) or get(registry, libtype))
        offer, large = Offer(Solution("busy", "k"), "table", ""), attrs.evolve(SHAPE, m=9)
        for shape, wanted in ((SHAPE, ["busy"]), (large, ["busy", "anyrow", "busy", "torch"]), (large, ["busy"])):
            assert examine(offer, shape, MI300X, registry)
            assert asked == wanted
            asked.clear()

    @listed("row", ["fmoe:one", "a16w16:anyrow", "a16w16:", "one"])
    def test_a_wrong_statement_breaks_the_contract(self, row):
        """An entry has an op of the plugin and another libtype."""
        with pytest.raises(PluginError, match="rows must be op:libtype of its ops"):
            any_row(row)

    def test_both_reasons_are_given(self):
        """Where neither serves the shape, the reason names both."""
        registry = fake_registry(fake_backend("busy", supports=lambda shape, device: Unsupported("too wide")))
        registry.add(any_row(supports=lambda shape, device: Unsupported("no library")))
        refusal = examine(Offer(Solution("busy", "k"), "table", ""), SHAPE, MI300X, registry)
        assert refusal.reason == "too wide; anyrow: no library"


def test_a_missing_torch_route_is_a_miss():
    """If no backend covers an op, the reason does not claim that torch runs it."""
    shape = attrs.evolve(SHAPE, op="nobodys")
    found = offers(shape, MI300X, Table(OP, [[]]), Registry(()), ())
    explanation = choose(found, shape, MI300X, Registry(()), lambda _: "")[0]
    assert "op nobodys is not covered" in explanation.refused and not explanation.tuned
    assert "  nothing runs: op nobodys is not covered" in str(explanation) and "  runs " not in str(explanation)


def test_a_kernel_that_a_backend_lacks_is_passed_over_for_a_described_device():
    """A row with a missing kernel is passed over for the next;
    without one it is a miss with the reason."""

    def lacks(solution, shape, device):
        return "" if solution.kernel_name == "k" else f"none for {device.gfx}"

    registry = fake_registry(with_hooks(fake_backend("mine"), lacks=lacks))
    there, gone = (chosen(registry, row(Solution("mine", name), gfx="gfx942", cu_num=304)) for name in ("k", "old"))

    assert (there.libtype, told(there)) == ("mine", [])
    assert (gone.libtype, told(gone)) == ("torch", ["mine refuses: none for gfx942"])


def test_rows_come_before_heuristics_and_torch_is_last():
    """A row, then the heuristics for untuned calls, then torch."""
    registry = fake_registry(fake_backend("mine", solutions=("k",), heuristic="k"))
    table = Table(OP, [[row(Solution("mine", "k"), gfx="gfx942", cu_num=304)]])
    found = list(offers(SHAPE, MI300X, table, registry, ("mine", "absent")))
    assert [(offer.origin, offer.solution.libtype) for offer in found] == [("table", "mine"), ("heuristic", "mine"), ("builtin", "torch")]


def test_a_row_of_another_problem_states_its_fields():
    """An expert-parallel call names the topk of AITER's row, which counts no spare slot."""
    op = op_named("fmoe")
    routed = Shape("fmoe", 8, 64, 32, layout="aiter16x16", extra={
        "expert": 4, "topk": 8, "act": "silu", "q_dtype_a": "bf16", "q_dtype_w": "bf16", "q_type": "No", "g1u1": True,
        "doweight_stage1": False,
    })  # fmt: skip
    called = attrs.evolve(routed, extra={**dict(routed.extra), "topk": 9, "expert_parallel": True})
    table = Table(op, [[attrs.evolve(row(NATIVE, gfx="gfx942", cu_num=304), shape=routed)]])
    reasons = [next(offers(shape, MI300X, table, Registry(()), ())).why for shape in (called, routed)]
    assert [reason.partition("exact M=8")[2] for reason in reasons] == [", a row of topk=8", ""]


def test_rows_without_a_bias_serve_a_call_with_one():
    """A plugin's kernel gets the bias or an add after it; torch adds a bias in its own call."""
    shape = attrs.evolve(SHAPE, epilogue="bias")
    table = Table(OP, [[row(Solution("mine", "k"), gfx="gfx942", cu_num=304), row(NATIVE, 9.0, gfx="gfx942")]])
    solutions = [str(offer.solution) for offer in offers(shape, MI300X, table, Registry(()), ())]
    assert solutions == ["mine:k", "mine:k+add", str(NATIVE), str(NATIVE)]  # the last one is the untuned offer


def test_the_last_refusal_is_not_passed_over_too():
    """Where nothing runs, the rows passed over exclude the built-in backend, whose reason is given."""
    shape = attrs.evolve(SHAPE, op="nobodys")
    tried = [Offer(Solution("mine", "k"), "table", ""), Offer(NATIVE, "builtin", "")]
    registry = fake_registry(fake_backend("mine"))
    explanation, launcher = choose(iter(tried), shape, MI300X, registry, None)
    assert (told(explanation), launcher) == (["op nobodys is not covered (covers a16w16)"], None)
    assert "op nobodys is not covered" in explanation.refused


def test_a_vetoed_solution_is_skipped(caplog):
    """A vetoed solution is skipped with its reason; a present device gets the next one bound."""
    caplog.set_level(logging.INFO)
    registry, device = fake_registry(fake_backend("mine", solutions=("a", "b"))), Device("cpu-avx2", 4)
    table = Table(OP, [[row(Solution("mine", "a"), 1.0), row(Solution("mine", "b"), 2.0)]])
    explanation, launcher = choose(
        offers(SHAPE, device, table, registry, ()), SHAPE, device, registry, lambda solution: "raised" * (solution.kernel_name == "a")
    )
    assert explanation.offer.solution.kernel_name == "b" and told(explanation) == ["raised"] and launcher is not None


def test_load_config_takes_the_short_form(tmp_path):
    """A row of M,N,K,lib,kernel_name,tflops,bandwidth_gb_s serves bf16 and fp16 calls, with bias
    and shuffled weights."""
    path = tmp_path / "short.csv"
    path.write_text(
        "M,N,K,lib,kernel_name,tflops,bandwidth_gb_s\n"
        "4,32,64,mine,128x64,1.5,2\n"
        "4,32,64,mine,tn_bshuffle,1.4,2\n"
        "5,32,64,mine,,1,2\n"
        "6,32,64,mine,tn,1,2\n"
    )
    ran = []

    def call(solution, shape, *operands):
        ran.append((solution.kernel_name, shape.dtype, shape.epilogue, shape.layout))
        return exact(solution, shape, *operands)

    registry = fake_registry(fake_backend("mine", solutions=("tn_128x64", "tn_bshuffle_1"), heuristic="tn_bshuffle_1", call=call))
    gemm = TunedGemm(registry)
    gemm.load_config(path)
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        weight, bias = torch.randn(32, 64, dtype=dtype), torch.randn(32, dtype=dtype)
        for m, given, layout, name in (
            (4, weight, "row", "tn_128x64"), (4, shuffle_weight(weight), "aiter16x16", "tn_bshuffle_1"),
            (5, weight, "row", "tn_bshuffle_1"),
        ):  # fmt: skip
            x = torch.randn(m, 64, dtype=dtype)
            for added in (None, bias):
                ran.clear()
                out = gemm.mm(x, given, added)
                torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, added), atol=5e-2, rtol=5e-2)
                assert {*ran} == {(name, short, "none" if added is None else "bias", layout)}
        said = gemm.dispatcher.explain(attrs.evolve(SHAPE, m=6, n=32, k=64, dtype=short, outdtype=short))
        assert said.libtype == "torch" and told(said) == ["2 kernels of mine have 'tn' in their names: tn_128x64, tn_bshuffle_1"]


def test_another_library_version_is_a_warning(tmp_path, caplog):
    """Rows of another library version are named once for each table and libtype, in a warning."""
    here, shapes = device_of(-1), [Shape("a16w16", m, 16, 32, dtype="fp32") for m in (1, 2, 3)]
    expected = []
    for number, libtype in enumerate(("alpha", "beta", "alpha")):
        gemm = TunedGemm(fake_registry(with_hooks(fake_backend(libtype), library_version=lambda: "2")))
        rows = [attrs.evolve(row(Solution(libtype, "fake"), gfx=here.gfx, cu_num=here.cu_num), shape=shape, libver="1") for shape in shapes]
        write_rows(tmp_path / f"{number}.csv", OP, rows)
        gemm.load_config(tmp_path / f"{number}.csv")
        for shape in shapes:
            gemm.mm(torch.randn(shape.m, 32), torch.randn(16, 32))
        expected.append(f"{tmp_path}/{number}.csv: rows of {libtype} were tuned with its library's version 1, and now serve with 2; ")

    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(expected)
    assert all(text.startswith(start) for text, start in zip(warnings, expected, strict=True))

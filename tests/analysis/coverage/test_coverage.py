"""The solutions that serve a workload's calls, and their cost."""

from __future__ import annotations

import time

import attrs
import pytest
from tunedgemm.analysis.coverage import TUNED, Coverage, Replays, coverage
from tunedgemm.analysis.coverage.answers import entry_of
from tunedgemm.analysis.coverage.known import KnownTimes
from tunedgemm.analysis.coverage.measure import measure_all
from tunedgemm.analysis.coverage.proposal import propose
from tunedgemm.backends import split_bias
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device, current_device
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution, Unsupported
from tunedgemm.table.lookup import Table
from tunedgemm.table.untuned import Untuned
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.tuner.log import trials_path

OP = op_named("a16w16")
HEAD = "M,N,K,bias,dtype,outdtype,count,graph\n"
MI300X = Device("gfx942", 304)
#: torch's two ways of a product, which no backend needs to be installed for
NATIVE, ONEDNN = Solution("torch", "native"), Solution("torch", "onednn")


def product(m: int) -> Shape:
    return Shape("a16w16", m, 64, 128, "fp32")


class TestAnswers:
    """Which row or backend answers a call, as dispatch reports it."""

    def test_each_kind_of_answer_has_a_word(self, listed, table, row):
        """A row of this M, of its fine or coarse rung or of a sibling device has its word,
        and so has no row."""
        rows = [row(16), row(32), row(64), row(256, device="another-cpu")]
        found = coverage(listed((16, 1), (17, 2), (60, 4), (33, 8), (256, 16), (2000, 32)), tables=[table(*rows)])

        words = {entry.shape.m: (entry.how, entry.row_m) for entry in found.entries}
        assert words == {
            16: ("exact", 16), 17: ("fine", 32), 60: ("fine", 64), 33: ("coarse", 64), 256: ("other device", 256), 2000: ("fallback", -1),
        }  # fmt: skip
        assert found.share("exact", by="calls") == 1 / 63
        assert found.share("fine", by="calls") == 6 / 63
        assert sum(found.share(word, by="calls") for word in ("exact", "fine", "coarse", "other device", "fallback")) == pytest.approx(1)

    def test_a_pin_counts_as_tuned_but_not_as_exact(self, listed, table, row):
        """A row with M = 0 answers every M and is counted as pinned."""
        found = coverage(listed((16, 1), (17, 2)), tables=[table(row(0))])

        assert {entry.how for entry in found.entries} == {"pinned"}
        assert (found.share("exact"), found.share(*TUNED)) == (0.0, 1.0)
        assert found.next() == []

    def test_an_unusable_row_counts_as_its_replacement(self, listed, table, row, hide):
        """The reason is reported with the number of calls,
        and with what the rows would answer if usable."""
        hide("ck")
        rows = [row(16, solution=Solution("ck", "kernel")), row(32, solution=Solution("ck", "kernel")), row(64)]
        found = coverage(listed((16, 100), (30, 20), (64, 3)), tables=[table(*rows)])

        assert {entry.shape.m: entry.how for entry in found.entries} == {16: "fallback", 30: "fallback", 64: "exact"}
        [unused] = found.unused()
        assert (unused.libtype, unused.calls) == ("ck", 120)
        assert unused.reason == "not installed; pip install tunedgemm[ck]"
        assert found.rows("exact", by="calls") == 103 / 123

    def test_a_heuristic_and_a_refusal_are_reported(self):
        """An untuned call gets the backend's heuristic; a call that no backend takes is refused
        with the reason and not proposed."""
        triton = fake_registry(fake_backend("triton", heuristic="own"))
        guessed = entry_of(Dispatcher(OP, triton), current_device(), Untuned(product(4), 7), Replays(), KnownTimes())
        assert (guessed.how, str(guessed.solution), guessed.calls) == ("heuristic", "triton:own", 7)

        nobodys = attrs.evolve(OP, name="nobodys")
        shape = attrs.evolve(product(4), op="nobodys")
        refused = entry_of(Dispatcher(nobodys, Registry(())), current_device(), Untuned(shape, 7), Replays(), KnownTimes())
        assert refused.how == "refused" and "op nobodys is not covered" in refused.why
        assert propose([refused], 10) == []

    @pytest.mark.parametrize("own", [True, False], ids=["row with +add", "row without a bias"])
    def test_a_row_that_serves_as_the_product_of_a_split_bias_is_in_use(self, row, own):
        """A kernel without bias answers with an add,
        under its own row or as unbiased, and its row counts as used."""
        kernel, biased = Solution("mine", "k"), attrs.evolve(product(4), epilogue="bias")
        rows = [row(4, solution=kernel), *([attrs.evolve(row(4, solution=split_bias.with_add(kernel)), shape=biased)] if own else [])]
        mine = fake_backend("mine", solutions=("k",), supports=lambda shape, _: Unsupported("takes no bias") if shape.bias else None)
        dispatcher = Dispatcher(OP, fake_registry(mine), table=Table(OP, [rows]))
        entries = [entry_of(dispatcher, current_device(), Untuned(shape, 7), Replays(), KnownTimes()) for shape in (product(4), biased)]

        assert [(entry.how, entry.solution) for entry in entries] == [
            ("exact", kernel), ("exact" if own else "unbiased", split_bias.with_add(kernel))
        ]  # fmt: skip
        assert Coverage("calls", tuple(entries), current_device()).unused() == ()

    def test_another_device_is_described_and_nothing_is_bound(self, listed, table, row):
        """Rows of a device that is not here are judged by static limits."""
        path = table(row(16, gfx="sm_90", cu_num=132, device="nvidia-h200"))
        for device, how in ((Device("sm_90", 132, "nvidia-h200"), "exact"), (Device("sm_90", 132, "nvidia-h100"), "other device")):
            [entry] = coverage(listed((16, 1)), tables=[path], device=device).entries
            assert (entry.how, entry.solution) == (how, NATIVE)

    def test_a_device_without_a_name_is_asked_for_one(self, listed, table, row):
        """A device kind without a product name asks which product is meant;
        a named device is not asked."""
        path = table(row(16, gfx="sm_90", cu_num=132, device="nvidia-h200"))
        nameless, named = (coverage(listed((16, 1)), tables=[path], device=Device("sm_90", 132, name)) for name in ("", "nvidia-h200"))

        assert [entry.how for entry in nameless.entries] == ["other device"]
        assert any("--device sm_90:132:NAME" in note for note in nameless.notes)
        assert not any("NAME" in note for note in named.notes)

    @pytest.mark.timing
    def test_ten_thousand_shapes_take_seconds(self, tmp_path, table, row):
        """A captured file of a serving engine's prefills is judged in less than 15 s."""
        path = tmp_path / "many.csv"
        path.write_text(HEAD + "".join(f"{m},{n},128,False,fp32,fp32,1,0\n" for n in (64, 128, 192, 256) for m in range(1, 2501)))
        start = time.monotonic()
        found = coverage(path, tables=[table(row(16))])

        assert len(found.entries) == 10_000
        assert time.monotonic() - start < 15


class TestTimes:
    """Times of calls, and the cost of padding."""

    def test_a_time_is_the_best_known_and_has_a_source(self, listed, table, row, trial):
        """The time shown is the best known: the own row, a trial at this M, another table's row,
        the padded row or an estimate."""
        path = table(row(16, 10.0), row(32, 20.0), row(64, 40.0), row(128, 80.0, solution=ONEDNN))
        trial(path, 17, NATIVE, 12.0)
        trial(path, 17, ONEDNN, 11.0)
        trial(path, 33, NATIVE, 5.0, Device("gfx942", 304))  # another device's
        other = table(row(50, 30.0), name="other.csv")
        found = coverage(listed((16, 1), (17, 1), (33, 1), (50, 1), (1000, 1)), tables=[path], against=[other])

        times = {entry.shape.m: (entry.us, entry.us_from) for entry in found.entries}
        assert times.pop(1000)[1] == "guess"
        assert times == {16: (10.0, "row"), 17: (12.0, "trial"), 33: (40.0, "padded row"), 50: (30.0, "against")}

    def test_the_regret_of_padding_is_relative_to_the_best_at_the_real_m(self, listed, table, row, trial):
        """Padding regret uses the serving kernel's time at that M, else the row's; the sum is
        weighted by calls, and the worst is named."""
        path = table(row(32, 20.0), row(64, 40.0))
        other = table(row(17, 16.0, solution=ONEDNN), row(50, 20.0, solution=ONEDNN), name="other.csv")
        trial(path, 17, NATIVE, 18.0)
        found = coverage(listed((17, 10), (50, 1), (60, 9)), tables=[path], against=[other])

        assert {entry.shape.m: entry.regret for entry in found.entries} == {17: 0.125, 50: 1.0, 60: None}
        regret = found.regret()
        assert (regret.worst.shape.m, regret.calls, regret.of) == (50, 11, 20)
        assert regret.weighted == pytest.approx((10 * 18 + 40) / (10 * 16 + 20) - 1)
        assert found.regret("fallback") is None

    def test_the_regret_of_untuned_calls_comes_from_trials(self, listed, table, trial):
        """Torch's call is in every trial log;
        against the best trial it shows what tuning would save."""
        other = table(name="other.csv")
        trial(other, 7, NATIVE, 30.0)
        trial(other, 7, ONEDNN, 20.0)
        found = coverage(listed((7, 4)), against=[other])

        assert found.regret("fallback").weighted == pytest.approx(0.5)
        [entry] = found.entries
        assert (entry.us, entry.best_us) == (30.0, 20.0) and "torch:onednn (trial, other.trials.jsonl)" in entry.best

    def test_a_trial_log_that_cannot_be_read_costs_its_trials_only(self, listed, table, row):
        """The log is named, and everything else counts."""
        path = table(row(16))
        trials_path(path).write_text("hello\n")
        found = coverage(listed((16, 1)), tables=[path])

        assert found.share("exact") == 1.0
        assert any("table.trials.jsonl:1" in note for note in found.notes)

    @pytest.mark.parametrize(("kernel", "status"), [("aborts", "crashed"), pytest.param("hangs", "hung", marks=pytest.mark.nightly)])
    def test_measured_kernels_that_fail_cost_one_shape(self, listed, table, row, faulty_plugin, one_thread, kernel, status):
        """The heaviest shapes are timed first in a child process; a crash keeps the shape's other
        time and gives the reason."""
        path = table(row(16, solution=Solution("faulty", kernel)), row(32), row(64, 0.1))
        found = coverage(listed((16, 1), (32, 3), (64, 1)), tables=[path], measure=60.0)

        entries = {entry.shape.m: entry for entry in found.entries}
        assert entries[32].us_from == entries[64].us_from == "measured"
        assert entries[64].us > 0.1
        assert entries[16].us_from == "row" and status in entries[16].why
        assert any(note.startswith("measured 2 of 3 shapes") for note in found.notes)

    def test_the_measured_solution_is_the_answer(self, listed, table, row, one_thread):
        """If binding or a new table changes the answer after it was explained,
        the entry reports the one that ran."""
        [entry] = coverage(listed((30, 1))).entries
        [timed], _ = measure_all([entry], {"a16w16": table(row(32, solution=ONEDNN))}, current_device(), 60.0)

        assert (entry.how, entry.solution, entry.row_m) == ("fallback", NATIVE, -1)
        assert (timed.how, timed.solution, timed.row_m, timed.us_from) == ("fine", ONEDNN, 32, "measured")

    def test_measuring_needs_the_device(self, listed):
        """A device that is only described cannot be timed, nor can a time that is none be spent."""
        with pytest.raises(UserError, match="leave out one of them"):
            coverage(listed((1, 1)), device=MI300X, measure=1.0)
        with pytest.raises(UserError, match="--measure: expected a positive number of seconds"):
            coverage(listed((1, 1)), measure=-1.0)

"""Coverage: what answers the calls of a workload, what that costs, and what to tune next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest
from tunedgemm.coverage import TUNED, Replays, coverage, propose, write_next
from tunedgemm.coverage.answers import entry_of
from tunedgemm.coverage.known import Known
from tunedgemm.coverage.proposal import rung_of
from tunedgemm.csvfile import Row, read_untuned, write_rows
from tunedgemm.device import Device, current_device
from tunedgemm.dispatch import Dispatcher
from tunedgemm.errors import TableError, UserError
from tunedgemm.folders import home_folder
from tunedgemm.ops import op_named, ops
from tunedgemm.registry import Registry
from tunedgemm.row import Untuned
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.testing.fakes import fake_backend, fake_registry
from tunedgemm.testing.shapes import shapes_of
from tunedgemm.timing import Timing
from tunedgemm.tuner import Options, tune
from tunedgemm.tuner.log import trials_path

OP = op_named("a16w16")
AITER = Path(__file__).parents[2] / "shared" / "aiter" / "configs"
MI300X = Device("gfx942", 304)
HEAD = "M,N,K,bias,dtype,outdtype,count,graph\n"
#: torch's two ways of a product, which no backend needs to be installed for
NATIVE, ONEDNN = Solution("torch", "native"), Solution("torch", "onednn")


def product(m: int, n: int = 64, k: int = 128) -> Shape:
    return Shape("a16w16", m, n, k, "fp32")


def row(m: int, us: float = 10.0, n: int = 64, solution: Solution = NATIVE, **more: object) -> Row:
    here = current_device()
    return Row(
        **{"shape": product(m, n), "gfx": here.gfx, "cu_num": here.cu_num, "device": here.name, "solution": solution, "us": us, **more}
    )


@pytest.fixture
def listed(tmp_path: Path):
    """Makes an untuned file of (M, count) or (M, count, graph) with N = 64."""

    def make(*calls: tuple[int, ...], name: str = "bf16_untuned_gemm.csv") -> Path:
        lines = (f"{m},64,128,False,fp32,fp32,{count},{graph[0] if graph else 0}\n" for m, count, *graph in calls)
        (tmp_path / name).write_text(HEAD + "".join(lines))
        return tmp_path / name

    return make


@pytest.fixture
def table(tmp_path: Path):
    """Makes a tuned table of rows."""

    def make(*rows: Row, name: str = "table.csv") -> Path:
        write_rows(tmp_path / name, OP, rows)
        return tmp_path / name

    return make


def trial(path: Path, m: int, solution: Solution, us: float, device: Device | None = None) -> None:
    """Put a trial beside a table."""
    here = device or current_device()
    fields = json.loads(Timing(product(m), solution, "ok", us=us).to_json())
    with trials_path(path).open("a") as file:
        file.write(json.dumps({**fields, "kind": "trial", "run": "r", "gfx": here.gfx, "cu_num": here.cu_num, "device": here.name}) + "\n")


class TestAnswers:
    """What answers, told by dispatch."""

    def test_each_way_has_its_word(self, listed, table):
        """A row of this M, of its fine and coarse rung, of another product of the same kind of device, and none at all."""
        rows = [row(16), row(32), row(64), row(256, device="another-cpu")]
        found = coverage(listed((16, 1), (17, 2), (60, 4), (33, 8), (256, 16), (2000, 32)), tables=[table(*rows)])

        words = {entry.shape.m: (entry.how, entry.row_m) for entry in found.entries}
        assert words == {
            16: ("exact", 16), 17: ("fine", 32), 60: ("fine", 64), 33: ("coarse", 64), 256: ("other device", 256), 2000: ("fallback", -1),
        }  # fmt: skip
        assert found.share("exact", by="calls") == 1 / 63
        assert found.share("fine", by="calls") == 6 / 63
        assert sum(found.share(word, by="calls") for word in ("exact", "fine", "coarse", "other device", "fallback")) == pytest.approx(1)

    def test_a_pin_is_no_exact_row_and_counts_as_tuned(self, listed, table):
        """A row with M = 0 answers every M under a word of its own."""
        found = coverage(listed((16, 1), (17, 2)), tables=[table(row(0))])

        assert {entry.how for entry in found.entries} == {"pinned"}
        assert (found.share("exact"), found.share(*TUNED)) == (0.0, 1.0)
        assert propose(found.entries, 10) == []

    def test_a_row_that_cannot_be_used_counts_as_what_really_answers(self, listed, table):
        """The reason is told with the calls it stands for, and what the rows would answer if they could."""
        rows = [row(16, solution=Solution("asm", "kernel")), row(32, solution=Solution("asm", "kernel")), row(64)]
        found = coverage(listed((16, 100), (30, 20), (64, 3)), tables=[table(*rows)])

        assert {entry.shape.m: entry.how for entry in found.entries} == {16: "fallback", 30: "fallback", 64: "exact"}
        [unused] = found.unused()
        assert (unused.libtype, unused.calls) == ("asm", 120)
        assert unused.reason == "not installed; pip install tunedgemm[asm]"
        assert found.rows("exact", by="calls") == 103 / 123

    def test_a_backends_heuristic_and_a_refusal_are_told(self):
        """Of an untuned call the backend's own choice; what no backend takes is refused with the reason and is not proposed."""
        triton = fake_registry(fake_backend("triton", heuristic="own"))
        guessed = entry_of(Dispatcher(OP, triton), current_device(), Untuned(product(4), 7), Replays(), Known())
        assert (guessed.how, str(guessed.solution), guessed.calls) == ("heuristic", "triton:own", 7)

        nobodys = attrs.evolve(OP, name="nobodys")
        shape = attrs.evolve(product(4), op="nobodys")
        refused = entry_of(Dispatcher(nobodys, Registry(())), current_device(), Untuned(shape, 7), Replays(), Known())
        assert refused.how == "refused" and "op nobodys is not covered" in refused.why
        assert propose([refused], 10) == []

    def test_tables_of_other_devices_are_named(self, listed, table):
        """A row for 80 CUs is none for 304: whose rows there are is said, which no single miss shows."""
        path = table(row(16, gfx="gfx942", cu_num=80, device=""))
        found = coverage(listed((16, 1)), tables=[path], device=MI300X)

        assert [entry.how for entry in found.entries] == ["fallback"]
        assert any("is for gfx942, 304 CUs: theirs are for" in note and "80" in note for note in found.notes)

    def test_the_words_are_those_of_the_dispatcher_that_serves(self, listed, monkeypatch):
        """The user's table counts, and a table of the environment's variable above it, as when calls are served."""
        shapes = listed((16, 1), (32, 1))
        home_folder().mkdir()
        write_rows(home_folder() / "bf16_tuned_gemm.csv", OP, [row(16)])
        assert coverage(shapes).share("exact", by="calls") == 0.5

        other = home_folder() / "other.csv"
        write_rows(other, OP, [row(16, 5.0), row(32)])
        monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(other))
        found = coverage(shapes)
        assert found.share("exact", by="calls") == 1.0
        assert all("other.csv" in entry.why for entry in found.entries)

    def test_another_device_is_described_and_nothing_is_bound(self, listed, table):
        """Rows of a device that is not here are judged by static limits."""
        path = table(row(16, gfx="sm_90", cu_num=132, device="nvidia-h200"))
        for device, how in ((Device("sm_90", 132, "nvidia-h200"), "exact"), (Device("sm_90", 132, "nvidia-h100"), "other device")):
            [entry] = coverage(listed((16, 1)), tables=[path], device=device).entries
            assert (entry.how, entry.solution) == (how, NATIVE)

    def test_ten_thousand_shapes_take_seconds(self, tmp_path, table):
        """A captured file of a serving engine's prefills is judged in less than 15 s."""
        path = tmp_path / "many.csv"
        path.write_text(HEAD + "".join(f"{m},{n},128,False,fp32,fp32,1,0\n" for n in (64, 128, 192, 256) for m in range(1, 2501)))
        start = time.monotonic()
        found = coverage(path, tables=[table(row(16))])

        assert len(found.entries) == 10_000
        assert time.monotonic() - start < 15


class TestCalls:
    """What was captured."""

    def test_calls_in_graphs_count_once_for_each_replay(self, listed):
        """One number for all graphs, or one for each M; the M that has none counts once, which is said."""
        path = listed((1, 2, 3), (2, 0, 5), (64, 7, 0))

        def calls(**more: object) -> dict[int, int]:
            return {entry.shape.m: entry.calls for entry in coverage(path, **more).entries}

        assert calls() == {1: 5, 2: 5, 64: 7}
        assert calls(replays=10) == {1: 32, 2: 50, 64: 7}
        assert calls(replays={1: 100}) == {1: 302, 2: 5, 64: 7}
        assert calls(replays="1:100, 2:10") == {1: 302, 2: 50, 64: 7}
        assert any("M=2 count once" in note for note in coverage(path, replays={1: 100}).notes)
        assert not any("count once" in note for note in coverage(path, replays="1:100,2:10").notes)

    @pytest.mark.parametrize("said", [0, -1, 1.5, True, "x", "0", "1:0", "1:2,3", "1:2,1:3", "9:2", {9: 2}, {1: -4}, "1:2:3", ""])
    def test_replays_that_make_no_sense(self, listed, said):
        """Each is a mistake that names the flag."""
        with pytest.raises(UserError, match="--replays"):
            coverage(listed((1, 2, 3)), replays=said)

    def test_files_of_several_ops_are_judged_at_once(self, listed, tmp_path):
        """Each file by its own op; one that several list is folded."""
        batched = tmp_path / "bf16_untuned_batched_gemm.csv"
        batched.write_text("B,M,N,K,count\n2,4,32,64,5\n")
        found = coverage([listed((1, 2)), batched, listed((1, 3), (2, 1), name="more.csv")])

        assert {(entry.shape.op, entry.shape.m): entry.calls for entry in found.entries} == {
            ("a16w16", 1): 3 + 2, ("a16w16", 2): 1, ("batched_bf16", 4): 5,
        }  # fmt: skip
        assert sorted(group.name for group in found.by("op")) == ["a16w16", "batched_bf16"]

    def test_without_files_all_captured_ones_are_judged(self, tmp_path):
        """Those of the user folder, of every op or of the one that is named; none there is a mistake."""
        with pytest.raises(UserError, match="no shapes are captured"):
            coverage()
        home_folder().mkdir()
        (home_folder() / "bf16_untuned_gemm.csv").write_text("M,N,K,count\n4,32,64,5\n")
        (home_folder() / "a8w8_untuned_gemm.csv").write_text("M,N,K,q_dtype_w,count\n4,32,64,torch.int8,6\n")

        assert (coverage().calls, coverage(op="a8w8").calls) == (11, 6)
        with pytest.raises(UserError, match=r"untuned_fmoe\.csv: no shapes are captured"):
            coverage(op="fmoe")

    def test_an_op_whose_file_is_named_otherwise(self, tmp_path):
        """M, N and K alone are those of the op that is named."""
        path = tmp_path / "list.csv"
        path.write_text("M,N,K\n4,128,256\n8,128,256\n")

        assert coverage(path).ops == ("a16w16",)
        found = coverage(path, op="a8w8_blockscale")
        assert found.ops == ("a8w8_blockscale",)
        assert found.calls == 2 and any("no column 'count'" in note for note in found.notes)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("4,64,128,False,fp32,fp32,x,0\n", "'count' must be a number"),
            ("4,64,128,False,fp32,fp32,-3,0\n", "'count' must not be negative"),
            ("4,64,128,False,fp32,fp32,3,-1\n", "'graph' must not be negative"),
            ("-4,64,128,False,fp32,fp32,3,0\n", "'M' must be a whole number from 0"),
            ("0,64,128,False,fp32,fp32,3,0\n", "'M' must be at least 1"),
            ("4,64,128,False,fp99,fp32,3,0\n", "fp99"),
            ("hello\n", ""),
        ],
    )
    def test_a_broken_line_is_named_and_the_others_are_judged(self, listed, text, reason):
        """A file edited by hand: file and line, and what is wrong with it."""
        path = listed((1, 2), (2, 3))
        first, *rest = path.read_text().splitlines(keepends=True)
        path.write_text(first + text + "".join(rest))
        found = coverage(path)

        [problem] = found.problems
        assert (problem.path, problem.line) == (path, 2)
        assert reason in str(problem)
        assert found.calls == 5

    def test_a_line_that_is_cut_off_is_named_and_tuning_still_refuses_the_file(self, listed):
        """The rest is judged; `tune`, which would leave a shape out for good, takes no such file."""
        path = listed((1, 2), (2, 3), (4, 5))
        path.write_text(path.read_text()[:-17])
        found = coverage(path)

        [problem] = found.problems
        assert problem.line == 4 and "cut off" in str(problem)
        assert found.calls == 5
        with pytest.raises(TableError, match="cut off"):
            read_untuned(path, OP)

    def test_an_fmoe_file_that_is_cut_off_is_still_one_of_fmoe(self, tmp_path):
        """The columns tell the op, whatever became of the last line."""
        op, path = op_named("fmoe"), tmp_path / "list.csv"
        texts = op.columns.format(shapes_of("fmoe")[0])
        line = ",".join(texts[column] for column in op.columns.key)
        path.write_text(",".join(op.columns.key) + f"\n{line}\n{line[:9]}")
        found = coverage(path)

        assert found.ops == ("fmoe",) and len(found.problems) == 1

    def test_nothing_to_judge_is_a_mistake(self, listed, table, tmp_path):
        """A missing file, an empty one, a tuned one, one without shapes, and one of broken lines only."""
        (tmp_path / "empty.csv").write_text("")
        broken = listed((1, 2), name="broken.csv")
        broken.write_text(HEAD + "x,64,128,False,fp32,fp32,1,0\n")
        for path, reason in (
            (tmp_path / "nope.csv", "no such file"),
            (tmp_path, "is a folder"),
            (tmp_path / "empty.csv", "is empty"),
            (table(row(16)), "is a tuned table, not a list of shapes"),
            (listed(name="head.csv"), "no calls are listed"),
            (listed((4, 0, 0), name="zero.csv"), "no calls are listed"),
            (broken, "no calls are listed .*broken.csv:2"),
        ):
            with pytest.raises(UserError, match=reason):
                coverage(path)


class TestTimes:
    """How long calls take, and what padding costs."""

    def test_a_time_is_the_best_that_is_known_and_says_where_it_is_from(self, listed, table):
        """The row's own, a trial of what runs at this very M, another table's row of it, the padded row's, a guess."""
        path = table(row(16, 10.0), row(32, 20.0), row(64, 40.0), row(128, 80.0, solution=ONEDNN))
        trial(path, 17, NATIVE, 12.0)
        trial(path, 17, ONEDNN, 11.0)
        trial(path, 33, NATIVE, 5.0, Device("gfx942", 304))  # another device's
        other = table(row(50, 30.0), name="other.csv")
        found = coverage(listed((16, 1), (17, 1), (33, 1), (50, 1), (1000, 1)), tables=[path], against=[other])

        times = {entry.shape.m: (entry.us, entry.us_from) for entry in found.entries}
        assert times.pop(1000)[1] == "guess"
        assert times == {16: (10.0, "row"), 17: (12.0, "trial"), 33: (40.0, "padded row"), 50: (30.0, "against")}

    def test_the_regret_of_padding_is_what_the_best_at_the_real_m_would_save(self, listed, table):
        """By the time of what serves at that M where it is known, else by the row's own; weighted by calls, and the worst."""
        path = table(row(32, 20.0), row(64, 40.0))
        other = table(row(17, 16.0, solution=ONEDNN), row(50, 20.0, solution=ONEDNN), name="other.csv")
        trial(path, 17, NATIVE, 18.0)
        found = coverage(listed((17, 10), (50, 1), (60, 9)), tables=[path], against=[other])

        assert {entry.shape.m: entry.regret for entry in found.entries} == {17: 0.125, 50: 1.0, 60: None}
        regret = found.regret()
        assert (regret.worst.shape.m, regret.calls, regret.of) == (50, 11, 20)
        assert regret.weighted == pytest.approx((10 * 18 + 40) / (10 * 16 + 20) - 1)
        assert found.regret("fallback") is None

    def test_the_regret_of_what_is_not_tuned_is_known_from_trials(self, listed, table):
        """Torch's own call is in every trial log; beside the best there it says what tuning would save."""
        other = table(name="other.csv")
        trial(other, 7, NATIVE, 30.0)
        trial(other, 7, ONEDNN, 20.0)
        found = coverage(listed((7, 4)), against=[other])

        assert found.regret("fallback").weighted == pytest.approx(0.5)
        [entry] = found.entries
        assert (entry.us, entry.best_us) == (30.0, 20.0) and "torch:onednn (trial, other.trials.jsonl)" in entry.best

    def test_a_trial_log_that_cannot_be_read_costs_its_trials_only(self, listed, table):
        """What it is said of, the rest is judged."""
        path = table(row(16))
        trials_path(path).write_text("hello\n")
        found = coverage(listed((16, 1)), tables=[path])

        assert found.share("exact") == 1.0
        assert any("table.trials.jsonl:1" in note for note in found.notes)

    def test_what_runs_is_timed_and_a_kernel_that_hangs_costs_its_shape(self, listed, table, faulty_plugin, monkeypatch):
        """The heaviest first, in a child process; the shape whose kernel ends it keeps its other time and says why."""
        # Of any number of threads: the child has one, as the fixture says.
        path = table(row(16, solution=Solution("faulty", "aborts"), cu_num=0), row(32, cu_num=0), row(64, 0.1, cu_num=0))
        found = coverage(listed((16, 1), (32, 3), (64, 1)), tables=[path], measure=60.0)

        entries = {entry.shape.m: entry for entry in found.entries}
        assert entries[32].us_from == entries[64].us_from == "measured"
        assert entries[64].us > 0.1
        assert entries[16].us_from == "row" and "crashed" in entries[16].why
        assert any(note.startswith("measured 2 of 3 shapes") for note in found.notes)

    def test_measuring_needs_the_device(self, listed):
        """A device that is only described cannot be timed, nor can a time that is none be spent."""
        with pytest.raises(UserError, match="leave one of both out"):
            coverage(listed((1, 1)), device=MI300X, measure=1.0)
        with pytest.raises(UserError, match="--measure takes seconds"):
            coverage(listed((1, 1)), measure=-1.0)


class TestNext:
    """What to tune next."""

    def test_layers_are_ranked_by_the_time_that_they_stand_for(self, listed, table, tmp_path):
        """All that is equal but M is one layer; what has its row is left out, and what the best known saves is all that counts."""
        path = tmp_path / "several.csv"
        lines = [(16, 64, 9), (48, 64, 9), (16, 128, 100), (16, 192, 1)]
        path.write_text(HEAD + "".join(f"{m},{n},128,False,fp32,fp32,{count},0\n" for m, n, count in lines))
        found = coverage(path, tables=[table(row(16))])
        first, second, third = propose(found.entries, 10)

        assert (first.layer.n, second.layer.n, third.layer.n) == (128, 64, 192)
        assert [(one.shape.m, one.calls) for one in second.listed] == [(48, 9)]
        assert propose(found.entries, 1) == [first]
        other = table(row(16, 1e-3, n=128), name="other.csv")
        trial(other, 16, NATIVE, 1e-3)
        known = coverage(path, tables=[table(row(16))], against=[other])
        assert propose(known.entries, 10)[0].layer.n == 64

    def test_a_ragged_rest_is_folded_into_its_rungs(self, listed):
        """Thousands of prefill lengths become as many rows as they would share; M with a share of their own stay."""
        found = coverage(listed((1, 90_000), (6, 90_000), *((m, 1) for m in range(1025, 2049))))
        [one] = propose(found.entries, 10)

        ms = [found.shape.m for found in one.listed]
        assert ms == [1, 6, *range(1088, 2049, 64)]
        assert sum(found.calls for found in one.listed) == 181_024

    def test_rungs_that_have_their_rows_are_not_proposed_again(self, listed, table):
        """What a finely padded row serves is tuned as far as folding goes."""
        rows = [row(m) for m in range(1088, 2049, 64)]
        found = coverage(listed((1, 90_000), *((m, 1) for m in range(1025, 2049))), tables=[table(row(1), *rows)])

        assert found.share("fine", by="calls") > 0.01
        assert propose(found.entries, 10) == []

    @pytest.mark.parametrize("name", sorted(ops()))
    @pytest.mark.parametrize("n", [64, 8192])
    def test_a_rung_serves_what_is_folded_into_it(self, name, n):
        """Of every op the M is on the ladder of what asks for it, and is a rung itself: folding twice is folding once."""
        op = op_named(name)
        for m in (*range(1, 700), 1000, 4096, 4097, 8193, 20_000, 32_767, 32_768, 40_000, 131_072, 200_000):
            rung = rung_of(op, m, n)
            assert rung in op.ladder(m, n)
            assert rung_of(op, rung, n) == rung

    def test_an_op_without_padding_keeps_every_m(self, tmp_path):
        """A batched product looks up exactly its M, so folding would tune what nobody asks for."""
        path = tmp_path / "bf16_untuned_batched_gemm.csv"
        path.write_text("B,M,N,K,count\n" + "".join(f"2,{m},32,64,1\n" for m in range(1025, 1425)))
        [one] = propose(coverage(path).entries, 10)

        assert [found.shape.m for found in one.listed] == list(range(1025, 1425))

    def test_what_is_proposed_is_written_as_lists_of_shapes(self, listed, tmp_path):
        """A file, or a folder with AITER's names where there are several ops; nothing else is written over."""
        batched = tmp_path / "bf16_untuned_batched_gemm.csv"
        batched.write_text("B,M,N,K,count\n2,4,32,64,5\n")
        (tmp_path / "folder").mkdir()
        captured = listed((6, 2, 3), name="folder/bf16_untuned_gemm.csv")
        found = coverage([captured, batched], replays=10)
        following = propose(found.entries, 10)

        paths = write_next(following, f"{tmp_path}/next/", found.paths)
        assert {op: path.name for op, path in paths.items()} == {
            "a16w16": "bf16_untuned_gemm.csv", "batched_bf16": "bf16_untuned_batched_gemm.csv",
        }  # fmt: skip
        assert read_untuned(paths["a16w16"], OP) == [Untuned(product(6), 32)]
        for target, reason in (
            (tmp_path / "one.csv", "of several ops"),
            (tmp_path / "folder", "is one of the files with the captured calls"),
        ):
            with pytest.raises(UserError, match=reason):
                write_next(following, target, found.paths)
        assert captured.read_text().count("\n") == 2

    def test_tuning_what_is_proposed_covers_it(self, listed, tmp_path):
        """The whole way round: propose, write, tune, and every call has a row."""
        shapes = listed((6, 2), (20, 3))
        following = propose(coverage(shapes).entries, 10)
        [path] = write_next(following, tmp_path / "next.csv", [shapes]).values()
        tune("a16w16", path, None, Options(libtype="torch", device="cpu", iters=3, warmup=1, seconds=0.1))

        assert coverage(shapes).share("exact", by="calls") == 1.0


@pytest.mark.skipif(not AITER.is_dir(), reason="AITER's tables are not here")
class TestAiter:
    """AITER's own lists and tables, whose backends are not installed."""

    def test_what_its_tables_hold_for_its_own_list_of_a_model(self):
        """Of the bf16 list of llama70B its own bf16 tables have many rows for gfx950, and none at all for an MI300X."""
        shapes, tables = AITER / "model_configs" / "llama70B_untuned_gemm.csv", AITER / "model_configs" / "llama70B_bf16_tuned_gemm.csv"
        far = coverage(shapes, device=Device("gfx950", 256), tables=[tables])
        near = coverage(shapes, device=MI300X, tables=[tables])

        assert far.rows("exact", by="calls") > 0.5 > far.share("exact", by="calls") > 0.1
        assert {one.libtype for one in far.unused()} >= {"asm", "flydsl"}
        assert far.share("exact", "fine", "coarse", "heuristic", "fallback", by="calls") == pytest.approx(1)
        assert {(entry.how in ("fallback", "heuristic"), entry.row) for entry in near.entries} == {(True, "")}

    def test_rows_of_the_mi300x_have_their_words_without_their_backend(self):
        """Its list of a8w8_bpreshuffle is exactly what its table holds for gfx942:304, all of it asm."""
        op = op_named("a8w8_bpreshuffle")
        found = coverage(AITER / op.columns.untuned_file, device=MI300X, tables=[AITER / op.columns.tuned_file])

        assert found.rows("exact") == 1.0
        [unused] = found.unused()
        assert (unused.libtype, unused.calls) == ("asm", found.calls)


WORKLOAD = """
import sys, torch, tunedgemm
from transformers import LlamaConfig, LlamaForCausalLM

sizes = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, vocab_size=128)
torch.manual_seed(0)
model = LlamaForCausalLM(sizes).eval()
with torch.inference_mode(), tunedgemm.patched():
    for length in map(int, sys.argv[1:]):
        model(input_ids=torch.arange(length)[None], logits_to_keep=1)
"""


@pytest.mark.slow
def test_a_model_is_captured_tuned_and_covered(tmp_path):
    """The issue's story: 0 % exact, tuned, 100 %; then with other prompts a padded share, and what that padding costs."""

    def run(*lengths: int) -> None:
        command = [sys.executable, "-c", WORKLOAD, *map(str, lengths)]
        subprocess.run(command, check=True, env={**os.environ, "AITER_TUNE_GEMM": "1"}, timeout=300)

    options = Options(libtype="torch", device="cpu", iters=15, seconds=0.1)
    run(16, 1)
    first = coverage()
    assert first.ops == ("a16w16",) and first.calls == 2 * (2 * 7 + 1)
    assert first.share("exact") == first.share("exact", by="calls") == 0.0

    assert not tune(options=options).failed
    second = coverage()
    assert second.share("exact") == second.share("exact", by="calls") == 1.0
    assert {entry.us_from for entry in second.entries} == {"row"}
    assert propose(second.entries, 10) == []

    (home_folder() / "bf16_untuned_gemm.csv").unlink()
    run(13)
    third = coverage()
    padded = {entry.shape.m: entry for entry in third.entries if entry.how == "fine"}
    assert {entry.row_m for entry in padded.values()} == {16} and set(padded) == {13}
    assert third.share("fine", by="calls") == 14 / 15 and third.share("exact", by="calls") == 1 / 15
    assert third.regret() is None

    real = tmp_path / "real.csv"
    assert not tune("a16w16", None, real, options).failed
    fourth = coverage(against=[real])
    regret = fourth.regret()
    assert (regret.calls, regret.of) == (14, 14)
    assert 0.0 <= regret.weighted <= (regret.worst.regret or 0.0)
    assert fourth.share("fine", by="calls") == 14 / 15

"""A run's files, their state after a crash, and their use by the next run."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import tunedgemm.tuner.store as module
from tunedgemm.device import Device
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, read_rows, upsert
from tunedgemm.testing.replay import read_trials
from tunedgemm.timing import Timing
from tunedgemm.tuner.store import MISSING, Store
from tunedgemm.tuner.trial import ChosenClass, Outcome, Place, Task

OP = op_named("a16w16")
H200 = Device("sm_90", 132, "nvidia-h200", 1)
PLACE = Place(H200, "one")
SHAPES = [Shape("a16w16", m, 64, 128) for m in range(1, 9)]
SAME = {"iters": "101", "torch": "2.9"}


def timing(shape: Shape, name: str, us: float = 0.0) -> Timing:
    return Timing(shape, Solution("turbo", name), "ok" if us else "failed", us=us, noise=0.01, samples=51)


def outcome(shape: Shape, us: float = 5.0, name: str = "good", **fields) -> Outcome:
    winner = timing(shape, name, us)
    return Outcome(Task(shape, **fields), winner, None, (timing(shape, "bad"), winner), libver="3", place=PLACE)


def lines(store: Store) -> list[dict]:
    return [json.loads(text) for text in store.trials.read_text().splitlines() if text]


def rows(store: Store) -> dict[int, float]:
    return {row.shape.m: row.us for row in read_rows(store.table, OP)[0]}


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Open runs on one table; those that a test leaves open are interrupted at its end."""
    stores = []

    def run(identity: dict[str, str] = SAME, resume: bool = True, **fields) -> Store:
        stores.append(Store(OP, tmp_path / "t.csv", **fields))
        stores[-1].open(identity, resume)
        return stores[-1]

    yield run
    for store in stores:
        with contextlib.suppress(TableError):
            store.close()


class TestLog:
    """The trial log."""

    def test_says_who_ran_what_where(self, begin):
        """The log has a header, each trial once, outcomes and an end, each with a place."""
        store = begin()
        store.log(PLACE, [timing(SHAPES[0], "bad")])
        store.record(outcome(SHAPES[0]))
        store.record(Outcome(Task(SHAPES[1]), None, None, (timing(SHAPES[1], "bad"),), place=PLACE))
        store.finish()

        header, *middle, end = lines(store)
        assert (header["kind"], header["identity"], header["resumes"], header["pid"]) == ("run", SAME, [], os.getpid())
        assert [line["kind"] for line in middle] == ["trial", "trial", "shape", "trial", "shape"]
        assert {(line["node"], line["gpu"], line["device"]) for line in middle} == {("one", 1, "nvidia-h200")}
        assert (middle[2]["winner"]["kernel_name"], middle[2]["us"], middle[4]["winner"]) == ("good", 5.0, None)
        assert end["kind"] == "end"
        assert {line["run"] for line in lines(store)} == {store.run}
        assert read_trials(store.trials) == [timing(SHAPES[0], "bad"), timing(SHAPES[0], "good", 5.0), timing(SHAPES[1], "bad")]

    def test_has_no_trial_twice(self, begin):
        """A trial is logged once in a call and in a run; another device's is another trial."""
        store = begin()
        store.log(PLACE, [timing(SHAPES[0], "a"), timing(SHAPES[0], "a", 3.0)])
        store.log(PLACE, [timing(SHAPES[0], "a")])
        store.log(attrs.evolve(PLACE, node="two"), [timing(SHAPES[0], "a")])
        store.log(Place(Device("gfx942", 304, "mi300x", 0)), [timing(SHAPES[0], "a")])

        assert [line["device"] for line in lines(store)[1:]] == ["nvidia-h200", "mi300x"]

    def test_of_schema_1_is_read_and_continued(self, begin, golden, tmp_path):
        """Its trials are of no known run: they stay, and nothing is adopted."""
        old = (golden / "trials-v1.jsonl").read_bytes()
        (tmp_path / "t.trials.jsonl").write_bytes(old)
        before = read_trials(tmp_path / "t.trials.jsonl")

        store = begin()
        store.log(PLACE, [timing(SHAPES[0], "a")])

        assert store.trials.read_bytes().startswith(old)
        assert read_trials(store.trials) == [*before, timing(SHAPES[0], "a")]
        assert store.final_timings(H200, before[0].shape) == ()

    def test_passes_over_what_a_killed_writer_left_half_written(self, begin, caplog):
        """A partial line costs itself only, and a cut header does not make the file foreign."""
        store = begin()
        store.log(PLACE, [timing(SHAPES[0], "a"), timing(SHAPES[0], "b")])
        store.close()
        for half in (b'{"schema": 2, "kind": "tri', b'{"sc', store.trials.read_bytes()[:9]):
            whole = store.trials.read_bytes() if len(half) > 9 else b""
            store.trials.write_bytes(whole + half)
            caplog.clear()
            begin().log(PLACE, [timing(SHAPES[0], "c")])
            assert "skipped a partial line of a killed writer" in caplog.text
            assert [t.solution.kernel_name for t in read_trials(store.trials)] == (["a", "b", "c"] if whole else ["c"])

    def test_of_others_is_never_touched(self, begin, tmp_path):
        """A foreign, damaged or newer file stops the run before anything is measured."""
        path = tmp_path / "t.trials.jsonl"
        ours = timing(SHAPES[0], "a").to_json().encode()
        for content in (b"M,N,K\n", b"[1]\n", b'{"a": 1}\n', b'{"schema": true}\n', b"\xff\xfe\x00\n", b"{\n", ours + b"\nhello\n"):
            path.write_bytes(content)
            with pytest.raises(TableError, match=r"t\.trials\.jsonl:[12]: not a line of a trial log.*move the file away"):
                begin()
            assert path.read_bytes() == content
        path.write_bytes(ours + b'\n{"schema": 99, "kind": "run"}\n')
        with pytest.raises(TableError, match=r"jsonl:2: was written by a newer tunedgemm \(schema 99.*move the file away"):
            begin()

    def test_names_a_line_that_says_something_impossible(self, begin):
        """An adopted trial that is none is an error, not a guess."""
        store = begin()
        store.log(PLACE, [timing(SHAPES[0], "a")])
        store.close()
        text = store.trials.read_text()
        for old, new in (('"failed"', '"great"'), ('"m": 1', '"m": -1'), ('"solution"', '"dissolution"'), ('"gfx": "sm_90"', '"gfx": 7')):
            store.trials.write_text(text.replace(old, new))
            with pytest.raises(TableError, match=r"t\.trials\.jsonl:2: not a "):
                begin()

    def test_takes_lines_of_many_threads(self, begin):
        """Devices report at the same time; every trial is there, whole and once."""
        store = begin()
        work = [[timing(shape, f"{thread}-{i}") for i in range(20)] for thread, shape in enumerate(SHAPES)]

        def report(trials: list[Timing]) -> None:
            for trial in trials:
                store.log(PLACE, [trial])

        threads = [threading.Thread(target=report, args=(trials,)) for trials in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert Counter(map(str, read_trials(store.trials))) == Counter(map(str, itertools.chain(*work)))


class TestResume:
    """A run after one that was interrupted."""

    def test_knows_the_trials_and_the_outcomes(self, begin):
        """A finished shape is not repeated; another shape or device is unknown."""
        first = begin()
        first.record(outcome(SHAPES[0]))
        first.record(Outcome(Task(SHAPES[1]), None, None, (timing(SHAPES[1], "bad"),), place=PLACE))
        first.log(PLACE, [timing(SHAPES[2], "bad")])
        first.close()

        second = begin()
        assert second.done(H200, SHAPES[0]) == timing(SHAPES[0], "good", 5.0)
        assert second.done(H200, SHAPES[1]) is None
        assert second.done(H200, SHAPES[2]) is MISSING
        assert second.final_timings(attrs.evolve(H200, index=7), SHAPES[2]) == (timing(SHAPES[2], "bad"),)
        assert second.final_timings(Device("sm_90", 114, "nvidia-h200"), SHAPES[2]) == ()
        second.record(outcome(SHAPES[2], 7.0))

        names = [(t.shape.m, t.solution.kernel_name) for t in read_trials(second.trials)]
        assert names == [(1, "bad"), (1, "good"), (2, "bad"), (3, "bad"), (3, "good")]
        assert rows(second) == {1: 5.0, 3: 7.0}
        assert lines(second)[0]["run"] in lines(second)[-3]["resumes"]

    def test_reuses_nothing_of_a_finished_run(self, begin):
        """Tuning again (--all) is measuring again, also after a run that had been resumed."""
        first = begin()
        first.record(outcome(SHAPES[0]))
        first.close()
        begin().finish()

        assert begin().done(H200, SHAPES[0]) is MISSING

    def test_reuses_nothing_that_was_tuned_since(self, begin):
        """A newer outcome has priority over an interrupted run's trials."""
        first = begin()
        first.log(PLACE, [timing(shape, "a") for shape in SHAPES[:2]])
        first.close()
        other = begin(resume=False)
        other.record(outcome(SHAPES[0]))
        other.finish()

        third = begin()
        assert third.final_timings(H200, SHAPES[0]) == ()
        assert len(third.final_timings(H200, SHAPES[1])) == 1

    def test_reuses_nothing_measured_with_other_options(self, begin, caplog):
        """Trials of other options or versions are not reused, and a log line says so; --no-resume reuses none."""
        caplog.set_level(logging.INFO, "tunedgemm")
        first = begin()
        first.log(PLACE, [timing(SHAPES[0], "a")])
        first.close()

        other = begin({**SAME, "iters": "51"})
        assert other.final_timings(H200, SHAPES[0]) == ()
        assert f"run {first.run} are not reused: it had iters '101' instead of '51'" in caplog.text
        other.close()
        fresh = begin(resume=False)
        assert fresh.final_timings(H200, SHAPES[0]) == ()
        fresh.close()
        assert len(begin().final_timings(H200, SHAPES[0])) == 1

    def test_leaves_a_running_run_alone(self, begin):
        """No trial of a running run, nor one that it resumed, is taken before it dies."""
        dead = begin()
        dead.log(PLACE, [timing(SHAPES[0], "a")])
        dead.close()
        alive = begin()
        alive.log(PLACE, [timing(SHAPES[1], "a")])

        beside = begin()
        assert beside.final_timings(H200, SHAPES[0]) == beside.final_timings(H200, SHAPES[1]) == ()
        beside.close()
        alive.close()

        heir = begin()
        assert len(heir.final_timings(H200, SHAPES[0])) == len(heir.final_timings(H200, SHAPES[1])) == 1

    def test_writes_the_row_that_a_killed_run_had_not_written(self, begin, monkeypatch):
        """The next open writes a row that only the log has, with its version."""
        first = begin()
        first.record(outcome(SHAPES[0]))
        monkeypatch.setattr(module, "upsert", _full)
        with pytest.raises(TableError, match="disk is full"):
            first.record(outcome(SHAPES[1], 6.0))
        with pytest.raises(TableError, match="disk is full"):
            first.close()
        monkeypatch.undo()
        assert rows(first) == {1: 5.0}

        second = begin()
        assert rows(second) == {1: 5.0, 2: 6.0}
        assert second.done(H200, SHAPES[1]) == timing(SHAPES[1], "good", 6.0)
        assert {row.libver for row in read_rows(second.table, OP)[0]} == {"3"}

    def test_writes_it_over_the_row_that_it_replaces(self, begin, monkeypatch):
        """With --all it replaces the incumbent's row, but not a user's later one."""
        begin().record(outcome(SHAPES[0], 9.0, "old"))
        again = begin(resume=False)
        monkeypatch.setattr(module, "upsert", _full)
        with pytest.raises(TableError):
            again.record(outcome(SHAPES[0], 5.0, incumbent=Solution("turbo", "old")))
        with pytest.raises(TableError):
            again.close()
        monkeypatch.undo()
        kept = again.trials.read_bytes()

        begin().close()
        assert rows(again) == {1: 5.0}

        again.trials.write_bytes(kept)
        upsert(again.table, OP, [_row(SHAPES[0], "edited", 4.0)])
        begin()
        assert rows(again) == {1: 4.0}

    def test_tunes_again_a_shape_whose_row_was_removed(self, begin):
        """A deleted row is not put back from the log, and its trials are forgotten."""
        first = begin()
        for shape in SHAPES[:3]:
            first.record(outcome(shape))
        first.close()
        text = first.table.read_text().splitlines(keepends=True)
        first.table.write_text("".join(line for line in text if ",2,64,128," not in line))

        second = begin()
        assert second.done(H200, SHAPES[1]) is MISSING
        assert second.final_timings(H200, SHAPES[1]) == ()
        assert second.done(H200, SHAPES[0]) is not MISSING
        assert set(rows(second)) == {1, 3}

    def test_the_locks_of_runs_are_cleared_away(self, begin, tmp_path):
        """A run holds a file while it lives; a killed run's stays until the next opens."""
        (tmp_path / "t.trials.jsonl.dead-1.lock").touch()
        store = begin()
        assert sorted(path.name for path in tmp_path.glob("*.jsonl.*.lock")) == [f"t.trials.jsonl.{store.run}.lock"]
        store.finish()
        store.close()
        assert list(tmp_path.glob("*.jsonl.*.lock")) == []


class TestTable:
    """The table and the profile."""

    def test_a_users_edits_survive(self, begin):
        """A row, a column and a meaningless line of a user survive the next shape of a run."""
        store = begin()
        store.record(outcome(SHAPES[0]))
        header, first = store.table.read_text().splitlines()
        mine = first.replace(",1,64,128,", ",5,64,128,").replace(",good,", ",mine,")
        store.table.write_text(f"{header},comment\n{first},checked\n{mine},by hand\nnonsense,,x\n")
        store.record(outcome(SHAPES[1]))

        text = store.table.read_text()
        assert set(rows(store)) == {1, 2, 5}
        assert "by hand" in text
        assert "checked" in text
        assert "nonsense" in text

    @pytest.mark.parametrize("content", [b"", b"M,N\n1,2\n", b"\xff\xfe", b"gfx,cu_num,M,N,K,libtype,us\nsm_90,132,1,6"])
    def test_a_broken_table_is_an_error_before_measuring(self, begin, tmp_path, content):
        """The run does not begin: no log is written and the file is as it was."""
        (tmp_path / "t.csv").write_bytes(content)
        with pytest.raises(TableError, match=r"t\.csv"):
            begin()
        assert (tmp_path / "t.csv").read_bytes() == content
        assert not (tmp_path / "t.trials.jsonl").exists()

    def test_an_unwritable_file_is_an_error_before_measuring(self, tmp_path):
        """A folder in the way, a file as a folder and a pipe are errors."""
        (tmp_path / "file").touch()
        (tmp_path / "folder.trials.jsonl").mkdir()
        os.mkfifo(tmp_path / "pipe.trials.jsonl")
        for table in ("file/t.csv", "folder.csv", "pipe.csv"):
            with pytest.raises(TableError, match="cannot write"):
                Store(OP, tmp_path / table).open(SAME)
        with pytest.raises(TableError, match="-o2"):
            Store(OP, tmp_path / "t.csv", tmp_path / "file" / "p.csv").open(SAME)

    def test_each_table_has_a_separate_log(self, tmp_path):
        """Names of logs differ, also where a name has dots but no .csv."""
        logs = {name: Store(OP, tmp_path / name).trials.name for name in ("a.csv", "a.v1", "a.v2", "a")}
        assert logs == {"a.csv": "a.trials.jsonl", "a.v1": "a.v1.trials.jsonl", "a.v2": "a.v2.trials.jsonl", "a": "a.trials.jsonl"}

    def test_a_bit_class_is_a_row_for_each_m_and_one_for_any(self, begin):
        """All have the class, this device and the version of their library."""
        store, group = begin(), attrs.evolve(SHAPES[0], m=0)
        found = [attrs.evolve(timing(shape, "member", 8.0), bits="3f" * 8) for shape in (SHAPES[4], group)]
        store.put_class(PLACE, ChosenClass(group, (), tuple(found)), {"turbo": "7"})

        stored = read_rows(store.table, OP)[0]
        assert [row.shape.m for row in stored] == [0, 5]
        store.put_class(PLACE, ChosenClass(group, (), tuple(attrs.evolve(each, bits="ab" * 8) for each in found[1:])), {})
        assert [(row.shape.m, row.bit_class) for row in read_rows(store.table, OP)[0]] == [(0, "ab" * 8)]
        assert {(row.device, row.libver, row.us, row.bit_class) for row in stored} == {(H200.name, "7", 8.0, "3f" * 8)}

    def test_the_profile_has_each_trial_once(self, begin, tmp_path):
        """One header, also with two runs, and one line a trial; without a time it has AITER's -1."""
        for name in ("a", "b"):
            store = begin(profile=tmp_path / "profile.csv")
            store.log(PLACE, [attrs.evolve(timing(SHAPES[0], "bad"), detail='launch failure\nSearch for "it"\n\nthere')])
            store.record(outcome(SHAPES[0], name=name))
            store.close()

        head, *text = [line.split(",") for line in (tmp_path / "profile.csv").read_text().splitlines()]
        columns = [head.index(column) for column in ("kernelName", "us", "err_ratio")]
        assert [[line[i] for i in columns] for line in text] == [["bad", "-1", "1.0"], ["a", "5.0", "0.0"], ["b", "5.0", "0.0"]]


class TestFullDisk:
    """A file may not grow any more, as on a full disk or with a quota."""

    def test_the_log_is_only_appended_to(self, begin, file_limit):
        """The error names the file, no half line stays, and with space again the run goes on."""
        store = begin()
        store.log(PLACE, [timing(SHAPES[0], "a")])
        before = store.trials.read_bytes()
        with file_limit(len(before) + 700), pytest.raises(TableError, match=r"t\.trials\.jsonl: .*: File too large; free some"):
            store.record(outcome(SHAPES[1]))
        assert store.trials.read_bytes() == before

        store.record(outcome(SHAPES[1]))
        assert [(t.shape.m, t.solution.kernel_name) for t in read_trials(store.trials)] == [(1, "a"), (2, "bad"), (2, "good")]
        assert rows(store) == {2: 5.0}

    def test_the_table_keeps_what_it_has(self, begin, file_limit):
        """A table that cannot grow stays as it was; the row goes in with the next one."""
        store = begin()
        upsert(store.table, OP, [_row(Shape("a16w16", m, 64, 128), "there", 5.0) for m in range(1, 41)])
        store.trials.unlink()  # the larger file is out of the way of the limit
        before = store.table.read_bytes()
        with file_limit(len(before) + 10), pytest.raises(TableError, match=r"t\.csv: cannot be written"):
            store.record(outcome(Shape("a16w16", 99, 64, 128)))
        assert store.table.read_bytes() == before
        store.record(outcome(Shape("a16w16", 98, 64, 128)))
        assert {98, 99} < set(rows(store))

    def test_a_run_that_cannot_begin_releases_its_locks(self, begin, tmp_path, file_limit):
        """The header does not fit: an error, and no lock that would make the run look alive."""
        begin().close()
        size = (tmp_path / "t.trials.jsonl").stat().st_size
        with file_limit(size + 50), pytest.raises(TableError, match="cannot be written"):
            begin()
        assert list(tmp_path.glob("*.jsonl.*.lock")) == []

    def test_the_profile_is_named(self, begin, tmp_path):
        """/dev/full is a disk without space; the log has the trial all the same."""
        store = begin(profile=Path("/dev/full"))
        with pytest.raises(TableError, match=r"/dev/full: cannot be written: No space left.*-o2"):
            store.log(PLACE, [timing(SHAPES[0], "a")])
        assert len(read_trials(store.trials)) == 1


def _full(*_: object, **__: object) -> None:
    raise TableError("disk is full")


def _row(shape: Shape, name: str, us: float) -> Row:
    return Row(shape, H200.gfx, H200.cu_num, H200.name, Solution("turbo", name), us)


@pytest.mark.parametrize(("versions", "kept"), [({"turbo": "3"}, True), ({"turbo": "4"}, False)], ids=["the same", "another"])
def test_trials_of_another_version_are_measured_again(begin: Callable[..., Store], versions: dict[str, str], kept: bool) -> None:
    """Trials of another library version are forgotten, on that kind of device alone."""
    first = begin()
    first.use(H200, {"turbo": "3", "torch": ""})
    first.log(PLACE, [timing(SHAPES[1], "half", 4.0)])
    first.record(outcome(SHAPES[0]))
    assert {entry.get("libver") for entry in lines(first) if entry["kind"] == "trial"} == {"3"}
    first.close()
    again = begin()
    for device, found in ((attrs.evolve(H200, name="another"), {"turbo": "5"}), (H200, versions)):
        again.use(device, found)
    assert bool(again.final_timings(H200, SHAPES[1])) is kept
    assert (again.done(H200, SHAPES[0]) is not MISSING) is kept

"""Which calls a workload makes: lists of any ops, replays of graphs, broken files."""

from __future__ import annotations

import pytest
from tunedgemm.analysis.coverage import coverage
from tunedgemm.errors import TableError, UserError
from tunedgemm.ops import op_named
from tunedgemm.table.folders import home_folder
from tunedgemm.table.untuned import read_untuned

OP = op_named("a16w16")
HEAD = "M,N,K,bias,dtype,outdtype,count,graph\n"


class TestCalls:
    """Captured calls."""

    def test_calls_in_graphs_count_once_for_each_replay(self, listed):
        """One number for all graphs, or one for each M; an M without replays counts once, with a note."""
        path = listed((1, 2, 3), (2, 0, 5), (64, 7, 0))

        def calls(**more: object) -> dict[int, int]:
            return {entry.shape.m: entry.calls for entry in coverage(path, **more).entries}

        assert calls() == {1: 5, 2: 5, 64: 7}
        assert calls(replays=10) == {1: 32, 2: 50, 64: 7}
        assert calls(replays={1: 100}) == {1: 302, 2: 5, 64: 7}
        assert calls(replays="1:100, 2:10") == {1: 302, 2: 50, 64: 7}
        assert any("M=2 count once" in note for note in coverage(path, replays={1: 100}).notes)
        assert not any("count once" in note for note in coverage(path, replays="1:100,2:10").notes)

    def test_replays_without_graphs(self, listed):
        """Replays without recorded calls count nothing, with a note."""
        found = coverage(listed((1, 2, 0)), replays=10)

        assert found.calls == 2 and "--replays has no effect: no call was recorded into a graph" in found.notes

    @pytest.mark.parametrize("said", [0, -1, 1.5, True, "x", "0", "1:0", "1:2,3", "1:2,1:3", "9:2", {9: 2}, {1: -4}, "1:2:3", "", "9" * 30])
    def test_invalid_replays_are_errors(self, listed, said):
        """Each is a mistake that names the flag."""
        with pytest.raises(UserError, match="--replays"):
            coverage(listed((1, 2, 3)), replays=said)

    def test_files_of_several_ops_are_covered_together(self, listed, tmp_path):
        """Each file is covered by its own op, and one that several list is folded."""
        batched = tmp_path / "bf16_untuned_batched_gemm.csv"
        batched.write_text("B,M,N,K,count\n2,4,32,64,5\n")
        found = coverage([listed((1, 2)), batched, listed((1, 3), (2, 1), name="more.csv")])

        assert {(entry.shape.op, entry.shape.m): entry.calls for entry in found.entries} == {
            ("a16w16", 1): 3 + 2, ("a16w16", 2): 1, ("batched_bf16", 4): 5,
        }  # fmt: skip
        assert sorted(group.name for group in found.by("op")) == ["a16w16", "batched_bf16"]

    def test_a_file_counts_once_under_several_paths(self, listed, tmp_path):
        """A file reached through a symlink or another path to its folder is counted once."""
        path = listed((1, 2))
        (tmp_path / "link.csv").symlink_to(path)

        found = coverage([path, tmp_path / "link.csv", tmp_path / "x" / ".." / path.name])
        assert found.calls == 2 and found.paths == (path,)

    def test_without_files_all_captured_ones_are_covered(self, tmp_path):
        """Those of the user folder, of every op or of the one that is named; without any it is an error."""
        with pytest.raises(UserError, match="no shapes are captured"):
            coverage()
        home_folder().mkdir()
        (home_folder() / "bf16_untuned_gemm.csv").write_text("M,N,K,count\n4,32,64,5\n")
        (home_folder() / "a8w8_untuned_gemm.csv").write_text("M,N,K,q_dtype_w,count\n4,32,64,torch.int8,6\n")

        assert (coverage().calls, coverage(op="a8w8").calls) == (11, 6)
        with pytest.raises(UserError, match=r"untuned_fmoe\.csv: no shapes are captured"):
            coverage(op="fmoe")

    def test_an_op_whose_file_has_another_name(self, tmp_path):
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
            ("4,64,128,False,fp32,fp32,1e300,0\n", "'count' must be at most"),
            ("-4,64,128,False,fp32,fp32,3,0\n", "'M' must be a whole number from 0"),
            ("0,64,128,False,fp32,fp32,3,0\n", "'M' must be at least 1"),
            ("4,64,128,False,fp99,fp32,3,0\n", "fp99"),
            ("hello\n", ""),
        ],
    )
    def test_a_broken_line_is_named_and_the_others_count(self, listed, text, reason):
        """A file edited by hand: the note has file, line and fault."""
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

    def test_an_empty_list_is_an_error(self, listed, table, tmp_path, row):
        """A missing file, an empty one, a tuned one, one without shapes, and one of broken lines only."""
        (tmp_path / "empty.csv").write_text("")
        broken = listed((1, 2), name="broken.csv")
        broken.write_text(HEAD + "x,64,128,False,fp32,fp32,1,0\n")
        for path, reason in (
            (tmp_path / "nope.csv", "no such file"),
            (tmp_path, "is a folder"),
            (tmp_path / "empty.csv", "is empty"),
            (table(row(16)), "a tuned table, not a list of shapes"),
            (listed(name="head.csv"), "no calls are listed"),
            (listed((4, 0, 0), name="zero.csv"), "no calls are listed"),
            (broken, "no calls are listed .*broken.csv:2"),
        ):
            with pytest.raises(UserError, match=reason):
                coverage(path)

"""What to tune next."""

from __future__ import annotations

import pytest
from tunedgemm.analysis.coverage import coverage, write_next
from tunedgemm.analysis.coverage.proposal import rung_of
from tunedgemm.errors import UserError
from tunedgemm.ops import op_named, ops
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.untuned import Untuned, read_untuned

OP = op_named("a16w16")
HEAD = "M,N,K,bias,dtype,outdtype,count,graph\n"
#: torch's plain call, which no backend needs to be installed for
NATIVE = Solution("torch", "native")


def product(m: int) -> Shape:
    return Shape("a16w16", m, 64, 128, "fp32")


class TestNext:
    """What to tune next."""

    def test_layers_are_ranked_by_their_total_time(self, listed, table, tmp_path, row, trial):
        """Shapes that differ in M alone form one layer;
        layers with rows are left out, and possible savings count."""
        path = tmp_path / "several.csv"
        lines = [(16, 64, 9), (48, 64, 9), (16, 128, 100), (16, 192, 1)]
        path.write_text(HEAD + "".join(f"{m},{n},128,False,fp32,fp32,{count},0\n" for m, n, count in lines))
        found = coverage(path, tables=[table(row(16))])
        first, second, third = found.next()

        assert (first.layer.n, second.layer.n, third.layer.n) == (128, 64, 192)
        assert [(one.shape.m, one.calls) for one in second.listed] == [(48, 9)]
        assert found.next(1) == [first]
        other = table(row(16, 1e-3, n=128), name="other.csv")
        trial(other, 16, NATIVE, 1e-3)
        known = coverage(path, tables=[table(row(16))], against=[other])
        assert known.next()[0].layer.n == 64

    def test_rare_m_are_folded_into_padded_m(self, listed):
        """Thousands of prefill lengths fold into the rows they would share;
        an M with a large share stays."""
        found = coverage(listed((1, 90_000), (6, 90_000), *((m, 1) for m in range(1025, 2049))))
        [one] = found.next()

        ms = [found.shape.m for found in one.listed]
        assert ms == [1, 6, *range(1088, 2049, 64)]
        assert sum(found.calls for found in one.listed) == 181_024

    def test_padded_m_with_rows_are_not_proposed_again(self, listed, table, row):
        """Folding treats shapes that a finely padded row serves as tuned."""
        rows = [row(m) for m in range(1088, 2049, 64)]
        found = coverage(listed((1, 90_000), *((m, 1) for m in range(1025, 2049))), tables=[table(row(1), *rows)])

        assert found.share("fine", by="calls") > 0.01
        assert found.next() == []

    @pytest.mark.parametrize("name", sorted(ops()))
    @pytest.mark.parametrize("n", [64, 8192])
    def test_a_padded_m_serves_the_m_folded_into_it(self, name, n):
        """For every op the folded M is on the ladder of the calls it serves,
        and folding is idempotent."""
        op = op_named(name)
        for m in (*range(1, 700), 1000, 4096, 4097, 8193, 20_000, 32_767, 32_768, 40_000, 131_072, 200_000):
            rung = rung_of(op, m, n)
            assert rung in op.padded_m(m, n)
            assert rung_of(op, rung, n) == rung

    def test_an_op_without_padding_keeps_every_m(self, tmp_path):
        """A batched product looks up exactly its M,
        so folding would tune rows that no call uses."""
        path = tmp_path / "bf16_untuned_batched_gemm.csv"
        path.write_text("B,M,N,K,count\n" + "".join(f"2,{m},32,64,1\n" for m in range(1025, 1425)))
        [one] = coverage(path).next()

        assert [found.shape.m for found in one.listed] == list(range(1025, 1425))

    def test_proposals_are_written_as_lists_of_shapes(self, listed, tmp_path):
        """A file, or for several ops a folder with AITER's names; nothing else is written over."""
        batched = tmp_path / "bf16_untuned_batched_gemm.csv"
        batched.write_text("B,M,N,K,count\n2,4,32,64,5\n")
        (tmp_path / "folder").mkdir()
        captured = listed((6, 2, 3), name="folder/bf16_untuned_gemm.csv")
        found = coverage([captured, batched], replays=10)
        following = found.next()

        paths = write_next(following, f"{tmp_path}/next/", found.paths)
        assert {op: path.name for op, path in paths.items()} == {
            "a16w16": "bf16_untuned_gemm.csv", "batched_bf16": "bf16_untuned_batched_gemm.csv",
        }  # fmt: skip
        assert read_untuned(paths["a16w16"], OP) == [Untuned(product(6), 32)]
        for target, reason in (
            (tmp_path / "one.csv", "several ops"),
            (tmp_path / "folder", "is one of the files with the captured calls"),
        ):
            with pytest.raises(UserError, match=reason):
                write_next(following, target, found.paths)
        assert captured.read_text().count("\n") == 2

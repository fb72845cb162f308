"""Coverage by the layer of tables, and of the package's tables alone."""

from __future__ import annotations

import json

import pytest
from tunedgemm.analysis.coverage import SHIPPED, coverage
from tunedgemm.cli import main
from tunedgemm.ops import op_named
from tunedgemm.table import folders
from tunedgemm.table.csvfile import write_rows
from tunedgemm.table.folders import tuned_path

OP = op_named("a16w16")


class TestShipped:
    """`--shipped`: the calls that the package's tables serve, whatever the user has tuned."""

    @pytest.fixture(autouse=True)
    def tables(self, tmp_path, monkeypatch, listed, row) -> None:
        """Write a shipped row of M=1, a user's rows of M=1 and 2, and four calls of each M."""
        monkeypatch.setattr(folders, "SHIPPED", tmp_path / "configs")
        (tmp_path / "configs" / folders.MODELS).mkdir(parents=True)
        write_rows(tmp_path / "configs" / folders.MODELS / "m_bf16_tuned_gemm.csv", OP, [row(1, libver="0.1")])
        user = tuned_path(OP)
        user.parent.mkdir(parents=True, exist_ok=True)
        write_rows(user, OP, [row(1), row(2)])
        self.file = listed((1, 4), (2, 4), (3, 4))

    def test_the_layers_of_rows_are_told_apart(self) -> None:
        """Each entry has the layer of its row, and --shipped asks the package's alone."""
        found = coverage(self.file)
        assert {entry.shape.m: entry.table_layer for entry in found.entries} == {1: "user", 2: "user", 3: ""}
        assert {name: group.calls for name, group in found.by_table_layer().items()} == {"user": 8}
        alone = coverage(self.file, tables=SHIPPED)
        assert {entry.shape.m: entry.table_layer for entry in alone.entries} == {1: "shipped", 2: "", 3: ""}
        assert alone.share("exact", by="calls") == pytest.approx(1 / 3)

    def test_another_version_is_noted(self) -> None:
        """A row of another version of its library is counted with both versions."""
        assert not any("tuned with" in note for note in coverage(self.file).notes)
        (note,) = [note for note in coverage(self.file, tables=SHIPPED).notes if "tuned with" in note]
        assert note.startswith("4 calls of a16w16 have rows of torch tuned with 0.1; they serve if ")

    def test_the_command_prints_and_repeats_it(self, capsys, tmp_path) -> None:
        """The command prints the layers' shares, in JSON too, and proposes itself with the flag."""
        (tmp_path / "plain").mkdir()
        assert main(["coverage", str(self.file), "--shipped"]) == 0
        shown = capsys.readouterr().out
        assert "rows of: shipped 33.3 % of calls, " in shown and "--shipped -o next.csv" in shown
        assert main(["coverage", str(self.file), "--shipped", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["table_layers"]["shipped"]["calls"] == pytest.approx(1 / 3)
        assert [shape["table_layer"] for shape in document["shapes"] if shape["shape"]["m"] == 1] == ["shipped"]
        for words, fault in ((["--table", "x.csv"], "--shipped and --table"), (["--measure"], "--shipped and --measure")):
            assert main(["coverage", str(self.file), "--shipped", *words]) == 2
            assert fault in capsys.readouterr().err

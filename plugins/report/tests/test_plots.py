"""Pictures of the plots, and the rows that plots draw."""

from __future__ import annotations

import xml.etree.ElementTree

import pytest
from tunedgemm.analysis.results import read_findings, read_sides
from tunedgemm.errors import UserError
from tunedgemm_report.document import document
from tunedgemm_report.plots import data_sets, write_plots

from .conftest import TRIALS, WIDE, log_lines

pytest.importorskip("vl_convert")

OF_MARKS = ("mark-symbol role-mark", "mark-rect role-mark")
SVG = "{http://www.w3.org/2000/svg}"
#: Plots to the number of marks that the log of `TRIALS` draws: dots, rings and bars.
MARKS = {"gain-by-m": 2, "floor-by-m": 2, "rate-by-m": 2, "roofline": 6, "gain-by-layer": 4}


def test_each_plot_is_drawn_twice(log, tmp_path):
    """Draw every plot that has data as PNG and SVG, with a mark for each shape."""
    written = write_plots(document(read_findings([log()])), tmp_path / "plots")

    names = {"candidates", "cost", "floor-by-m", "gain-by-layer", "gain-by-m", "rate-by-m", "roofline", "won"}
    assert {path.name for path in written} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written if path.suffix == ".png")
    for name, marks in MARKS.items():
        drawn = (tmp_path / "plots" / f"{name}.svg").read_text()
        assert "var(" not in drawn
        groups = [group for group in xml.etree.ElementTree.fromstring(drawn).iter(f"{SVG}g") if group.get("class", "").startswith(OF_MARKS)]
        paths = [path for group in groups for path in group]
        assert len(paths) == marks, name


def test_two_sides_have_their_plot(table, tmp_path):
    """Draw the comparison where there is one, and nothing that has no data."""
    first, second = read_sides([table("a.csv"), table("b.csv", scale=0.5)])
    written = write_plots(document(second, against=first), tmp_path / "plots")

    assert {path.stem for path in written} == {"compare", "floor-by-m", "rate-by-m", "won", "roofline"}


def test_names_of_backends_are_data(log, tmp_path):
    """Draw backends whose names would end an expression or hold markup."""
    text = "".join(log_lines({WIDE: TRIALS[WIDE]})).replace('"libtype": "asm"', '"libtype": "a\'] + \\"<b>"')
    made = document(read_findings([log([text])]))

    write_plots(made, tmp_path / "plots")
    drawn = xml.etree.ElementTree.fromstring((tmp_path / "plots" / "won.svg").read_text())
    assert "a'] + \"<b>" in {text.text for text in drawn.iter(f"{SVG}text")}


def test_the_heaviest_shapes_are_drawn(log):
    """Draw the shapes with the most time, and the candidates of the one with the most time over its floor."""
    made = document(read_findings([log()]))
    sets = data_sets(made)

    assert [shape["m"] for shape in sets["shapes"]] == [4096, 64]
    assert {row["solution"] for row in sets["strip"]} == {"torch:native", "asm:fast splitK=2"}
    assert [row["won"] for row in sets["strip"]] == [True, False]


def test_a_folder_that_cannot_be_written(log, tmp_path):
    """Name the file and the flag."""
    (tmp_path / "file").write_text("")

    with pytest.raises(UserError, match=r"file/gain-by-m\.svg: cannot be written: .*; name another folder with --plots"):
        write_plots(document(read_findings([log()])), tmp_path / "file")

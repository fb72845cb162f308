"""Files with AITER's columns, invented ones and AITER's own where present: read, found, rewritten."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import attrs
import pytest
from tunedgemm.backends.registry import Registry
from tunedgemm.device import Device
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.libtypes import STAND_INS
from tunedgemm.ops import ops
from tunedgemm.ops.op import Op
from tunedgemm.table import folders
from tunedgemm.table.columns import own_names
from tunedgemm.table.csvfile import Problem, infer_op, read_rows, read_tuned, upsert
from tunedgemm.table.lookup import Table
from tunedgemm.table.row import Row, blank, record_of
from tunedgemm.table.sheet import read_sheet
from tunedgemm.table.untuned import read_untuned

ROOT = Path(__file__).parents[3]
INVENTED = Path(__file__).parent / "files"
AITERS = ROOT.parent / "shared" / "aiter" / "configs"
PAGE = ROOT / "benchmarks" / "results" / "aiter-tables" / "README.md"
FILES = sorted([*INVENTED.rglob("*.csv"), *AITERS.rglob("*.csv")])

#: what the invented tables hold, by the end of the file's name
LIBTYPES = {
    "bf16_tuned_gemm.csv": ["asm", "hipblaslt", "skinny", "flydsl", "opus", "torch", "triton"],
    "legacy_bf16_tuned_gemm.csv": ["hipblaslt", "torch", "torch"],
    "a8w8_tuned_gemm.csv": ["ck", "ck", "asm"],
    "a8w8_bpreshuffle_tuned_gemm.csv": ["asm", "ck", "cktile", "flydsl"],
    "a8w8_blockscale_tuned_gemm.csv": ["ck", "cktile", "ck"],
    "a8w8_blockscale_tuned_gemm_small.csv": ["ck", "ck"],
    "a8w8_blockscale_bpreshuffle_tuned_gemm.csv": ["asm", "triton"],
    "a4w4_blockscale_tuned_gemm.csv": ["asm", "ck"],
    "bf16_tuned_batched_gemm.csv": ["ck", "ck"],
    "a8w8_tuned_batched_gemm.csv": ["ck", "ck"],
    "tuned_fmoe.csv": ["ck", "asm+ck", "asm", "asm", "flydsl+ck", "ck"],
    "a8w8_blockscale_tuned_fmoe_small.csv": ["ck"],
}


TUNED = [path for path in FILES if "untuned" not in path.name]
UNTUNED = [path for path in FILES if "untuned" in path.name]


@pytest.fixture(scope="module")
def script(as_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Load benchmarks/aiter_tables.py, with each folder surveyed once."""
    module = as_module(ROOT / "benchmarks" / "aiter_tables.py")
    module.survey = functools.cache(module.survey)  # AITER's tables take seconds
    return module


@functools.cache
def op_of(path: Path) -> Op:
    return infer_op([path])


@functools.cache
def read(path: Path) -> tuple[list[Row], list[Problem]]:
    return read_rows(path, op_of(path))


def same(text: str, other: str) -> bool:
    """Whether two cells say the same: as text, as numbers rounded as tables round, or nothing both."""
    if text == other or {text.lower(), other.lower()} <= {"", "null", "nan"}:
        return True
    try:
        return math.isclose(float(text.removesuffix("%")), float(other.removesuffix("%")), abs_tol=5e-5)
    except ValueError:
        return False


class TestTuned:
    """Each tuned file."""

    def test_every_line_is_a_row_or_a_problem(self, faults_of):
        """No line is lost: it is a row that may win, or a problem with its number."""

        def check(path):
            rows, problems = read(path)
            valid, told = {row.line for row in rows if row.valid}, {problem.line for problem in problems}
            assert not valid & told
            assert valid | told == set(range(2, len(path.read_text().splitlines()) + 1))
            assert len(valid) > len(told) or "dsv3_bf16" in path.name

        assert not faults_of(check, TUNED)

    def test_is_rewritten_unchanged(self, tmp_path, faults_of):
        """Read and written, and with all its rows put into it, it stays byte for byte."""

        def check(path):
            op, copy = op_of(path), tmp_path / path.name
            before = path.read_bytes()
            copy.write_bytes(before)
            assert read_sheet(path).text().encode() == before
            upsert(copy, op, read(path)[0], sort=False)
            assert copy.read_bytes() == before

        assert not faults_of(check, TUNED)

    def test_one_new_row_changes_nothing_else(self, tmp_path, faults_of):
        """A row that replaces another leaves all other lines' texts alone, but for the commas of new columns."""

        def check(path):
            op, copy = op_of(path), tmp_path / path.name
            copy.write_bytes(path.read_bytes())
            rows = [row for row in read(path)[0] if row.valid]
            chosen = rows[len(rows) // 2]
            upsert(copy, op, [attrs.evolve(chosen, us=0.5, libver="7.1")], sort=False)
            before, after = path.read_text().splitlines(), copy.read_text().splitlines()
            assert len(after) == len(before)
            changed = [number for number, (old, new) in enumerate(zip(before, after, strict=True), 1) if new.rstrip(",") != old.rstrip(",")]
            assert changed == [1, chosen.line]
            assert after[0].startswith(f"{before[0]},") and after[0].endswith("libver")

        assert not faults_of(check, TUNED)

    def test_rows_have_the_values_of_their_lines(self, faults_of):
        """A row as texts has the values of its line, those that follow from its time aside."""

        def check(path):
            op = op_of(path)
            lines = {record.line: record for record in read_tuned(path, op).records if not blank(record)}
            for row in read(path)[0]:
                again, cells = record_of(row, op).cells, lines[row.line].cells
                if cells.get("libtype") in STAND_INS:
                    continue
                again |= {"libtype": cells["libtype"]} if cells.get("libtype") == "hipblast" else {}
                differ = {column: (text, again.get(column, "")) for column, text in cells.items() if not same(text, again.get(column, ""))}
                assert {*differ} <= {"tflops", "bw"}, (row.line, differ)

        assert not faults_of(check, TUNED)

    def test_its_name_determines_its_op(self, faults_of):
        """The op that its columns and name tell is the one whose folders would find it."""

        def check(path):
            op = op_of(path)
            assert [name for name, each in ops().items() if folders.is_table_name(path.name, each)] == [op.name]

        assert not faults_of(check, TUNED)


class TestUntuned:
    """Each list of shapes."""

    def test_every_line_is_counted(self, faults_of):
        """All lines but blank ones are shapes to tune."""

        def check(path):
            lines = [line for line in path.read_text().splitlines()[1:] if line.strip(" \t,")]
            assert sum(entry.count for entry in read_untuned(path, op_of(path))) == len(lines)

        assert not faults_of(check, UNTUNED)

    def test_is_rewritten_unchanged(self, faults_of):
        """Read and written it stays byte for byte."""

        def check(path):
            assert read_sheet(path).text().encode() == path.read_bytes()

        assert not faults_of(check, UNTUNED)


def test_libtypes(faults_of):
    """The file's own libtype, or what the kernel's name says; of two stages both, where they differ."""

    def check(name):
        [path] = [path for path in INVENTED.rglob("*.csv") if path.name == name]
        rows, _ = read_rows(path, infer_op([path]))
        assert [row.solution.libtype for row in rows] == LIBTYPES[name]

    assert not faults_of(check, LIBTYPES)


def test_legacy_files_without_gfx():
    """80 and 304 compute units are gfx942, 256 are gfx950."""
    for name in ("model_configs/legacy_bf16_tuned_gemm.csv", "tuned_fmoe.csv"):
        path = INVENTED / name
        rows, _ = read_rows(path, infer_op([path]))
        assert {(row.cu_num, row.gfx) for row in rows} == {(80, "gfx942"), (304, "gfx942"), (256, "gfx950")}


def test_fused_moe_of_aiter():
    """Both stages are one solution, with both names, the larger error ratio and ksplit.

    AITER's further columns are kept.
    """
    rows, _ = read_rows(INVENTED / "tuned_fmoe.csv", ops()["fmoe"])
    assert rows[0].solution.kernel_name == "moe_ck2stages_gemm1_invented+moe_ck2stages_gemm2_invented"
    assert [rows[0].err_ratio, rows[4].err_ratio] == pytest.approx([0.003, 0.015])
    assert rows[2].solution.kernel_name == rows[3].solution.kernel_name == "_ZN5aiter16invented_fused__E"
    assert dict(rows[2].solution.extra)["run_1stage"] == "1"
    assert {row.shape.layout for row in rows} == {"aiter16x16"}
    assert {"kernelName1", "block_m"} <= {*own_names(ops()["fmoe"].columns).values()}


def test_fallback_rows_stay_in_their_file(tmp_path):
    """A fallback row that AITER runs without flydsl is not replaced: a tuned row joins it."""
    op, path = ops()["fmoe"], tmp_path / "tuned_fmoe.csv"
    path.write_bytes((INVENTED / "tuned_fmoe.csv").read_bytes())
    rows, problems = read_rows(path, op)
    [told] = [problem for problem in problems if "flydsl_fallback" in problem.reason]
    base = next(row for row in rows if row.shape.m == 256)
    upsert(path, op, [attrs.evolve(base, shape=attrs.evolve(base.shape, m=128), us=13.0)], sort=False)
    kept = (INVENTED / "tuned_fmoe.csv").read_text().splitlines()[told.line - 1]
    assert path.read_text().splitlines()[told.line - 1].rstrip(",") == kept
    assert sum(row.shape.m == 128 for row in read_rows(path, op)[0]) == 1


@pytest.mark.parametrize("folder", [INVENTED, AITERS], ids=["invented", "aiter"])
def test_every_valid_row_is_found_and_explained(script, folder):
    """A look-up of a row's shape returns it or a better one of its key, and names AITER's kernel."""
    if not folder.is_dir():
        pytest.skip("AITER's tables are not here")
    families = script.survey(folder)
    for name, family in families.items():
        assert family.found == family.explained == len(family.valid) > 0, name
        assert family.files == family.unchanged > 1, name


def test_the_variable_of_each_op(monkeypatch, faults_of):
    """All files in an op's variable are one table, in which the faster of duplicates wins."""

    def check(name):
        op = ops()[name]
        paths = [path for path in sorted(INVENTED.rglob("*.csv")) if "untuned" not in path.name and folders.is_table_name(path.name, op)]
        monkeypatch.setenv(op.columns.variable, os.pathsep.join(map(str, paths)))
        table = Table.load(op)
        rows = [row for path in paths for row in read_rows(path, op)[0]]
        assert Counter(table.rows) == Counter(rows)
        for row in rows:
            best = min((other for other in rows if other.key == row.key and other.valid), key=lambda other: other.us, default=None)
            found = [match.row for match in table.candidates(row.shape, Device(row.gfx, row.cu_num))]
            assert found[:1] == ([best] if best else [])

    assert not faults_of(check, sorted(ops()))


def test_explanations(monkeypatch, faults_of):
    """The explanation names AITER's kernel and why it does not run here; torch serves the call."""

    def check(name, m, says):
        op = ops()[name]
        monkeypatch.setenv(op.columns.variable, str(INVENTED / op.columns.tuned_file))
        row = next(row for row in read_rows(INVENTED / op.columns.tuned_file, op)[0] if row.shape.m == m)
        said = Dispatcher(op, Registry(())).explain(row.shape, Device(row.gfx, row.cu_num))
        assert said.libtype == "torch" and says in str(said)

    assert not faults_of(
        check,
        [
            ("a16w16", 1, "not asm:_ZN5aiter15invented_bf16_aE splitK=3: libtype 'asm': not installed; pip install tunedgemm[asm]"),
            ("a16w16", 32, "not flydsl:flydsl_invented_t16: libtype 'flydsl': not installed; pip install tunedgemm[flydsl]"),
            ("fmoe", 8, "libtype 'asm+ck': its stages belong to asm and ck: no installed backend runs both"),
            ("batched_bf16", 32, "not ck:bf16_batched_invented_v2: libtype 'ck': not installed; pip install tunedgemm[ck]"),
        ],
    )


def test_the_page_of_counts(script, tmp_path):
    """The committed page matches AITER's files; without them the script says so."""
    out = tmp_path / "new" / "README.md"
    assert script.main(["--configs", str(tmp_path / "nowhere"), "-o", str(out.parent)]) == 0
    assert "were not there: nothing was counted" in out.read_text()
    assert script.main(["--configs", str(INVENTED), "-o", str(out.parent)]) == 0
    assert "| all | 22 | 22 | 37 | 33 | 1 | 3 | 1 | 34 | 34 | 17 |" in out.read_text()
    if AITERS.is_dir():
        assert PAGE.read_text() == script.page(AITERS)

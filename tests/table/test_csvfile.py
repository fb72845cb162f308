"""Tuned and untuned files: read with tolerance, refused with a reason, rewritten without loss."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import attrs
import pytest
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, fold, read_rows, upsert, write_rows
from tunedgemm.table.untuned import Untuned, read_listed, read_untuned, write_untuned

OP = op_named("a16w16")
AITER = Path(__file__).parents[3] / "shared" / "aiter" / "configs"
GOLDEN = Path(__file__).parents[1] / "golden" / "table-v1" / "bf16_tuned_gemm.csv"

HEADER = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
LINE = "gfx942,304,16,1280,8192,False,torch.bfloat16,torch.bfloat16,False,False,asm,3,4,9.1234,kernel_a,0.0,36.78,2332.71"


def row(m: int = 16, *, n: int = 1280, k: int = 8192, us: float = 9.0, gfx: str = "gfx942", **more: object) -> Row:
    fields = {"cu_num": 304, "device": "", "solution": Solution("asm", "kernel_a", 4, 3), **more}
    return Row(shape=Shape("a16w16", m, n, k), gfx=gfx, us=us, **fields)


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join((*lines, "")))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bf16_tuned_gemm.csv"


def test_legacy_rows_without_gfx(path, faults_of):
    """A missing gfx follows from the CU count that AITER's legacy files had, else stands for any."""

    def check(pair, absent):
        cu_num, gfx = pair
        header, line = "cu_num,M,N,K,libtype,us", f"{cu_num},1,64,64,asm,2.5"
        if absent != "no column":
            header, line = f"gfx,{header}", f"{absent},{line}"
        [found], problems = read_rows(written(path, header, line), OP)
        assert (found.gfx, problems) == (gfx, [])
        assert found.shape == Shape("a16w16", 1, 64, 64)  # bias False, bf16, no scales, plain weights

    assert not faults_of(
        check, itertools.product([(304, "gfx942"), (80, "gfx942"), (256, "gfx950"), (120, "")], ["no column", "", "0", "nan"])
    )


def test_gradlibs_names(path):
    """gradlib's ``soltimes`` is the time and its ``hipblast`` is hipblaslt."""
    [found], problems = read_rows(written(path, "cu_num,M,N,K,libtype,solidx,soltimes", "304,1,64,64, hipblast ,9,2.5"), OP)
    assert (found.us, found.solution.libtype, found.solution.solidx, problems) == (2.5, "hipblaslt", 9, [])


def test_op_without_a_libtype_column(path):
    """In tables of AITER's one-backend ops the kernel's name gives the libtype; column names are kept."""
    columns = attrs.evolve(OP.columns, values=("kernelId", "splitK", "us", "kernelName", "errRatio", "block_m"))
    op = attrs.evolve(OP, columns=columns)
    lines = ["gfx950,256,1,64,64,5,0,2.0,_ZN5aiter9gemm,0.5%,32", "gfx950,256,2,64,64,6,0,2.0,256x16,0,64"]
    rows, problems = read_rows(written(path, "gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,errRatio,block_m", *lines), op)
    assert problems == []
    assert [found.solution.libtype for found in rows] == ["asm", "ck"]
    assert (rows[0].solution.solidx, rows[0].err_ratio, rows[0].solution.extra) == (5, 0.005, (("block_m", "32"),))
    upsert(path, op, [attrs.evolve(rows[0], us=1.0)])
    header, *found = path.read_text().splitlines()
    assert header == "gfx,cu_num,M,N,K,kernelId,splitK,us,kernelName,errRatio,block_m,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype"
    assert found[1] == lines[1] + "," * 6  # only what the new row says is added, and other lines keep their text
    assert [(found.us, found.solution.libtype, found.solution.extra) for found in read_rows(path, op)[0]] == [
        (1.0, "asm", (("block_m", "32"),)),
        (2.0, "ck", (("block_m", "64"),)),
    ]


def test_a_bad_row_costs_itself_only(path, faults_of):
    """One bad row is reported with its line and reason; the rows around it load."""

    def check(column, text, reason):
        fields = LINE.split(",")
        fields[HEADER.split(",").index(column)] = text
        rows, [problem] = read_rows(written(path, HEADER, LINE, ",".join(fields), LINE), OP)
        assert sum(found.valid for found in rows) == 2
        assert (problem.path, problem.line) == (path, 3)
        assert reason in problem.reason
        assert str(problem).startswith(f"{path}:3: ")

    assert not faults_of(
        check,
        [
            ("M", "-4", "column 'M' must be a whole number from 0"),
            ("M", "sixteen", "'M' must be a whole number"),
            ("K", "99999999999", "column 'K' must be a whole number from 0"),
            ("N", "0", "'n' must be at least 1"),
            ("cu_num", "", "'cu_num' is empty"),
            ("cu_num", "1.5", "'cu_num' must be a whole number"),
            ("cu_num", "-3", "'cu_num' must be >= 0"),
            ("gfx", "gfx 9!", "'gfx' must match regex"),
            ("dtype", "__import__('os').abort()", "unknown dtype"),
            ("bias", "perhaps", "'bias' must be True or False"),
            ("libtype", "", "'libtype' is empty"),
            ("libtype", "a/b", "'libtype' must match regex"),
            ("us", "fast", "'us' must be a number"),
            ("us", "0", "'us' must be a finite number above 0"),
            ("us", "-1", "'us' must be a finite number above 0"),
            ("us", "inf", "'us' must be a finite number above 0"),
            ("us", "", "'us' must be a finite number above 0"),
            ("splitK", "0.5", "'splitK' must be a whole number"),
            ("bw", "1.0,2.0", "more fields than columns"),
            ("kernelName", '"torn', "not a CSV line"),
            ("kernelName", '"a,b"', "'kernel_name' must be text without commas"),
            ("us", "nan", "'us' must be a finite number above 0 (got nan)"),
            ("M", "inf", "'M' must be a whole number"),
            ("M", "nan", "'M' must be a whole number"),
            ("solidx", "inf", "'solidx' must be a whole number"),
            ("err_ratio", "none at all", "'err_ratio' must be a number"),
        ],
    )


def test_merge_conflict_markers(path):
    """Lines that a version control merge left are reported, the rows between them load."""
    rows, problems = read_rows(written(path, HEADER, "<<<<<<< HEAD", LINE, "=======", LINE, ">>>>>>> theirs"), OP)
    assert (len(rows), [problem.line for problem in problems]) == (2, [3 - 1, 4, 6])
    assert "merge marker" in problems[0].reason


def test_a_file_that_is_no_table(path, faults_of):
    """An unusable file is an error that names it and the fault; writing leaves it unchanged."""

    def check(content, reason):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(TableError, match=reason) as caught:
            read_rows(path, OP)
        assert str(path) in str(caught.value)
        if content is not None:
            with pytest.raises(TableError, match=reason):
                upsert(path, OP, [row()])
            assert path.read_bytes() == content

    assert not faults_of(
        check,
        [
            (None, "no such file"),
            (b"", "is empty"),
            (b"\n\n ,,\n", "is empty"),
            (b"\x7fELF\x00\x01\x02", "not a table: an ELF file"),
            (b"\x80\x81\xff", "not a text file"),
            ((HEADER + "\n" + LINE + "\n").encode("utf-16-le"), "not a table: text in UTF-16"),
            (b"M,N,K\n1,2,3\n", "lacks the column 'libtype', 'us'"),
            (HEADER.replace(",", ";").encode() + b"\n", "fields must be separated by commas .got ';'.; save the file as CSV"),
            (HEADER.replace(",", "\t").encode() + b"\n", "fields must be separated by commas .got '.t'.; save the file as CSV"),
            (LINE.encode() + b"\n", "column 'False' occurs twice .*should be the header"),
            (f"{HEADER},M\n{LINE},1\n".encode(), "column 'M' occurs twice"),
            (f"{HEADER}\n{LINE}\n{LINE[:60]}".encode(), "cut off after 9 of 18"),
        ],
    )


def test_a_folder_is_not_a_table(tmp_path):
    """The error says that the path is a folder."""
    with pytest.raises(TableError, match="is a folder"):
        read_rows(tmp_path, OP)


def test_header_alone_is_an_empty_table(path):
    """A file with only column names is a table without rows."""
    assert read_rows(written(path, HEADER), OP) == ([], [])


@pytest.mark.skipif(not AITER.is_dir(), reason="AITER's tables are not here")
def test_aiters_own_tables(faults_of):
    """Each row of AITER's tables is either valid or reported with its line."""

    def check(name):
        file = AITER / name
        rows, problems = read_rows(file, OP)
        valid = {found.line for found in rows if found.valid}
        reported = {problem.line for problem in problems}
        assert not valid & reported
        assert valid | reported == set(range(2, len(file.read_text().splitlines()) + 1))
        assert len(valid) > 50

    assert not faults_of(
        check, ["bf16_tuned_gemm.csv", *(f"model_configs/{model}_bf16_tuned_gemm.csv" for model in ("dsv3", "llama70B", "qwen32B"))]
    )


@pytest.mark.skipif(not AITER.is_dir(), reason="AITER's tables are not here")
def test_aiters_own_untuned_files(faults_of):
    """AITER's untuned files are read whole: every line that is not blank is counted."""

    def check(name):
        lines = [line for line in (AITER / name).read_text().splitlines()[1:] if line.strip()]
        assert sum(entry.count for entry in read_untuned(AITER / name, OP)) == len(lines) > 50

    assert not faults_of(
        check, ["bf16_untuned_gemm.csv", "model_configs/dsv3_bf16_untuned_gemm.csv", "model_configs/llama70B_untuned_gemm.csv"]
    )


def test_ints_as_floats_percents_and_null(path):
    """pandas' 16.0 and AITER's 0.5% are numbers; Null, NaN and the like are absent."""
    text = LINE.replace(",16,1280,8192,", ",16.0,1280.0,8192.0,").replace("304", "304.0").replace(",3,4,", ",3.0,4.0,")
    text = text.replace("False,False,asm", "0.0,Null,asm").replace(",0.0,36.78", ",0.5%,NaN")
    [found], problems = read_rows(written(path, HEADER, text), OP)
    assert (problems, found) == ([], row(us=9.1234, err_ratio=0.005))


def test_a_quoted_field(path):
    """Quoted commas stay inside their field."""
    lines = [f"{HEADER},note", f'{LINE},"a, ""b"""']
    [found], problems = read_rows(written(path, *lines), OP)
    assert (problems, found.extra) == ([], (("note", 'a, "b"'),))
    upsert(path, OP, [row(2)])
    assert lines[1] in path.read_text().splitlines()


def test_a_row_that_is_there_already_keeps_its_line(path):
    """Putting a row that a line says already changes nothing, however the line spells it."""
    before = written(path, HEADER, LINE.replace("torch.bfloat16", "dtypes.bf16").replace("False", "0")).read_text()
    upsert(path, OP, read_rows(path, OP)[0])
    assert path.read_text() == before
    upsert(path, OP, [row(us=9.0)])
    assert path.read_text().splitlines()[1].endswith("asm,3,4,9.0,kernel_a,0.0,37.28,2363.85")


def test_an_invalid_time_is_no_conflict(path):
    """Of another table's rows the fastest valid one stays; a row without a time conflicts with none."""
    write_rows(path, OP, [row()])
    slower = row(us=12.0, solution=Solution("asm", "kernel_b"))
    conflicts = fold(path, OP, [row(us=0.0, solution=Solution("asm", "kernel_c")), slower])
    assert [(conflict.kept.solution, conflict.others) for conflict in conflicts] == [(row().solution, (slower,))]
    assert read_rows(path, OP)[0] == [row()]


def test_untuned_defaults(path):
    """M, N and K suffice in an untuned file: bf16 in and out, no bias, no scales, plain weights."""
    assert read_untuned(written(path, "M, N, K", "1, 64, 128"), OP) == [Untuned(Shape("a16w16", 1, 64, 128))]
    [entry] = read_untuned(written(path, "M,N,K,dtype,bias,bpreshuffle", "1,64,128,dtypes.fp16,True,1"), OP)
    assert entry.shape == Shape("a16w16", 1, 64, 128, dtype="fp16", outdtype="fp16", epilogue="bias", layout="aiter16x16")


def test_untuned_duplicates_are_folded(path):
    """Rows of one shape are one entry with their counts added; a row without a count is one call."""
    entries = read_untuned(written(path, "M,N,K,count,graph", "1,64,64,5,", "2,64,64,,1", "1,64,64,,", "", "1,64,64,4,"), OP)
    assert [(entry.shape.m, entry.count) for entry in entries] == [(1, 10), (2, 1)]


def test_a_bad_untuned_file(path, faults_of):
    """An untuned file with a mistake is refused with line and reason, lest shapes silently be missed."""

    def check(lines, reason):
        with pytest.raises(TableError, match=reason):
            read_untuned(written(path, *lines), OP)

    assert not faults_of(
        check,
        [
            (("M,N,K,colour", "1,2,3,red"), ":1: unknown column 'colour', not read; .* may have M, N, K, bias, .*count, graph"),
            (("M,N", "1,2"), "lacks the column 'K'"),
            (("M\tN\tK", "1\t2\t3"), "fields must be separated by commas .got '.t'."),
            (("M,N,K", "-1,2,3"), ":2: column 'M' must be a whole number from 0 to 2147483647"),
            (("M,N,K", "1,64,64", "-1,64,64"), ":3: column 'M' must be"),
            (("M,N,K", "1,64,64", "1,0,64"), ":3: 'n' must be at least 1"),
            (("M,N,K", "0,64,64"), ":2: 'M' must be at least 1"),
            (("M,N,K", "1,64,9999999999"), ":2: column 'K' must be"),
            (("M,N,K", "1,64"), ":2: column 'K' must be a whole number"),
            (("M,N,K", "1,64,64,64"), ":2: more fields than columns"),
            (("M,N,K,dtype", "1,64,64,torch.bfloat17"), ":2: unknown dtype 'torch.bfloat17'"),
            (("M,N,K,count", "1,64,64,-2"), ":2: 'count' must not be negative"),
            (("M,N,K,count", "1,64,64,many"), ":2: 'count' must be a number"),
        ],
    )


def test_columns_and_figures_of_a_written_file(path):
    """AITER's columns come first and in its order, ours after them; figures are rounded as AITER's are."""
    write_rows(path, OP, [row(m=64, n=256, k=5120, us=7.91911, extra=(("note", "x"),))])
    header, line = path.read_text().splitlines()
    assert header == f"{HEADER},device,layout,scale,libver,note"
    fields = dict(zip(header.split(","), line.split(","), strict=True))
    assert (fields["us"], fields["tflops"], fields["err_ratio"]) == ("7.9191", "21.19", "0.0")
    assert fields["bw"] == str(round((64 * 5120 + 256 * 5120 + 64 * 256) * 2 / 7.91911 / 1e3, 2))


def test_upsert_replaces_and_adds(path):
    """A row of the same shape and device, or of no device, is replaced; others stay, new ones are added."""
    write_rows(path, OP, [row(16), row(32), row(16, gfx="gfx950", cu_num=256)])
    upsert(path, OP, [row(16, us=1.0), row(64), row(32, device="amd-instinct-mi325x")])
    found, problems = read_rows(path, OP)
    assert problems == []
    assert [(entry.gfx, entry.shape.m, entry.device, entry.us) for entry in found] == [
        ("gfx942", 16, "", 1.0),
        ("gfx942", 32, "amd-instinct-mi325x", 9.0),
        ("gfx942", 64, "", 9.0),
        ("gfx950", 16, "", 9.0),
    ]


def test_order_of_a_table(path):
    """Sorted files have N before M and numbers by value; unsorted ones append new rows."""
    rows = [row(100, n=64), row(9, n=64), row(1, n=128), row(2, n=64, gfx="gfx1250", cu_num=96)]
    upsert(path, OP, rows, sort=False)
    upsert(path, OP, [row(5, n=64), row(9, n=64, us=1.0)], sort=False)
    assert [entry.shape.m for entry in read_rows(path, OP)[0]] == [100, 9, 1, 2, 5]
    upsert(path, OP, [], sort=True)
    assert [(entry.shape.n, entry.shape.m) for entry in read_rows(path, OP)[0]] == [(64, 2), (64, 5), (64, 9), (64, 100), (128, 1)]


def test_upsert_keeps_what_it_does_not_understand(path):
    """Unknown columns, unparsable rows and torn lines survive a rewrite, however often."""
    odd = LINE.replace("torch.bfloat16", "torch.bfloat17")
    lines = [f"note,{HEADER}", f"keep me,{LINE}", f"odd,{odd}", f"long,{LINE},1,2", 'torn,"gfx942', "<<<<<<< HEAD"]
    written(path, *lines)
    before = {problem.reason for problem in read_rows(path, OP)[1]}
    for m in (1, 2, 3):
        upsert(path, OP, [row(m)])
    rows, problems = read_rows(path, OP)
    assert {problem.reason for problem in problems} == before
    assert sorted(found.shape.m for found in rows) == [1, 2, 3, 16]
    assert [found.extra for found in rows if found.shape.m == 16] == [(("note", "keep me"),)]
    assert set(lines) < set(path.read_text().splitlines())


def test_a_row_that_never_wins_is_replaced(path):
    """A measured row replaces a placeholder without a time, or a legacy row without gfx, of its key."""
    written(path, "cu_num,M,N,K,libtype,us", "304,16,1280,8192,torch,0")
    upsert(path, OP, [row()])
    assert read_rows(path, OP) == ([row()], [])


def test_golden_table_of_version_1():
    """A table in the format of version 1 stays readable, and rewriting it changes nothing but the order."""
    rows, problems = read_rows(GOLDEN, OP)
    assert [(problem.line, problem.reason.partition("shape: ")[2].partition(" must")[0]) for problem in problems] == [
        (6, "scale"),
        (7, "layout"),
    ]
    assert len(rows) == 4
    by_libtype = {found.solution.libtype: found for found in rows}
    assert by_libtype["asm"].shape == Shape("a16w16", 16, 1280, 8192)
    assert by_libtype["asm"].solution == Solution("asm", "_ZN5aiter39bf16gemm_fp32bf16_tn_32x64_splitk_cleanE", 4)
    assert by_libtype["hipblaslt"].shape == Shape("a16w16", 32, 1280, 8192, epilogue="bias", layout="aiter16x16")
    assert by_libtype["hipblaslt"].libver == "1.2.1"
    assert (by_libtype["triton"].shape.m, by_libtype["triton"].extra) == (0, (("note", "pin"),))
    assert by_libtype["torch"].shape == Shape("a16w16", 64, 4096, 4096, "fp16", "fp32")
    assert all(found.device == "nvidia-h200" for found in rows if found.gfx == "sm_90")


def test_golden_table_is_rewritten_unchanged(path):
    """Rows that are put into their own table change nothing, and unusable lines stay."""
    path.write_text(GOLDEN.read_text())
    upsert(path, OP, [attrs.evolve(row, line=0) for row in read_rows(GOLDEN, OP)[0]], sort=False)
    assert path.read_text() == GOLDEN.read_text()


def test_valid_rows():
    """Only a finite time above 0 may win."""
    assert row(us=0.1).valid
    assert not any(row(us=us).valid for us in (0.0, -1.0, math.inf, math.nan))


def test_filler_in_the_columns_of_other_ops_says_nothing(tmp_path):
    """The 0 that AITER's merge of files writes in other ops' columns does not change a row's op."""
    op, path = op_named("batched_bf16"), tmp_path / "bf16_tuned_batched_gemm.csv"
    head, body = "gfx,cu_num,B,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio,q_type", "gfx942,304,8,16,64,32,1,0,5.0,k,1,1,0.0"
    for filler in ("0", "nan", ""):
        path.write_text(f"{head}\n{body},{filler}\n")
        assert len(read_rows(path, op)[0]) == 1
    path.write_text(f"{head}\n{body},QuantType.No\n")
    with pytest.raises(TableError, match="not a table of batched_bf16, which has no 'q_type'"):
        read_rows(path, op)


def test_a_list_of_shapes_that_is_written_reads_the_same(path):
    """Counts, calls in graphs and layers survive writing; an empty column is not written."""
    plain = [Untuned(Shape("a16w16", 1, 64, 128), 3)]
    write_untuned(path, OP, plain)
    assert path.read_text().splitlines() == [
        "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,count",
        "1,64,128,False,torch.bfloat16,torch.bfloat16,False,False,3",
    ]
    more = [*plain, Untuned(Shape("a16w16", 2, 64, 128, epilogue="bias", layout="aiter16x16"), 0, 7, "o_proj")]
    write_untuned(path, OP, more)
    assert read_untuned(path, OP) == more


def test_broken_lines_of_a_list_of_shapes_have_different_errors(path):
    """`read_listed` reports broken and truncated lines and keeps the others; `read_untuned` refuses."""
    path.write_text("M,N,K,count\n1,64,128,2\nx,64,128,2\n2,64,128,-1\n1,64,128,3\n4,6")
    listed, problems = read_listed(path, OP)

    assert listed == [Untuned(Shape("a16w16", 1, 64, 128), 5)]
    assert [problem.line for problem in problems] == [3, 4, 6]
    assert str(problems[-1]) == f"{path}:6: the last, is cut off after 2 of 4 fields; restore the file, or delete that line"
    with pytest.raises(TableError, match="line 6, the last, is cut off"):
        read_untuned(path, OP)
    path.write_text("M,N,K,count\n1,64,128,2\nx,64,128,2\n")
    with pytest.raises(TableError, match=rf"{path.name}:3: "):
        read_untuned(path, OP)

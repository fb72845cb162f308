"""The scan of a tuned file: the rows and problems of reading it line by line, parsed lazily."""

from __future__ import annotations

import gc
import itertools
import random
from pathlib import Path

import attrs
import pytest
from tunedgemm.errors import ShapeError, TableError
from tunedgemm.ops import op_named, ops
from tunedgemm.table import scan as module
from tunedgemm.table.csvfile import read_rows
from tunedgemm.table.scan import normalise, scan
from tunedgemm.table.source import open_source

OP = op_named("a16w16")
HEADER = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
GOOD = "gfx942,304,16,1280,8192,False,torch.bfloat16,torch.bfloat16,False,False,asm,5,13,7.9,name,0.0,21.1,417.9"
CONFIGS = Path(__file__).parents[3] / "shared" / "aiter" / "configs"

#: one field of a line -> texts that reading treats specially
ODD = {
    0: ["", "0", "nan", "gfx950", "GFX942", " gfx942 ", "<<<<<<< ours", "=======", "no gfx", "sm_90"],
    1: ["", "0", "80", "256", "304.0", "-1", "1.5", "many"],
    2: ["0", "1", "-1", "16.0", "1e3", " 7 ", "1_0", "", "nan", "M", "2147483648", "99999999999999999999", "0x10", "12abc"],
    3: ["0", "64", "-64", "64.5", "inf"],
    4: ["0", "128", "1,2", "128\t"],
    5: ["True", "1", "0", "", "maybe"],
    6: ["dtypes.fp16", "fp16", "", "float3", "nan", "torch.float8_e4m3fn"],
    7: ["torch.float32", "", "bf16", "none"],
    8: ["True", "1.0", ""],
    9: ["True", "false"],
    10: ["triton", "hipblast", "rocblas", "", "nan", "a b", "torch", " asm "],
    11: ["-1", "", "5.0", "5.5", "nan", "x", "inf", "120000", "9" * 30],
    12: ["0", "", "2.0", "-3", "many", str(2**53), str(2**64), "1e300"],
    13: ["0", "-1", "inf", "nan", "", "1e-3", "12.5%", "5,0", "abc", "1_0.5", "7"],
    14: ["", "nan", "it's", 'a "name"', "Null", "<<<<<<<", "ünï_kernel", "k" * 4096, "k" * 4097, "k" * 9000],
    15: ["5%", "", "nan", "0.25", "bad", "inf"],
    16: ["", "rate"],
    17: ["", "0.0", "extra,field", "end,,"],
}


def lines(seed: int, count: int, oddness: float) -> list[str]:
    """Lines of which some are odd in one field or two, cut short, quoted, or none at all."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        fields = GOOD.split(",")
        fields[0], fields[1] = draw.choice([("gfx942", "304"), ("gfx942", "80"), ("gfx950", "256"), ("sm_90", "132")])
        fields[2:5] = [str(draw.choice([1, 16, 17, 32, 4096])), str(64 * draw.randint(1, 9)), str(64 * draw.randint(1, 4))]
        fields[13] = str(round(draw.uniform(0.5, 20), draw.randint(0, 4)))
        for _ in range((draw.random() < oddness) + (draw.random() < oddness / 4)):
            place = draw.choice(list(ODD))
            fields[place] = draw.choice(ODD[place])
        line = ",".join(fields)
        if draw.random() < oddness / 8:
            line = draw.choice(
                ["", " ,,\t", line[: draw.randint(0, len(line))], f'"{line}', '"gfx942"' + line[6:], ">>>>>>> theirs", HEADER, "nan"]
            )
        found.append(line)
    return found


def same(path: Path, op=OP) -> int:
    """Compare a scan with a reading line by line; returns how many rows there are."""
    rows, problems = read_rows(path, op)
    source = scan(path, op, normalise(path.read_bytes()))
    assert source is not None
    assert len(source) == len(rows)
    found = list(source)
    assert [(repr(row), row.source, row.line) for row in found] == [(repr(row), row.source, row.line) for row in rows]
    assert source.problems == problems
    assert list(source) == found or any(row.us != row.us for row in rows)
    return len(rows)


def test_odd_texts_in_any_column_of_any_op(tmp_path, faults_of):
    """Also in columns of other ops and in unknown ones, whatever their order."""

    def check(name):
        op, draw, file = op_named(name), random.Random(name), tmp_path / "t.csv"
        texts = [
            "flydsl_fallback",
            "tensor",
            "aiter16x16",
            "row",
            "asm+ck",
            "\x85",
            "\u2028",
            *(text for odd in ODD.values() for text in odd),
        ]
        told = {"gfx": "gfx942", "cu_num": "304", "us": "5.0", "libtype": "ck", "kernelName": "k", "kernelName1": "k", "splitK": "0"}
        known = op.columns.format(op.examples[0]) if op.examples else dict(zip(HEADER.split(","), GOOD.split(","), strict=True))
        for _ in range(30):
            columns = list(dict.fromkeys(["gfx", "cu_num", *op.columns.key, *op.columns.values]))
            more = ["libtype", "device", "libver", *op.columns.own, "_tag", "note", "q_type", "token", "B", "dtype"]
            columns += [column for column in more if column not in columns and draw.random() < 0.3]
            draw.shuffle(columns)
            body = []
            for _ in range(draw.randint(1, 30)):
                cells = {**known, **told, **{size: str(32 * draw.randint(1, 9)) for size in "MNK" if draw.random() < 0.7}}
                cells |= {draw.choice(columns): draw.choice(texts) for _ in range(draw.choice([0, 0, 0, 1, 2]))}
                body.append(",".join(cells.get(column, "") for column in columns))
            file.write_text("\n".join([",".join(columns), *body, ""]), encoding="utf-8")
            outcomes = []
            for read in (lambda: read_rows(file, op), lambda: (list(source := open_source(file, op)), source.problems)):
                try:
                    outcomes.append(repr(read()))
                except TableError as error:
                    outcomes.append(str(error))
            assert outcomes[0] == outcomes[1]

    assert not faults_of(check, sorted(ops()))


def test_a_scan_finds_what_reading_finds(tmp_path, faults_of):
    """Rows, lines and problems of random files are those of the line-by-line reader."""

    def check(seed, newline):
        file = tmp_path / "t.csv"
        body = lines(seed, 60 if newline == "\r" else 400, oddness=(0.0, 0.02, 0.2, 1.0)[seed % 4])
        mark = "\ufeff" if seed % 3 == 0 else ""
        blank = ["", " , "] if seed % 5 == 0 else []
        file.write_text(mark + newline.join([*blank, HEADER, GOOD, *body, GOOD, ""]), encoding="utf-8", newline="")
        assert same(file) > 10

    assert not faults_of(check, itertools.product(range(0, 12, 2), ["\n", "\r\n", "\r"]))


def test_a_small_chunk_changes_nothing(tmp_path, monkeypatch):
    """Where the file is cut for reading does not show, not even with lines longer than a piece."""
    file = tmp_path / "t.csv"
    file.write_text("\n".join([HEADER, GOOD, *lines(7, 300, 0.1), GOOD.replace("name", "n" * 700), GOOD, ""]), encoding="utf-8")
    for size in (1, 100, 333, 5000):
        monkeypatch.setattr(module, "_CHUNK", size)
        assert same(file) > 100


def test_rows_that_no_call_of_aiter_looks_up(tmp_path):
    """A tag that makes a line no row is seen, whatever the lines before it were."""
    file = tmp_path / "t.csv"
    tags = ["", "flydsl_fallback", "other"]
    file.write_text("\n".join([f"{HEADER},_tag", *(f"{GOOD},{tag}" for tag in tags), ""]))
    source = open_source(file, OP)
    rows, problems = read_rows(file, OP)
    assert (list(source), source.problems) == (rows, problems)
    assert ([row.line for row in rows], [problem.line for problem in problems]) == ([2, 4], [3])


def test_the_short_form(tmp_path):
    """Lines of the short form are several rows each, in the order that reading gives."""
    file = tmp_path / "t.csv"
    file.write_text("M,N,K,lib,kernel_name,tflops,bandwidth_gb_s\n16,128,64,hipblaslt,x,1.5,2\n32,128,64,triton,bshuffle_x,1.5,2\n")
    rows, problems = read_rows(file, OP)
    source = open_source(file, OP)
    assert (list(source), source.problems) == (rows, problems)
    assert len(rows) > 2


def test_an_op_whose_kinds_limit_sizes(tmp_path):
    """Where some of an op's lines are refused for their sizes alone, all of them are judged."""
    for op in ops().values():
        if not op.examples:
            continue
        key = {**op.columns.format(op.examples[0]), "gfx": "gfx942", "cu_num": "304"}
        columns = ["gfx", "cu_num", *op.columns.key, *op.columns.values]
        told = {"us": "5.0", "libtype": "ck", "kernelName": "k", "kernelName1": "k", "kernelName2": "l"}
        body = []
        for size in (1, 32, 33, 64, 127, 128, 4096):
            sized = key | {name: str(size) for name in ("K", "N", "inter_dim", "model_dim") if name in key}
            body.append(",".join(str((sized | told).get(column, "0")) for column in columns))
        file = tmp_path / op.columns.tuned_file
        file.write_text("\n".join([",".join(columns), *body, ""]))
        rows, problems = read_rows(file, op)
        source = open_source(file, op)
        assert (list(source), source.problems) == (rows, problems)


def test_an_op_that_refuses_sizes(tmp_path):
    """A parser that refuses some K, or reads one size from another's column, parses every line."""

    def picky(cells):
        shape = OP.columns.parse(cells)
        if shape.k % 128:
            raise ShapeError(f"K must be a multiple of 128 (got {shape.k})")
        return shape

    def tied(cells):
        shape = OP.columns.parse(cells)
        return attrs.evolve(shape, layout="row" if shape.n < 300 else "aiter16x16")

    file = tmp_path / "t.csv"
    file.write_text("\n".join([HEADER, *lines(5, 200, 0.1), ""]), encoding="utf-8")
    for parse in (picky, tied):
        same(file, attrs.evolve(OP, columns=attrs.evolve(OP.columns, parse=parse)))
    assert any(
        "multiple of 128" in problem.reason
        for problem in read_rows(file, attrs.evolve(OP, columns=attrs.evolve(OP.columns, parse=picky)))[1]
    )


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="AITER's tables are not here")
def test_aiters_files(faults_of):
    """Every tuned file of AITER's gives the rows and problems that reading it line by line gives."""

    def check(name):
        op = ops()[name]
        stem = Path(op.columns.tuned_file).stem
        files = [path for path in sorted(CONFIGS.rglob("*.csv")) if stem in path.name and "untuned" not in path.name]
        for file in files:
            try:
                rows, problems = read_rows(file, op)
            except TableError:
                continue  # a file whose name is a longer one's end
            source = open_source(file, op)
            assert (list(source), source.problems) == (rows, problems)

    assert not faults_of(check, sorted(ops()))


def test_rows_are_made_when_asked_for(tmp_path):
    """A scan makes no row of a plain line; each is made once."""
    file = tmp_path / "t.csv"
    file.write_text("\n".join([HEADER, *lines(3, 500, 0.0), ""]))
    source = scan(file, OP, file.read_bytes())
    assert not source.parsed
    assert source.row(77) is source.row(77)
    assert list(source.parsed) == [77]
    assert source.peek(78).line == 80
    assert list(source.parsed) == [77]


def test_garbage_collection_is_as_it_was(tmp_path):
    """A scan leaves the collector on or off, as it found it, an error or none."""
    file = tmp_path / "t.csv"
    file.write_text("\n".join([HEADER, GOOD, ""]))
    assert gc.isenabled()
    scan(file, OP, file.read_bytes())
    assert gc.isenabled()
    gc.disable()
    try:
        scan(file, OP, file.read_bytes())
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(TableError):
        scan(file, OP, b"M,N\n1,2\n")
    assert gc.isenabled()

"""``tunedgemm table``: merging the tables of shards and machines."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest
from tunedgemm.cli import main
from tunedgemm.cli.table import check
from tunedgemm.device import Device, current_device
from tunedgemm.libtypes import AITER, OF_AITERS_OPS
from tunedgemm.ops import op_named, ops
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table.csvfile import Row, read_rows, write_rows
from tunedgemm.testing.fakes import fake_backend, fake_registry, with_hooks

OP = op_named("a16w16")
HEAD = "gfx,cu_num,M,N,K,libtype,us,kernelName,note"


def row(m: int, kernel: str = "k", us: float = 5.0, **more: object) -> Row:
    fields = {"gfx": "sm_90", "cu_num": 132, "device": "nvidia-h200", **more}
    return Row(**{"shape": Shape("a16w16", m, 64, 128), "solution": Solution("triton", kernel), "us": us, **fields})


def rows(path: Path) -> set[tuple[int, str, str, float]]:
    return {(found.shape.m, found.device, found.solution.kernel_name, found.us) for found in read_rows(path, OP)[0]}


@pytest.fixture
def tables(tmp_path: Path):
    """Write tables of rows, one a list."""

    def write(*lists: list[Row]) -> list[str]:
        paths = [tmp_path / f"{number}.csv" for number in range(len(lists))]
        for path, found in zip(paths, lists, strict=True):
            write_rows(path, OP, found)
        return list(map(str, paths))

    return write


def test_shards_become_one_table(tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OUT gets all rows of all tables;
    other devices and libvers stay apart, and the inputs unchanged."""
    paths = tables([row(1), row(3)], [row(2, libver="9.1"), row(1, device="nvidia-h100")], [row(0, "pin")])
    before = [Path(path).read_text() for path in paths]
    out = tmp_path / "new" / "out.csv"

    assert main(["table", "merge", str(out), *paths]) == 0

    assert rows(out) == {
        (1, "nvidia-h200", "k", 5.0), (3, "nvidia-h200", "k", 5.0), (2, "nvidia-h200", "k", 5.0),
        (1, "nvidia-h100", "k", 5.0), (0, "nvidia-h200", "pin", 5.0),
    }  # fmt: skip
    assert [found.libver for found in read_rows(out, OP)[0] if found.shape.m == 2] == ["9.1"]
    assert [Path(path).read_text() for path in paths] == before
    assert f"{out}: 5 rows, 0 conflicts, 0 lines left out" in capsys.readouterr().out


def test_the_lowest_time_wins_and_the_conflict_is_reported(tables, capsys: pytest.CaptureFixture[str]) -> None:
    """Another solution for the same device and shape is a conflict that the lowest time wins, and the
    exit code is 1, as where AITER merges; a faster time of one solution is not."""
    out, *others = tables(
        [row(1, "old", 5.0), row(2, "old", 3.0), row(4, "same", 9.0)],
        [row(1, "slow", 6.0), row(2, "fast", 2.0), row(3, "a", 4.0)],
        [row(1, "fastest", 4.0), row(3, "b", 4.5), row(4, "same", 8.0)],
    )

    assert main(["table", "merge", out, *others]) == 1

    assert {found[2:] for found in rows(Path(out))} == {("fastest", 4.0), ("fast", 2.0), ("a", 4.0), ("same", 8.0)}
    said = capsys.readouterr().out
    assert said.count("conflict, the lowest time stays") == 3 and f"{out}: 4 rows, 3 conflicts" in said
    assert f"triton:fastest 4.00 us ({others[1]}:2), triton:old 5.00 us ({out}:2), triton:slow 6.00 us ({others[0]}:2)" in said


def test_a_row_without_a_time_gives_way(tables, capsys: pytest.CaptureFixture[str]) -> None:
    """A row with the time 0 loses to a measured one without a conflict, and stays if it is alone."""
    out, other = tables([row(1, "pin", 0.0), row(2, "timed", 5.0), row(3, "pin", 0.0)], [row(1, "timed", 5.0), row(2, "pin", 0.0)])

    assert main(["table", "merge", out, other]) == 0

    assert {(m, *found) for m, _, *found in rows(Path(out))} == {(1, "timed", 5.0), (2, "timed", 5.0), (3, "pin", 0.0)}
    assert "0 conflicts" in capsys.readouterr().out


def test_other_lines_and_columns_survive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown columns and unreadable lines of OUT survive;
    unreadable lines of IN are named, exit code 1."""
    out, other = tmp_path / "out.csv", tmp_path / "in.csv"
    out.write_text(f"{HEAD}\nsm_90,132,1,64,128,triton,5,k,mine\nsm_90,132,banana,64,128,triton,5,k,odd\n")
    lines = ["sm_90,132,2,64,128,triton,5,k,bob", "sm_90,132,x,64,128,triton,5,k,odd", "sm_90,132,3,64,128,triton,0,k,", ""]
    other.write_text("\n".join([HEAD.replace("note", "owner"), *lines]))

    assert main(["table", "merge", str(out), str(other)]) == 1

    found = {found.shape.m: dict(found.extra) for found in read_rows(out, OP)[0]}
    assert found == {1: {"note": "mine"}, 2: {"owner": "bob"}, 3: {}}
    assert "banana" in out.read_text()
    said = capsys.readouterr().out
    assert f"left out: {other}:3" in said and f"note: {other}:4" in said and "1 lines left out" in said


def test_a_missing_input_is_named(tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are merged, as in AITER; if none exists, nothing is written and the exit code is 2."""
    out, other, absent = *tables([row(1)], [row(2)]), str(tmp_path / "absent.csv")

    assert main(["table", "merge", out, absent, other]) == 0
    assert [found.shape.m for found in read_rows(Path(out), OP)[0]] == [1, 2]
    assert f"left out: {absent}: no such file" in capsys.readouterr().out
    assert main(["table", "merge", str(tmp_path / "new.csv"), absent]) == 2
    assert not (tmp_path / "new.csv").exists()


def test_a_broken_input_changes_nothing(tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All inputs are read first;
    a file that is not a table, or OUT among the inputs, leaves OUT unchanged."""
    out, other = tables([row(1)], [row(2)])
    before = Path(out).read_text()
    (tmp_path / "foreign.csv").write_text("epoch,loss\n1,0.5\n")

    assert main(["table", "merge", out, other, str(tmp_path / "foreign.csv")]) == 2
    assert main(["table", "merge", out, other, out]) == 2
    assert Path(out).read_text() == before
    err = capsys.readouterr().err
    assert "foreign.csv: lacks the column" in err and "is both OUT and IN" in err


BF16 = "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"


def line(
    m: int = 1, n: int = 64, *, libtype: str = "triton", us: object = 3.0, name: str = "k", err: object = 0.0, gfx: str = "gfx942,304"
) -> str:
    return f"{gfx},{m},{n},128,False,torch.bfloat16,torch.bfloat16,False,False,{libtype},0,0,{us},{name},{err},1,1"


def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], *lines: str, head: str = BF16, op: str = "") -> tuple[int, list[str]]:
    path = tmp_path / "t.csv"
    path.write_text("\n".join([head, *lines, ""]))
    code = main(["table", "check", str(path), *(["--op", op] if op else [])])
    return code, capsys.readouterr().out.replace(f"{path}:", "").splitlines()


class TestCheck:
    """The strict judge."""

    @pytest.mark.parametrize(
        ("bad", "says"),
        [
            (["<<<<<<< HEAD"], ["2: not a CSV line, for an unclosed quote or a merge marker (got '<<<<<<< HEAD'); fix or delete it"]),
            ([line(us=0)], ["2: 'us' must be a finite number above 0 (got 0.0); the row is never chosen"]),
            ([line(us="inf")], ["2: 'us' must be a finite number above 0 (got inf); the row is never chosen"]),
            ([line(err=0.21)], ["2: err_ratio 0.21 exceeds 0.2"]),
            ([line(err="30%")], ["2: err_ratio 0.3 exceeds 0.2"]),
            ([line(err="nan")], []),
            ([line(libtype="tritn")], ["2: unknown libtype 'tritn', in 1 rows"]),
            ([line().replace("torch.bfloat16", "bf17")], ["2: unknown dtype 'bf17'"]),
            ([line(), line(2), line()], [" 2 rows for", "in lines 2, 4: all equal"]),
            ([line(), line(us=2, name="j")], [" 2 rows for", "in lines 2, 3: triton:k 3.00 us, triton:j 2.00 us"]),
            (
                [line(n=72).replace("False,triton", "True,triton")],
                ["2: a16w16: no call asks for this shape: layout: aiter16x16 of bf16 needs N divisible by 16 (got N=72)"],
            ),
            ([line(name="k+add")], ["2: triton:k+add: +add needs a bias"]),
            ([line(name="k+add").replace("False,", "True,", 1)], []),
            ([line(libtype="torch", name="mm+add").replace("False,", "True,", 1)], ["2: torch:mm+add: torch adds a bias in its routes"]),
            ([BF16], ["2: repeats the header"]),
        ],
    )
    def test_faults(self, tmp_path, capsys, bad, says):
        """Each kind of fault is printed with its line and exit code 1;
        a good row is not reported."""
        code, out = checked(tmp_path, capsys, *bad)
        out = [text for text in out if not text.startswith("note:")]
        assert code == bool(says)
        assert len(out) == 1
        assert all(said in out[0] for said in says or [" rows, no fault"])

    def test_a_table_of_other_devices_is_noted(self, tmp_path, capsys):
        """The note names its devices; a table with a row for this one has none."""
        here = current_device()
        code, out = checked(tmp_path, capsys, line(), line(m=32, gfx="gfx942,80"))
        assert code == 0
        assert f"no row for this device, {here}; rows are for gfx942/80, gfx942/304" in out[-1]
        _, out = checked(tmp_path, capsys, line(gfx="gfx942,80"), line(gfx=f"{here.gfx},{here.cu_num}"))
        assert not any("no row for this device" in text for text in out)

    def test_stages_of_two_backends_are_noted(self, tmp_path, capsys, monkeypatch):
        """Rows of fused MoE that no backend runs are no fault of the table; their tokens can all be looked up."""
        monkeypatch.setattr(check, "Registry", fake_registry)
        head = ",".join(("cu_num", *ops()["fmoe"].columns.key, *ops()["fmoe"].columns.values))
        shape = "ActivationType.Silu,torch.bfloat16,torch.float8_e4m3fnuz,torch.float8_e4m3fnuz,QuantType.per_Token,1,0"
        rows = [
            f"80,{token},256,128,8,2,{shape},32,0,1,{first},0%,2,ck_b,0.5%,3,0,1,1," for token, first in ((37, "_ZN5aiter_a"), (40, "ck_a"))
        ]
        code, out = checked(tmp_path, capsys, *rows, head=head)
        assert code == 0
        assert "2 rows, no fault" in out[0]
        assert "note" in out[1] and "1 rows have stages of two backends (asm+ck)" in out[1]
        assert checked(tmp_path, capsys, f"{rows[1]}flydsl_fallback", head=head) == (
            1,
            ["2: tagged 'flydsl_fallback': never looked up, as in AITER"],
        )

    def test_only_the_rows_backend_is_asked_about_misses(self, tmp_path, capsys, monkeypatch):
        """A backend is asked only about rows of its ops that
        name a device and may win, on that device."""
        asked = []

        def lacks(solution: Solution, shape: Shape, device: Device) -> str:
            asked.append((solution.kernel_name, device.gfx, device.cu_num))
            return f"no kernel for {device.gfx}"

        mine, other = (with_hooks(fake_backend(name, ops=(op,)), lacks=lacks) for name, op in (("mine", "a16w16"), ("other", "a8w8")))
        monkeypatch.setattr(check, "Registry", lambda: fake_registry(mine, other))
        _, out = checked(
            tmp_path,
            capsys,
            line(libtype="mine", name="a"),
            line(2, libtype="mine", name="of_no_device", gfx=",0"),
            line(4, libtype="mine", name="never_wins", us=0),
            line(8, libtype="other", name="of_another_op"),
            line(16, libtype="mine", name="b"),
        )
        assert asked == [("a", "gfx942", 304), ("b", "gfx942", 304)]
        assert [text for text in out if "miss" in text] == [
            "note:  2 rows are misses here, the first in line 2: mine: no kernel for gfx942"
        ]

    def test_a_packed_weight_that_no_layout_divides(self, tmp_path, capsys):
        """K counts elements and the layout bytes, also where the activations are no pairs."""
        for name in ("a4w4_blockscale", "a16w4_blockscale"):
            op = ops()[name]
            shape = op.columns.parse({"M": "1", "N": "32", "K": "128", "layout": "aiter32x16"})
            path = tmp_path / op.columns.tuned_file
            write_rows(path, op, [Row(shape=shape, gfx="gfx950", cu_num=256, device="", solution=Solution("torch", "native"), us=2.0)])
            path.write_text(path.read_text().replace(",128,", ",96,"))
            assert main(["table", "check", str(path)]) == 1
            assert "layout: aiter32x16 of fp4x2 needs K divisible by 64 (got K=96)" in capsys.readouterr().out

    def test_tables_of_every_op(self, tmp_path, capsys):
        """A table of each op's examples is found faultless by the op that its columns and name tell."""
        for name, op in ops().items():
            path = tmp_path / op.columns.tuned_file
            shapes = op.examples or (Shape(name, 4, 32, 64), Shape(name, 4, 32, 64, epilogue="bias"))
            write_rows(
                path,
                op,
                [Row(shape=each, gfx="gfx942", cu_num=304, device="", solution=Solution("torch", "native"), us=2.0) for each in shapes],
            )
            assert main(["table", "check", str(path)]) == 0, capsys.readouterr().out
            assert f"{len(shapes)} rows, no fault" in capsys.readouterr().out


def test_the_file_determines_the_op(tmp_path, capsys):
    """Columns that two ops have, under a name that says nothing, need --op; AITER's name does not."""
    head = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
    rows = ["gfx942,304,1,128,128,ck,0,0,3,k,1,1,0"]
    code, _ = checked(tmp_path, capsys, *rows, head=head)
    assert code == 2
    assert checked(tmp_path, capsys, *rows, head=head, op="a8w8_blockscale")[0] == 0
    named = tmp_path / "dsv3_a8w8_blockscale_tuned_gemm.csv"
    (tmp_path / "t.csv").rename(named)
    assert main(["table", "check", str(named)]) == main(["table", "show", str(named)]) == 0
    assert main(["table", "merge", str(tmp_path / "out.csv"), str(named)]) == 0
    assert len(read_rows(tmp_path / "out.csv", ops()["a8w8_blockscale"])[0]) == 1


class TestDiff:
    """Differences between two tables."""

    def test_lists_rows_winners_and_times(self, tables, capsys):
        """The diff lists rows of one only, other winners and other times, and exits with 1."""
        first, second = tables(
            [row(1, "k", 5.0), row(2, "k", 5.0), row(3, "k", 5.0), row(4, "k", 5.0), row(6, us=0.0)],
            [row(1, "k", 5.0), row(2, "j", 4.0), row(2, "k", 9.0), row(3, "k", 4.0), row(5, "k", 5.0)],
        )
        assert main(["table", "diff", first, second]) == 1
        out = capsys.readouterr().out
        assert f"only in {first}: a16w16 M=4 N=64 K=128 bf16->bf16 on nvidia-h200/132: triton:k 5.00 us" in out
        assert f"only in {second}: a16w16 M=5" in out
        assert "another winner: a16w16 M=2 N=64 K=128 bf16->bf16 on nvidia-h200/132: triton:k 5.00 us -> triton:j 4.00 us" in out
        assert "another time: a16w16 M=3" in out and "-> 4.00 us (-20.0 %)" in out
        assert out.splitlines()[-1] == f"1 equal, 1 other winners, 1 other times, 1 only in {first}, 1 only in {second}"

    def test_a_table_does_not_differ_from_itself(self, tables, capsys):
        """Nothing differs, exit code 0."""
        [first] = tables([row(1), row(2)])
        assert main(["table", "diff", first, first]) == 0
        assert capsys.readouterr().out.startswith("2 equal, 0 other")


class TestExport:
    """A table for AITER."""

    def test_has_the_rows_that_aiter_can_use(self, tables, tmp_path, capsys):
        """AITER's columns and libtypes, one row a key, the best; the others are counted with the reason."""
        shape = attrs.evolve(row(1).shape, layout="aiter32x16")
        [path] = tables([
            row(1, "slow", 5.0), row(1, "fast", 4.0, device="nvidia-h100"), row(0, "pin"), row(2, us=0.0),
            row(3, gfx="", cu_num=0),
            row(4, libver="9"), attrs.evolve(row(5), solution=Solution("cublaslt", "x")),
            attrs.evolve(row(6), solution=Solution("asm", "y")), attrs.evolve(row(7), shape=shape),
            row(8, "k+add", shape=attrs.evolve(row(8).shape, epilogue="bias")),
        ])  # fmt: skip
        out = tmp_path / "aiter.csv"
        assert main(["table", "export", "--aiter", str(out), path]) == 0

        assert out.read_text().splitlines()[0] == BF16
        rows, problems = read_rows(out, OP)
        assert problems == []
        assert [(found.shape.m, found.solution.kernel_name, found.us, found.device, found.libver) for found in rows] == [
            (1, "fast", 4.0, "", ""), (4, "k", 5.0, "", ""), (6, "y", 5.0, "", "")
        ]  # fmt: skip
        assert {found.solution.libtype for found in rows} <= {*AITER}
        said = capsys.readouterr().out
        for reason in (
            "M=0 pins every M", "the time never wins", "no device is named", "libtype cublaslt is not AITER's",
            "AITER's key lacks layout", "AITER adds no bias after a kernel (+add)", "a better row has AITER's key",
        ):  # fmt: skip
            assert f"left out: 1 rows: {reason}" in said

    def test_loads_uniquely_by_aiters_key(self, tmp_path, capsys):
        """pandas finds no duplicate of AITER's key in a table of
        each op's examples on two devices of a kind."""
        import pandas as pd

        for name, op in ops().items():
            if not OF_AITERS_OPS.get(name, AITER):
                continue
            path, out = tmp_path / op.columns.tuned_file, tmp_path / f"for_aiter_{op.columns.tuned_file}"
            shapes = op.examples or (Shape(name, 4, 32, 64), Shape(name, 4, 32, 64, epilogue="bias"))
            kernel = "flydsl_n" if name == "fmoe" else "n"
            places = [("gfx942", 304, "a"), ("gfx942", 304, "b"), ("gfx950", 256, "")]
            made = [
                Row(shape=each, gfx=gfx, cu_num=units, device=slug, solution=Solution(OF_AITERS_OPS.get(name, AITER)[-1], kernel), us=2.0)
                for each in shapes
                for gfx, units, slug in places
            ]
            write_rows(path, op, made)
            assert main(["table", "export", "--aiter", str(out), str(path)]) == 0
            frame = pd.read_csv(out)
            keys = ["gfx", "cu_num", *op.columns.key]
            assert list(frame.columns) == [*keys, *op.columns.values]
            assert len(frame) > 0 and not frame.duplicated(keys).any(), name

    def test_fp8_comes_back_blank(self, tmp_path, capsys):
        """A row of its gfx's own fp8 is AITER's, blank; the other kind is none of AITER's."""
        op, texts = ops()["a8w8_blockscale"], {"M": "16", "N": "256", "K": "512"}
        path, out = tmp_path / op.columns.tuned_file, tmp_path / "for_aiter_a8w8_blockscale.csv"
        rows = [
            Row(op.columns.parse({**texts, "gfx": kind}), gfx, 304, "", Solution("ck", f"{gfx}-{kind}"), us=2.0)
            for gfx in ("gfx942", "gfx950")
            for kind in ("gfx942", "gfx950")
        ]
        write_rows(path, op, rows)
        assert main(["table", "export", "--aiter", str(out), str(path)]) == 0
        assert "left out: 2 rows: AITER's key lacks dtype" in capsys.readouterr().out
        assert "float8" not in out.read_text() and read_rows(out, op)[0] == [rows[0], rows[3]]

    def test_nothing_is_exported_for_an_op_of_which_aiter_has_no_table(self, tmp_path, capsys):
        """One line says so, and no file is written."""
        out = tmp_path / "for_aiter.csv"
        assert main(["table", "export", "--op", "a16w4_blockscale", "--aiter", str(out)]) == 2
        assert "a16w4_blockscale: AITER has no table of this op" in capsys.readouterr().err
        assert not out.exists()

    def test_a_family_has_the_libtypes_that_aiter_runs_in_it(self, tmp_path, capsys):
        """Torch's rows are AITER's only for a16w16;
        without a libtype column the kernel's name must give it."""
        for name, solution, why in (
            ("a8w8", Solution("torch", "native"), "libtype torch is not AITER's for a8w8"),
            ("a8w8_blockscale", Solution("triton", "t"), "libtype triton is not AITER's for a8w8_blockscale"),
            ("a4w4_blockscale", Solution("asm", "unlike_asm"), "AITER has no column for libtype asm"),
        ):
            op = ops()[name]
            path, out = tmp_path / op.columns.tuned_file, tmp_path / f"for_aiter_{name}.csv"
            shape = op.columns.parse({"M": "16", "N": "256", "K": "512", "q_dtype_w": "torch.int8", "gfx": "gfx942"})
            places = {"gfx": "gfx942", "cu_num": 304, "device": ""}
            write_rows(path, op, [Row(shape=shape, solution=made, us=2.0, **places) for made in (solution, Solution("ck", "k"))])
            assert main(["table", "export", "--op", name, "--aiter", str(out), str(path)]) == 0
            assert [found.solution.libtype for found in read_rows(out, op)[0]] == ["ck"]
            assert f"left out: 1 rows: {why}" in capsys.readouterr().out

    def test_lines_that_are_no_rows_are_named(self, tables, tmp_path, capsys):
        """Unreadable lines are named, and the exit code is 1; the rows are exported."""
        [path] = tables([row(1), row(2)])
        with Path(path).open("a") as file:
            file.write("<<<<<<< HEAD\n")
        out = tmp_path / "aiter.csv"
        assert main(["table", "export", "--aiter", str(out), path]) == 1
        assert len(read_rows(out, OP)[0]) == 2 and f"left out: {path}:4: not a CSV line" in capsys.readouterr().out

    def test_higher_layers_win(self, tables, tmp_path, monkeypatch, capsys):
        """Without files the layers of dispatch are exported,
        and a higher layer wins whatever the times."""
        high, low = tables([row(1, "high", 5.0)], [row(1, "low", 1.0), row(2, "low", 1.0)])
        (tmp_path / "home").mkdir()
        Path(low).rename(tmp_path / "home" / OP.columns.tuned_file)
        monkeypatch.setenv(OP.columns.variable, os.pathsep.join([high, "default"]))
        out = tmp_path / "aiter.csv"
        assert main(["table", "export", "--aiter", str(out), "--op", "a16w16"]) == 0
        found = {each.shape.m: each.solution.kernel_name for each in read_rows(out, OP)[0] if each.gfx == "sm_90" and each.shape.n == 64}
        assert found == {1: "high", 2: "low"}

    def test_overwrites_nothing(self, tables, capsys):
        """A file that is there stays, and the exit code is 2."""
        first, second = tables([row(1)], [row(2)])
        before = Path(second).read_text()
        assert main(["table", "export", "--aiter", second, first]) == 2
        assert Path(second).read_text() == before and "exists" in capsys.readouterr().err

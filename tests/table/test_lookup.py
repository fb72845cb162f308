"""The merged table: the look-up ladder, layers, devices, fingerprint."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import attrs
import pytest
from tunedgemm.device import Device
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named
from tunedgemm.shape import Shape
from tunedgemm.solution import Solution
from tunedgemm.table import folders, index
from tunedgemm.table.csvfile import Row, write_rows
from tunedgemm.table.lookup import Table
from tunedgemm.table.match import Match

OP = op_named("a16w16")
H200 = Device("sm_90", 132, "nvidia-h200")
H100 = Device("sm_90", 132, "nvidia-h100-80gb-hbm3")


def row(kernel: str, m: int = 16, us: float = 5.0, *, n: int = 1280, **more: object) -> Row:
    fields = {"gfx": "sm_90", "cu_num": 132, "device": "", **more}
    return Row(shape=Shape("a16w16", m, n, 512), solution=Solution("triton", kernel), us=us, **fields)


def asked(m: int = 16, n: int = 1280, **more: object) -> Shape:
    return Shape("a16w16", m, n, 512, **more)


def found(table: Table, shape: Shape, device: Device = H200) -> list[tuple[str, str]]:
    return [(match.row.solution.kernel_name, match.granularity) for match in table.candidates(shape, device)]


@pytest.fixture(autouse=True)
def shipped(tmp_path, monkeypatch):
    """An empty stand-in for the shipped tables."""
    monkeypatch.setattr(folders, "SHIPPED", tmp_path / "configs")
    return tmp_path / "configs"


def test_the_ladder():
    """A pin comes first, then the exact M, fine and coarse padding; each row is offered once."""
    rows = [row("coarse", 512, 1.0), row("fine", 480, 2.0), row("exact", 449, 3.0), row("pin", 0, 4.0), row("other", 256, 0.1)]
    table = Table(OP, [[attrs.evolve(each, gfx="") for each in rows]])
    amd = Device("gfx942", 132)
    assert found(table, asked(449), amd) == [("pin", "pinned"), ("exact", "exact"), ("fine", "fine"), ("coarse", "coarse")]
    assert found(table, asked(480), amd) == [("pin", "pinned"), ("fine", "exact"), ("coarse", "coarse")]
    assert found(table, asked(512)) == [("pin", "pinned"), ("coarse", "exact")]
    assert found(table, asked(0)) == [("pin", "pinned")]


@pytest.mark.parametrize(
    ("gfx", "m", "words"),
    [
        ("sm_90", 1, ""), ("sm_90", 3, "4 coarse"), ("sm_90", 4, "4 exact"), ("sm_90", 5, "8 coarse, 16 fine"), ("sm_90", 65, "128 coarse"),
        ("sm_90", 129, ""), ("sm_90", 240, ""), ("sm_90", 241, "256 fine"), ("sm_90", 256, "256 exact"),
        ("gfx942", 1, "16 fine"), ("gfx942", 3, "16 fine, 4 coarse"), ("gfx942", 129, "256 coarse"),
    ],
)  # fmt: skip
def test_far_rows_answer_on_amd_alone(gfx: str, m: int, words: str):
    """AMD has AITER's order; NVIDIA takes the nearest row, and none that is far."""
    table = Table(OP, [[row("k", rows, gfx=gfx) for rows in (4, 8, 16, 128, 256)]])
    answers = [f"{match.row.shape.m} {match.granularity}" for match in table.candidates(asked(m), Device(gfx, 132))]
    assert ", ".join(answers) == words


def test_shipped_rows_serve_their_own_device(shipped: Path, tmp_path: Path):
    """In 16 bits a row of the package serves devices alike, others all of that gfx and cu_num."""
    (shipped / "model_configs").mkdir(parents=True)
    own = tmp_path / "own.csv"
    for file, kernel in ((shipped / "model_configs" / "x_bf16_tuned_gemm.csv", "shipped"), (own, "own")):
        write_rows(file, OP, [row(kernel, device=H100.name)])
    assert found(Table.load(OP), asked(), H100) == [("shipped", "exact")]
    assert found(Table.load(OP), asked(), Device("sm_90", 132, "nvidia-h800")) == [("shipped", "exact")]
    for other in (H200, Device("sm_90", 132, "nvidia-h100-nvl"), Device("sm_90", 132, "nvidia-gh200-480gb")):
        assert found(Table.load(OP), asked(), other) == [] and not list(Table.load(OP).rows_for(other))
    assert found(Table.load(OP, [own]), asked(), H200) == [("own", "exact")]
    by_row, op = Shape("a8w8", 16, 1280, 512, "fp8_e4m3fn", "bf16", scale="row"), op_named("a8w8")
    write_rows(shipped / "model_configs" / "x_a8w8_tuned_gemm.csv", op, [attrs.evolve(row("k", device=H100.name), shape=by_row)])
    for name in ("nvidia-h200", "nvidia-h100-nvl", "nvidia-gh200-480gb", "nvidia-gh200-144g-hbm3e", "nvidia-unknown"):
        [match] = Table.load(op).candidates(by_row, Device("sm_90", 132, name))
        assert match.why.endswith("measured on nvidia-h100-80gb-hbm3 (3352 GB/s)")


def test_coarse_padding_goes_down_for_wide_weights():
    """Above M = 8192 the row of 8192 answers where N is above 4096, as in AITER, and none does below."""
    table = Table(OP, [[row("clamped", 8192, n=4352), row("not asked", 8192, n=4096)]])
    assert found(table, asked(20000, 4352)) == [("clamped", "coarse")]
    assert found(table, asked(20000, 4096)) == []


def test_another_shape_finds_nothing(faults_of):
    """N, dtypes, bias, scales and layout must be those of the row."""

    def check(other):
        table = Table(OP, [[row("k")]])
        assert found(table, asked()) == [("k", "exact")]
        assert found(table, other) == []

    assert not faults_of(
        check,
        [
            asked(n=1296),
            asked(outdtype="fp32"),
            asked(dtype="fp16"),
            asked(epilogue="bias"),
            asked(scale="tensor"),
            asked(layout="aiter16x16"),
        ],
    )


def test_the_bias_dtype_is_not_part_of_the_key():
    """A row with a bias answers for a bias of any dtype, as AITER's key does."""
    biased = attrs.evolve(row("k"), shape=asked(epilogue="bias"))
    assert found(Table(OP, [[biased]]), asked(epilogue="bias", bias_dtype="fp32")) == [("k", "exact")]


def test_layers_rank_by_precedence_not_time():
    """An earlier layer wins, then the lower time; a finer row of a lower layer beats a coarser one."""
    above = [row("slow above", us=9.0), row("fast above", us=8.0), row("padded above", 32, us=0.5)]
    below = [row("below", us=1.0), row("exact below", 17, us=7.0)]
    table = Table(OP, [above, below])
    assert [name for name, _ in found(table, asked(16))] == ["fast above", "slow above", "below"]
    assert [name for name, _ in found(table, asked(17))] == ["exact below", "padded above"]


def test_ties_go_by_rank():
    """Of equal times the libtype of the better rank wins, torch last, in whatever order the file has them."""
    rows = [attrs.evolve(row("k"), solution=Solution(libtype, "k")) for libtype in ("torch", "someone", "triton", "asm")]
    for order in (rows, rows[::-1]):
        matches = Table(OP, [order]).candidates(asked(), H200)
        assert [match.row.solution.libtype for match in matches] == ["asm", "triton", "someone", "torch"]


def test_another_device_of_the_same_kind_comes_last():
    """Rows of H100 serve H200, which shares sm_90 and 132 SMs, after all its and unnamed rows."""
    rows = [
        row("h100 exact", 17, 1.0, device=H100.name),
        row("h200 coarse", 32, 9.0, device=H200.name),
        row("unnamed coarse", 32, 8.0),
        row("h100 pin", 0, 1.0, device=H100.name),
        row("other count", 17, 1.0, cu_num=114),
        row("other gfx", 17, 1.0, gfx="gfx942"),
    ]
    matches = list(Table(OP, [rows]).candidates(asked(17), H200))
    assert [(match.row.solution.kernel_name, match.same_device) for match in matches] == [
        ("unnamed coarse", True),
        ("h200 coarse", True),
        ("h100 pin", False),
        ("h100 exact", False),
    ]
    assert [name for name, _ in found(Table(OP, [rows]), asked(17), H100)] == ["h100 pin", "h100 exact", "unnamed coarse", "h200 coarse"]


def test_the_most_similar_product_comes_first():
    """Of rows of two other products those with more similar memory serve, whatever their times."""
    rows = [row("h100", us=9.0, device=H100.name), row("h200", us=1.0, device=H200.name), row("unknown", us=0.5, device="nvidia-x")]
    for name, expected in (
        ("nvidia-h800", ["h100", "h200", "unknown"]),
        ("nvidia-h100-nvl", ["h100", "h200", "unknown"]),
        ("nvidia-gh200-144g-hbm3e", ["h200", "h100", "unknown"]),
        ("nvidia-y", ["unknown", "h200", "h100"]),
    ):
        matches = list(Table(OP, [rows]).candidates(asked(), Device("sm_90", 132, name)))
        assert [match.row.solution.kernel_name for match in matches] == expected, name
        assert not any(match.same_device for match in matches)
        assert "measured on nvidia-h200 (4800 GB/s)" in next(match.why for match in matches if match.row.device == H200.name)


def test_rows_keyed_by_pairs_of_compute_units_are_named():
    """A row with HIP's count of an RDNA device serves no call, and the message has both counts."""
    table = Table(OP, [[row("old", gfx="gfx1201", cu_num=32)], [row("aiters", n=640, gfx="gfx1201", cu_num=64)]])
    device = Device("gfx1201", 64, "amd-radeon-rx-9070-xt")
    assert found(table, asked(n=640), device) == [("aiters", "exact")]
    assert found(table, asked(), device) == []
    assert table.elsewhere(asked(), device).endswith("has this shape for gfx1201, 32 CUs; this device has 64")


def test_a_row_without_gfx_serves_any():
    """A legacy row of unknown architecture answers wherever its CU count fits."""
    table = Table(OP, [[row("legacy", gfx="", cu_num=120)]])
    assert found(table, asked(), Device("gfx1100", 120)) == [("legacy", "exact")]
    assert found(table, asked(), Device("gfx1100", 121)) == []


def test_a_repeated_row_is_offered_once():
    """A solution in two layers is tried once for one device, and again for another library version."""
    layers = [[row("k", us=2.0, libver="1")], [row("k", us=1.0, libver="1"), row("k", us=1.0, libver="2")]]
    matches = list(Table(OP, layers).candidates(asked(), H200))
    assert [match.row.libver for match in matches] == ["1", "2"]
    assert isinstance(matches[0], Match)


def test_broken_files_are_left_out(tmp_path, monkeypatch, caplog, shipped):
    """Broken files of any layer are logged once each and kept as problems; good ones still load."""
    user, good = tmp_path / "home" / OP.columns.tuned_file, tmp_path / "good.csv"
    user.parent.mkdir()
    user.write_bytes(b"\x00\x01")
    shipped.mkdir()
    (shipped / OP.columns.tuned_file).write_text("M,N,K\n1,2,3\n")
    write_rows(good, OP, [row("good"), row("idle", 32, us=0.0), row("idle", 64, us=0.0)])
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", f"{tmp_path}/missing.csv:{good}:default")
    with caplog.at_level(logging.WARNING, "tunedgemm"):
        table = Table.load(OP)
    assert found(table, asked()) == [("good", "exact")]
    reasons = " ".join(map(str, table.problems))
    assert all(text in reasons for text in ("missing.csv: no such file", "not a text file", "lacks the column", "good.csv:3", "good.csv:4"))
    assert len(caplog.messages) == 4


def test_a_broken_file_above_is_an_error(tmp_path):
    """A file that was named explicitly is not skipped silently."""
    with pytest.raises(TableError, match="no such file"):
        Table.load(OP, above=[tmp_path / "missing.csv"])


def test_absent_default_files_are_fine(caplog):
    """Without any table there are no rows, no problems and no words."""
    table = Table.load(OP)
    assert (table.rows, table.problems, found(table, asked()), caplog.messages) == ((), (), [], [])


def test_fingerprint_depends_only_on_the_rows_in_effect(tmp_path):
    """Paths, order in files and rows that never answer do not change the fingerprint."""
    rows = [row("a", us=1.0), row("b", us=2.0), row("c", 32), row("pin", 0)]
    first, second = tmp_path / "first.csv", tmp_path / "elsewhere" / "second.csv"
    write_rows(first, OP, rows)
    write_rows(second, OP, [*reversed(rows), row("never", us=0.0)])
    fingerprint = Table.load(OP, above=[first]).fingerprint()
    assert Table.load(OP, above=[second]).fingerprint() == fingerprint
    assert Table(OP, [rows[:1], rows]).fingerprint() == fingerprint
    assert len(bytes.fromhex(fingerprint)) == 32
    changes = [
        rows[:-1],
        [row("a", us=3.0), *rows[1:]],
        [row("x", us=1.0), *rows[1:]],
        [attrs.evolve(rows[0], libver="2"), *rows[1:]],
        [attrs.evolve(rows[0], device="nvidia-h200"), *rows[1:]],
        [attrs.evolve(rows[0], cu_num=114), *rows[1:]],
        [attrs.evolve(rows[0], solution=Solution("triton", "a", 2)), *rows[1:]],
    ]
    assert len({fingerprint, *(Table(OP, [changed]).fingerprint() for changed in changes)}) == 1 + len(changes)


def test_fingerprint_is_equal_in_another_process(tmp_path, child, monkeypatch):
    """Ranks agree on the fingerprint, whatever seed their hashes have."""
    file = tmp_path / "t.csv"
    write_rows(file, OP, [row(f"k{n}", n=64 * n) for n in range(1, 40)])
    monkeypatch.setenv("AITER_CONFIG_GEMM_BF16", str(file))  # the shipped tables stay out of both processes
    source = "from tunedgemm.ops import op_named; from tunedgemm.table.lookup import Table\n"
    printed = child(source + "print(Table.load(op_named('a16w16')).fingerprint())")
    assert printed == Table.load(OP).fingerprint()


def test_reading_needs_neither_torch_nor_pandas(tmp_path, child):
    """Tables are read, looked up and written without torch, pandas or pluggy."""
    file = tmp_path / "t.csv"
    write_rows(file, OP, [row("k")])
    source = f"""
import json, sys
from pathlib import Path
from tunedgemm.table.csvfile import upsert
from tunedgemm.device import Device
from tunedgemm.ops import op_named
from tunedgemm.table.lookup import Table
op = op_named("a16w16")
table = Table.load(op, above=[Path({str(file)!r})])
upsert(Path({str(file)!r}), op, table.rows)
found = [match.granularity for match in table.candidates(table.rows[0].shape, Device("sm_90", 132))]
print(json.dumps([found, sorted({{"torch", "pandas", "pluggy"}} & set(sys.modules))]))
"""
    assert json.loads(child(source)) == [["exact"], []]


@pytest.mark.parametrize("differing", ["kernels", "times", "nothing"])
def test_many_rows_of_one_key_are_parsed_as_they_are_asked_for(tmp_path, monkeypatch, differing):
    """The first answer parses a few of a key's rows, the rest come in few batches, none is lost."""
    count, batches = 5000, []
    parse = index.RowSource._parse
    monkeypatch.setattr(index.RowSource, "_parse", lambda source, some: batches.append(len(some)) or parse(source, some))
    names = ["k" if differing == "nothing" else f"k{number}" for number in range(count)]
    rows = [row(name, us=5.0 + number * 1e-3 * (differing == "times")) for number, name in enumerate(names)]
    write_rows(tmp_path / "t.csv", OP, rows)
    table = Table.load(OP, above=[tmp_path / "t.csv"])

    answers = table.candidates(asked(), H200)
    assert next(answers).row.solution.kernel_name == names[0]
    assert sum(batches) <= 20
    assert len([*answers]) == len({*names}) - 1
    assert len(batches) <= 20
    assert table.fingerprint() == Table.load(OP, above=[tmp_path / "t.csv"]).fingerprint()


@pytest.mark.skipif(not (Path(__file__).parents[3] / "shared" / "aiter").is_dir(), reason="AITER's tables are not here")
def test_aiters_rows_answer_their_shapes():
    """Every valid row of AITER's tables, loaded together, answers for its shape and device."""
    configs = Path(__file__).parents[3] / "shared" / "aiter" / "configs"
    files = [configs / "bf16_tuned_gemm.csv", *sorted((configs / "model_configs").glob("*bf16_tuned_gemm.csv"))]
    table = Table.load(OP, above=files)
    valid = [entry for entry in table.rows if entry.valid]
    assert len(valid) > 600
    for entry in valid:
        matches = list(table.candidates(entry.shape, Device(entry.gfx, entry.cu_num, "any")))
        best = matches[0].row
        assert (best.shape, best.us <= entry.us) == (entry.shape, True)
        assert entry.solution in [match.row.solution for match in matches]


def test_a_frame_holds_every_row_with_numbers_as_numbers(tmp_path):
    """The table answers questions in pandas: each row, its numbers and where it was read."""
    file = tmp_path / "t.csv"
    write_rows(file, OP, [row("slow", n=64), row("quick", n=128)])

    frame = Table.load(OP, above=[file]).to_frame()

    assert list(frame.kernelName) == ["slow", "quick"]
    assert frame.N.sum() == 192
    assert frame.us.dtype.kind == "f"
    assert set(frame.source) == {str(file)}


def test_a_table_of_other_devices_says_whose_it_is():
    """A table of other devices names them; one with rows for any device, or without rows, does not.

    A row of this gfx and another of this cu_num make no row for this device.
    """
    rows = [row("k"), row("k", gfx="gfx942", cu_num=80)]
    table = Table(OP, [rows])

    assert table.foreign(Device("gfx950", 256)) == table.foreign(Device("gfx942", 304)) == "gfx942/80, sm_90/132"
    assert table.foreign(Device("gfx942", 132)) == table.foreign(Device("sm_90", 80)) == "gfx942/80, sm_90/132"
    assert table.foreign(H200) == table.foreign(Device("gfx942", 80)) == ""
    assert Table(OP, [[*rows, row("k", gfx="", cu_num=0)]]).foreign(Device("gfx942", 304)) == ""
    assert Table(OP, [[]]).foreign(H200) == ""


def test_a_named_table_of_other_devices_is_logged_once(tmp_path, monkeypatch, caplog):
    """A file of the variable whose rows are all for other devices; a file with a row for this one is not."""
    for name, units in (("there", 80), ("here", 132)):
        path = tmp_path / f"{name}.csv"
        write_rows(path, OP, [row("k", cu_num=units)])
    monkeypatch.setenv(OP.columns.variable, f"{tmp_path}/there.csv{os.pathsep}{tmp_path}/here.csv")
    table = Table.load(OP)

    for _ in range(2):
        table.warn_of_foreign_files(H200)

    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"a table that serves no call: {tmp_path}/there.csv: no row for sm_90, 132 SMs")
    assert message.endswith("its rows are for sm_90/80")


def test_the_row_of_another_device_is_named(faults_of):
    """A row of the same gfx comes first, then one of the nearest cu_num; M is as looked up."""
    rows = [
        row("k", gfx=gfx, cu_num=units, line=line)
        for line, (gfx, units) in enumerate([("gfx950", 304), ("gfx942", 80), ("gfx942", 228)], 2)
    ]
    table = Table(OP, [rows])
    shape = rows[0].shape

    def check(gfx, units, line, said):
        text = table.elsewhere(shape, Device(gfx, units))
        assert text == (f"{rows[line - 2].source}:{line} has this shape for {said}" if line else "")

    assert not faults_of(
        check,
        [
            ("gfx942", 304, 4, "gfx942, 228 CUs; this device has 304"),
            ("gfx942", 100, 3, "gfx942, 80 CUs; this device has 100"),
            ("gfx90a", 104, 3, "gfx942, 80 CUs; this device has gfx90a, 104"),
        ],
    )
    assert table.elsewhere(attrs.evolve(shape, k=shape.k + 1), Device("gfx942", 304)) == ""
    below = attrs.evolve(shape, m=shape.m - 1)
    assert f"has M={shape.m}, which serves this shape, for gfx942, 228 CUs" in table.elsewhere(below, Device("gfx942", 304))

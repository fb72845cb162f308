"""AITER's file of online tuning: the rows that count, and the switch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Shape, Solution
from tunedgemm_hipblaslt import onlinefile
from tunedgemm_hipblaslt.limits import SHUFFLED_LAYOUT, make_problem
from tunedgemm_hipblaslt.onlinefile import FILE, OnlineRow, find_row, is_switched_on, make_key, read

#: AITER's header, with blanks; rows have none (gradlib/csrc/hipbsolgemm.cu, append_hip_tuning_csv).
HEADER = (
    "preshuffle, use_rowwise, trans_a, trans_b, m, n, k, A_data_type, lda, stride_a, B_data_type, ldb, stride_b, "
    "C_data_type, ldc, stride_c, compute_type, batch_count, algo_index, kernel_name"
)
KERNEL = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT16x16x1"
VERSION = "hipblaslt 100200 fake0001"
PLAIN = Shape("a16w16", 5, 48, 128)
FP8 = Shape("a8w8", 5, 48, 128, dtype="fp8_e4m3fnuz", outdtype="bf16", scale="row")
#: Shape, preshuffle and use_rowwise, types of A and C.
KEYS = [
    (PLAIN, "false,false", ("bf16_r", "bf16_r")),
    (attrs.evolve(PLAIN, outdtype="fp32"), "false,false", ("bf16_r", "f32_r")),
    (attrs.evolve(PLAIN, dtype="fp16", outdtype="fp16"), "false,false", ("f16_r", "f16_r")),
    (attrs.evolve(PLAIN, dtype="fp32", outdtype="fp32"), "false,false", ("f32_r", "f32_r")),
    (attrs.evolve(PLAIN, layout=SHUFFLED_LAYOUT), "true,false", ("bf16_r", "bf16_r")),
    (FP8, "false,true", ("f8_e4m3_fnuz_r", "bf16_r")),
    (attrs.evolve(FP8, scale="tensor"), "false,false", ("f8_e4m3_fnuz_r", "bf16_r")),
    (attrs.evolve(FP8, op="a8w8_bpreshuffle", layout=SHUFFLED_LAYOUT), "true,true", ("f8_e4m3_fnuz_r", "bf16_r")),
]


def find_index(problem: Any, libver: str) -> int | None:
    """Return the index of the row that answers."""
    row = find_row(problem, libver)
    return None if row is None else row.index


def make_row(
    index: int, libver: str = "", *, start: str = "false,false", types: tuple[str, str] = ("bf16_r", "bf16_r"), m: int = 48,
    kernel: str = "",
) -> str:  # fmt: skip
    """Return AITER's row for [5, 48, 128]: its m is our N; *libver* is our 21st column."""
    a, out = types
    text = f"{start},T,N,{m},5,128,{a},128,0,{a},128,0,{out},48,0,f32_r,1,{index},{kernel}"
    return f"{text},{libver}" if libver else text


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty working folder and an empty user folder, with online tuning on."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HIP_ONLINE_TUNING", "1")
    monkeypatch.chdir(tmp_path / "work")
    onlinefile.read.cache_clear()
    return tmp_path


def write(folder: Path, *lines: str) -> Path:
    """Write a file with AITER's header, to be read anew."""
    (folder / FILE).write_text("\n".join([HEADER, *lines]) + "\n")
    onlinefile.read.cache_clear()
    return folder / FILE


def test_rows_match_aiters_format(folders: Path) -> None:
    """A row in AITER's format with a version gives the index for its product alone."""
    for shape, start, types in KEYS:
        write(folders / "work", make_row(1003, VERSION, start=start, types=types))
        assert find_index(make_problem(shape), VERSION) == 1003, shape
        assert find_index(make_problem(attrs.evolve(shape, m=6)), VERSION) is None, shape
        assert find_index(make_problem(attrs.evolve(shape, n=64)), VERSION) is None, shape


def test_products_that_aiter_does_not_tune() -> None:
    """int8, batches and OCP fp8 have no key."""
    for shape in (
        attrs.evolve(FP8, dtype="int8"),
        Shape("batched_bf16", 5, 48, 128, extra={"B": 3}),
        attrs.evolve(FP8, dtype="fp8_e4m3fn"),
    ):
        assert make_key(make_problem(shape)) is None, shape
        assert find_index(make_problem(shape), VERSION) is None, shape


def test_the_key_has_aiters_columns() -> None:
    """The key has the header's first 18 columns in order."""
    key = make_key(make_problem(PLAIN))
    assert key is not None
    assert len(key) == 18
    assert dict(zip(HEADER.replace(" ", "").split(","), key, strict=False)) == {
        "preshuffle": "false", "use_rowwise": "false", "trans_a": "T", "trans_b": "N", "m": "48", "n": "5", "k": "128",
        "A_data_type": "bf16_r", "lda": "128", "stride_a": "0", "B_data_type": "bf16_r", "ldb": "128", "stride_b": "0",
        "C_data_type": "bf16_r", "ldc": "48", "stride_c": "0", "compute_type": "f32_r", "batch_count": "1",
    }  # fmt: skip


def test_rows_without_a_version(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows with neither version nor name are ignored with one warning; other versions miss."""
    path = write(
        folders / "work",
        make_row(1003),
        make_row(1004, m=64),
        make_row(1005, "hipblaslt 100100 fake0001"),
        make_row(1006, kernel="<unknown>") + ",",
    )
    with caplog.at_level(logging.WARNING, logger="tunedgemm"):
        assert [find_index(make_problem(PLAIN), VERSION) for _ in range(3)] == [None] * 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: rows with no hipBLASLt version and no kernel name are ignored (got 3); tune those shapes instead"
    ]
    assert find_index(make_problem(PLAIN), "hipblaslt 100100 fake0001") == 1005


def test_malformed_lines(folders: Path) -> None:
    """Malformed lines are skipped, and the others are read."""
    complete = make_row(1003, VERSION)
    truncated = [complete[:end] for end in range(0, len(make_row(1003)) - 1, 7)]
    broken = [
        "",
        "# a comment, with, commas",
        ",",
        "," * 30,
        "\x00" * 40,
        '"' + make_row(1008),
        *(complete.replace("1003", text) for text in ("-1", "x")),
    ]
    write(folders / "work", *truncated, *broken, make_row(1007, VERSION, m=64), *truncated, complete)
    kept = {key: [(row.index, row.libver) for row in rows] for key, rows in read(folders / "work" / FILE).items()}
    assert kept == {
        tuple(complete.split(",")[:18]): [(1003, VERSION)],
        tuple(make_row(1007, m=64).split(",")[:18]): [(1007, VERSION)],
    }


def test_other_headers(folders: Path) -> None:
    """Files with another header, without one or with binary bytes are read."""
    path = folders / "work" / FILE
    for header in ("b" + HEADER, "", "\ufeff" + HEADER):
        path.write_text(f"{header}\n{make_row(1003, VERSION)}\n")
        onlinefile.read.cache_clear()
        assert find_index(make_problem(PLAIN), VERSION) == 1003
    path.write_bytes(b"\xff\xfe\x00" * 9 + b"\n" + make_row(1004, VERSION).encode())
    onlinefile.read.cache_clear()
    assert find_index(make_problem(PLAIN), VERSION) == 1004


def test_precedence(folders: Path) -> None:
    """The working folder comes before the user folder, and the first of equal rows wins."""
    write(folders / "home", make_row(1001, VERSION), make_row(1002, VERSION, m=64))
    assert find_index(make_problem(PLAIN), VERSION) == 1001
    write(folders / "work", make_row(1003, VERSION))
    assert find_index(make_problem(PLAIN), VERSION) == 1003
    assert find_index(make_problem(attrs.evolve(PLAIN, n=64)), VERSION) is None, "the output has another leading dimension"
    write(folders / "work", make_row(1003, VERSION), make_row(1005, VERSION))
    assert find_index(make_problem(PLAIN), VERSION) == 1003


def test_the_switch(folders: Path, backends: dict[str, Any], harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file counts only where HIP_ONLINE_TUNING is on."""
    write(folders / "work", make_row(1003, VERSION))
    for value, on in (("1", True), ("true", True), ("True", True), ("0", False), ("", False), ("2", True), ("enable", False)):
        monkeypatch.setenv("HIP_ONLINE_TUNING", value)
        assert is_switched_on() is on, value
        answer = backends["hipblaslt"].heuristic_fallback(PLAIN, harness.CPU)
        assert answer == (Solution("hipblaslt", "sol1003_v100200_fake0001") if on else None), value
    monkeypatch.delenv("HIP_ONLINE_TUNING")
    assert not is_switched_on()


def test_the_row_is_launched(folders: Path, backends: dict[str, Any], harness: Any) -> None:
    """The index of a row binds and is right; an unlisted one leaves the call to the library."""
    lt = backends["hipblaslt"]
    write(folders / "work", make_row(1003, VERSION), make_row(9999, VERSION, start="true,false"))
    answer = lt.heuristic_fallback(PLAIN, harness.CPU)
    assert not harness.make_case(PLAIN).launch_fault(harness.bind(lt, answer.kernel_name, PLAIN))
    assert lt.heuristic_fallback(attrs.evolve(PLAIN, layout=SHUFFLED_LAYOUT), harness.CPU).kernel_name == "heuristic"


def test_rows_of_aiter_are_verified_by_name(
    folders: Path, backends: dict[str, Any], harness: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A row of AITER's runs if the library has its kernel; else the reason is logged once."""
    lt, shuffled = backends["hipblaslt"], attrs.evolve(PLAIN, layout=SHUFFLED_LAYOUT)
    path = write(
        folders / "work",
        make_row(1002, kernel=KERNEL),  # the index of another build: kernel 1 has 1002 and 1003 here
        make_row(4711, kernel=f"{KERNEL}999", start="true,false"),
    )
    row = find_row(make_problem(PLAIN), VERSION)
    assert row == OnlineRow(1002, KERNEL, "", f"{path}:2")
    answer = lt.heuristic_fallback(PLAIN, harness.CPU)
    assert (answer, answer.solidx) == (Solution("hipblaslt", KERNEL), 1002)
    assert not harness.make_case(PLAIN).launch_fault(harness.bind(lt, answer.kernel_name, PLAIN))
    with caplog.at_level(logging.WARNING, logger="tunedgemm"):
        assert {lt.heuristic_fallback(shuffled, harness.CPU) for _ in range(3)} == {Solution("hipblaslt", "heuristic")}
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}:3: a row that is not used: kernelName: the library lists no algorithm {KERNEL}999 for this shape"
    ]


def test_the_file_is_hipblaslts(folders: Path, backends: dict[str, Any], harness: Any) -> None:
    """cuBLASLt and absent devices ignore the file."""
    write(folders / "work", make_row(1003, VERSION), make_row(1003, "cublaslt 130100"))
    assert backends["cublaslt"].heuristic_fallback(PLAIN, harness.CPU) is None
    assert backends["hipblaslt"].heuristic_fallback(PLAIN, harness.MI300) is None


@pytest.mark.parametrize("index", ["9" * 5000, "\u0663", "-1", "1.5", ""])
def test_an_index_that_cannot_be_one_is_skipped(tmp_path: Path, index: str) -> None:
    """A line without an index that the library could have is passed over, as its header is."""
    cells = ["false"] * 18
    (tmp_path / FILE).write_text(",".join([*cells, index, KERNEL, VERSION]) + "\n" + ",".join([*cells, "7", KERNEL, VERSION]) + "\n")

    assert [row.index for rows in read(tmp_path / FILE).values() for row in rows] == [7]


def test_an_unsigned_file_has_no_rows(folders: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where signatures are required, the rows of an unsigned file are left out with the reason."""
    path = write(folders / "work", make_row(1003, VERSION))
    assert find_index(make_problem(PLAIN), VERSION) == 1003
    onlinefile.read.cache_clear()
    monkeypatch.setenv("TUNEDGEMM_REQUIRE_SIGNED", "1")
    assert find_index(make_problem(PLAIN), VERSION) is None
    assert f"{path}: unsigned" in caplog.text or "py-minisign" in caplog.text

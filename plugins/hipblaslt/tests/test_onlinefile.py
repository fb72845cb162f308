"""AITER's file of online tuning: which rows are read, for which library, and that it changes nothing where it is switched off."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import attrs
import pytest
from tunedgemm.plugin import Shape, Solution
from tunedgemm_hipblaslt import onlinefile
from tunedgemm_hipblaslt.limits import SHUFFLED_LAYOUT, make_problem
from tunedgemm_hipblaslt.onlinefile import FILE, find_index, make_key, read, switched_on

#: As AITER writes it (gradlib/csrc/hipbsolgemm.cu, append_hip_tuning_csv): blanks in the header, none in the rows, no quotes.
HEADER = (
    "preshuffle, use_rowwise, trans_a, trans_b, m, n, k, A_data_type, lda, stride_a, B_data_type, ldb, stride_b, "
    "C_data_type, ldc, stride_c, compute_type, batch_count, algo_index, kernel_name"
)
KERNEL = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT16x16x256_MI16x16x1"
VERSION = "hipblaslt 100200 fake0001"
PLAIN = Shape("a16w16", 5, 48, 128)
FP8 = Shape("a8w8", 5, 48, 128, dtype="fp8_e4m3fnuz", outdtype="bf16", scale="row")


def row(number: int, libver: str = "", *, start: str = "false,false", types: tuple[str, str] = ("bf16_r", "bf16_r"), m: int = 48) -> str:
    """A row of AITER's for the product [5, 48, 128]: m is the weight's rows there; *libver* is our 21st column."""
    a, out = types
    text = f"{start},T,N,{m},5,128,{a},128,0,{a},128,0,{out},48,0,f32_r,1,{number},{KERNEL}"
    return f"{text},{libver}" if libver else text


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder and an empty user folder, in which AITER would tune."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("TUNEDGEMM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HIP_ONLINE_TUNING", "1")
    monkeypatch.chdir(tmp_path / "work")
    onlinefile.read.cache_clear()
    return tmp_path


def write(folder: Path, *lines: str) -> Path:
    (folder / FILE).write_text("\n".join([HEADER, *lines]) + "\n")
    return folder / FILE


@pytest.mark.parametrize(
    ("shape", "start", "types"),
    [
        (PLAIN, "false,false", ("bf16_r", "bf16_r")),
        (attrs.evolve(PLAIN, outdtype="fp32"), "false,false", ("bf16_r", "f32_r")),
        (attrs.evolve(PLAIN, dtype="fp16", outdtype="fp16"), "false,false", ("f16_r", "f16_r")),
        (attrs.evolve(PLAIN, dtype="fp32", outdtype="fp32"), "false,false", ("f32_r", "f32_r")),
        (attrs.evolve(PLAIN, layout=SHUFFLED_LAYOUT), "true,false", ("bf16_r", "bf16_r")),
        (FP8, "false,true", ("f8_e4m3_fnuz_r", "bf16_r")),
        (attrs.evolve(FP8, scale="tensor"), "false,false", ("f8_e4m3_fnuz_r", "bf16_r")),
        (attrs.evolve(FP8, op="a8w8_bpreshuffle", layout=SHUFFLED_LAYOUT), "true,true", ("f8_e4m3_fnuz_r", "bf16_r")),
    ],
    ids=str,
)
def test_rows_are_aiters(shape: Shape, start: str, types: tuple[str, str], folders: Path) -> None:
    """A row in AITER's exact format, with the version behind it, names the number for its product and for no other."""
    write(folders / "work", row(1003, VERSION, start=start, types=types))
    assert find_index(make_problem(shape), VERSION) == 1003
    assert find_index(make_problem(attrs.evolve(shape, m=6)), VERSION) is None
    assert find_index(make_problem(attrs.evolve(shape, n=64)), VERSION) is None


@pytest.mark.parametrize(
    "shape",
    [
        attrs.evolve(FP8, dtype="int8"),
        Shape("batched_bf16", 5, 48, 128, extra={"B": 3}),
        attrs.evolve(FP8, dtype="fp8_e4m3fn"),
    ],
    ids=str,
)
def test_products_that_aiter_does_not_tune(shape: Shape) -> None:
    """int8, batches and the standard fp8 have no key there."""
    assert make_key(make_problem(shape)) is None
    assert find_index(make_problem(shape), VERSION) is None


def test_the_key_has_aiters_columns() -> None:
    """The key's 18 columns are those of the header, in its order."""
    key = make_key(make_problem(PLAIN))
    assert key is not None
    named = dict(zip(HEADER.replace(" ", "").split(","), key, strict=False))
    assert len(key) == 18
    assert named == {
        "preshuffle": "false", "use_rowwise": "false", "trans_a": "T", "trans_b": "N", "m": "48", "n": "5", "k": "128",
        "A_data_type": "bf16_r", "lda": "128", "stride_a": "0", "B_data_type": "bf16_r", "ldb": "128", "stride_b": "0",
        "C_data_type": "bf16_r", "ldc": "48", "stride_c": "0", "compute_type": "f32_r", "batch_count": "1",
    }  # fmt: skip


def test_rows_without_a_version_are_counted_and_not_used(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    """AITER's own rows hold no version: one warning says how many, where, and what to do; a row of another version is no match."""
    path = write(folders / "work", row(1003), row(1004, m=64), row(1005, "hipblaslt 100100 fake0001"), row(1006) + ",")
    with caplog.at_level(logging.WARNING, logger="tunedgemm"):
        assert [find_index(make_problem(PLAIN), VERSION) for _ in range(3)] == [None] * 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: rows without a hipBLASLt version are ignored (got 3); tune those shapes instead"
    ]
    assert find_index(make_problem(PLAIN), "hipblaslt 100100 fake0001") == 1005


def test_lines_that_hold_something_else(folders: Path) -> None:
    """Lines that are cut off, empty, comments, of another length or without a number are left out, and the others are read."""
    whole = row(1003, VERSION)
    cut = [whole[:end] for end in range(0, len(row(1003)) - len(KERNEL) - 1, 7)]
    broken = [
        "",
        "# a comment, with, commas",
        ",",
        "," * 30,
        "\x00" * 40,
        '"' + row(1008),
        *(whole.replace("1003", each) for each in ("-1", "x")),
    ]
    write(folders / "work", *cut, *broken, row(1007, VERSION, m=64), *cut, whole)
    assert dict(read(folders / "work" / FILE)) == {
        (VERSION, tuple(whole.split(",")[:18])): 1003,
        (VERSION, tuple(row(1007, m=64).split(",")[:18])): 1007,
    }


def test_the_header_of_other_versions(folders: Path) -> None:
    """A file whose header starts as AITER's reader expects it, one without any, and bytes that are no text are read."""
    path = folders / "work" / FILE
    for head in ("b" + HEADER, "", "\ufeff" + HEADER):
        path.write_text(f"{head}\n{row(1003, VERSION)}\n")
        onlinefile.read.cache_clear()
        assert find_index(make_problem(PLAIN), VERSION) == 1003
    path.write_bytes(b"\xff\xfe\x00" * 9 + b"\n" + row(1004, VERSION).encode())
    onlinefile.read.cache_clear()
    assert find_index(make_problem(PLAIN), VERSION) == 1004


def test_which_file_and_which_row(folders: Path) -> None:
    """The working folder comes before the user folder, product by product."""
    write(folders / "home", row(1001, VERSION), row(1002, VERSION, m=64))
    assert find_index(make_problem(PLAIN), VERSION) == 1001
    write(folders / "work", row(1003, VERSION))
    onlinefile.read.cache_clear()
    assert find_index(make_problem(PLAIN), VERSION) == 1003
    assert find_index(make_problem(attrs.evolve(PLAIN, n=64)), VERSION) is None, "the leading dimension of the output is another"
    write(folders / "work", row(1003, VERSION), row(1005, VERSION))
    onlinefile.read.cache_clear()
    assert find_index(make_problem(PLAIN), VERSION) == 1003, "the first of two, as in AITER"


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("True", True), ("0", False), ("", False), ("yes", False)])
def test_the_switch(value: str, on: bool, folders: Path, backends: dict[str, Any], over: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file counts with HIP_ONLINE_TUNING of 1 or true; else an untuned call stays as it is."""
    monkeypatch.setenv("HIP_ONLINE_TUNING", value)
    write(folders / "work", row(1003, VERSION))
    assert switched_on() is on
    answer = backends["hipblaslt"].heuristic_fallback(PLAIN, over.CPU)
    assert answer == (Solution("hipblaslt", "sol1003_v100200_fake0001") if on else None)


def test_the_switch_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable nothing is read."""
    monkeypatch.delenv("HIP_ONLINE_TUNING")
    assert not switched_on()


def test_the_row_is_launched(folders: Path, backends: dict[str, Any], over: Any) -> None:
    """The number of a row binds and is right; a number that this library does not list is refused, not launched."""
    lt = backends["hipblaslt"]
    write(folders / "work", row(1003, VERSION), row(9999, VERSION, start="true,false"))
    answer = lt.heuristic_fallback(PLAIN, over.CPU)
    assert not over.case(PLAIN).launched(over.bound(lt, answer.kernel_name, PLAIN))
    shuffled = attrs.evolve(PLAIN, layout=SHUFFLED_LAYOUT)
    assert "does not list algorithm 9999" in over.refused(lt, lt.heuristic_fallback(shuffled, over.CPU).kernel_name, shuffled)


def test_it_is_hipblaslts_alone(folders: Path, backends: dict[str, Any], over: Any) -> None:
    """cuBLASLt has no numbers; an absent device has no version to compare with."""
    write(folders / "work", row(1003, VERSION))
    assert backends["cublaslt"].heuristic_fallback(PLAIN, over.CPU) is None
    assert backends["hipblaslt"].heuristic_fallback(PLAIN, over.MI300) is None

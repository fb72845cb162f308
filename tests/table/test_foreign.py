"""Foreign: files of other formats are named, with what to do; tables and lists never are."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path

import pytest
from tunedgemm.cli import main
from tunedgemm.errors import TableError
from tunedgemm.ops import op_named, ops
from tunedgemm.table.folders import SHIPPED
from tunedgemm.table.foreign import FORMATS, refuse_foreign
from tunedgemm.table.untuned import Untuned, untuned_text

CSV = "M,N,K\n32,256,512\n"


def zipped(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, "text")
    return file.getvalue()


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("t.csv"))
    return file.getvalue()


#: a word of the format's name -> contents of such files
CONTENTS: dict[str, tuple[bytes | str, ...]] = {
    "TunableOp": (
        "Validator,PT_VERSION,2.9.0\nGemmTunableOp_Half_TN,tn_32000_64_8192,Gemm_Hipblaslt_TN_1,0.1\n",
        "GemmTunableOp_BFloat16_TN,tn_6144_8_2560\n",
        "GemmAndBiasTunableOp_BFloat16_TN,tn_1_2_3\n",
        "ScaledGemmTunableOp_Float8_e4m3fn_TN,tn_1_2_3\n",
        "GemmStridedBatchedTunableOp_float_NT,nt_1_2_3_B_4\n",
    ),
    "hipBLASLt": ("Git Version: a\n transA,transB,m,n,k\n", "transA,transB,grouped_gemm,batch_count,m,n,k\n", "   transA,transB,m\n"),
    "bench": ("hipblaslt-bench --api_method c -m 1 -n 2 -k 3\n", "./rocblas-bench -f gemm_ex --transposeA T\n"),
    "log of AITER": ("[aiter] shape is M:1, N:2, K:3, not found tuned config, will use default config!\n",),
    "vLLM": ('{\n    "1": {"BLOCK_SIZE_M": 16}}', '{"triton_version": "3.6.0", "1": {"BLOCK_SIZE_M": 64}}'),
    "FlashInfer": (
        """{"_metadata": {"gpu_name": "B200"}, "('bf16_gemm', 'R', ((8, 64), (64, 64)))": ["R", 1]}""",
        """{\n  "('fp4_gemm', 'R', ((8, 64),), ())": ["R", [1, 2]]}""",
    ),
    "AITER's configurations": ('{\n  "M_LEQ_64": {"BLOCK_SIZE_M": 64}}', '{"any": {"BLOCK_SIZE_M": 64}}'),
    "trial log": ('{"schema": 1, "shape": {"op": "a16w16"}, "solution": {}, "status": "ok"}\n',),
    "JSON": ("[1, 2]", '\n {"shapes": []}', "{}"),
    "YAML": ("- {MinimumRequiredVersion: 4.33.0}\n- gfx942\n", "---\nshapes:\n", "- rocblas_function: rocblas_gemm_ex\n"),
    "Git LFS": ("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n",),
    "git-annex": ("../.git/annex/objects/aa/bb/MD5E-s1--c.csv", "/annex/objects/MD5E-s1--c.csv\n"),
    "web page": ("<!DOCTYPE html>\n<html>", "<!doctype HTML><title>a</title>", "\n<html lang=en>"),
    "XML": ("<?xml version='1.0'?>", "<Error><Code>AccessDenied</Code></Error>"),
    "sep=": ("sep=,\n" + CSV, '"sep=;"\r\nM;N;K\r\n'),
    "Markdown": ("| M | N | K |\n|---|---|---|\n| 1 | 2 | 3 |\n",),
    "patch": ("diff --git a/t.csv b/t.csv\n", "--- a/t.csv\n+++ b/t.csv\n@@ -1 +1 @@\n"),
    "title": (
        "my tuned gemms\n" + CSV,
        "tuned on MI300X, ROCm 7\n\n# a note\ngfx,cu_num,M,N,K,us\n",
        "experts\ntoken,model_dim,inter_dim\n",
    ),
    "Parquet": (b"PAR1\x15\x04\x15",),
    "Arrow": (b"ARROW1\0\0", b"FEA1\0\0"),
    ".xls)": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",),
    ".xlsx": (zipped("[Content_Types].xml", "xl/workbook.xml"), zipped("_rels/.rels", "xl/styles.xml")),
    "zip": (zipped("t.csv"), zipped("archive/data.pkl")),
    "gzip": (gzip.compress(CSV.encode()),),
    "xz": (lzma.compress(CSV.encode()),),
    "bzip2": (bz2.compress(CSV.encode()),),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\x00",),
    "7-Zip": (b"7z\xbc\xaf\x27\x1c",),
    "tar": (tarred(),),
    "UTF-16": (CSV.encode("utf-16"), CSV.encode("utf-16-le"), CSV.encode("utf-16-be")),
    "UTF-32": (CSV.encode("utf-32"),),
    "SQLite": (b"SQLite format 3\0",),
    "HDF5": (b"\x89HDF\r\n\x1a\n",),
    "NumPy": (b"\x93NUMPY\x01\0",),
    "safetensors": (b'\x40\0\0\0\0\0\0\0{"__metadata__":{}}',),
    "pickle": (pickle.dumps(1, 2), pickle.dumps([1], 4)),
    "PDF": (b"%PDF-1.7\n",),
    "ELF": (b"\x7fELF\x02\x01",),
    "Python": ("import torch\n", "from a import b\n"),
}
CASES = [(word, content.encode() if isinstance(content, str) else content) for word, contents in CONTENTS.items() for content in contents]


def test_a_file_of_another_format_is_named(faults_of):
    """The message has the format's name, and a remedy; comments and a byte order mark hide no format."""

    def check(word, content):
        with pytest.raises(TableError) as raised:
            refuse_foreign(Path("t.csv"), content)
        thing, fault, rest = str(raised.value).split(": ", 2)
        assert (thing, fault) == ("t.csv", "not a table")
        assert word in rest.partition("; ")[0] and rest.partition("; ")[2]
        if content.isascii() and b"\0" not in content:
            with pytest.raises(TableError, match=r"not a table"):
                refuse_foreign(Path("t.csv"), b"\xef\xbb\xbf# a note\n\n" + content)

    assert not faults_of(check, CASES)


def test_each_format_has_a_case():
    """No format is without a file here that it names first."""
    named = {next(known.name for known in FORMATS if known.begins.match(content)) for _, content in CASES}

    assert named == {known.name for known in FORMATS}


@pytest.mark.parametrize(
    "command", [["tune", "-i"], ["table", "check"], ["table", "show"], ["table", "merge", "OUT"], ["explain"], ["coverage"]]
)
def test_every_command_names_the_format(tmp_path, capsys, command):
    """Tables and lists are read in one place: one line on standard error, and exit code 2."""
    path = tmp_path / "t.csv"
    path.write_text("Validator,PT_VERSION,2.9.0\n")
    words = [str(tmp_path / "out.csv") if word == "OUT" else word for word in command]

    code = main([*words, f"{path}:2" if command == ["explain"] else str(path)])

    err = capsys.readouterr().err
    assert code == 2 and "TunableOp" in err and err.count("\n") == 1, err


def test_no_table_or_list_is_taken_for_another_format(faults_of):
    """Every shipped file, and the list of each op's examples in any order of columns."""
    files = [path.read_bytes() for path in SHIPPED.rglob("*.csv")]
    for op in ops().values():
        text = untuned_text(op, [Untuned(shape, layer="a.b") for shape in op.examples if shape.m])
        table = [line.split(",") for line in text.splitlines()]
        files += [text.encode(), *("\n".join(",".join(line[at:] + line[:at]) for line in table).encode() for at in range(len(table[0])))]

    assert not faults_of(lambda content: refuse_foreign(Path("t.csv"), content), [(content,) for content in files])


def test_columns_in_lower_case(tmp_path):
    """The message says how to write them."""
    from tunedgemm.table.untuned import read_untuned

    path = tmp_path / "t.csv"
    path.write_text("m,n,k\n1,2,3\n")

    with pytest.raises(TableError, match=r"spelt otherwise \(got m, n, k\); write M, N, K"):
        read_untuned(path, op_named("a16w16"))

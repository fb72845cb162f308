"""Detect files of other formats by the start of their content. Torch-free.

A signature is a pattern that no header of a table matches, so a new format is one line.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import attrs

from tunedgemm.errors import TableError

#: Bytes at the start of a file in which signatures are searched.
_OPENING = 4096

#: Empty lines and comments before a header.
_BEFORE = re.compile(rb'(?:\xef\xbb\xbf)?(?:[ \t,]*\r?\n|[ \t"]*#[^\n]*\n)*')


def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)


@attrs.frozen
class ForeignFormat:
    """A file format of another program.

    Attributes:
        name: description of the format.
        begins: pattern at the start, after empty lines and comments.
        remedy: what the user can do.
    """

    name: str
    begins: re.Pattern[bytes] = attrs.field(converter=_compiled)
    remedy: str


_SHAPES = "list its shapes with `tunedgemm shapes --from FILE` to tune them here; its solutions serve that program alone"
_CAPTURE = "capture the shapes of the same workload with AITER_TUNE_GEMM=1, or list them in a CSV with the columns M,N,K"
_UNPACK, _SAVE, _LIST = "unpack it, and name the file in it", "save it as CSV in UTF-8", "name a table or a list of shapes"
_TITLED = rb'"?(?:gfx|cu_num|token|M|B)"?,[^\n]*\b(?:N|model_dim)\b'

TUNABLEOP = ForeignFormat("results of PyTorch's TunableOp", rb"Validator,|\w*TunableOp_", _SHAPES)
HIPBLASLT_TUNING = ForeignFormat("a tuning file of hipBLASLt", rb"Git Version: |[^\n]*\btransA,transB,", _SHAPES)
BENCH_LOG = ForeignFormat("a log of calls for rocblas-bench or hipblaslt-bench", rb"(?:\./)?(?:rocblas|hipblaslt)-bench ", _SHAPES)
ENGINE_JSON = ForeignFormat(
    "vLLM's or SGLang's configurations of Triton kernels in JSON", rb'\s*\{.{0,400}?"(?:BLOCK_SIZE_M|triton_version)"\s*:', _SHAPES
)
FLASHINFER = ForeignFormat("an autotune cache of FlashInfer", rb"\s*\{.{0,2000}?\"\('\w+', '\w+', \(\(", _SHAPES)

#: Known formats; the first that matches wins.
FORMATS = (
    TUNABLEOP,
    HIPBLASLT_TUNING,
    BENCH_LOG,
    ForeignFormat(
        "AITER's configurations of Triton kernels in JSON",
        rb'\s*\{.{0,400}?"(?:M_[LG]EQ_\d+|any|small|large)"\s*:',
        "docs/tuning-triton.md tells which folders such files are read from",
    ),
    ENGINE_JSON,
    FLASHINFER,
    *itertools.starmap(
        ForeignFormat,
        (
            ("a log of AITER", rb"[^\n]*not found tuned config", _CAPTURE),
            (
                "a patch",
                rb"diff --git |--- [^\n]*\n\+\+\+ |From [0-9a-f]{40} ",
                "apply it with `git apply`, and name the file that it changes",
            ),
            ("YAML, as libraries write their logic and their logs", rb"---|%YAML|- [\[{\w]", _CAPTURE),
            ("a trial log", rb'\s*\{"schema": [^\n]*"solution": ', "name its table, or read the log with `tunedgemm report`"),
            ("JSON", rb"\s*[\[{]", f"{_LIST}, which are CSV files"),
            ("a pointer of Git LFS instead of the file", rb"version https://git-lfs\.github\.com/", "run `git lfs pull` in its repository"),
            ("a pointer of git-annex instead of the file", rb"[./]*(?:git)?/annex/objects/", "run `git annex get` in its repository"),
            ("a web page", rb"\s*<(?i:!DOCTYPE html|html|head|body)\b", "download the raw file instead of its page"),
            ("XML", rb"\s*<(?:\?xml|[A-Za-z]+[ >])", _SAVE),
            ("a CSV below a spreadsheet's line sep=", rb'"?sep=', "delete its first line"),
            ("a table in Markdown", rb"\s*\|[^\n]*\|\s*\n\s*\|[ :|-]+\|", "write its fields with commas between them"),
            ("a Parquet file", rb"PAR1", _SAVE),
            ("an Arrow or Feather file", rb"ARROW1|FEA1", _SAVE),
            ("a spreadsheet of old Excel (.xls)", rb"\xd0\xcf\x11\xe0", _SAVE),
            ("a spreadsheet (.xlsx, .ods)", rb"PK\x03\x04.*?(?:\[Content_Types\]\.xml|_rels/|xl/|mimetypeapplication/vnd\.oasis)", _SAVE),
            ("a zip archive, as wheels and files of torch.save are", rb"PK[\x03\x05]", _UNPACK),
            ("a file packed with gzip", rb"\x1f\x8b", f"{_UNPACK}: gunzip"),
            ("a file packed with zstd", rb"\x28\xb5\x2f\xfd", f"{_UNPACK}: unzstd"),
            ("a file packed with xz", rb"\xfd7zXZ\x00", f"{_UNPACK}: unxz"),
            ("a file packed with bzip2", rb"BZh[1-9]", f"{_UNPACK}: bunzip2"),
            ("an archive of 7-Zip", rb"7z\xbc\xaf", _UNPACK),
            ("a tar archive", rb".{257}ustar", f"{_UNPACK}: tar -xf"),
            ("text in UTF-32", rb"\xff\xfe\x00\x00|\x00\x00\xfe\xff", _SAVE),
            ("text in UTF-16", rb"\xff\xfe|\xfe\xff|[ -~]\x00[ -~]\x00|\x00[ -~]\x00[ -~]", _SAVE),
            ("a database of SQLite", rb"SQLite format 3\x00", "export its table as CSV in UTF-8"),
            ("an HDF5 file", rb"\x89HDF", _SAVE),
            ("an array of NumPy", rb"\x93NUMPY", _SAVE),
            ("a file of safetensors", rb'.{6}\x00\x00\{"', _LIST),
            ("a pickle of Python, which is never loaded", rb"\x80[\x02-\x05]", _SAVE),
            ("a PDF", rb"%PDF-", _SAVE),
            ("an ELF file: a program, a library or a code object", rb"\x7fELF", _LIST),
            ("Python code", rb"(?:import \w|from [\w.]+ import |def \w+\(|class \w+[(:])", _LIST),
            (
                "a CSV with a title above its header",
                rb"(?:(?!" + _TITLED + rb")[^\n]*\n){1,9}" + _TITLED,
                "begin the lines above the header with #, or delete them",
            ),
        ),
    ),
)


def foreign_format(content: bytes) -> ForeignFormat | None:
    """Return the format of content that is not CSV; None for CSV and for text of no known format."""
    opening = content[:_OPENING]
    before = _BEFORE.match(opening)
    start = before.end() if before else 0
    return next((known for known in FORMATS if known.begins.match(opening, start)), None)


def refuse_foreign(path: Path, content: bytes) -> None:
    """Raise TableError for content in a known format other than CSV."""
    if known := foreign_format(content):
        raise TableError(f"{path}: not a table: {known.name}; {known.remedy.replace('FILE', str(path))}")

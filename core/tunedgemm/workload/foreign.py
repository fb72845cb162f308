"""Read the shapes in other tuners' files as shapes to tune here. Torch-free.

`tunedgemm.table.foreign` recognises the formats. BLAS libraries count columns first: their m is our
N, their n our M, and ``TN`` is a product with a weight [N, K].
"""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

from tunedgemm.errors import UserError
from tunedgemm.ops import op_named
from tunedgemm.process.files import read_regular
from tunedgemm.shape import Shape
from tunedgemm.table.foreign import (
    BENCH_LOG,
    ENGINE_JSON,
    FLASHINFER,
    HIPBLASLT_TUNING,
    TUNABLEOP,
    ForeignFormat,
    foreign_format,
)
from tunedgemm.table.untuned import Untuned

#: Names of dtypes in the libraries' files; fp8 is that of OCP unless named fnuz.
_DTYPES = {
    "BFloat16": "bf16", "Half": "fp16", "float": "fp32", "double": "fp64", "Float8_e4m3fn": "fp8_e4m3fn",
    "Float8_e4m3fnuz": "fp8_e4m3fnuz", "Float8_e5m2": "fp8_e5m2", "Float8_e5m2fnuz": "fp8_e5m2fnuz",
    "bf16_r": "bf16", "f16_r": "fp16", "f32_r": "fp32", "f64_r": "fp64", "h": "fp16", "s": "fp32",
    "d": "fp64", "f8_r": "fp8_e4m3fn", "f8_fnuz_r": "fp8_e4m3fnuz", "i8_r": "int8",
}  # fmt: skip
_OPERATION = re.compile(r"(Gemm|GemmAndBias|GemmStridedBatched|ScaledGemm)TunableOp_(\w+)_([NTC]{2})")
_SIGNATURE = re.compile(r"[ntc]{2}_(\d+)_(\d+)_(\d+)(?:_B_(\d+))?(?:_ld_\d+_\d+_\d+)?(?:_rw_(\d+))?(?:_bias_(\w+))?")
_BLOCKS = re.compile(r"N=(\d+),K=(\d+),.*dtype=fp8_w8a8,block_shape=\[128, ?128\]\.json")
_PROFILE = re.compile(r"\('(\w+)', '\w+', \(\((\d+), (\d+)\), \((\d+), (\d+)\)")
#: FlashInfer's ops with the operands of one of ours.
_FLASHINFER = {"bf16_gemm": "a16w16", "mxfp8_gemm": "a8w8_mxfp8"}
#: hipBLASLt's values of ``scaleA``, also as its bench writes them.
_SCALES = {"": "none", "0": "none", "1": "tensor", "2": "row"}


@attrs.frozen
class _Product:
    """One product of a BLAS library, in its own terms.

    Attributes:
        turned: whether each side is transposed, as ``TN``.
        m, n, k: sizes, as the library counts them.
        dtype, out: dtypes of the operands and of the output, as the file names them.
        batch: products of one call.
        bias: whether a bias is added.
        scale: granularity of the scales.
        other: what it does in addition; "" for nothing.
    """

    turned: str
    m: int
    n: int
    k: int
    dtype: str
    out: str
    batch: int = 1
    bias: bool = False
    scale: str = "none"
    other: str = ""

    def shape(self) -> Shape | str:
        """Return the shape of the op with these operands, or why no op has them."""
        if self.turned.upper() != "TN":
            return f"{self.turned.upper()} products; ops multiply by a weight [N, K], which is TN"
        if self.other or not {self.dtype, self.out} <= set(_DTYPES):
            return self.other or f"products of {self.dtype} to {self.out}"
        dtype, out = _DTYPES[self.dtype], _DTYPES[self.out]
        narrow = dtype.startswith(("fp8", "int8"))
        if narrow is (self.scale == "none") or self.scale not in _SCALES.values() or (self.batch > 1 and narrow):
            return f"products of {dtype} with {self.scale} scales" + (", batched" if self.batch > 1 else "")
        op = "batched_bf16" if self.batch > 1 else "a8w8" if self.scale == "row" else "a16w16"
        own: dict[str, object] = {"dtype": dtype, "scaleAB": self.scale == "tensor"}
        if op != "a16w16":
            own = {"B": self.batch, "dtype": dtype} if self.batch > 1 else {"q_dtype_w": dtype}
        return _parsed(op, {"M": self.n, "N": self.m, "K": self.k, "outdtype": out, "bias": self.bias} | own)


def _parsed(op: str, cells: Mapping[str, object]) -> Shape | str:
    try:
        return op_named(op).columns.parse({column: str(value) for column, value in cells.items()})
    except UserError as error:
        return f"{op}: {error}"


#: Shapes, each as often as it was called, and reasons of products without one.
_Found = Iterator[Shape | str]


def read_foreign(path: Path) -> tuple[str, dict[str, tuple[Untuned, ...]], tuple[str, ...]]:
    """Return the format of another tuner's file, its shapes by op with counts, and notes on the rest.

    Raises:
        UserError: the file cannot be read, is of no such format, or has no shape for an op.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    form = foreign_format(content)
    if form is None or form not in _READERS:
        known = ", ".join(each.name for each in _READERS)
        raise UserError(
            f"{path}: no file of another tuner whose shapes are known (got {form.name if form else 'a CSV or text'}); use {known}"
        )
    counts = Counter(_READERS[form](path, content.decode(errors="replace")))
    notes = tuple(f"{path}: {count} left out: {found}" for found, count in counts.items() if isinstance(found, str))
    by_op: dict[str, list[Untuned]] = {}
    for found, count in counts.items():
        if isinstance(found, Shape):
            by_op.setdefault(found.op, []).append(Untuned(found, count))
    if not by_op:
        raise UserError("; ".join(notes) or f"{path}: has no shape (got {form.name})")
    return form.name, {op: tuple(rows) for op, rows in by_op.items()}, notes


def _tunableop(path: Path, text: str) -> _Found:
    """Read results and untuned lines: ``GemmTunableOp_BFloat16_TN,tn_M_N_K_ld_…``."""
    del path
    for line in text.splitlines():
        name, _, rest = line.partition(",")
        operation, signature = _OPERATION.fullmatch(name.strip()), _SIGNATURE.fullmatch(rest.partition(",")[0].strip())
        if operation and signature:
            m, n, k, batch, by_row, bias = signature.groups()
            dtypes = re.findall("|".join(sorted(_DTYPES, key=len, reverse=True)), operation[2]) or [operation[2]]
            scaled = operation[1] == "ScaledGemm"
            product = _Product(
                operation[3], int(m), int(n), int(k), dtypes[0], dtypes[-1], int(batch or 1),
                operation[1] == "GemmAndBias" or bias not in (None, "None"),
                ("row" if by_row == "1" else "tensor") if scaled else "none",
                "products of two dtypes" if scaled and dtypes[:1] != dtypes[1:2] else "",
            )  # fmt: skip
            yield product.shape()
        elif name.strip() not in ("Validator", ""):
            yield "lines that are none of TunableOp's"


def _tuning_file(_: Path, text: str) -> _Found:
    """Read the CSV of hipBLASLt's tuning, whose header may be repeated."""
    header: list[str] = []
    for cells in csv.reader(text.splitlines(), skipinitialspace=True):
        stripped = [cell.strip() for cell in cells]
        if "transA" in stripped:
            header = stripped
        elif header and len(stripped) == len(header):
            yield _of_library(dict(zip(header, stripped, strict=True)))


def _bench_log(_: Path, text: str) -> _Found:
    """Read the calls that hipBLASLt and rocBLAS log as commands; each line is one call."""
    for line in text.splitlines():
        if "blas" in line and "-bench " in line:
            try:
                words = shlex.split(line[line.index("-bench ") :])
            except ValueError:
                yield "commands that are cut off"
                continue
            pairs = [(word.lstrip("-"), after) for word, after in zip(words, [*words[1:], "-"], strict=True) if word.startswith("-")]
            named = {word: "1" if after.startswith("-") else after for word, after in pairs}  # a flag without a value is set
            named |= {ours: named[theirs] for ours, theirs in (("transA", "transposeA"), ("transB", "transposeB")) if theirs in named}
            yield _of_library(named)


def _of_library(named: Mapping[str, str]) -> Shape | str:
    """Return the shape of hipBLASLt's or rocBLAS's fields, by their names there."""
    missing = [name for name in ("transA", "transB", "m", "n", "k") if not named.get(name)]
    if missing or not all(named[name].isdecimal() for name in ("m", "n", "k", "batch_count") if named.get(name)):
        return f"products without {' and '.join(missing) or 'whole numbers as sizes'}"
    dtype, activation = named.get("a_type") or named.get("r", "s"), named.get("activation_type", "none")
    others = (
        ("products with an activation", activation not in ("none", "")),
        ("products of two dtypes", named.get("b_type", dtype) != dtype),
        ("products with two kinds of scales", named.get("scaleB", named.get("scaleA")) != named.get("scaleA")),
        (
            "products that are scaled or added to",
            any(_number(named.get(name), usual) != usual for name, usual in (("alpha", 1), ("beta", 0))),
        ),
        ("products of swizzled operands", any(named.get(name, "0") not in ("0", "") for name in ("swizzleA", "swizzleB"))),
        ("products in TF32", "xf32" in named.get("compute_type", "")),
        ("groups of products", named.get("grouped_gemm", "0") != "0"),
    )
    return _Product(
        named["transA"] + named["transB"], int(named["m"]), int(named["n"]), int(named["k"]), dtype, named.get("d_type", dtype),
        int(named.get("batch_count") or 1), named.get("bias_vector", "0") not in ("0", ""), _SCALES.get(named.get("scaleA", ""), "other"),
        next((name for name, is_so in others if is_so), ""),
    ).shape()  # fmt: skip


def _number(text: str | None, usual: float) -> float:
    try:
        return float(text or usual)
    except ValueError:
        return math.nan


def _engine_json(path: Path, text: str) -> _Found:
    """Read an engine's configurations, whose name has the sizes and whose keys are M."""
    blocks = _BLOCKS.fullmatch(path.name)
    what = (
        "experts without their hidden size and top-k"
        if path.name.startswith("E=")
        else "products without sizes, or not fp8 by blocks of 128x128"
    )
    for key in _object_of(path, text):
        if key.isdecimal():
            cells = blocks and {"M": key, "N": blocks[1], "K": blocks[2]}
            yield _parsed("a8w8_blockscale", cells) if cells else f"{what}; list the model's shapes with --model_dir"


def _flashinfer(path: Path, text: str) -> _Found:
    """Read FlashInfer's autotune cache, whose keys are an op, a runner and the operands' sizes."""
    for key in _object_of(path, text):
        profile = _PROFILE.match(key)
        if profile and profile[1] in _FLASHINFER and profile[3] in profile.groups()[3:]:
            m, k, rows, columns = profile.groups()[1:]
            op = _FLASHINFER[profile[1]]
            yield _parsed(op, {"M": m, "N": columns if rows == k else rows, "K": k, "outdtype": "bf16"})
        elif not key.startswith("_"):
            yield f"calls of {key.split(',')[0].strip('(')}, whose format the file lacks or no op has"


def _object_of(path: Path, text: str) -> dict[str, object]:
    try:
        loaded = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: broken JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: must be an object of JSON (got {type(loaded).__name__})")
    return loaded


_READERS: dict[ForeignFormat, Callable[[Path, str], _Found]] = {
    TUNABLEOP: _tunableop,
    HIPBLASLT_TUNING: _tuning_file,
    BENCH_LOG: _bench_log,
    ENGINE_JSON: _engine_json,
    FLASHINFER: _flashinfer,
}

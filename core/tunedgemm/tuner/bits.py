"""Measure the bits of a kernel's rows on standard operands, to find bit classes.

Kernels of one class give each row the same bits, whatever M is, which other rows there are and
where the row stands. Equal hashes show that for these operands; only a declared `sum_order` claims
it for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from tunedgemm.backends.launcher import Launcher
from tunedgemm.ops.op import Op
from tunedgemm.ops.scale_order import ROW, scale_order
from tunedgemm.process.plugin_guard import described
from tunedgemm.shape import Shape
from tunedgemm.solution import Unsupported

#: M at which bits are compared: around the edges of tiles, and ragged ones.
SIZES = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 512, 1000, 4096)
#: Different rows of x; row i has content i modulo this prime, so each content meets every place in
#: a tile.
CONTENTS = 17
#: Largest exponent of the pairs of elements that cancel, by dtype: their sums are in magnitude
#: that much above the result, so that a result shows how partial sums were rounded.
_CANCELLING = {"bf16": 10, "fp16": 8, "fp8_e4m3fn": 5, "fp8_e4m3fnuz": 5, "fp8_e5m2": 8, "fp8_e5m2fnuz": 8}
#: Bits of the mantissa by dtype of torch.
_MANTISSA = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 23}
#: Columns of a block of scales: elements cancel inside one.
_BLOCK = 128
_WORD = (1 << 63) - 1

#: Binds a candidate at a shape.
Bind = Callable[[Shape], Launcher | Unsupported]


@attrs.frozen
class Bits:
    """The bits of one kernel's rows.

    Attributes:
        rows: hash of the row of each content; empty if no M ran.
        served: M that the kernel served.
        fault: how the bits of a row depend on M or on its place, or the error of a call; "" if
            they do not.
    """

    rows: tuple[int, ...]
    served: tuple[int, ...]
    fault: str = ""

    @property
    def label(self) -> str:
        """Return the hash of all rows, 16 hexadecimal digits; "" if the bits are in no class."""
        if self.fault or len(self.rows) < CONTENTS:
            return ""
        return hashlib.sha256(",".join(map(str, self.rows)).encode()).hexdigest()[:16]


class StandardOperands:
    """Operands that are equal bit for bit on all devices and in all versions of torch.

    Args:
        op, shape: the op, and a shape of any M.
        device: where the operands are.
        most: largest M.
    """

    def __init__(self, op: Op, shape: Shape, device: torch.device, most: int = SIZES[-1]) -> None:
        self.op, self.shape = op, shape.with_m(most)
        self._operands = list(op.make_inputs(self.shape, device, 0))
        for place in op.weights:
            if place < len(self._operands) and (weight := self._operands[place]) is not None:
                self._fill(place, weight, None)

    def at(self, m: int, first: int = 0) -> tuple[Any, ...]:
        """Return the operands of M rows, of which the first has content *first*."""
        operands = list(self.op.first_rows(self.shape, tuple(self._operands), m))
        for place, operand in enumerate(operands):
            if operand is not None and place not in self.op.weights:
                self._fill(place, operand, (torch.arange(m, device=operand.device) + first) % CONTENTS)
        return tuple(operands)

    def _fill(self, place: int, operand: torch.Tensor, contents: torch.Tensor | None) -> None:
        """Overwrite an operand by values of its place, column and row, or content of the row.

        A shuffled weight and operands of other types keep what `Op.make_inputs` draws.
        """
        if type(operand) is not torch.Tensor or not (operand.is_floating_point() or operand.dtype == torch.int8):
            return
        name = self.op.operands[place]
        is_scale, is_matrix = "scale" in name, name in ("x", "weight")
        if is_scale and scale_order(self.shape) != ROW and contents is not None and operand.dim() != 2:
            return
        rows = operand if operand.dim() == 2 else operand.reshape(-1, 1)
        if rows.data_ptr() != operand.data_ptr() or (not is_matrix and not is_scale and contents is not None):
            return
        by_row = contents is not None and rows.shape[0] == len(contents)
        numbers = contents if by_row and contents is not None else torch.arange(rows.shape[0], device=rows.device)
        values = _values(numbers, rows.shape[1], place, operand.dtype)
        if is_matrix:
            _cancel(values, self.shape, is_x=name == "x")
        _write(rows, values)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return 62 pseudorandom bits of each integer, by integer arithmetic alone."""
    mixed = numbers * 0x2545F4914F6CDD1D + 0x1B873593CC9E2D51
    for shift, factor in ((31, 0x7FB5D329728EA185), (27, 0x01DADEF4BC2DD44D)):
        mixed = (mixed ^ ((mixed & _WORD) >> shift)) * factor
    return (mixed ^ ((mixed & _WORD) >> 33)) & (_WORD >> 1)


def _values(rows: torch.Tensor, columns: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 [rows, columns] that *dtype* holds exactly, of magnitudes from 1/4 to 2.

    int8 gets integers from -127 to 127.
    """
    numbers = rows.reshape(-1, 1) * (columns + 1) + torch.arange(columns, device=rows.device) + (seed << 40)
    bits = _mixed(numbers)
    if dtype == torch.int8:
        return (bits % 255 - 127).float()
    mantissa = 1 << (3 if "e4m3" in str(dtype) else _MANTISSA.get(dtype, 2))
    values = ((bits & (mantissa - 1)) + mantissa).float() / mantissa
    values *= torch.exp2(-((bits >> 30) % 3).float())
    return torch.where((bits >> 40) & 1 == 1, -values, values)


def _cancel(values: torch.Tensor, shape: Shape, *, is_x: bool) -> None:
    """Make most elements of a row cancel with another, at magnitudes up to 2**10 times the others.

    Both factors of a pair are equal but for the sign of x. Pairs lie at all distances; those of
    scaled blocks lie inside one.
    """
    largest = _CANCELLING.get(shape.dtype, 0)
    span = _BLOCK if shape.scale == "block" else shape.k
    whole = shape.k // span * span
    if not largest or whole < 4:
        return
    keys = _mixed(torch.arange(whole, device=values.device) + (7 << 40)).reshape(-1, span)
    order = (keys.argsort(dim=1) + torch.arange(0, whole, span, device=values.device).reshape(-1, 1)).cpu()
    half = span // 2
    left, right = order[:, :half].reshape(-1).to(values.device), order[:, half : 2 * half].reshape(-1).to(values.device)
    exponents = _mixed(left + (9 << 40)) % (largest + 1)
    left, right, exponents = left[exponents > 0], right[exponents > 0], exponents[exponents > 0]
    if is_x:
        values[:, left] *= torch.exp2(exponents.float())
        values[:, right] = -values[:, left]
    else:
        values[:, right] = values[:, left]


def _write(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor, also in dtypes that torch cannot copy to strided memory."""
    target.copy_(values.to(target.dtype))


def measure(operands: StandardOperands, bind: Bind, sizes: Iterable[int] = SIZES) -> Bits:
    """Run a kernel at several M, and hash its rows.

    Args:
        operands: the standard operands of the shape.
        bind: binds the kernel at a shape; a refusal leaves out this M.
        sizes: the M to run.
    """
    rows: dict[int, int] = {}
    served: list[int] = []
    try:
        for m in sizes:
            launcher = bind(operands.shape.with_m(m))
            if isinstance(launcher, Unsupported):
                continue
            for first in range(0, CONTENTS, m) if m < CONTENTS else (0,):
                if fault := _compare(rows, operands, launcher, m, first):
                    return Bits(tuple(rows.values()), tuple(served), fault)
            served.append(m)
    except Exception as error:  # a kernel may raise anything
        return Bits(tuple(rows.values()), tuple(served), described(error))
    return Bits(tuple(rows[content] for content in sorted(rows)), tuple(served))


def _compare(rows: dict[int, int], operands: StandardOperands, launcher: Launcher, m: int, first: int) -> str:
    """Add the hashes of one call's rows; return which row differs from an earlier one, or ""."""
    with torch.no_grad():
        hashes = row_hashes(launcher.call(*operands.at(m, first)), m)
    for place, found in enumerate(hashes):
        content = (first + place) % CONTENTS
        if rows.setdefault(content, found) != found:
            return f"row {place} at M = {m} has other bits than at a smaller M or another place"
    return ""


def row_hashes(out: torch.Tensor, m: int) -> list[int]:
    """Hash the bits of each of the M rows of an output [M, N]."""
    plain = out.detach().reshape(m, -1).contiguous()
    words = plain.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]).to(torch.int64)
    factors = _mixed(torch.arange(words.shape[1], device=words.device) + (11 << 40)) | 1
    return (words * factors).sum(dim=1).tolist()  # type: ignore[no-any-return]

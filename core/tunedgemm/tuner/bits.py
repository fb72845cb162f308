"""Measure the bits of a kernel's rows on standard operands, to find bit classes.

Kernels of one class give each row the same bits, whatever M is, which other rows there are and
where the row stands. Equal hashes show that for these operands; only a declared `sum_order` claims
it for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch

from tunedgemm.backends.launcher import Launcher
from tunedgemm.ops.formats.shuffle import ShuffledWeight, plain_weight, shuffle_weight
from tunedgemm.ops.formats.tensor_bytes import fingerprint, overwrite
from tunedgemm.ops.op import Op
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
#: Bits of the mantissa by dtype of torch; 2 of the others.
_MANTISSA = {
    torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 23, torch.float8_e4m3fn: 3, torch.float8_e4m3fnuz: 3,
}  # fmt: skip
#: Exponent of the largest scale of int8, whose sums are large, so that fp16 holds the products.
_INT8_SCALE = -7
#: Columns of a block of scales: elements cancel inside one.
_BLOCK = 128
#: Elements that are computed at a time: 128 MiB as integers.
_SLICE = 1 << 24
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
        refused: (M, reason) of those that it does not serve.
        raised: whether the fault is an error.
    """

    rows: tuple[int, ...]
    served: tuple[int, ...]
    fault: str = ""
    refused: tuple[tuple[int, str], ...] = ()
    raised: bool = False

    @property
    def label(self) -> str:
        """Return the hash of all rows, 16 hexadecimal digits; "" if the bits are in no class."""
        if self.fault or len(self.rows) < CONTENTS:
            return ""
        return hashlib.sha256(",".join(map(str, self.rows)).encode()).hexdigest()[:16]


class StandardOperands:
    """Operands that are equal bit for bit on all devices and in all versions of torch.

    Those of `fmoe` are what `Op.make_inputs` draws on a CPU.

    Args:
        op, shape: the op, and a shape of any M.
        device: where the operands are.
    """

    def __init__(self, op: Op, shape: Shape, device: torch.device) -> None:
        self.op, self.of, self.shape, self._device = op, shape, shape.with_m(CONTENTS), device
        self._made: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._contents: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}  # by id, with the fingerprint when made
        if op.operands[:2] != ("x", "weight"):
            drawn = op.make_inputs(self.shape, torch.device("cpu"), 0)
            self._operands = tuple(None if operand is None else operand.to(device) for operand in drawn)
            return
        self._operands = op.make_inputs(self.shape, device, 0)
        for place, operand in enumerate(self._operands):
            if operand is not None:
                self._fill(place, operand)

    def at(self, m: int, first: int = 0) -> tuple[Any, ...]:
        """Return the operands of M rows, of which the first has content *first*."""
        if (m, first) not in self._made:
            indices = (torch.arange(m, device=self._device) + first) % CONTENTS
            self._made[m, first] = self.op.some_rows(self.shape, self._operands, indices)
            fresh = {id(each): each for each in self._made[m, first] if each is not None and id(each) not in self._contents}
            self._contents |= {key: (each, fingerprint([each])) for key, each in fresh.items()}
        return self._made[m, first]

    def changed(self) -> bool:
        """Check whether a call has changed operands."""
        tensors, prints = zip(*self._contents.values(), strict=True)
        return fingerprint(tensors) != tuple(part for place in (0, 1) for part in (each[place] for each in prints))

    def _fill(self, place: int, operand: torch.Tensor) -> None:
        """Overwrite an operand by values of its place, row and column."""
        target = plain_weight(operand)
        name, memory = self.op.operands[place], target
        if isinstance(operand, ShuffledWeight):
            target = torch.empty_like(memory)
        rows = target if target.dim() == 2 else target.reshape(-1, target.shape[-1])
        largest_scale = 0 if "scale" not in name else 2 ** (_INT8_SCALE if self.shape.dtype == "int8" else 1)
        pairs = self._pairs(rows) if name in ("x", "weight") else None
        for numbers in torch.arange(rows.shape[0], device=rows.device).split(max(1, _SLICE // rows.shape[1])):
            values = _values(numbers, rows.shape[1], place, operand.dtype, largest_scale)
            if pairs is not None:
                _cancel(values, pairs, is_x=name == "x")
            into = rows[numbers[0] : numbers[0] + len(numbers)]
            overwrite(into, values.to(operand.dtype) if values.is_floating_point() else values.view(operand.dtype))
        if isinstance(operand, ShuffledWeight):
            overwrite(memory, shuffle_weight(target, operand.layout_name))

    def _pairs(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return the columns of pairs of elements that cancel, and their exponents; None if none do.

        Pairs lie at all distances; those of scaled blocks lie inside one. At least every eighth
        does not cancel, so that a short row is not all zeros.
        """
        largest, k, device = _CANCELLING.get(self.shape.dtype, 0), self.shape.k, rows.device
        span = _BLOCK if self.shape.scale == "block" else k
        whole = k // span * span
        if not largest or whole < 4 or rows.shape[1] != k:
            return None
        keys = _mixed(torch.arange(whole, device=device) + (7 << 40)).reshape(-1, span)
        order = keys.argsort(dim=1) + torch.arange(0, whole, span, device=device).reshape(-1, 1)
        left, right = (order[:, first : first + span // 2].reshape(-1) for first in (0, span // 2))
        exponents = _mixed(left + (9 << 40)) % (largest + 1)
        used = (exponents > 0) & (torch.arange(len(left), device=device) % 8 > 0)
        return left[used], right[used], exponents[used]


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return 62 pseudorandom bits of each integer, by integer arithmetic alone."""
    mixed = numbers * 0x2545F4914F6CDD1D + 0x1B873593CC9E2D51
    for shift, factor in ((31, 0x7FB5D329728EA185), (27, 0x01DADEF4BC2DD44D)):
        mixed = (mixed ^ ((mixed & _WORD) >> shift)) * factor
    return (mixed ^ ((mixed & _WORD) >> 33)) & (_WORD >> 1)


def _values(rows: torch.Tensor, columns: int, seed: int, dtype: torch.dtype, largest_scale: float) -> torch.Tensor:
    """Return float32 [rows, columns] that *dtype* holds exactly, of magnitudes from 1/4 to 2.

    int8 gets integers from -127 to 127, and packed 4-bit values any bytes. Scales, for which
    *largest_scale* is not 0, are above 0; e8m0 ones, as bytes, are 2^-7 to 1.
    """
    numbers = rows.reshape(-1, 1) * (columns + 1) + torch.arange(columns, device=rows.device) + (seed << 40)
    bits = _mixed(numbers)
    if dtype == torch.int8:
        return (bits % 255 - 127).to(torch.int8)
    if dtype not in _MANTISSA and dtype not in (torch.float8_e5m2, torch.float8_e5m2fnuz):
        return (bits % 8 + 120 if largest_scale else bits % 256).to(torch.uint8)
    mantissa = 1 << _MANTISSA.get(dtype, 2)
    values = ((bits & (mantissa - 1)) + mantissa).float() / mantissa
    values /= torch.ones_like(bits).bitwise_left_shift((bits >> 30) % 3).float()
    return values * (largest_scale / 2) if largest_scale else torch.where((bits >> 40) & 1 == 1, -values, values)


def _cancel(values: torch.Tensor, pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, is_x: bool) -> None:
    """Make pairs of elements cancel: both factors are equal but for the sign of x."""
    left, right, exponents = pairs
    if is_x:
        values[:, left] *= torch.ones_like(exponents).bitwise_left_shift(exponents).float()
    values[:, right] = -values[:, left] if is_x else values[:, left]


def measure(operands: StandardOperands, bind: Bind, sizes: Iterable[int] = SIZES) -> Bits:
    """Run a kernel at several M, and hash its rows.

    Args:
        operands: the standard operands of the shape.
        bind: binds the kernel at a shape; a refusal leaves out this M.
        sizes: the M to run.
    """
    rows: dict[int, int] = {}
    served: list[int] = []
    refused: list[tuple[int, str]] = []
    fault, raised = "", False
    try:
        for m in sizes:
            launcher = bind(operands.op.canonical(operands.shape.with_m(m)))
            if isinstance(launcher, Unsupported):
                refused.append((m, launcher.reason))
            elif fault := next(_differences(rows, operands, launcher, m), ""):
                break
            else:
                served.append(m)
    except Exception as error:  # a kernel may raise anything
        fault, raised = described(error), True
    return Bits(tuple(rows[content] for content in sorted(rows)), tuple(served), fault, tuple(refused), raised)


def _differences(rows: dict[int, int], operands: StandardOperands, launcher: Launcher, m: int) -> Iterator[str]:
    """Add the hashes of the rows of M; yield which row differs from an earlier one.

    Of a small M, each content is in some call.
    """
    for first in range(0, CONTENTS, m) if m < CONTENTS else (0,):
        with torch.no_grad():
            hashes = row_hashes(launcher.call(*operands.at(m, first)), m)
        for place, found in enumerate(hashes):
            content = (first + place) % CONTENTS
            if rows.setdefault(content, found) != found:
                yield f"row {place} at M = {m} has other bits than at a smaller M or another place"


def row_hashes(out: torch.Tensor, m: int) -> list[int]:
    """Hash the bits of each of the M rows of an output [..., M, N], of all batches together."""
    by_row = out.detach().reshape(-1, m, out.shape[-1]).transpose(0, 1).reshape(m, -1).contiguous()
    words = by_row.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[by_row.element_size()])
    factors = _mixed(torch.arange(words.shape[1], device=words.device) + (11 << 40)) | 1
    parts = words.split(max(1, _SLICE // max(1, words.shape[1])))
    return [found for part in parts for found in (part.to(torch.int64) * factors).sum(dim=1).tolist()]

"""Measure the bits of a kernel's rows on standard operands, to find bit classes.

Kernels of one class give each row the same bits, whatever M is, which other rows there are and
where the row stands. Equal hashes show that for these operands; only a declared `sum_order` claims
it for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import attrs
import torch

from tunedgemm.backends.launcher import Launcher
from tunedgemm.ops.formats.shuffle import ShuffledWeight, plain_weight, shuffle_weight
from tunedgemm.ops.formats.tensor_bytes import fingerprint, overwrite, raw
from tunedgemm.ops.layout import REPACKED
from tunedgemm.ops.moe import local_routing
from tunedgemm.ops.moe_words import BLOCK_ROWS
from tunedgemm.ops.op import Factors, Op
from tunedgemm.ops.scale_order import BLOCK, blocks
from tunedgemm.process.plugin_guard import described
from tunedgemm.shape import Shape
from tunedgemm.solution import Unsupported
from tunedgemm.timing import OTHER_BITS
from tunedgemm.tuner.trial import CONTENTS, SIZES

#: Most calls at an M whose rows were hashed at another one: the others show nothing new.
_CALLS = 4
#: Fault of a kernel whose calls are those of another op.
_OTHER_TABLES = "its bits depend on the tables of another op"
#: Largest exponent of the pairs of elements that cancel, by dtype: their sums are in magnitude
#: that much above the result, so that a result shows how partial sums were rounded.
_CANCELLING = {"bf16": 10, "fp16": 8, "fp8_e4m3fn": 7, "fp8_e4m3fnuz": 7, "fp8_e5m2": 8, "fp8_e5m2fnuz": 8}
#: Exponents of other elements, from 0 down: few bits of a mantissa need more of them, or float32
#: would hold sums exactly, whatever their order.
_EXPONENTS, _EXPONENTS_FP8 = 3, 6
#: Least and largest exponent of a whole block of fp8. Hopper keeps about 14 bits of a block's sum
#: (arXiv 2412.19437, section 3.5.2), so float32 adds blocks of like exponents exactly.
_LEAST, _LARGEST = -3, 7
#: Bits of the mantissa by dtype of torch; 2 of the others.
_MANTISSA = {
    torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 23, torch.float8_e4m3fn: 3, torch.float8_e4m3fnuz: 3,
}  # fmt: skip
#: Exponent of the largest scale of int8, whose sums are large, so that fp16 holds the products.
_INT8_SCALE = -7
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
        others: whether the first rows have other bits than all kernels that serve every M.
        order: the declared order of sums, where the operands do not show it.
    """

    rows: tuple[int, ...]
    served: tuple[int, ...]
    fault: str = ""
    refused: tuple[tuple[int, str], ...] = ()
    raised: bool = False
    others: bool = False
    order: str = ""

    @property
    def detail(self) -> str:
        """Return why the kernel is in no class, or not for every M."""
        reasons = [OTHER_BITS] * self.others + [f"it refuses M = {m}: {reason}" for m, reason in self.refused]
        return self.fault or "; ".join(reasons)

    @property
    def label(self) -> str:
        """Return the hash of all rows, 16 hexadecimal digits; "" if the bits are in no class."""
        if self.fault or self.others or len(self.rows) < CONTENTS:
            return ""
        return hashlib.sha256((",".join(map(str, self.rows)) + self.order).encode()).hexdigest()[:16]


class StandardOperands:
    """Operands that are equal bit for bit on all devices and in all versions of torch.

    Args:
        op, shape: the op, and a shape of any M.
        device: where the operands are.

    Attributes:
        any_m: rows of the kernels that serve every M, see `measure`.
    """

    def __init__(self, op: Op, shape: Shape, device: torch.device) -> None:
        self.op, self.of, self.shape, self._device = op, shape, shape.with_m(CONTENTS), device
        kind, weights, x = (str(dict(shape.extra).get(name, "")) for name in ("q_type", "q_dtype_w", "q_dtype_a"))
        factors = (*op.factors(shape), Factors((0,), (1,)))[0]  # those of a third-party op may be empty
        self._x, self._weight, self._k = factors.activations[0], factors.weights[0], int(getattr(shape, factors.k))
        by_block = kind in BLOCK_ROWS or shape.scale == "block"
        self._int8 = "int8" in (shape.dtype, weights)
        whole, dtype = self._k // BLOCK, x or shape.dtype
        self._in_blocks = not by_block and kind != "per_1x32" and dtype.startswith("fp8") and whole > 1
        self._blocks = _halves(whole, device) if whole > 1 and (by_block or self._in_blocks) else None
        cancels = kind != "per_1x32" and (self._blocks is not None or not by_block)
        self._cancelling = _CANCELLING.get(dtype, 0) if cancels else 0
        self.any_m: set[tuple[int, ...]] = set()
        self._made: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._contents: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}  # by id, with the fingerprint when made
        self._operands = op.make_inputs(self.shape, device, 0)
        for place, operand in enumerate(self._operands):
            if operand is not None and op.roles[place] == "index":
                overwrite(operand, operand.sort().values[_mixed(torch.arange(len(operand), device=device)).argsort()])
            elif operand is not None and (operand.dtype != torch.int32 or place in op.weights):  # packed codes, filled by byte
                self._fill(place, operand)
        if kind:
            _route(self.shape, *self._operands[3:5])

    @property
    def shows_orders(self) -> bool:
        """Check whether elements cancel, so that results show how their sums were rounded.

        They do not in groups that share a scale of 16 or fewer bits, whose scales are unlike.
        """
        scales = (operand for name, operand in zip(self.op.operands, self._operands, strict=False) if "scale" in name)
        grouped = self.of.scale == "block" and any(scale is not None and scale.dtype.itemsize < 4 for scale in scales)
        return self._int8 or (self._cancelling > 0 and not grouped)

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
        plain = plain_weight(operand)
        target = plain.view(torch.uint8) if operand.dtype == torch.int32 else plain
        name, memory = self.op.operands[place], target
        layout = operand.layout_name if isinstance(operand, ShuffledWeight) and operand.layout_name not in REPACKED else ""
        if layout:
            target = torch.empty_like(memory)
        rows = target if target.dim() == 2 else target.reshape(-1, target.shape[-1] if target.dim() else 1)
        by_block = "scale" in name and self._blocks is not None and rows.shape[1] == blocks(self._k)
        largest_scale = 0 if "scale" not in name else 2 ** (_INT8_SCALE if self._int8 else 1)
        pairs = self._pairs(rows) if place in (self._x, self._weight) else None
        exponents = _EXPONENTS_FP8 if not largest_scale and operand.dtype.itemsize == 1 and not self._in_blocks else _EXPONENTS
        for numbers in torch.arange(rows.shape[0], device=rows.device).split(max(1, _SLICE // rows.shape[1])):
            values = _values(numbers, rows.shape[1], place, operand.dtype, largest_scale, exponents)
            if pairs is not None:
                _cancel(values, pairs, is_x=place == self._x, both=self._in_blocks)
            if by_block and self._blocks is not None:  # blocks cancel only at equal scales
                values[:, self._blocks[1]] = values[:, self._blocks[0]]
            values = _shrunk(values, name, self.shape)
            into = rows[numbers[0] : numbers[0] + len(numbers)]
            overwrite(into, values.to(operand.dtype) if values.is_floating_point() else values.view(target.dtype))
        if name[0] in "wb" and target.shape[:1] == (dict(self.shape.extra).get("expert"),):
            experts = raw(target)
            experts[1::2] = experts[: len(target) // 2 * 2 : 2]  # twins, see `_route`
        if layout:
            overwrite(memory, shuffle_weight(target, layout))

    def _pairs(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return the columns of pairs of elements that cancel, and their exponents; None if none do.

        Pairs lie at all distances; those of scaled blocks lie in two blocks of equal scales, and
        those of fp8 in two blocks of an exponent, both factors. At least every eighth does not
        cancel, in fp8 every sixteenth, so that a short row is not all zeros.
        """
        largest, k, device = self._cancelling, self._k, rows.device
        if not largest or k < 4 or rows.shape[1] != k:
            return None
        if self._blocks is None:
            left, right = _halves(k, device)
        else:
            columns = torch.arange(BLOCK, device=device)
            left = (self._blocks[0].reshape(-1, 1) * BLOCK + columns).reshape(-1)
            right = (self._blocks[1].reshape(-1, 1) * BLOCK + torch.cat(_halves(BLOCK, device))).reshape(-1)
        places = torch.arange(len(left), device=device)
        if self._in_blocks:  # the first two at the extremes
            exponents, used = _LEAST + places // BLOCK * (_LARGEST - _LEAST) % (_LARGEST - _LEAST + 1), places % 16 > 0
        else:
            exponents = _mixed(left + (9 << 40)) % (largest + 1)
            used = (exponents > 0) & (places % 8 > 0)
        return left[used], right[used], exponents[used]


def _halves(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two halves of the numbers below *count*, shuffled; an odd one is left out."""
    order = _mixed(torch.arange(count, device=device) + (7 << 40)).argsort()
    return order[: count // 2], order[count // 2 : count // 2 * 2]


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return 62 pseudorandom bits of each integer, by integer arithmetic alone."""
    mixed = numbers * 0x2545F4914F6CDD1D + 0x1B873593CC9E2D51
    for shift, factor in ((31, 0x7FB5D329728EA185), (27, 0x01DADEF4BC2DD44D)):
        mixed = (mixed ^ ((mixed & _WORD) >> shift)) * factor
    return (mixed ^ ((mixed & _WORD) >> 33)) & (_WORD >> 1)


def _values(rows: torch.Tensor, columns: int, seed: int, dtype: torch.dtype, largest_scale: float, exponents: int) -> torch.Tensor:
    """Return float32 [rows, columns] that *dtype* holds exactly.

    Magnitudes have that many *exponents*, from 0 down.

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
    values /= torch.ones_like(bits).bitwise_left_shift((bits >> 30) % exponents).float()
    return values * (largest_scale / 2) if largest_scale else torch.where((bits >> 40) & 1 == 1, -values, values)


def _cancel(values: torch.Tensor, pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, is_x: bool, both: bool) -> None:
    """Make pairs of elements cancel: both factors are equal but for the sign of x.

    x has the exponents, and with *both* the weight, too.
    """
    left, right, exponents = pairs
    if is_x or both:
        values[:, left] *= torch.ones_like(exponents).bitwise_left_shift(exponents - _LEAST).float() * 2.0**_LEAST
    values[:, right] = -values[:, left] if is_x else values[:, left]


def _shrunk(values: torch.Tensor, name: str, shape: Shape) -> torch.Tensor:
    """Return values of an operand; those of experts shrink, so that neither stage's sums overflow fp16."""
    suffix = "" if dict(shape.extra).get("q_type") in (None, "No") else "_scale"
    width = {f"w1{suffix}": shape.n, f"w2{suffix}": shape.k}.get(name, 0)
    if not width:
        return values
    exponent = width.bit_length() // 2
    return values * 0.5**exponent if values.is_floating_point() else values - exponent


def _route(shape: Shape, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """Overwrite the experts of each token; some are twins whose results cancel in the sum.

    Twins are an expert of even number and the next one. Their weights are large and of unlike
    signs, and other experts come between them.
    """
    topk, experts = ids.shape[1], int(shape["expert"])
    twins = 0 if shape["doweight_stage1"] else (topk - 1) // 2
    if topk - twins > experts // 2:  # too few pairs
        order = _shuffled(len(ids), max(experts, topk), ids.device)[:, :topk]
        routing = local_routing(weights, order, None, None, experts)
    else:
        first = _shuffled(len(ids), experts // 2, ids.device)[:, : topk - twins] * 2
        exponents = _mixed(first + (9 << 40)) % (_CANCELLING[shape.dtype] + 1)
        large = weights[:, : topk - twins] * torch.ones_like(first).bitwise_left_shift(exponents)
        weights[:, 1 : 1 + twins] = large[:, 1 : 1 + twins]
        weights[:, topk - twins :] = -large[:, 1 : 1 + twins]
        routing = weights, torch.cat([first, first[:, 1 : 1 + twins] + 1], 1)
    weights.copy_(routing[0])
    ids.copy_(routing[1])


def _shuffled(rows: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the numbers below *count*, shuffled otherwise in each row."""
    return _mixed(torch.arange(rows * count, device=device) + (5 << 40)).reshape(rows, count).argsort(dim=1)


def measure(
    operands: StandardOperands, bind: Bind, sizes: Iterable[int] = SIZES, any_m: set[tuple[int, ...]] | None = None, order: str = ""
) -> Bits:
    """Run a kernel at several M, and hash its rows.

    Args:
        operands: the standard operands of the shape.
        bind: binds the kernel at a shape; a refusal leaves out this M.
        sizes: the M to run.
        any_m: rows of earlier kernels that serve every M, to which those of this one are added. One
            that refuses a larger M is given up where it has the bits of none: no class holds it.
        order: the order of sums that the kernel declares; it counts where operands do not show it.
    """
    rows: dict[int, int] = {}
    served: list[int] = []
    refused: list[tuple[int, str]] = []
    fault, raised = "", False
    try:
        for m in sorted(sizes, reverse=True):
            launcher = bind(operands.op.canonical(operands.shape.with_m(m)))
            if isinstance(launcher, Unsupported):
                refused.insert(0, (m, launcher.reason))
            elif launcher.is_nested:
                fault = _OTHER_TABLES
                break
            elif fault := next(_differences(rows, operands, launcher, m, (any_m or ()) if refused else ()), ""):
                break
            else:
                served.insert(0, m)
    except Exception as error:  # a kernel may raise anything
        fault, raised = described(error), True
    others, fault = fault == OTHER_BITS, "" if fault == OTHER_BITS else fault
    found = Bits(
        tuple(rows[content] for content in sorted(rows)),
        tuple(served),
        fault,
        tuple(refused),
        raised,
        others,
        "" if operands.shows_orders else order,
    )
    if any_m is not None and found.label and not refused:
        any_m.add(found.rows)
    return found


def _differences(
    rows: dict[int, int], operands: StandardOperands, launcher: Launcher, m: int, any_m: Collection[tuple[int, ...]]
) -> Iterator[str]:
    """Add the hashes of the rows of M; yield which row differs from an earlier one, or `OTHER_BITS`.

    At the largest M each content is in some call, at others in one of a few.
    """
    calls = range(0, CONTENTS, m)
    for first in calls[:_CALLS] if len(rows) == CONTENTS else calls:
        with torch.no_grad():
            hashes = row_hashes(launcher.call(*operands.at(m, first)), m)
        for place, found in enumerate(hashes):
            content = (first + place) % CONTENTS
            if rows.setdefault(content, found) != found:
                yield f"row {place} at M = {m} has other bits than at another M or place"
        if any_m and not any(all(like[content] == found for content, found in rows.items()) for like in any_m):
            yield OTHER_BITS


def row_hashes(out: torch.Tensor, m: int) -> list[int]:
    """Hash the bits of each of the M rows of an output [..., M, N], of all batches together."""
    by_row = out.detach().reshape(-1, m, out.shape[-1]).transpose(0, 1).reshape(m, -1).contiguous()
    words = by_row.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[by_row.element_size()])
    factors = _mixed(torch.arange(words.shape[1], device=words.device) + (11 << 40)) | 1
    parts = words.split(max(1, _SLICE // max(1, words.shape[1])))
    return [found for part in parts for found in (part.to(torch.int64) * factors).sum(dim=1).tolist()]

"""Changes: verify with other operand contents at the same addresses.

In use, weights are updated in place, and activations vary in magnitude, NaN and routing.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from tunedgemm.dtype import torch_dtype
from tunedgemm.ops.formats.scales import E8M0, ShuffledScale, plain_bytes, shuffle_scale, unshuffle_scale
from tunedgemm.ops.formats.shuffle import plain_weight
from tunedgemm.ops.formats.tensor_bytes import overwrite
from tunedgemm.ops.op import Factors
from tunedgemm.tuner.verify import Variant, Verifier

#: 1 / PART of an operand's elements change in a partial change.
PART = 256
#: Largest power of two, up or down, by which operands are scaled.
EXPONENT = 40
#: The same for e8m0 scales, which kernels may multiply into 16-bit values, and for activations that
#: kernels may quantise: vLLM's smallest scale is 1 / (448 * 512).
MILD_EXPONENT = 8
#: Byte of NaN in the 8-bit dtypes that have one.
_NAN_BYTES = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F, torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}
_INDICES = (torch.int32, torch.int64)


@attrs.frozen(eq=False)
class Changes:
    """Variants of a shape's first operands with other contents.

    Attributes:
        verifier: operands and references of the shape.
    """

    verifier: Verifier

    def variants(self) -> Iterator[Variant]:
        """Yield changes of all contents, parts, magnitudes, NaN and indices, then the original."""
        shape, operands, other = self.verifier.shape, self._operands, self.verifier.operand_sets[1]

        def variant(what: str, change: Any, *arguments: Any, **fields: Any) -> Variant:
            return Variant(what, shape, operands, functools.partial(change, *arguments), **fields)

        expected = self.verifier.expected(self.verifier.variant(1))
        yield variant("after weights changed in place", _replace, other, expected=expected)
        for place in range(2):
            yield variant(f"after a part of the operands changed in place ({place + 1})", self._replace_part, place)
        weights = self.verifier.op.weights  # int32 there is packed codes
        if any(each is not None and each.dtype in _INDICES for index, each in enumerate(operands) if index not in weights):
            yield variant("with all rows of indices alike, the first last", _one_route)
        for factors in self.verifier.op.factors(shape):
            if factors.is_linear:
                yield from self._sizes_of_rows(variant, factors)
            yield from self._shifts(variant, factors)
        if torch_dtype(shape.outdtype).is_floating_point:
            yield from self._not_numbers(variant)
        yield Variant("after all of this", shape, operands, expected=self._expected)

    @property
    def _operands(self) -> tuple[Any, ...]:
        return self.verifier.operand_sets[0]

    @property
    def _expected(self) -> torch.Tensor:
        return self.verifier.expected(self.verifier.variant(0))

    def _sizes_of_rows(self, variant: Any, factors: Factors) -> Iterator[Variant]:
        """Yield rows of very different magnitude, or all rows large and small under one scale."""
        position = self._sized(factors.activations)
        if position is None or (exponents := self._exponents(position)) == (0, 0):
            return
        for first, what in enumerate(("large", "small")[: 1 if self._is_by_row(position) and self.verifier.shape.m > 1 else 2]):
            words = f"with rows of very different size in {self._name(position)}, the first {what}"
            yield variant(words, self._scale_rows, position, exponents, first, by_row=True)

    def _shifts(self, variant: Any, factors: Factors) -> Iterator[Variant]:
        """Yield weights (or their scales) times a power of two, with activations times its inverse."""
        position = self._sized(factors.activations)
        weights = [index for index in factors.weights if index in self.verifier.op.matrices and self._given(index) is not None]
        if position is None or not weights:
            return
        if not all(_is_sized(self._operands[index]) for index in weights):
            weights = [index for index in (self._sized(factors.weights),) if index is not None]
        room = self._exponents(position)[1]  # a kernel may round between the two factors
        exponent = min(room, *(self._range(index) for index in (position, *weights))) if weights else 0
        exponent = exponent if factors.is_linear else min(exponent, MILD_EXPONENT)
        unchanged = self._expected if len(self.verifier.op.factors(self.verifier.shape)) == 1 else None  # else a bias does not cancel
        for each in (exponent, -exponent) if exponent > 0 else ():
            words = f"with {self._name(weights[0])} 2^{each} times as large, and {self._name(position)} as much smaller"
            yield variant(words, _shift_size, position, weights, each, expected=unchanged)

    def _not_numbers(self, variant: Any) -> Iterator[Variant]:
        """Yield NaN in a row of each float activation, then in the weights, then in their scales."""
        op, m = self.verifier.op, self.verifier.shape.m
        linear = [factors for factors in op.factors(self.verifier.shape) if factors.is_linear]
        activations = [index for factors in linear for index in factors.activations if _has_nan(self._given(index))]
        for number, index in enumerate(activations):
            only_nan = number or m > 2 or self._operands[index].dtype in _NAN_BYTES
            for value in (math.nan, math.inf)[: 1 if only_nan else 2]:
                words = f"with {value} in a row of {self._name(index)}"
                yield variant(words, self._spoil_rows, index, value, not number, spoiled=True)
        weights = [index for factors in linear for index in factors.weights if _has_nan(self._given(index))]
        weights += [index for index, name in enumerate(op.operands) if name == "bias?" and self._given(index) is not None]
        scales = [index for index in weights if "scale" in op.operands[index]]
        for group in ([index for index in weights if index not in scales] if activations else [], scales):
            if group:
                yield variant(f"with NaN in {self._name(group[0])}", _spoil_weights, group, spoiled=True)

    def _given(self, index: int) -> Any:
        return self._operands[index] if index < len(self._operands) else None

    def _name(self, index: int) -> str:
        return self.verifier.op.operands[index].rstrip("?")

    def _sized(self, positions: tuple[int, ...]) -> int | None:
        """Return the first position with an operand in e8m0 or floats of at least 16 bits."""
        return next((index for index in positions if _is_sized(self._given(index))), None)

    def _is_by_row(self, index: int) -> bool:
        operand = self._operands[index]
        return isinstance(operand, ShuffledScale) or (operand.dim() >= 2 and operand.shape[-2] == self.verifier.shape.m)

    def _exponents(self, position: int) -> tuple[int, int]:
        """Return the powers of two by which rows may shrink and grow within their dtypes."""
        if not self._expected.numel():
            return 0, 0
        operand = self._operands[position]
        lows, highs = [-_most(operand)], [_most(operand)]
        out = torch.finfo(torch_dtype(self.verifier.shape.outdtype))
        for size, info in ((float(self._expected.abs().max()), out), (_size(operand), torch.finfo(operand.dtype))):
            most = math.log2(max(size, info.tiny))
            highs.append(math.floor(math.log2(info.max) - most) - 4)
            lows.append(math.ceil(math.log2(info.tiny) - most) + 14)
        return min(0, max(lows)), max(0, min(highs))

    def _range(self, index: int) -> int:
        """Return the power of two by which a whole operand may grow and shrink."""
        operand = self._operands[index]
        info = torch.finfo(operand.dtype)
        size = math.log2(max(_size(operand), info.tiny))
        up, down = math.log2(info.max) - size - 1, size - math.log2(info.tiny) - 14
        return max(0, min(_most(operand), math.floor(up), math.floor(down)))

    def _scale_rows(self, position: int, exponents: tuple[int, int], first: int, now: tuple[Any, ...]) -> None:
        """Scale each row by a power of two, to detect clamping and fixed-scale rounding."""
        low, high = exponents
        operand, m = now[position], self.verifier.shape.m
        draw = random.Random(str(self.verifier.shape))
        drawn = [*((low, high) if first else (high, low)), *(draw.randint(low, high) for _ in range(m - 2))][:m]
        powers = torch.tensor(drawn, device=operand.device)
        _multiply(operand, powers[:, None] if self._is_by_row(position) else powers[0], (m, self.verifier.shape.k // 32))

    def _spoil_rows(self, position: int, value: float, infinite: bool, now: tuple[Any, ...]) -> None:
        """Put the value into one row and, of three or more rows, infinity into another."""
        operand, m = now[position], self.verifier.shape.m
        if operand.dim() < 2 or operand.shape[-2] != m:
            operand.data.fill_(value)
            return
        row = m // 2
        if operand.dtype in _NAN_BYTES:
            operand.view(torch.uint8)[..., row, -1] = _NAN_BYTES[operand.dtype]
            return
        operand.data[..., row, -1] = value
        if infinite and m > 2:
            operand.data[..., m - 1, operand.shape[-1] // 3] = math.inf

    def _replace_part(self, place: int, now: tuple[Any, ...]) -> None:
        """Change a small part of each operand, which a cache keyed on samples would miss.

        At the second place, one element of a float weight or bias becomes large. Parts of int8
        operands become -128.
        """
        draw, op, shape = random.Random(f"{self.verifier.shape} {place}"), self.verifier.op, self.verifier.shape
        for position, operand in enumerate(now):
            if operand is None:
                continue
            source = self.verifier.operand_sets[1] if position in op.weights else self.verifier.renewed()
            target, new = plain_weight(operand), plain_weight(source[position])
            if not target.is_contiguous() or not target.dim() or target.dtype in _INDICES:  # indices depend on each other
                overwrite(target, new)
                continue
            large = position in op.matrices or op.operands[position].startswith("bias")
            if place and large and target.dtype.is_floating_point and target.dtype.itemsize > 1:
                size = min(4096.0, math.sqrt(shape.n * shape.k))
                at = draw.randrange(target.numel())
                target.data.view(-1)[at] = -size if target.view(-1)[at] > 0 else size
                continue
            part = max(1, target.numel() // PART)
            start = draw.randrange(target.numel() - part + 1)
            if place and target.dtype is torch.int8:
                target.data.view(-1)[start : start + part] = -128
                continue
            overwrite(target.view(-1)[start : start + part], new.contiguous().view(-1)[start : start + part])


def _is_sized(operand: Any) -> bool:
    return operand is not None and operand.dtype.is_floating_point and (operand.dtype.itemsize > 1 or operand.dtype is E8M0)


def _most(operand: Any) -> int:
    return MILD_EXPONENT if operand.dtype is E8M0 else EXPONENT


def _has_nan(operand: Any) -> bool:
    """Check whether kernels propagate NaN of an operand; emulated e8m0 may give infinity."""
    return operand is not None and (operand.dtype in _NAN_BYTES or (operand.dtype.is_floating_point and operand.dtype.itemsize > 1))


def _size(operand: Any) -> float:
    """Return the largest magnitude of an operand, ignoring NaN in padding."""
    return float(plain_bytes(plain_weight(operand)).detach().float().nan_to_num(nan=0.0).abs().max())


def _multiply(operand: Any, exponents: torch.Tensor, sizes: tuple[int, int]) -> None:
    """Multiply an operand in place by powers of two, per row or as a whole.

    Args:
        operand: a float or e8m0 tensor.
        exponents: [rows, 1] or a scalar.
        sizes: rows and columns of shuffled e8m0 scales.
    """
    if operand.dtype is not E8M0:
        plain_weight(operand).data.mul_((2.0 ** exponents.double()).to(operand.dtype))
        return
    memory = plain_bytes(operand).data.view(torch.uint8)
    if isinstance(operand, ShuffledScale) and exponents.dim():
        rows = unshuffle_scale(memory, *sizes)
        memory.copy_(plain_bytes(shuffle_scale((rows + exponents).to(torch.uint8))))
    else:
        memory.copy_((memory + exponents).clamp(0, 254))


def _shift_size(position: int, weights: list[int], exponent: int, now: tuple[Any, ...]) -> None:
    """Scale weights by a power of two and the activation by its inverse, to detect clamping."""
    power = torch.tensor(exponent, device=now[position].device)
    _multiply(now[position], -power, (0, 0))
    for index in weights:
        _multiply(now[index], power, (0, 0))


def _spoil_weights(positions: list[int], now: tuple[Any, ...]) -> None:
    """Put NaN into one element of each operand; in biases, into the last element of a batch."""
    for index in positions:
        plain = plain_weight(now[index]).data
        at = 0 if plain.dim() == 1 else plain.numel() // 2 - (plain.dim() == 2 and index == positions[-1] and len(positions) > 1)
        if plain.dtype in _NAN_BYTES:
            plain.view(torch.uint8).view(-1)[at] = _NAN_BYTES[plain.dtype]
        else:
            plain.view(-1)[at] = math.nan


def _one_route(now: tuple[Any, ...]) -> None:
    """Give all rows the first row's indices, reversed: some experts get all tokens, most none.

    Routing weights are reversed, too, since callers need not sort them.
    """
    given = [plain_weight(operand) for operand in now if operand is not None]
    indices = [operand for operand in given if operand.dtype in _INDICES]
    for operand in given:
        if operand.dtype.itemsize > 1 and any(operand.shape == each.shape for each in indices):
            flipped = operand.flip(-1)
            operand.data.copy_(flipped[:1].expand_as(flipped) if operand.dtype in _INDICES else flipped)


def _replace(other: tuple[Any, ...], now: tuple[Any, ...]) -> None:
    for operand, source in zip(now, other, strict=True):
        if operand is not None:
            overwrite(operand, source)

"""Compare products on the emulator with numpy: small integers make every order of a sum exact."""

from __future__ import annotations

import re
from typing import Any

import attrs
import numpy as np
import torch
from tunedgemm.tools.launching import torch_dtype
from tunedgemm.tools.tables import shuffle_weight
from tunedgemm_asm.ptx.abi import MAP_BYTES, MAP_OUT, MAPS, SCALES, abi_of
from tunedgemm_asm.ptx.kernel import text_of
from tunedgemm_asm.ptx.launch import LaunchArguments, arguments_of
from tunedgemm_asm.ptx.limits import boxes_of
from tunedgemm_asm.ptx.names import KernelConfig

from .formats import BYTES, to_bits
from .launch import Launch, run
from .memory import Fault, Memory, described

#: Elements of K, and rows of the weight, that share a scale by block.
_BLOCK = 128


@attrs.define
class Bench:
    """Operands of one shape, random unless given; output and workspace start as NaN."""

    shape: Any
    config: KernelConfig
    splits: int = 1
    multiprocessors: int = 3
    seed: int = 0
    given: tuple[np.ndarray, np.ndarray] | None = None
    resident: int = 0
    launches: int = 1
    memory: Memory = attrs.field(factory=Memory)
    counters: np.ndarray = attrs.field(factory=lambda: np.zeros(0, np.uint32))

    @property
    def arguments(self) -> LaunchArguments:
        """Return the kernel's arguments."""
        return arguments_of(self.config, self.splits, self.shape, self.multiprocessors)

    @property
    def text(self) -> str:
        """Return the kernel's text."""
        return text_of(self.arguments.variant)

    def output(self, text: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Return the output of a text, or of the kernel's own, and the expected output."""
        shape, chance = self.shape, np.random.default_rng(self.seed)
        x, weight = self.given or [chance.integers(-3, 4, (rows, shape.k)) for rows in (shape.m, shape.n)]
        bias = chance.integers(-9, 10, shape.n) if shape.bias else np.zeros(shape.n)
        out = (
            np.full((shape.m, shape.n), -1, np.int16).view(np.uint16)
            if shape.outdtype != "fp32"
            else np.full((shape.m, shape.n), np.nan, "f4")
        )
        scales = self._scales(chance)
        wanted = to_bits((self._product(x, weight, scales) + bias).astype(np.float32), shape.outdtype)
        operands = [to_bits(each, shape.dtype) for each in (x, weight)]
        if shape.layout != "row":
            lying = torch.from_numpy(operands[1].view(np.int8)).view(torch_dtype(shape.dtype))
            operands[1] = shuffle_weight(lying, shape.layout).plain.view(torch.uint8).numpy().view(operands[1].dtype)
        arguments = self._arguments(operands, to_bits(bias, shape.bias_dtype or "fp32"), out, scales)
        launch, poison = Launch(self.arguments.grid, self.config.shared_bytes, arguments, self.resident), out.copy()
        for number in range(self.launches):
            out[...] = poison
            run(text or self.text, launch, self.memory, self.seed + number)
            if self.counters.any():
                raise Fault("a counter is not left as it was")
        return out, wanted

    def _scales(self, chance: np.random.Generator) -> list[np.ndarray]:
        """Return power-of-two scales of x and of the weight, if the shape has any."""
        shape, blocks = self.shape, -(-self.shape.k // _BLOCK)
        sizes = {
            "none": [],
            "tensor": [(1,), (1,)],
            "row": [(shape.m,), (shape.n,)],
            "block": [(shape.m, blocks), (-(-shape.n // _BLOCK), blocks)],
        }[shape.scale]
        return [(2.0 ** chance.integers(-2, 3, size)).astype(np.float32) for size in sizes]

    def _product(self, x: np.ndarray, weight: np.ndarray, scales: list[np.ndarray]) -> np.ndarray:
        """Return the exact product in fp64."""
        if self.shape.scale == "block":
            x_scale = scales[0].repeat(_BLOCK, 1)[:, : self.shape.k]
            w_scale = scales[1].repeat(_BLOCK, 0).repeat(_BLOCK, 1)[: self.shape.n, : self.shape.k]
            return (x * x_scale.astype(np.float64)) @ (weight * w_scale.astype(np.float64)).T
        product = (x @ weight.T).astype(np.float64)
        return product * scales[0][:, None] * scales[1] if scales else product

    def _arguments(self, operands: list[np.ndarray], bias: np.ndarray, out: np.ndarray, scales: list[np.ndarray]) -> bytes:
        arguments, place = self.arguments, self.memory.place
        if arguments.variant.transposed:
            padding = -self.shape.m % 4 * arguments.variant.padded
            scales = [np.pad(scales[0].T, ((0, 0), (0, padding)), constant_values=np.nan), scales[1]]
        values = {**arguments.values, "out": place(out, True), **{name: place(each) for name, each in zip(SCALES, scales, strict=False)}}
        if self.shape.bias:
            values["bias"] = place(bias)
        if arguments.workspace:
            self.counters = np.zeros(arguments.counters, np.uint32)
            values["workspace"] = place(np.full(arguments.workspace, 0xFF, np.uint8), True)
            values["counters"] = place(self.counters, True)
        boxes, size = boxes_of(self.config, self.shape), BYTES[self.shape.dtype]
        ordered = operands[::-1] if self.config.swapped else operands
        columns = [arguments.variant.columns * (each is operands[1]) * self.shape.k * size // 128 for each in ordered]
        maps = [
            described(place(each), each.shape[0], self.shape.k, box, size, columns=count)
            for each, box, count in zip(ordered, boxes, columns, strict=True)
        ]
        packed = b"".join(maps) + abi_of(self.shape.scale, self.config.panels > 0).pack(values)[MAP_BYTES * len(MAPS) :]
        if not self.config.panels:
            return packed
        return packed[:MAP_OUT] + described(values["out"], *out.shape, 64, out.itemsize, out.itemsize * self.config.panel_columns)


def mistake_shows(case: tuple[Any, ...], pattern: str, by: str) -> bool:
    """Check that replacing a pattern in the kernel's text fails in one of five orders of events.

    Args:
        case: config, shape, parts of K, and multiprocessors where there are several: then in four
            orders one cluster is at work at a time.
    """
    config, shape, splits, multiprocessors = (*case, 1)[:4]
    found = 0
    for seed in range(5):
        bench = Bench(shape, config, splits, multiprocessors, seed, resident=min(seed, multiprocessors - 1, 1))
        wrong, changes = re.subn(pattern, by, bench.text)
        assert changes
        try:
            out, wanted = bench.output(wrong)
        except Fault:
            found += 1
        else:
            found += not np.array_equal(out, wanted)
    return found > 0

"""Products on the emulator: small whole numbers, so that every order of a sum is exact, against numpy's."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from tunedgemm_asm.ptx.arguments import ABI, MAP_BYTES, MAPS
from tunedgemm_asm.ptx.kernel import text_of
from tunedgemm_asm.ptx.plan import Plan
from tunedgemm_asm.ptx.problem import Problem, problem_of

from .launch import Launch, run
from .memory import Memory, described

WIDE = {"bf16": np.uint16, "fp16": np.uint16, "fp32": np.float32}


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers in a dtype's bytes, rounded to the nearest even."""
    values = values.astype(np.float32)
    if dtype == "fp32":
        return values
    if dtype == "fp16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers of a dtype's bytes."""
    if dtype == "fp32":
        return bits
    return bits.view(np.float16).astype(np.float32) if dtype == "fp16" else (bits.astype(np.uint32) << 16).view(np.float32)


@attrs.define
class Bench:
    """The operands of one shape, random ones but where they are given, and their memory; the output and the workspace start as NaN."""

    shape: Any
    plan: Plan
    splits: int = 1
    multiprocessors: int = 3
    seed: int = 0
    given: tuple[np.ndarray, np.ndarray] | None = None
    memory: Memory = attrs.field(factory=Memory)
    counters: np.ndarray = attrs.field(factory=lambda: np.zeros(0, np.uint32))

    @property
    def problem(self) -> Problem:
        """What the kernel is told."""
        return problem_of(self.plan, self.splits, self.shape, self.multiprocessors)

    @property
    def text(self) -> str:
        """The kernel."""
        return text_of(self.problem.variant)

    def output(self, text: str = "") -> tuple[np.ndarray, np.ndarray]:
        """The output of a text, else of the kernel's own, and what it has to be, both in the output's dtype."""
        shape, chance = self.shape, np.random.default_rng(self.seed)
        x, weight = self.given or [chance.integers(-3, 4, (rows, shape.k)) for rows in (shape.m, shape.n)]
        bias = chance.integers(-9, 10, shape.n) if shape.bias else np.zeros(shape.n)
        out = (
            np.full((shape.m, shape.n), -1, np.int16).view(np.uint16)
            if shape.outdtype != "fp32"
            else np.full((shape.m, shape.n), np.nan, "f4")
        )
        wanted = to_bits((x @ weight.T + bias).astype(np.float32), shape.outdtype)
        arguments = self._arguments([to_bits(x, shape.dtype), to_bits(weight, shape.dtype)], to_bits(bias, shape.bias_dtype or "fp32"), out)
        run(text or self.text, Launch(self.problem.grid, self.plan.shared_bytes, arguments), self.memory, self.seed)
        assert not self.counters.any()
        return out, wanted

    def _arguments(self, operands: list[np.ndarray], bias: np.ndarray, out: np.ndarray) -> bytes:
        problem, place = self.problem, self.memory.place
        values = {**problem.values, "out": place(out, True)}
        if self.shape.bias:
            values["bias"] = place(bias)
        if problem.workspace:
            self.counters = np.zeros(problem.counters, np.uint32)
            values["workspace"] = place(np.full(problem.workspace, 0xFF, np.uint8), True)
            values["counters"] = place(self.counters, True)
        boxes = (self.plan.tile_a, self.plan.box_b)
        ordered = operands[::-1] if self.plan.swapped else operands
        maps = [described(place(each), each.shape[0], self.shape.k, box) for each, box in zip(ordered, boxes, strict=True)]
        return b"".join(maps) + ABI.pack(values)[MAP_BYTES * len(MAPS) :]

"""Consumers that take turns, on the emulator: exact products in many orders of events, and texts made wrong, which it must find."""

from __future__ import annotations

import re
from types import ModuleType

import attrs
import numpy as np
import pytest
from tunedgemm.plugin import PluginError, Shape
from tunedgemm_asm.ptx.kernel import text_of
from tunedgemm_asm.ptx.plan import Plan, Variant, plan_of
from tunedgemm_asm.ptx.problem import problem_of

#: Plan, shape, parts of K, multiprocessors: each has tails in M, N and K; items of a block are one to six, steps fewer and more than stages.
CASES = [
    (Plan(64, 40, 3, turns=True), Shape("a16w16", 150, 101, 200, epilogue="bias"), 1, 2),
    (Plan(128, 72, 3, turns=True), Shape("a16w16", 300, 200, 136, "fp16", "fp16", epilogue="bias", bias_dtype="bf16"), 1, 2),
    (Plan(128, 160, 4, turns=True), Shape("a16w16", 150, 328, 136, outdtype="fp32", epilogue="bias", bias_dtype="fp16"), 1, 2),
    (Plan(64, 32, 4, group=2, turns=True), Shape("a16w16", 150, 70, 264, outdtype="fp32"), 1, 1),
    (Plan(64, 16, 5, turns=True), Shape("a16w16", 100, 74, 72, "fp16", epilogue="bias", bias_dtype="fp32"), 1, 3),
    (Plan(192, 24, 2, turns=True), Shape("a16w16", 300, 40, 328), 1, 1),
    (Plan(64, 24, 3, turns=True), Shape("a16w16", 70, 101, 296, epilogue="bias"), 2, 2),
    (Plan(64, 32, 3, turns=True), Shape("a16w16", 150, 73, 456, "fp16", "fp16"), 4, 2),
    (Plan(64, 16, 3, cluster=2, group=2, turns=True), Shape("a16w16", 300, 41, 328, outdtype="fp32"), 1, 4),
    (Plan(128, 16, 2, cluster=2, turns=True), Shape("a16w16", 300, 41, 296, epilogue="bias"), 3, 2),
    (Plan(16, 128, 4, swapped=True, turns=True), Shape("a16w16", 13, 700, 200, epilogue="bias"), 1, 2),
    (Plan(24, 64, 3, swapped=True, turns=True), Shape("a16w16", 47, 101, 136, outdtype="fp32", epilogue="bias"), 2, 1),
    (Plan(16, 64, 3, cluster=2, swapped=True, turns=True), Shape("a16w16", 20, 400, 328), 3, 5),
    (Plan(128, 32, 3, turns=True), Shape("a8w8", 150, 101, 400, "int8", "bf16", "bias", "fp32", scale="row"), 2, 2),
    (Plan(64, 40, 3, turns=True), Shape("a8w8", 150, 104, 272, "fp8_e4m3fn", "bf16", "bias", "bf16", scale="row"), 1, 2),
    (Plan(8, 128, 3, swapped=True, turns=True), Shape("a8w8", 5, 600, 528, "fp8_e4m3fn", "fp32", scale="tensor"), 3, 2),
]
#: One block with three items and a half of five steps each, in two stages; and the same with parts of K, the last of which is shorter.
SMALL = (Plan(64, 16, 2, turns=True), Shape("a16w16", 100, 56, 296))


@pytest.mark.parametrize(("plan", "shape", "splits", "multiprocessors"), CASES, ids=lambda value: getattr(value, "name", None))
def test_products_are_exact(ptx: ModuleType, plan: Plan, shape: Shape, splits: int, multiprocessors: int) -> None:
    """Every element within the output is written, with the right bits, and no barrier, stage or sum is misused."""
    for seed in (0, 1):
        out, wanted = ptx.Bench(shape, plan, splits, multiprocessors, seed).output()
        np.testing.assert_array_equal(out, wanted)

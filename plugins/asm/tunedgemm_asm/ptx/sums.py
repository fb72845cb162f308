"""Name the order in which a kernel adds products, which decides an output's bits."""

from __future__ import annotations

from tunedgemm.plugin import Shape, Solution
from tunedgemm.tools.launching import sum_order

from tunedgemm_asm.ptx.limits import part_of
from tunedgemm_asm.ptx.names import DEEP, SCALE_BLOCK, KernelConfig, step_of


def solution_of(libtype: str, config: KernelConfig, splits: int, shape: Shape) -> Solution:
    """Return the solution of a kernel."""
    order = order_of(config, splits, shape)
    return Solution(libtype, config.name, splits, batch_invariant=bool(order), sum_order=order)


def order_of(config: KernelConfig, splits: int, shape: Shape) -> str:
    """Return the name of the kernel's order of sums; "" where it depends on M.

    Each accumulator gets the wgmma instructions of its stages in the order of K, whatever the tile,
    stages, cluster, consumers, or operand that is swapped. A stage has the same elements of K in
    every kernel. Promotion adds a stage at a time, overlapped or not; parts of a split are added in
    the order of K, by several CTAs or one. Where stream-K cuts a tile depends on the number of
    tiles, hence on M.
    """
    if config.stream and shape.dtype != "int8":
        return ""
    step = step_of(shape.dtype)
    part = part_of(splits, shape) * step if splits > 1 else 0
    return sum_order(shape, f"wgmma-k{step // DEEP}", promoted=SCALE_BLOCK * config.promoted, part=part)

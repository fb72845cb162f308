"""Split bias: ``kernel+add`` runs a kernel without bias, then adds it in place.

Some kernels take no bias, and some are slower with one. The result is rounded before and after the
addition; verification decides whether that is accurate enough.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs

from tunedgemm.backends.launcher import Launcher
from tunedgemm.dtype import torch_dtype
from tunedgemm.libtypes import BUILTIN
from tunedgemm.ops import ops
from tunedgemm.shape import Shape
from tunedgemm.solution import ADD, Solution, Unsupported

#: Output dtypes that represent a narrower bias exactly.
_WIDE = ("fp32", "fp64")
#: Output dtypes for which a bias of another dtype is added in float32.
_NARROW = ("bf16", "fp16")


def is_split(solution: Solution) -> bool:
    """Check whether a solution adds the bias after its kernel."""
    return solution.kernel_name.endswith(ADD)


def without_add(solution: Solution) -> Solution:
    """Return the solution of the kernel alone."""
    if not is_split(solution):
        return solution
    return attrs.evolve(solution, kernel_name=solution.kernel_name.removesuffix(ADD), sum_order=solution.sum_order.removesuffix(ADD))


def with_add(solution: Solution) -> Solution:
    """Return the solution that adds a bias after this one."""
    order = solution.sum_order and solution.sum_order + ADD
    return attrs.evolve(solution, kernel_name=solution.kernel_name + ADD, sum_order=order)


@functools.lru_cache(1024)  # called for each solution of a shape; a new Shape takes microseconds
def unbiased_shape(shape: Shape) -> Shape | None:
    """Return the shape without its bias; None without a bias, or if the op cannot split it."""
    op = ops().get(shape.op)
    return None if op is None or not shape.bias else op.unbiased(shape)


def product_shape(shape: Shape) -> Shape | None:
    """Return the kernel's shape before the bias is added.

    It is `unbiased_shape`, in float32 if the bias has another dtype than a 16-bit output.
    """
    plain = unbiased_shape(shape)
    if plain is None or shape.bias_dtype == shape.outdtype or shape.outdtype in _WIDE:
        return plain
    return attrs.evolve(plain, outdtype="fp32") if shape.outdtype in _NARROW else None


def kernel_and_shape(solution: Solution, shape: Shape) -> tuple[Solution, Shape] | Unsupported:
    """Return the solution and shape of the kernel alone; unchanged without a split bias."""
    if not solution.kernel_name.endswith(ADD):
        return solution, shape
    if solution.libtype == BUILTIN:
        return Unsupported(f"{BUILTIN} adds a bias in its routes, not by {ADD}")
    plain = product_shape(shape)
    if plain is None:
        return Unsupported(f"{ADD} needs a bias that is added last" if shape.bias else f"{ADD} needs a bias")
    return without_add(solution), plain


def wrap_with_add(launcher: Launcher, shape: Shape) -> Launcher:
    """Wrap a launcher of the product to add the bias of the shape."""
    plain = product_shape(shape)
    if plain is None:
        raise AssertionError(f"{shape} has a bias that is split off")
    call, bias_index = launcher.call, ops()[shape.op].operands.index("bias?")
    rounded = None if plain.outdtype == shape.outdtype else torch_dtype(shape.outdtype)

    def sum_of(*operands: Any) -> Any:
        return add_bias(call(*operands[:bias_index]), operands[bias_index], rounded)

    float32_bytes = 0 if rounded is None else 4 * shape.m * shape.n  # the product in float32
    return attrs.evolve(launcher, call=sum_of, workspace_bytes=launcher.workspace_bytes + float32_bytes)


def add_bias(out: Any, bias: Any, rounded: Any = None) -> Any:
    """Add a bias [N] or [1, N] to *out* [..., N] in place, then convert to the dtype *rounded*, if any."""
    out = out.add_(bias if bias.dim() == 1 else bias.view(-1))
    return out if rounded is None else out.to(rounded)

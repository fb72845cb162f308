"""A bias that is added by itself: ``kernel+add`` runs a kernel on the same shape without a bias, then adds it.

Some kernels take no bias, and some are slower with one than a product and an add, which torch does
in place. The sum is rounded after the product was: what that does to a row is for verification to
allow.
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

#: Output dtypes that lose nothing of a bias in a narrower one.
_WIDE = ("fp32", "fp64")
#: Output dtypes that a sum in float32 is rounded to, where the bias has another.
_NARROW = ("bf16", "fp16")


def is_split(solution: Solution) -> bool:
    """Whether the bias is added after the kernel."""
    return solution.kernel_name.endswith(ADD)


def base(solution: Solution) -> Solution:
    """The solution of the kernel alone."""
    return attrs.evolve(solution, kernel_name=solution.kernel_name.removesuffix(ADD)) if is_split(solution) else solution


def added(solution: Solution) -> Solution:
    """The solution that adds a bias after this one."""
    return attrs.evolve(solution, kernel_name=solution.kernel_name + ADD)


@functools.lru_cache(1024)  # asked for each solution of a shape; a new Shape takes microseconds
def unbiased(shape: Shape) -> Shape | None:
    """The shape without its bias; None where it has none, or the op cannot tell."""
    op = ops().get(shape.op)
    return None if op is None or not shape.bias else op.unbiased(shape)


def product(shape: Shape) -> Shape | None:
    """The shape of the product that a bias is added to: `unbiased`, in float32 where the bias has another dtype than a 16-bit output."""
    plain = unbiased(shape)
    if plain is None or shape.bias_dtype == shape.outdtype or shape.outdtype in _WIDE:
        return plain
    return attrs.evolve(plain, outdtype="fp32") if shape.outdtype in _NARROW else None


def of(solution: Solution, shape: Shape) -> tuple[Solution, Shape] | Unsupported:
    """What a backend is asked about: the solution and the shape as they are, or those of the product before a bias is added."""
    if not is_split(solution):
        return solution, shape
    if solution.libtype == BUILTIN:
        return Unsupported(f"{BUILTIN} adds a bias by a route of its own, not by {ADD}")
    plain = product(shape)
    if plain is None:
        return Unsupported(f"{ADD} needs a bias that stands alone behind the product" if shape.bias else f"{ADD} needs a bias")
    return base(solution), plain


def adding(launcher: Launcher, shape: Shape) -> Launcher:
    """A launcher of the product as one of the shape with its bias."""
    plain = product(shape)
    if plain is None:
        raise AssertionError(f"{shape} has a bias that is split off")
    call, place = launcher.call, ops()[shape.op].operands.index("bias?")
    rounded = None if plain.outdtype == shape.outdtype else torch_dtype(shape.outdtype)

    def sum_of(*operands: Any) -> Any:
        return add(call(*operands[:place]), operands[place], rounded)

    beside = 0 if rounded is None else 4 * shape.m * shape.n  # the product in float32
    return attrs.evolve(launcher, call=sum_of, workspace_bytes=launcher.workspace_bytes + beside)


def add(out: Any, bias: Any, rounded: Any = None) -> Any:
    """*out* [..., N] and a bias [N] or [1, N], in place, then in the dtype *rounded* where one is given."""
    out = out.add_(bias if bias.dim() == 1 else bias.view(-1))
    return out if rounded is None else out.to(rounded)

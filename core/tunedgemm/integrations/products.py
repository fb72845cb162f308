"""Route torch.mm, torch.addmm and torch.matmul by a weight [N, K] through the tables.

A product such as ``torch.mm(x, weight.t())`` is routed. Its second matrix is the transpose of a
contiguous [N, K] one, its dtype has 16 or 32 bits, and nothing is scaled or written in place. All
else stays torch's, and so do methods and operators of tensors (``x @ w``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.integrations.dynamo import trace_instead
from tunedgemm.integrations.linear import Function, FunctionRoute, forget_questions, op, stays_torch_in_graph
from tunedgemm.integrations.scripting import script_as
from tunedgemm.ops.formats.dual_layout import PLAIN_TYPES

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_mm, _addmm, _matmul = torch.mm, torch.addmm, torch.matmul
#: Dimensions of the first operand.
_OF_MM, _OF_MATMUL = (2,), (2, 3, 4)


def _fits(x: torch.Tensor, weight: torch.Tensor, dimensions: tuple[int, ...]) -> bool:
    """Check that x[..., K] has one of these numbers of dimensions, and *weight* is a transposed [N, K]."""
    return weight.dim() == 2 and x.dim() in dimensions and x.dtype in _DTYPES and weight.t().is_contiguous()


def _plain(*operands: torch.Tensor) -> bool:
    return all(type(operand) in PLAIN_TYPES for operand in operands)


def _of_product(dimensions: tuple[int, ...], input: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    return (input, weight.t()) if _plain(input, weight) and _fits(input, weight, dimensions) else None


def _of_addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    fits = _plain(input, mat1, mat2) and _fits(mat1, mat2, _OF_MM) and _is_bias(input, mat1, mat2)
    return (mat1, mat2.t(), input) if fits else None


def _is_bias(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> bool:
    return input.dim() == 1 and input.shape[0] == mat2.shape[1] and input.dtype == mat1.dtype


def _with_weight(call: Function) -> Function:
    return lambda input, mat2: call(input, mat2.t())


def _with_bias(call: Function) -> Function:
    return lambda input, mat1, mat2: call(mat1, mat2.t(), input)


def routed_product(dispatcher: Dispatcher, original: Function, operands: Callable[..., Any]) -> Function:
    """Make a drop-in for torch.mm or torch.matmul over the launchers of a dispatcher of a16w16."""
    get, name = dispatcher.launchers.get, original.__name__
    first = FunctionRoute(dispatcher, original, operands, _with_weight).first
    autocast, grad_enabled = torch.is_autocast_enabled, torch.is_grad_enabled

    def product(input: torch.Tensor, mat2: Any = None, *rest: Any, **named: Any) -> Any:
        """Multiply as torch's function of this name; go through the tables for a weight's transpose."""
        if rest or named or autocast() or forward_ad._current_level >= 0:
            return original(input, *(() if mat2 is None else (mat2,)), *rest, **named)  # matmul's second operand is also named `other`
        try:
            if mat2.is_contiguous() or mat2.dim() != 2:
                call: Function | None = original
            else:
                key = (
                    (x_address := input.data_ptr()) and (w_address := mat2.data_ptr())
                    and not (x_address | w_address) & 15 and input.is_contiguous(),
                    name, input.shape, mat2.shape, mat2.stride(), input.dtype, mat2.dtype, input.get_device(), mat2.get_device(),
                    input.__class__, mat2.__class__,
                    grad_enabled() and (input.requires_grad or mat2.requires_grad),
                )  # fmt: skip
                call = get(key)
        except (AttributeError, RuntimeError, TypeError, ValueError):  # as in `linear`
            forget_questions(input, mat2)
            call = original
        if call is original:
            return original(input, mat2)
        if call is None:
            return first(key, input, mat2)
        try:
            return call(input, mat2)
        except BaseException as error:  # a kernel of a plugin may raise anything
            return first(key, input, mat2, failed=(error, call))

    product.__name__ = product.__qualname__ = name
    return product


def routed_addmm(dispatcher: Dispatcher) -> Function:
    """Make a drop-in for torch.addmm over the launchers of a dispatcher of a16w16."""
    original, get = _addmm, dispatcher.launchers.get
    first = FunctionRoute(dispatcher, original, _of_addmm, _with_bias).first
    autocast, grad_enabled = torch.is_autocast_enabled, torch.is_grad_enabled

    def addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """Compute ``torch.addmm``; go through the tables for a weight's transpose *mat2* and bias *input*."""
        if rest or named or autocast() or forward_ad._current_level >= 0:
            return original(input, mat1, mat2, *rest, **named)
        try:
            if mat2.is_contiguous():
                call: Function | None = original
            else:
                key = (
                    (bias_address := input.data_ptr()) and (x_address := mat1.data_ptr()) and (w_address := mat2.data_ptr())
                    and not (bias_address | x_address | w_address) & 15 and input.is_contiguous() and mat1.is_contiguous(),
                    "addmm", input.shape, mat1.shape, mat2.shape, mat2.stride(), input.dtype, mat1.dtype, mat2.dtype,
                    input.get_device(), mat1.get_device(), mat2.get_device(), input.__class__, mat1.__class__, mat2.__class__,
                    grad_enabled() and (input.requires_grad or mat1.requires_grad or mat2.requires_grad),
                )  # fmt: skip
                call = get(key)
        except (AttributeError, RuntimeError, TypeError, ValueError):  # as in `linear`
            forget_questions(input, mat1, mat2)
            call = original
        if call is original:
            return original(input, mat1, mat2)
        if call is None:
            return first(key, input, mat1, mat2)
        try:
            return call(input, mat1, mat2)
        except BaseException as error:  # a kernel of a plugin may raise anything
            return first(key, input, mat1, mat2, failed=(error, call))

    return addmm


mm = routed_product(tgemm.dispatcher, _mm, functools.partial(_of_product, _OF_MM))
matmul = routed_product(tgemm.dispatcher, _matmul, functools.partial(_of_product, _OF_MATMUL))
addmm = routed_addmm(tgemm.dispatcher)
addmm.__qualname__ = addmm.__name__  # pickled by name
script_as("aten::mm", mm, _mm)
script_as("aten::addmm", addmm, _addmm)
script_as("aten::matmul", matmul, _matmul)


def _traced_mm(input: torch.Tensor, mat2: torch.Tensor, *rest: Any, **named: Any) -> Any:
    if rest or named or mat2.is_contiguous() or not _fits(input, mat2, _OF_MM) or stays_torch_in_graph(input, mat2):
        return _mm(input, mat2, *rest, **named)
    return op(input, mat2.t(), None)


def _traced_matmul(input: torch.Tensor, other: torch.Tensor, *rest: Any, **named: Any) -> Any:
    if rest or named or other.is_contiguous() or not _fits(input, other, _OF_MATMUL) or stays_torch_in_graph(input, other):
        return _matmul(input, other, *rest, **named)
    return op(input, other.t(), None)


def _traced_addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *rest: Any, **named: Any) -> Any:
    if rest or named or mat2.is_contiguous() or not _fits(mat1, mat2, _OF_MM) or not _is_bias(input, mat1, mat2):
        return _addmm(input, mat1, mat2, *rest, **named)
    if stays_torch_in_graph(input, mat1, mat2):
        return _addmm(input, mat1, mat2)
    return op(mat1, mat2.t(), input)


trace_instead(mm, _traced_mm)
trace_instead(matmul, _traced_matmul)
trace_instead(addmm, _traced_addmm)

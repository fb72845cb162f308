"""Route F.linear through the tables: `linear` is a drop-in for ``torch.nn.functional.linear``.

`FunctionRoute` also makes the drop-ins of `products`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.autograd import forward_ad

import tunedgemm.integrations.graph_ops  # noqa: F401 - teaches the compiler functions that layers call
from tunedgemm.dispatch.call import Call, in_memory
from tunedgemm.dispatch.dispatcher import MAX_LAUNCHERS, Dispatcher
from tunedgemm.dispatch.gradients import gradients_of_product, keep_product
from tunedgemm.dispatch.tuned_gemm import tgemm
from tunedgemm.errors import OperandError, UserError
from tunedgemm.integrations.dynamo import trace_instead
from tunedgemm.integrations.scripting import script_as
from tunedgemm.integrations.torch_compile import TORCHS, define_op, inside_transform, plain
from tunedgemm.ops.formats.dual_layout import DualLayoutWeight
from tunedgemm.ops.formats.shuffle import ShuffledWeight, as_shuffled

Function = Callable[..., Any]

_original = torch.nn.functional.linear
#: F.linear by its inner name, which patching does not replace.
_native = torch._C._nn.linear
#: Autocast of any device; calls first check GPU autocast only, which is twice as fast.
_autocast = torch._C._is_any_autocast_enabled


class _ThreadState(threading.local):
    """Flags of a thread: inside a launcher, and whether that called a routed function."""

    inside = False
    reentered = False


_serving = _ThreadState()


def _identity(launcher: Function) -> Function:
    return launcher


@attrs.frozen
class FunctionRoute:
    """Maps calls of a torch function to calls of a16w16.

    Attributes:
        dispatcher: the dispatcher of a16w16.
        original: torch's function.
        operands: maps its arguments to (x, weight[, bias]); None if they do not form a16w16.
        adapted: maps a launcher to a function of torch's arguments.
    """

    dispatcher: Dispatcher
    original: Function
    operands: Callable[..., tuple[torch.Tensor | None, ...] | None]
    adapted: Callable[[Function], Function] = _identity

    def first(self, key: tuple[Any, ...], *arguments: Any, failed: tuple[BaseException, Function] | None = None) -> Any:
        """Serve a cache miss, or a call whose launcher *failed*; cache a function for later calls.

        Args:
            key: the cache key; its first field is whether the operands are contiguous, with
                storage.
            arguments: the arguments of torch's function.
            failed: the exception and the launcher that raised it.
        """
        if _serving.inside:
            _serving.reentered = True
            return self.original(*arguments)
        if arguments[0].is_meta or _autocast() or not in_memory(arguments):
            return self.original(*arguments)
        operands = self.operands(*arguments)
        # A launcher that calls torch's function only later recurses to the end of the stack, where
        # it cannot be demoted.
        if operands is None or (failed is not None and isinstance(failed[0], RecursionError)):
            return self._keep_original(key, *arguments)
        cache = self.dispatcher.cache
        blamed = None if failed is None else cache.behind(key, failed[1])
        cache.take(key)
        trial = (key,)  # a launcher that calls torch's function returns here, and must not find itself
        _serving.inside, _serving.reentered = True, False
        try:
            call = Call.of(self.dispatcher.op, operands, key=trial)
            out = self.dispatcher.resolve(call) if failed is None else self.dispatcher.retry(call, failed[0], blamed)
        except OperandError:  # not this op: torch serves it, or raises
            return self._keep_original(key, *arguments)
        except (UserError, RuntimeError):
            return self.original(*arguments)
        finally:
            _serving.inside = False
            served = cache.take(trial)
        if served is not None:  # a captured call may have none to keep
            function, present = self._lasting_call(served.launcher), [argument for argument in arguments if argument is not None]
            on_cpu = arguments[0].get_device() < 0 and function is not self.original
            function = _on_cpu(function, self.original, bool(key[0]), len(present)) if on_cpu else function
            cache.keep(key, attrs.evolve(served, launcher=function))
        return out

    def _keep_original(self, key: tuple[Any, ...], *arguments: Any) -> Any:
        if len(self.dispatcher.launchers) < MAX_LAUNCHERS:
            self.dispatcher.launchers[key] = self.original
        return self.original(*arguments)

    def _lasting_call(self, launcher: Function) -> Function:
        """Return the cached function for later calls of a key."""
        launcher = getattr(launcher, "torch_call", launcher)  # autocast has been checked
        if launcher is _native:
            return self.original
        call = self.adapted(launcher)
        return _guard_reentry(call, self.original) if _serving.reentered else call


def _guard_reentry(call: Function, original: Function) -> Function:
    """Wrap a launcher that calls F.linear or torch.mm, so that it gets torch's function."""

    def guarded(*arguments: Any) -> Any:
        if _serving.inside:
            _serving.reentered = True
            return original(*arguments)
        _serving.inside = True
        try:
            return call(*arguments)
        finally:
            _serving.inside = False

    return guarded


def _on_cpu(call: Function, original: Function, is_dense: bool, arguments: int) -> Function:
    """Wrap a call on the CPU, which must check the CPU's autocast, and meta tensors unless *dense*.

    The caller checks the autocast of GPUs alone. Meta tensors share the key of CPU tensors that are
    not dense.
    """
    autocast = _autocast

    def of_any(*operands: Any) -> Any:
        if autocast() or any(operand is not None and operand.is_meta for operand in operands):
            return original(*operands)
        return call(*operands)

    # Arguments by name cost 0.1 us less than a tuple of them.
    def of_two(first: torch.Tensor, second: torch.Tensor) -> Any:
        return original(first, second) if autocast() else call(first, second)

    def of_three(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> Any:
        return original(first, second, third) if autocast() else call(first, second, third)

    return of_any if not is_dense else of_three if arguments == 3 else of_two


def forget_questions(*operands: Any) -> None:
    """Remove the queries of a key from the graph of `torch.fx.symbolic_trace`."""
    for operand in operands:
        for node in list(getattr(getattr(operand, "node", None), "users", ())):
            if node.op == "call_method" and node.target in ("data_ptr", "is_contiguous") and not node.users:
                node.graph.erase_node(node)


def _operands(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    return None if input.dtype is torch.float64 else (input, weight, bias)


def routed_linear(dispatcher: Dispatcher) -> Function:
    """Make `linear` over the launchers of a dispatcher of a16w16; a closure needs no attribute look-ups."""
    original, get = _original, dispatcher.launchers.get
    first = FunctionRoute(dispatcher, original, _operands).first
    autocast, grad_enabled = torch.is_autocast_enabled, torch.is_grad_enabled

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """Compute ``F.linear`` through the tables; other calls run torch's own, with torch's errors.

        A shuffled weight runs the solutions for its layout. Torch's own serves other tensor
        subclasses, meta and fake tensors, float64 and integer dtypes, and 1-D weights. It also
        serves inputs that need a gradient or carry a tangent, calls under autocast and inside
        functional transforms. In a graph of torch.compile it is one op, ``tunedgemm::linear``,
        which does the same at each call. An exported graph has torch's own.
        """
        if autocast() or forward_ad._current_level >= 0:  # a tensor with a tangent looks like any other
            return original(input, weight, bias)
        key: tuple[Any, ...]
        try:
            if bias is None:
                key = (
                    (x_address := input.data_ptr()) and (w_address := weight.data_ptr()) and not (x_address | w_address) & 15
                    and input.is_contiguous() and weight.is_contiguous(),
                    input.shape, weight.shape, input.dtype, weight.dtype, input.get_device(), weight.get_device(),
                    input.__class__, weight.__class__,
                    grad_enabled() and (input.requires_grad or weight.requires_grad),
                )  # fmt: skip
            else:
                key = (
                    (x_address := input.data_ptr()) and (w_address := weight.data_ptr()) and (bias_address := bias.data_ptr())
                    and not (x_address | w_address | bias_address) & 15
                    and input.is_contiguous() and weight.is_contiguous() and bias.is_contiguous(),
                    input.shape, weight.shape, input.dtype, weight.dtype, input.get_device(), weight.get_device(),
                    input.__class__, weight.__class__, bias.shape, bias.dtype, bias.get_device(), bias.__class__,
                    grad_enabled() and (input.requires_grad or weight.requires_grad or bias.requires_grad),
                )  # fmt: skip
            call = get(key)
        # no tensor, one without memory, a size that is a symbol, an address that is a proxy
        except (AttributeError, RuntimeError, TypeError, ValueError):
            forget_questions(input, weight, bias)
            return original(input, weight, bias)
        if call is None:
            return first(key, input, weight, bias)
        try:
            return call(input, weight) if bias is None else call(input, weight, bias)
        except BaseException as error:  # a kernel of a plugin may raise anything
            return first(key, input, weight, bias, failed=(error, call))

    return linear


linear = routed_linear(tgemm.dispatcher)
linear.__qualname__ = linear.__name__  # pickled by name
script_as("aten::linear", linear, _original)


def _run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, weight_layout: str = "row") -> torch.Tensor:
    if type(weight) not in TORCHS:  # a call of `plain` takes 60 ns
        weight = weight.as_plain() if type(weight) is DualLayoutWeight else plain(weight)
    if bias is not None and type(bias) not in TORCHS:
        bias = plain(bias)
    out: torch.Tensor = linear(x, weight if weight_layout == "row" else as_shuffled(weight, weight_layout), bias)
    return out.contiguous()


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, weight_layout: str = "row") -> torch.Tensor:
    del weight_layout
    return _original(x, weight, bias)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    keep_product(ctx, *inputs[:3])


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs_input_grad  # of the arguments that are not defaults
    return (*gradients_of_product(ctx, gradient, (*needs, False)[:3]), None)[: len(needs)]


op = define_op(
    'linear(Tensor x, Tensor weight, Tensor? bias=None, str weight_layout="row") -> Tensor',
    run=_run,
    fake=_fake,
    gradient=(_keep, _gradients),
)


def stays_torch_in_graph(*operands: torch.Tensor | None) -> bool:
    """Return whether a traced product stays torch's: for autocast, a functional transform, or a gradient.

    In batch-invariant mode a gradient needs our op, since the forward bits are those of a class.
    """
    needed = any(operand is not None and operand.requires_grad for operand in operands)
    return (needed and torch.is_grad_enabled() and not _is_batch_invariant()) or _autocast() or inside_transform()


def _is_batch_invariant() -> bool:
    return tgemm.dispatcher.settings.batch_invariant


# Called by Python itself while a graph is traced, as `inside_transform` is.
_is_batch_invariant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _traced(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Trace a call into a graph."""
    if isinstance(weight, ShuffledWeight):
        return op(input, weight._plain, bias, weight.layout_name)
    if weight.dim() != 2 or stays_torch_in_graph(input, weight, bias):
        return _original(input, weight, bias)
    return op(input, weight, bias)


trace_instead(linear, _traced)

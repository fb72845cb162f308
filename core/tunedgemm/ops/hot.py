"""Hot functions: generated code that serves a cache hit by one key, one look-up and one call.

The source is compiled once per signature, as attrs does for its methods. An op's module defines its
public functions, which call `hot`; `bound` copies them for a dispatcher.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from tunedgemm.errors import UserError
from tunedgemm.ops.key import Key, KeySource, any_given, compiled
from tunedgemm.ops.layout import SHUFFLED_ADDRESSES, check_not_transposed
from tunedgemm.ops.op import ArgumentOrder, Function, Op

if TYPE_CHECKING:
    import torch

#: Placeholder default for a dtype argument, which `bound` replaces by torch.bfloat16.
BF16: Any = "bf16"

#: Placeholder of the dispatcher in an op's module, which `bound` replaces.
serving = cast("Serving", None)


class Serving(Protocol):
    """Protocol of dispatchers as hot functions use them.

    See `tunedgemm.dispatch.dispatcher.Dispatcher`.
    """

    op: Op
    launchers: dict[Key, Function]
    #: Makes the call that `resolve` and `demote` take: `Call.of`.
    call_of: Callable[..., Any]

    def call(self, *operands: torch.Tensor | None, otype: torch.dtype | None = None, **fields: Any) -> torch.Tensor:
        """Serve a call, cached or not."""

    def resolve(self, call: Any) -> torch.Tensor:
        """Serve a cache miss."""

    def demote(self, call: Any, error: BaseException, launcher: Function) -> torch.Tensor:
        """Serve a call whose cached launcher raised."""

    def preferred(self, x: Any, weight: Any, shuffled_weight: Any, *rest: Any, otype: torch.dtype | None = None) -> Any:
        """Choose between a plain weight and its shuffled copy."""

    def hot(self, inner: Function, arrange: ArgumentOrder) -> Function:
        """Register and return a hot function."""


def hot(*arguments: Any) -> torch.Tensor:
    """Stand in for the hot function in an op's module; `bound` replaces it."""
    del arguments
    raise UserError("a function in the file of an op has no tables; call it by its name in tunedgemm")


def bound(function: Function, **names: Any) -> Any:
    """Copy a function of an op's module, with *names* and torch added to its globals.

    A call then pays for no closure, argument or attribute.
    """
    import torch

    from tunedgemm.ops.formats.scales import ShuffledScale

    original: Any = function
    scope = {**original.__globals__, "torch": torch, "ShuffledScale": ShuffledScale, **names}
    del scope["__name__"]  # by which Dynamo would find the module's globals
    dtypes = tuple(torch.bfloat16 if default is BF16 else default for default in original.__defaults__ or ())
    copy: Any = types.FunctionType(original.__code__, scope, original.__name__, dtypes)
    for name in ("__kwdefaults__", "__doc__", "__annotations__", "__module__", "__qualname__"):
        setattr(copy, name, getattr(original, name))
    return copy


def public(function: Function, operands: Sequence[str], fields: Sequence[str] = ()) -> Callable[[Serving], Mapping[str, Function]]:
    """Return the `Op.entry` of an op whose `Op.functions` all name one public function.

    Args:
        function: calls `hot` with the operands, then the fields, then the output dtype.
        operands, fields: as for `hot_function`.
    """

    def entry(serving: Serving) -> Mapping[str, Function]:
        return dict.fromkeys(serving.op.functions, bound(function, hot=hot_function(serving, operands, fields=fields)))

    return entry


def hot_function(
    serving: Serving,
    operands: Sequence[str],
    *,
    otype: str = "otype",
    fields: Sequence[str] = (),
    general: Function | None = None,
    spelling: Mapping[str, str] | None = None,
) -> Function:
    """Generate a hot function over a dispatcher's launchers.

    Without *general* it takes the operands, the fields and *otype* by position; absent operands
    are None.

    Args:
        serving: the dispatcher.
        operands: names of all or the first of the op's operands; optional ones end in ``?`` and
            come last.
        otype: name of the output dtype argument.
        fields: names of further arguments of the op's `shape_of`.
        general: a function of the op's module, whose signature and docstring the hot function
            gets. A copy bound to *serving* is called if any argument other than the operands and
            *otype* is given; their defaults are None.
        spelling: maps argument names of *operands* and *general* to those of the hot function.
    """
    spelling = spelling or {}
    own = tuple(name.removesuffix("?") for name in operands)
    source = KeySource(
        tuple(spelling.get(name, name) for name in operands), serving.op.matrices, (otype, *fields), scales=serving.op.shuffled_scales
    )
    others: tuple[str, ...] = ()
    if general is None:
        name, signature = f"{serving.op.name}_hot", ", ".join((*source.names, *fields, otype))
    else:
        general = bound(general, serving=serving)
        name, signature = general.__name__, _signature(general, spelling)
        others = tuple(parameter for parameter in inspect.signature(general).parameters if parameter not in (*own, otype))
    source.check_names(name, *others)
    rest = tuple(operand.removesuffix("?") for operand in serving.op.operands[len(own) :]) if others else ()
    make = compiled(name, _text(name, signature, source, others, tuple(operand for operand in rest if operand in others)))
    inner: Any
    inner, arrange = make(serving.call_of, serving.op, serving.launchers, _checked(serving), serving.demote, general, SHUFFLED_ADDRESSES)
    if general is not None:
        general.__globals__["hot"] = inner  # type: ignore[attr-defined]
        for function in (inner, arrange):
            function.__defaults__, function.__kwdefaults__ = general.__defaults__, general.__kwdefaults__  # type: ignore[attr-defined]
        inner.__doc__ = general.__doc__
        inner.__annotations__ = {spelling.get(name, name): kind for name, kind in general.__annotations__.items()}
        inner.__module__, inner.__qualname__ = general.__module__, general.__qualname__
        if not spelling:
            inner.__wrapped__ = general  # so that `inspect` and editors find the source
    return serving.hot(inner, arrange)


def _checked(serving: Serving) -> Callable[[Any], torch.Tensor]:
    """Wrap `Serving.resolve` to reject a transposed square weight; its strides are in the key."""

    def resolve(call: Any) -> torch.Tensor:
        for index in call.op.matrices:
            check_not_transposed(call.op.name, call.operands[index])
        return serving.resolve(call)

    return resolve


def _signature(function: Function, spelling: Mapping[str, str]) -> str:
    """Write a function's parameter list, with None for each default, to be set later."""
    parameters = inspect.signature(function).parameters.values()
    names = [(spelling.get(parameter.name, parameter.name), parameter.default is parameter.empty) for parameter in parameters]
    return ", ".join(name if required else f"{name}=None" for name, required in names)


def _text(name: str, signature: str, source: KeySource, others: Sequence[str], rest: Sequence[str]) -> str:
    """Write the source of the factory of a hot function and its `ArgumentOrder`.

    Args:
        name, signature: name and parameter list of the function.
        source: source of its cache keys.
        others: names of the arguments that only the general function handles.
        rest: those of *others* that are operands.
    """
    otype, values = _values(source)
    lines = ["def make(call_of, op, launchers, resolve, demote, general, shuffled):", f"    def {name}({signature}):"]
    if others:
        parameters = [part.removesuffix("=None") for part in signature.split(", ")]
        lines += [f"        if {any_given(others)}:", f"            return general({', '.join(parameters)})"]
    lines += [f"        {line}" for line in source.branched(functools.partial(_body, source))]
    lines += [f"    def arrange({signature}):", f"        return {_tuple([*source.names, *rest])}, {otype}, {values}"]
    return "\n".join([*lines, f"    return {name}, arrange"]) + "\n"


def _values(source: KeySource) -> tuple[str, str]:
    """Write the output dtype and the fields as arguments of `Serving.call`."""
    otype, *fields = source.values
    return otype, f"{{{', '.join(f'{field!r}: {field}' for field in fields)}}}"


def _body(source: KeySource, required: Sequence[str], optional: Sequence[str]) -> list[str]:
    """Write the statements of a call: key, look-up, launch."""
    values = ", ".join(_values(source))
    operands, run = _tuple(required), f"launcher({', '.join(required)})"
    lines = ["try:  # memory is asked for first: operands without any must not find what serves strided ones"]
    lines += [f"    {line}" for line in source.flat(required)]
    if optional:
        lines += [f"    operands = {operands}", f"    if {any_given(optional)}:", f"        operands = {_trim(required, optional)}"]
        lines += [f"        {line}" for line in source.parts(optional)]
        operands, run = "operands", "launcher(*operands)"
    return [
        *lines,
        "    launcher = launchers[key]",
        "except KeyError:",
        "    pass",
        "except (AttributeError, RuntimeError, TypeError, ValueError):  # Call.of says what",
        f"    return resolve(call_of(op, {_tuple(source.names)}, {values}))",
        "else:",
        "    try:",
        f"        return {run}",
        "    except BaseException as error:  # a kernel of a plugin may raise anything",
        f"        return demote(call_of(op, {operands}, {values}, key), error, launcher)",
        f"return resolve(call_of(op, {operands}, {values}, key))",
    ]


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)},)"


def _trim(required: Sequence[str], optional: Sequence[str]) -> str:
    """Write the expression for the operands without trailing absent ones."""
    text = _tuple(required)
    for count, name in enumerate(optional, 1):
        text = f"{_tuple([*required, *optional[:count]])} if {name} is not None else {text}"
    return text

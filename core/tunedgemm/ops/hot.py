"""Hot functions: one cache key, one look-up and one call, generated from an op's operands.

Their source text is compiled once per signature, as attrs does for its methods. The file of an op
has its public functions, which call `hot`; `bound` copies them for a dispatcher.
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

#: Default of a public function's argument for a dtype: `bound` puts that of torch there.
BF16: Any = "bf16"

#: Stands for the dispatcher of a function in the file of an op.
serving = cast("Serving", None)


class Serving(Protocol):
    """Launchers of one op by cache key, and the ways to one that is not cached yet.

    `tunedgemm.dispatch.dispatcher.Dispatcher` implements and documents it.
    """

    op: Op
    launchers: dict[Key, Function]
    #: Makes the value that `resolve` and `demote` take: `Call.of`.
    call_of: Callable[..., Any]

    def call(self, *operands: torch.Tensor | None, otype: torch.dtype | None = None, **fields: Any) -> torch.Tensor:
        """Serve a call of any operands."""

    def resolve(self, call: Any) -> torch.Tensor:
        """Serve a call whose key is new."""

    def demote(self, call: Any, error: BaseException, launcher: Function) -> torch.Tensor:
        """Serve a call whose launcher raised."""

    def preferred(self, x: Any, weight: Any, shuffled_weight: Any, *rest: Any, otype: torch.dtype | None = None) -> Any:
        """Choose between a plain weight and its shuffled copy."""

    def hot(self, inner: Function, arrange: ArgumentOrder) -> Function:
        """Register a function that reads addresses; returns it."""


def hot(*arguments: Any) -> torch.Tensor:
    """Stand for a dispatcher's hot function in the file of an op."""
    del arguments
    raise UserError("a function in the file of an op has no tables; call it by its name in tunedgemm")


def bound(function: Function, **names: Any) -> Any:
    """Copy a function of an op's file for a dispatcher.

    Its globals are those of the file, torch, which the file does not load, and *names*. A copy
    costs a call nothing, where an argument or an attribute would.
    """
    import torch

    from tunedgemm.ops.formats.scales import ShuffledScale

    original: Any = function
    scope = {**original.__globals__, "torch": torch, "ShuffledScale": ShuffledScale, **names}
    del scope["__name__"]  # by which compilers would find the globals of the file
    dtypes = tuple(torch.bfloat16 if default is BF16 else default for default in original.__defaults__ or ())
    copy: Any = types.FunctionType(original.__code__, scope, original.__name__, dtypes)
    for name in ("__kwdefaults__", "__doc__", "__annotations__", "__module__", "__qualname__"):
        setattr(copy, name, getattr(original, name))
    return copy


def public(function: Function, operands: Sequence[str], fields: Sequence[str] = ()) -> Callable[[Serving], Mapping[str, Function]]:
    """Return `Op.entry` of an op with one public function, which has all names of `Op.functions`.

    Args:
        function: calls `hot` with the operands, then the fields, then the dtype of the output.
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
    """Make the function of some operands over a dispatcher's launchers.

    Without *general* it takes the operands, then the fields, then *otype*, all by position; absent
    operands are None.

    Args:
        serving: the dispatcher.
        operands: names of the op's first operands or all; optional ones end in ``?`` and come last.
        otype: name of the argument for the dtype of the output.
        fields: names of what the op's `shape_of` takes in addition to the operands.
        general: a function of the op's file, whose signature and docstring the hot function gets. A
            copy that finds *serving*, too, is called where an argument is given that is neither one
            of the operands nor *otype*; the default of such an argument is None.
        spelling: other names of arguments by the name that *operands* and *general* have.
    """
    spelling = spelling or {}
    own = tuple(name.removesuffix("?") for name in operands)
    source = KeySource(tuple(spelling.get(name, name) for name in operands), serving.op.matrices, (otype, *fields))
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
            inner.__wrapped__ = general  # in which `inspect` and editors find the source
    return serving.hot(inner, arrange)


def _checked(serving: Serving) -> Callable[[Any], torch.Tensor]:
    """Wrap `Serving.resolve` so that it refuses a transposed square weight, whose strides are in the key."""

    def resolve(call: Any) -> torch.Tensor:
        for index in call.op.matrices:
            check_not_transposed(call.op.name, call.operands[index])
        return serving.resolve(call)

    return resolve


def _signature(function: Function, spelling: Mapping[str, str]) -> str:
    """Return a function's parameters as source text, each default None; the values are set later."""
    parameters = inspect.signature(function).parameters.values()
    names = [(spelling.get(parameter.name, parameter.name), parameter.default is parameter.empty) for parameter in parameters]
    return ", ".join(name if required else f"{name}=None" for name, required in names)


def _text(name: str, signature: str, source: KeySource, others: Sequence[str], rest: Sequence[str]) -> str:
    """Write the factory of a hot function, and of its `ArgumentOrder`.

    Args:
        name, signature: of the function.
        source: its cache keys.
        others: names of the arguments that the general function alone takes.
        rest: those of them that are operands.
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
    """Write the dtype of the output and the fields as `Serving.call` takes them."""
    otype, *fields = source.values
    return otype, f"{{{', '.join(f'{field!r}: {field}' for field in fields)}}}"


def _body(source: KeySource, required: Sequence[str], optional: Sequence[str]) -> list[str]:
    """Write the statements that serve a call: key, look-up, launch."""
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
    """Write the operands without the absent ones at the end."""
    text = _tuple(required)
    for count, name in enumerate(optional, 1):
        text = f"{_tuple([*required, *optional[:count]])} if {name} is not None else {text}"
    return text

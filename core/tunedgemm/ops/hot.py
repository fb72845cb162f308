"""Hot functions: one cache key, one look-up and one call, generated from an op's operands.

Their source text is compiled once per signature, as attrs does for its methods.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tunedgemm.ops.key import Key, KeySource, any_given, compiled
from tunedgemm.ops.layout import SHUFFLED_ADDRESSES, check_not_transposed
from tunedgemm.ops.op import ArgumentOrder, Arguments, Function, Op

if TYPE_CHECKING:
    import torch

    from tunedgemm.ops.call import Call


class Serving(Protocol):
    """Launchers of one op by cache key, and the ways to one that is not cached yet.

    `tunedgemm.dispatch.dispatcher.Dispatcher` implements and documents it.
    """

    op: Op
    launchers: dict[Key, Function]

    def call(self, *operands: torch.Tensor | None, otype: torch.dtype | None = None, **fields: Any) -> torch.Tensor:
        """Serve a call of any operands."""

    def resolve(self, call: Call) -> torch.Tensor:
        """Serve a call whose key is new."""

    def demote(self, call: Call, error: BaseException, launcher: Function) -> torch.Tensor:
        """Serve a call whose launcher raised."""

    def preferred(self, x: Any, weight: Any, shuffled_weight: Any, *rest: Any, otype: torch.dtype | None = None) -> Any:
        """Choose between a plain weight and its shuffled copy."""

    def hot(self, inner: Function, arrange: ArgumentOrder) -> Function:
        """Register a function that reads addresses; returns it."""


def hot_function(
    serving: Serving,
    operands: Sequence[str],
    *,
    otype: str = "otype",
    fields: Sequence[str] = (),
    general: Function | None = None,
    arrange: ArgumentOrder | None = None,
    spelling: Mapping[str, str] | None = None,
) -> Function:
    """Make the function of some operands over a dispatcher's launchers.

    Without *general* it takes the operands, then the fields, then *otype*, all by position; absent
    operands are None.

    Args:
        serving: the dispatcher.
        operands: names in the op's order; optional ones end in ``?`` and come last, as in
            `Op.operands`.
        otype: name of the argument for the dtype of the output.
        fields: names of what the op's `shape_of` takes in addition to the operands.
        general: a function whose signature and docstring the hot function gets. It is called where
            an argument is given that is neither one of the operands nor *otype*; the default of
            such an argument is None. Without arguments by name alone Python calls it quicker.
        arrange: from the function's arguments to those of `Serving.call`; needed with *general*.
        spelling: other names of arguments by the name that *operands* and *general* have.
    """
    spelling = spelling or {}
    own = tuple(name.removesuffix("?") for name in operands)
    source = KeySource(tuple(spelling.get(name, name) for name in operands), serving.op.matrices, (otype, *fields))
    others: tuple[str, ...] = ()
    if general is None:
        name, signature = f"{serving.op.name}_hot", ", ".join((*source.names, *fields, otype))
        arrange = functools.partial(_arrange, len(own), tuple(fields))
    else:
        name, signature = general.__name__, _signature(general, spelling)
        others = tuple(parameter for parameter in inspect.signature(general).parameters if parameter not in (*own, otype))
    source.check_names(name, *others)
    from tunedgemm.ops.call import Call

    make = compiled(name, _text(name, signature, source, others))
    inner: Any = make(Call.of, serving.op, serving.launchers, _checked(serving), serving.demote, general, SHUFFLED_ADDRESSES)
    if general is not None:
        inner.__defaults__, inner.__kwdefaults__ = general.__defaults__, general.__kwdefaults__  # type: ignore[attr-defined]
        inner.__doc__ = general.__doc__
        inner.__annotations__ = {spelling.get(name, name): kind for name, kind in general.__annotations__.items()}
        inner.__module__, inner.__qualname__ = general.__module__, general.__qualname__
    if arrange is None:
        raise AssertionError(f"{name}: a general function needs *arrange*")
    return serving.hot(inner, _respelled(arrange, spelling) if spelling else arrange)


def _respelled(arrange: ArgumentOrder, spelling: Mapping[str, str]) -> ArgumentOrder:
    """Make *arrange* take the other names of its arguments."""
    own = {other: name for name, other in spelling.items()}

    def respelled(*arguments: Any, **named: Any) -> Arguments:
        return arrange(*arguments, **{own.get(name, name): value for name, value in named.items()})

    return respelled


def _checked(serving: Serving) -> Callable[[Call], torch.Tensor]:
    """Wrap `Serving.resolve` so that it refuses a transposed square weight, whose strides are in the key."""

    def resolve(call: Call) -> torch.Tensor:
        for index in call.op.matrices:
            check_not_transposed(call.op.name, call.operands[index])
        return serving.resolve(call)

    return resolve


def _arrange(count: int, fields: tuple[str, ...], *arguments: Any) -> Arguments:
    """Return the arguments of a hot function without *general* as those of `Serving.call`."""
    return arguments[:count], arguments[-1], dict(zip(fields, arguments[count:-1], strict=True))


def _signature(function: Function, spelling: Mapping[str, str]) -> str:
    """Return a function's parameters as source text, each default None; the values are set later."""
    parameters = inspect.signature(function).parameters.values()
    names = [(spelling.get(parameter.name, parameter.name), parameter.default is parameter.empty) for parameter in parameters]
    parts = [name if required else f"{name}=None" for name, required in names]
    keywords = [index for index, parameter in enumerate(parameters) if parameter.kind is parameter.KEYWORD_ONLY]
    if keywords:
        parts.insert(keywords[0], "*")
    return ", ".join(parts)


def _text(name: str, signature: str, source: KeySource, others: Sequence[str]) -> str:
    """Write the factory of a hot function.

    Args:
        name, signature: of the function.
        source: its cache keys.
        others: names of the arguments that the general function alone takes.
    """
    lines = ["def make(call_of, op, launchers, resolve, demote, general, shuffled):", f"    def {name}({signature}):"]
    if others:
        parameters = [part.removesuffix("=None") for part in signature.split(", ")]
        first = parameters.index("*") if "*" in parameters else len(parameters)
        passed = [*parameters[:first], *(f"{parameter}={parameter}" for parameter in parameters[first + 1 :])]
        lines += [f"        if {any_given(others)}:", f"            return general({', '.join(passed)})"]
    lines += [f"        {line}" for line in source.branched(functools.partial(_body, source))]
    return "\n".join([*lines, f"    return {name}"]) + "\n"


def _body(source: KeySource, required: Sequence[str], optional: Sequence[str]) -> list[str]:
    """Write the statements that serve a call: key, look-up, launch."""
    otype, *fields = source.values
    values = f"{otype}, {{{', '.join(f'{field!r}: {field}' for field in fields)}}}"
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
        "except (AttributeError, RuntimeError, TypeError, ValueError):  # Call.of names what is no tensor",
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

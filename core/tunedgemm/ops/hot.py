"""Hot functions: one cache key, one look-up and one call, generated from an op's operands.

The source text is compiled once per signature, as attrs does for its methods. It is made from names
of operands alone, and added to `linecache`, so that tracebacks show it.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.ops.layout import SHUFFLED_ADDRESSES, check_not_transposed
from tunedgemm.ops.op import ArgumentOrder, Arguments, Call, Serving

if TYPE_CHECKING:
    import torch

#: Most operands whose key is one flat tuple. Python builds one of more than 30 fields from a list.
_MOST_FLAT = 4
#: Names that the generated source uses itself.
_TAKEN = {"at", "key", "call", "operands", "error", "launchers", "resolve", "demote", "general", "shuffled", "is_grad_enabled"}
_TAKEN |= {"forward_ad"}


def hot_function(
    serving: Serving,
    operands: Sequence[str],
    *,
    otype: str = "otype",
    fields: Sequence[str] = (),
    general: Call | None = None,
    arrange: ArgumentOrder | None = None,
    spelling: Mapping[str, str] | None = None,
) -> Call:
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
    names = tuple(spelling.get(name, name) for name in own)
    optional = tuple(name for name, operand in zip(names, operands, strict=True) if operand.endswith("?"))
    others: tuple[str, ...] = ()
    if general is None:
        name, signature = f"{serving.op.name}_hot", ", ".join((*names, *fields, otype))
        arrange = functools.partial(_arrange, len(names), tuple(fields))
    else:
        name, signature = general.__name__, _signature(general, spelling)
        others = tuple(parameter for parameter in inspect.signature(general).parameters if parameter not in (*own, otype))
    weights = tuple(names[index] for index in serving.op.matrices)
    make = _compile(_Source(name, signature, names, optional, weights, otype, tuple(fields), others))
    inner: Any = make(serving.launchers, _checked(serving), serving.demote, general, SHUFFLED_ADDRESSES)
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


def _checked(serving: Serving) -> Call:
    """Wrap `Serving.resolve` so that it refuses a transposed square weight, whose strides are in the key."""
    op = serving.op

    def resolve(key: tuple[Any, ...] | None, operands: tuple[Any, ...], otype: Any, **fields: Any) -> torch.Tensor:
        for index in op.matrices:
            check_not_transposed(op.name, operands[index])
        return serving.resolve(key, operands, otype, **fields)

    return resolve


def _arrange(count: int, fields: tuple[str, ...], *arguments: Any) -> Arguments:
    """Return the arguments of a hot function without *general* as those of `Serving.call`."""
    return arguments[:count], arguments[-1], dict(zip(fields, arguments[count:-1], strict=True))


def _signature(function: Call, spelling: Mapping[str, str]) -> str:
    """Return a function's parameters as source text, each default None; the values are set later."""
    parameters = inspect.signature(function).parameters.values()
    names = [(spelling.get(parameter.name, parameter.name), parameter.default is parameter.empty) for parameter in parameters]
    parts = [name if required else f"{name}=None" for name, required in names]
    keywords = [index for index, parameter in enumerate(parameters) if parameter.kind is parameter.KEYWORD_ONLY]
    if keywords:
        parts.insert(keywords[0], "*")
    return ", ".join(parts)


@attrs.frozen
class _Source:
    """The source of a hot function.

    Attributes:
        name, signature: of the function.
        operands: names of all operands.
        optional: those of them that may be None.
        weights: those of them that may be marked as shuffled (`Op.matrices`).
        otype: name of the argument for the dtype of the output.
        fields: names of further arguments of the op's `shape_of`.
        others: names of the arguments that the general function alone takes.
    """

    name: str
    signature: str
    operands: tuple[str, ...]
    optional: tuple[str, ...]
    weights: tuple[str, ...]
    otype: str
    fields: tuple[str, ...]
    others: tuple[str, ...]

    def text(self) -> str:
        """Write the factory of the function."""
        required = [operand for operand in self.operands if operand not in self.optional]
        lines = ["def make(launchers, resolve, demote, general, shuffled):", f"    def {self.name}({self.signature}):"]
        if self.others:
            parameters = [part.removesuffix("=None") for part in self.signature.split(", ")]
            first = parameters.index("*") if "*" in parameters else len(parameters)
            passed = [*parameters[:first], *(f"{parameter}={parameter}" for parameter in parameters[first + 1 :])]
            lines += [f"        if {_any_given(self.others)}:", f"            return general({', '.join(passed)})"]
        if len(self.optional) == 1:
            lines += [f"        if {self.optional[0]} is None:"]
            lines += [f"            {line}" for line in self._body(required, ())]
            lines += [f"        {line}" for line in self._body(self.operands, ())]
        else:
            lines += [f"        {line}" for line in self._body(required, self.optional)]
        return "\n".join([*lines, f"    return {self.name}"]) + "\n"

    def _body(self, required: Sequence[str], optional: Sequence[str]) -> list[str]:
        """Write the statements that serve a call: key, look-up, launch."""
        extra = "".join(f", {field}={field}" for field in self.fields)
        operands, run = _tuple(required), f"call({', '.join(required)})"
        lines = ["try:  # memory is asked for first: operands without any must not find what serves strided ones"]
        lines += [f"    {line}" for line in self._key(required)]
        if optional:
            lines += [f"    operands = {operands}", f"    if {_any_given(optional)}:", f"        operands = {_trim(required, optional)}"]
            lines += ["        key = (", "            key,", *(f"            {_part(operand)}," for operand in optional), "        )"]
            operands, run = "operands", "call(*operands)"
        return [
            *lines,
            "    call = launchers[key]",
            "except KeyError:",
            "    pass",
            "except (AttributeError, RuntimeError, TypeError, ValueError):  # shape_of names what is no tensor",
            f"    return resolve(None, {_tuple(self.operands)}, {self.otype}{extra})",
            "else:",
            "    try:",
            f"        return {run}",
            "    except BaseException as error:  # a kernel of a plugin may raise anything",
            f"        return demote(error, call, key, {operands}, {self.otype}{extra})",
            f"return resolve(key, {operands}, {self.otype}{extra})",
        ]

    def _key(self, names: Sequence[str]) -> list[str]:
        """Write the cache key of operands that are all given.

        An operand may be refused where it is not contiguous while another is copied, so each but x
        has a field for that. The field holds the strides of one that is not contiguous: they may be
        part of the shape (`Op.strided`), or those of a transposed weight.

        The last field tells a shuffled weight without our type, which must not find the launcher of
        a plain one. AITER marks it with an attribute. ``parameter.data = shuffled`` loses the type
        and keeps the address.

        Operands without memory have the address 0. For weights it is among the shuffled ones, and
        elsewhere it takes the place of the order. Tensors that torch negates as it reads them are
        imaginary parts: they begin inside a complex number, off 16 bytes, and are found where
        misaligned operands are copied. Only ``torch._neg_view`` makes aligned ones. To ask for
        them costs 60 to 75 ns an operand, and a hit takes 840.

        Reading one property of all operands, then the next, takes 2 % less time than operand by
        operand.
        """
        properties = ("{}.shape", "{}.dtype", "{}.get_device()", "{}.__class__")
        fields_by_operand = ["".join(f"{text.format(name)}, " for name in names).rstrip() for text in properties]
        if len(names) > _MOST_FLAT:
            fields_by_operand[-1] = f"({fields_by_operand[-1]}),"
        mark = " or ".join(f'getattr({name}, "is_shuffled", None) or {name}_at in shuffled' for name in self.weights)
        x, weight, *rest = names
        ready = f"{x}_at and not ({_misaligned([f'{name}_at' for name in names])}) and {x}.is_contiguous()"
        orders = "".join(f" {name}_at and ({name}.is_contiguous() or {name}.stride())," for name in rest)
        needs = " or ".join(f"{name}.requires_grad" for name in names)
        return [
            *(f"{name}_at = {name}.data_ptr()" for name in names),
            "key = (",
            *(f"    {line}" for line in fields_by_operand),
            f"    {', '.join([self.otype, *self.fields])},",
            f"    {ready} if {weight}.is_contiguous() else {weight}.stride(),{orders}",
            f"    is_grad_enabled() and ({needs}) if forward_ad._current_level < 0 else None,  # inside a level nothing is cached",
            f"    {mark},",
            ")",
        ]


def _misaligned(addresses: Sequence[str]) -> str:
    """Write the test for addresses off 16 bytes: the bits of up to three; of more a remainder each."""
    return f"({' | '.join(addresses)}) & 15" if len(addresses) < 4 else " or ".join(f"{address} % 16" for address in addresses)


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)},)"


def _any_given(names: Sequence[str]) -> str:
    return " or ".join(f"{name} is not None" for name in names)


def _trim(required: Sequence[str], optional: Sequence[str]) -> str:
    """Write the operands without the absent ones at the end."""
    text = _tuple(required)
    for count, name in enumerate(optional, 1):
        text = f"{_tuple([*required, *optional[:count]])} if {name} is not None else {text}"
    return text


def _part(name: str) -> str:
    """Write what an optional operand adds to a cache key."""
    return (
        f"None if {name} is None else ({name}.shape, {name}.dtype, {name}.get_device(), type({name}), "
        f"(at := {name}.data_ptr()) and not at & 15 and {name}.is_contiguous(), is_grad_enabled() and {name}.requires_grad)"
    )


@functools.cache
def _compile(source: _Source) -> Callable[..., Call]:
    """Compile a hot function; return its factory, which takes the launchers and a dispatcher's methods."""
    from torch import is_grad_enabled
    from torch.autograd import forward_ad

    for word in (source.name, *source.operands, source.otype, *source.fields, *source.others):
        if not word.isidentifier() or keyword.iskeyword(word) or word in _TAKEN:
            raise ValueError(f"hot function {source.name!r}: {word!r} cannot name an argument")
    text = source.text()
    filename = f"<tunedgemm hot function {source.name} #{len(_SOURCES)}>"
    _SOURCES.append(filename)
    # An entry without a time of change stays, as for attrs' methods.
    linecache.cache[filename] = len(text), None, text.splitlines(keepends=True), filename
    scope: dict[str, Any] = {"__name__": __name__, "is_grad_enabled": is_grad_enabled, "forward_ad": forward_ad}
    exec(compile(text, filename, "exec"), scope)
    factory: Callable[..., Call] = scope["make"]
    return factory


_SOURCES: list[str] = []

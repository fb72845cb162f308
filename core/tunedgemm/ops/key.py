"""Cache keys of calls: their only definition, as generated source.

Hot functions inline it; `key_function` compiles it alone, for `Dispatcher.call` and for choices
between two weights. The source depends only on operand names, and is added to `linecache` so that
tracebacks show it.
"""

from __future__ import annotations

import functools
import keyword
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from tunedgemm.ops.layout import SHUFFLED_ADDRESSES

#: A cache key.
Key = tuple[Any, ...]

#: Most operands with a flat key. CPython builds tuples of more than 30 items from a list.
_MOST_FLAT = 4
#: Names reserved by the generated source.
_TAKEN = {"at", "key", "launcher", "operands", "error", "launchers", "resolve", "demote", "general", "shuffled", "call_of", "op"}
_TAKEN |= {"forward_ad", "is_grad_enabled"}


@attrs.frozen
class KeySource:
    """Source of the cache keys of a signature.

    Attributes:
        operands: names of all operands; optional ones end in ``?`` and come last.
        weights: positions of the operands that may be shuffled (`Op.matrices`).
        scales: positions of the scales that may be (`Op.shuffled_scales`).
        values: names of the output dtype and of further arguments of the op's `shape_of`.
        reads_memory: whether keys depend on alignment and strides, as those of launchers must.
    """

    operands: tuple[str, ...]
    weights: tuple[int, ...]
    values: tuple[str, ...]
    reads_memory: bool = True
    scales: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the argument names of all operands."""
        return tuple(operand.removesuffix("?") for operand in self.operands)

    @property
    def optional(self) -> tuple[str, ...]:
        """Return the argument names of the optional operands."""
        return tuple(operand[:-1] for operand in self.operands if operand.endswith("?"))

    def branched(self, body: Callable[[Sequence[str], Sequence[str]], list[str]]) -> list[str]:
        """Write *body*, given the operands of the flat key and those appended in parts.

        A single optional operand gets its own branch, since the flat key is faster.
        """
        required, optional = self.names[: len(self.names) - len(self.optional)], self.optional
        if len(optional) != 1:
            return body(required, optional)
        return [f"if {optional[0]} is None:", *(f"    {line}" for line in body(required, ())), *body(self.names, ())]

    def flat(self, names: Sequence[str]) -> list[str]:
        """Write the cache key of operands that are all present.

        Each operand but x has a contiguity field, since a non-contiguous one may be rejected or
        copied. It holds the strides, which may be part of the shape (`Op.strided`) or reveal a
        transposed weight.

        The last fields mark shuffled weights and scales without our type, so that they miss the
        launcher of plain ones and of other orders. AITER marks weights by an attribute;
        ``parameter.data = shuffled`` drops the type but keeps the address.

        Operands without storage have address 0, which counts as shuffled for weights and replaces
        the contiguity field otherwise. Tensors with the negative bit are imaginary parts of complex
        ones, so they are misaligned and detected where misaligned operands are copied. Only
        ``torch._neg_view`` makes aligned ones. Checking would cost 60 to 75 ns per operand, of the
        840 ns of a hit.

        Reading one property of all operands before the next is 2 % faster than operand by operand.
        """
        properties = ("{}.shape", "{}.dtype", "{}.get_device()", "{}.__class__")
        fields_by_operand = ["".join(f"{text.format(name)}, " for name in names).rstrip() for text in properties]
        if len(names) > _MOST_FLAT:
            fields_by_operand[-1] = f"({fields_by_operand[-1]}),"
        needs = " or ".join(f"{name}.requires_grad" for name in names)
        lines = [*fields_by_operand, f"{', '.join(self.values)},"]
        gradient = f"is_grad_enabled() and ({needs}) if forward_ad._current_level < 0 else None,  # inside a level nothing is cached"
        if not self.reads_memory:
            return ["key = (", *(f"    {line}" for line in (*lines, gradient)), ")"]
        marks = [f'getattr({name}, "is_shuffled", None) or {name}_at in shuffled' for name in self._among(names, self.weights)]
        of_scales = [f"shuffled.get({name}_at)" for name in self._among(names, self.scales)]
        x, *others = names
        ready = f"{x}_at and not ({_misaligned([f'{name}_at' for name in names])}) and {x}.is_contiguous()"
        of_weight = f" if {others[0]}.is_contiguous() else {others[0]}.stride()" if others else ""
        orders = "".join(f" {name}_at and ({name}.is_contiguous() or {name}.stride())," for name in others[1:])
        lines += [f"{ready}{of_weight},{orders}", gradient, *(f"{' or '.join(each)}," for each in (marks, of_scales) if each)]
        return [*(f"{name}_at = {name}.data_ptr()" for name in names), "key = (", *(f"    {line}" for line in lines), ")"]

    def parts(self, optional: Sequence[str]) -> list[str]:
        """Write the key of a call with at least one of several optional operands."""
        weights, scales = self._among(optional, self.weights), self._among(optional, self.scales)
        lines = []
        for name in optional:
            part = f"{name}.shape, {name}.dtype, {name}.get_device(), type({name}), is_grad_enabled() and {name}.requires_grad"
            if self.reads_memory:
                part += f", (at := {name}.data_ptr()) and not at & 15 and {name}.is_contiguous()"
                part += f', getattr({name}, "is_shuffled", None) or at in shuffled' if name in weights else ""
                part += ", shuffled.get(at)" if name in scales else ""
            lines.append(f"    None if {name} is None else ({part}),")
        return ["key = (", "    key,", *lines, ")"]

    def _among(self, names: Sequence[str], positions: tuple[int, ...]) -> list[str]:
        """Return the operands at *positions* that are among *names*."""
        return [name for index, name in enumerate(self.names) if index in positions and name in names]

    def check_names(self, *others: str) -> None:
        """Check that all names are valid argument names.

        Raises:
            ValueError: a name is not an identifier, or is reserved.
        """
        for word in (*self.names, *self.values, *others):
            if not word.isidentifier() or keyword.iskeyword(word) or word in _TAKEN:
                raise ValueError(f"hot function: {word!r} cannot name an argument")


def _misaligned(addresses: Sequence[str]) -> str:
    """Write the test for an address that is not 16-byte aligned: or-ed bits for up to three."""
    return f"({' | '.join(addresses)}) & 15" if len(addresses) < 4 else " or ".join(f"{address} % 16" for address in addresses)


def any_given(names: Sequence[str]) -> str:
    """Write the test that at least one of the operands is given."""
    return " or ".join(f"{name} is not None" for name in names)


@functools.cache
def key_function(
    operands: tuple[str, ...], weights: tuple[int, ...], reads_memory: bool = True, scales: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Return a function from (output dtype, fields, *operands) to a cache key.

    It returns None for a tensor with the negative bit. It raises AttributeError, RuntimeError,
    TypeError or ValueError for an operand that is not a tensor or has no storage.
    """
    operands = tuple(f"operand{index}{'?' if name.endswith('?') else ''}" for index, name in enumerate(operands))
    source = KeySource(operands, weights, ("otype", "fields"), reads_memory, scales)

    def body(required: Sequence[str], optional: Sequence[str]) -> list[str]:
        negated = [f"{name}.is_neg()" for name in required] + [f"{name} is not None and {name}.is_neg()" for name in optional]
        extended = [f"if {any_given(optional)}:", *(f"    {line}" for line in source.parts(optional))] if optional else []
        return [*source.flat(required), *extended, f"return None if {' or '.join(negated)} else key" if reads_memory else "return key"]

    signature = ", ".join(f"{operand[:-1]}=None" if operand.endswith("?") else operand for operand in operands)
    lines = ["def make(shuffled):", f"    def key_of({', '.join(source.values)}, {signature}):"]
    lines += [*(f"        {line}" for line in source.branched(body)), "    return key_of"]
    key_of: Callable[..., Any] = compiled("key_of", "\n".join(lines) + "\n")(SHUFFLED_ADDRESSES)
    return key_of


@functools.cache
def compiled(name: str, text: str) -> Callable[..., Any]:
    """Compile source that defines ``make``, and return that function."""
    from torch import is_grad_enabled
    from torch.autograd import forward_ad

    filename = f"<tunedgemm hot function {name} #{len(_FILES)}>"
    _FILES.append(filename)
    # linecache keeps entries without a modification time, as for attrs' methods.
    linecache.cache[filename] = len(text), None, text.splitlines(keepends=True), filename
    scope: dict[str, Any] = {"__name__": __name__, "is_grad_enabled": is_grad_enabled, "forward_ad": forward_ad}
    exec(compile(text, filename, "exec"), scope)
    factory: Callable[..., Any] = scope["make"]
    return factory


_FILES: list[str] = []

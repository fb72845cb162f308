"""Give a DeepGEMM that registers its functions with torch the form of its former module `_C`.

Since 2.8, as in vLLM 0.32 and newer, the extension defines ``torch.ops.deep_gemm``, and `_C.py`
calls that. Torch takes a namespace once a process, and the linker joins the extension's settings
with those of any other copy. A private copy in memory has another namespace, and its settings to
itself. No file is changed.
"""

from __future__ import annotations

import atexit
import ctypes
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs

#: Namespace of the extension's operations, as the text in it.
NAMESPACE = b"\0deep_gemm\0"
#: Type of the section with the dynamic symbols, and bytes of a symbol. The linker joins symbols of
#: this binding among all libraries of a process.
_DYNSYM, _SYMBOL, _UNIQUE = 11, 24, 10


@attrs.frozen
class Operation:
    """An operation of torch behind a function of `_C`.

    Attributes:
        names: its names, the newest first.
        given: the arguments that are passed by position, by their names in vLLM's copy and others';
            an empty name is not checked.
        scaled: whether the function has pairs of a matrix and its scales.
    """

    names: tuple[str, ...]
    given: tuple[str, ...] = ()
    scaled: bool = False


_PAIRS = ("a", "sfa a_sf", "b", "sfb b_sf", "d")
#: Functions of `_C` that the plugin calls. The products also get `compiled_dims` by name.
OPERATIONS = {
    "init": Operation(("init",), ("",)),
    "set_num_sms": Operation(("set_num_sms",), ("",)),
    "get_num_sms": Operation(("get_num_sms",)),
    "set_pdl": Operation(("set_pdl",), ("",)),
    "set_block_size_multiple_of": Operation(("set_block_size_multiple_of",), ("",)),
    "set_mk_alignment_for_contiguous_layout": Operation(("set_mk_alignment_for_contiguous_layout",), ("",)),
    "bf16_gemm_nt": Operation(("bf16_gemm_nt",), ("a", "b", "d")),
    "fp8_gemm_nt": Operation(("fp8_fp4_gemm_nt", "fp8_gemm_nt"), _PAIRS, scaled=True),
    "m_grouped_fp8_gemm_nt_contiguous": Operation(
        ("m_grouped_fp8_fp4_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_contiguous"), (*_PAIRS, "grouped_layout"), scaled=True
    ),
    "m_grouped_fp8_gemm_nt_masked": Operation(
        ("m_grouped_fp8_fp4_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked"), (*_PAIRS, "masked_m", "expected_m"), scaled=True
    ),
}
#: Arguments that SGLang's copy requires, with the value that changes nothing; `init` and
#: ``set_block_size_multiple_of`` are given the first two.
_DEFAULTS = {
    "cuda_home": "",
    "n": 1,
    "compiled_dims": "nk",
    "disable_ue8m0_cast": False,
    "use_psum_layout": False,
    "ensure_zero_padding": True,
}


def private_content(content: bytes, namespace: str) -> bytes:
    """Return the extension with another namespace of the same length, and with settings of a copy.

    Raises:
        ImportError: it registers nothing, or is damaged.
    """
    own = b"\0" + namespace.encode() + b"\0"
    if len(own) != len(NAMESPACE):
        raise AssertionError(f"{namespace}: must be as long as the library's namespace")
    if content[:6] != b"\x7fELF\x02\x01" or NAMESPACE not in content:
        raise ImportError("it registers nothing as torch.ops.deep_gemm")
    copy = bytearray(content.replace(NAMESPACE, own))
    has_symbols = False
    try:
        sections, size, count = struct.unpack_from("<Q", copy, 40)[0], *struct.unpack_from("<HH", copy, 58)
        for index in range(count):
            kind, at, length = (struct.unpack_from(form, copy, sections + index * size + place)[0] for form, place in _SECTION)
            has_symbols = has_symbols or kind == _DYNSYM
            for symbol in range(at, at + length, _SYMBOL) if kind == _DYNSYM else ():
                info, defined = copy[symbol + 4], struct.unpack_from("<H", copy, symbol + 6)[0]
                if info >> 4 == _UNIQUE and defined:
                    copy[symbol + 4] = info & 15  # a local symbol of the same type
    except (struct.error, IndexError, OverflowError) as error:
        raise ImportError(f"it is damaged: {error}") from error
    if not has_symbols:  # the linker finds symbols without sections, and would join the settings
        raise ImportError("it has no section of dynamic symbols")
    return bytes(copy)


#: Format and place of a section's type, offset and length in its header.
_SECTION = (("<I", 4), ("<Q", 24), ("<Q", 32))


def load(path: str, namespace: str) -> Any:
    """Load a private copy from a path, and return an object with the functions of `_C`.

    Functions that this version lacks are absent.

    Raises:
        ImportError: it does not load, or takes other arguments than those passed here.
    """
    import torch

    try:
        ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(str(error)) from error
    operations = getattr(torch.ops, namespace)
    if close := _found(operations, ("shutdown",)):  # cuBLASLt's handles go before the library
        atexit.register(close)
    functions = SimpleNamespace()
    for name, operation in OPERATIONS.items():
        if found := _found(operations, operation.names):
            _check(name, operation, found)
            setattr(functions, name, _function(name, operation, found))
    return functions


def _found(operations: Any, names: tuple[str, ...]) -> Any:
    """Return the first operation that is registered, or None."""
    return next((found.default for name in names if (found := getattr(operations, name, None)) is not None), None)


def _check(name: str, operation: Operation, found: Any) -> None:
    """Check that an operation takes what is passed here.

    Raises:
        ImportError: it does not; the message has its schema.
    """
    arguments, count = found._schema.arguments, len(operation.given)
    fits = len(arguments) >= count
    fits = fits and all(not wanted or have.name in wanted.split() for wanted, have in zip(operation.given, arguments, strict=False))
    named = {"compiled_dims"} if "d" in operation.given else set()
    unknown = [key for key, value in _others(operation, found).items() if value is ...]
    if not fits or unknown or named - {argument.name for argument in arguments[count:]}:
        wanted = ", ".join((*(names.split()[0] for names in operation.given if names), *sorted(named))) or f"{count} arguments"
        raise ImportError(f"{name} must take {wanted} (got {found._schema})")


def _others(operation: Operation, found: Any) -> dict[str, Any]:
    """Return the other arguments that SGLang's copy requires, with the value that changes nothing.

    It is ... for an argument without such a value.
    """
    import torch

    required = (each for each in found._schema.arguments[len(operation.given) :] if not each.has_default_value())
    return {each.name: _DEFAULTS.get(each.name, None if isinstance(each.type, torch.OptionalType) else ...) for each in required}


def _function(name: str, operation: Operation, found: Any) -> Callable[..., Any]:
    """Return a function with the arguments of `_C`'s."""
    others = _others(operation, found)
    if operation.given[:1] == ("a",):
        product = (lambda *matrices, **named: found(*matrices, **{**others, **named})) if others else found
        return (lambda a, b, d, *more, **named: product(*a, *b, d, *more, **named)) if operation.scaled else product
    if name == "init":  # vLLM's reads CUDA_HOME
        return lambda folder, home: found(folder, *[home] * ("cuda_home" in others))
    if name == "set_block_size_multiple_of":
        return lambda value: found(*value) if others else found(list(value))
    return found  # type: ignore[no-any-return]

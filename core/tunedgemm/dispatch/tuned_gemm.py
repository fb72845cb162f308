"""TunedGemm: AITER's class, its default instance, and `call` for any op by name."""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tunedgemm.backends.registry import Registry
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import Settings
from tunedgemm.ops import DEFAULT_OP, functions, op_named
from tunedgemm.ops.op import Function
from tunedgemm.process.forksafe import ForkSafeLock

_PACKAGE = __name__.partition(".")[0]


class TunedGemm:
    """One set of tables with every op's public functions as attributes; AITER's ``TunedGemm``.

    Copies and pickles have its registry, settings and files. `tgemm` and its functions are copied
    and pickled by reference.

    Args:
        registry, settings: used in place of the installed backends and of the environment's
            settings.
        above: by op, tuned files that rank above all layers.
    """

    def __init__(
        self, registry: Registry | None = None, *, settings: Settings | None = None, above: Mapping[str, tuple[Path, ...]] | None = None
    ) -> None:
        self._configured = (registry, settings)
        self._above = dict(above or {})
        self._dispatchers: dict[str, Dispatcher] = {}
        self._lock = ForkSafeLock(awaited=True)
        self.dispatcher = self.of(DEFAULT_OP)
        _ = self.gemm_a16w16  # with its other spellings, `mm` among them

    def of(self, op: str) -> Dispatcher:
        """Return the dispatcher of an op, made at its first use.

        Raises:
            UnknownOpError: no such op.
        """
        dispatcher = self._dispatchers.get(op)
        if dispatcher is None:
            with self._lock:
                dispatcher = self._dispatchers.setdefault(op, self._new_dispatcher(op))
        return dispatcher

    def _new_dispatcher(self, op: str) -> Dispatcher:
        registry, settings = self._configured
        return Dispatcher(op_named(op), registry, settings=settings, above=self._above.get(op, ()))

    def _files(self) -> dict[str, tuple[Path, ...]]:
        return self._above | {op: dispatcher.above for op, dispatcher in self._dispatchers.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings, without launchers; `tgemm` by its name."""
        if self is tgemm:
            return _public, ("tgemm",)
        return _rebuilt, (type(self), *self._configured, self._files())

    def __copy__(self) -> TunedGemm:
        """Make an instance with the same registry, settings and files, and its own launchers."""
        return self if self is tgemm else _rebuilt(type(self), *self._configured, self._files())

    def __deepcopy__(self, memo: dict[int, Any]) -> TunedGemm:
        """Copy as `copy.copy` does: backends are shared."""
        return self.__copy__()

    @property
    def dispatchers(self) -> tuple[Dispatcher, ...]:
        """Return the dispatchers in use."""
        return tuple(self._dispatchers.values())

    def __getattr__(self, name: str) -> Function:
        """Return the public function of that name, of whichever op has it."""
        op = None if name.startswith("_") else functions().get(name)
        if op is None or op.entry is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; no op has a function of this name")
        entry = op.entry(self.of(op.name))
        for spelling, function in entry.items():
            if isinstance(function, types.FunctionType):  # pickled by name
                function.__module__, function.__qualname__ = _PACKAGE, f"tgemm.{spelling}"
        self.__dict__.update(entry)
        return entry[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *functions()})

    def call(self, op: str, *operands: torch.Tensor | None, otype: torch.dtype | None = None, **fields: Any) -> torch.Tensor:
        """Call any op by its name; see `tunedgemm.call`."""
        return self.of(op).call(*operands, otype=otype, **fields)

    def load_config(self, path: str | Path, op: str = DEFAULT_OP) -> None:
        """Put a tuned CSV of an op above every other layer, for this instance alone.

        Raises:
            TableError: the file cannot be read as a table of this op.
            UnknownOpError: no such op.
        """
        self.of(op).load(path)


def _public(name: str) -> Any:
    """Return a public name of the package, whose first use teaches compilers the functions of `tgemm`."""
    return getattr(importlib.import_module(_PACKAGE), name)


def _rebuilt(kind: type[TunedGemm], registry: Registry | None, settings: Settings | None, above: dict[str, tuple[Path, ...]]) -> TunedGemm:
    """Rebuild an instance from the parts of `__reduce__`."""
    return kind(registry, settings=settings, above=above)


tgemm = TunedGemm()


def dispatcher(op: str = DEFAULT_OP) -> Dispatcher:
    """Return the dispatcher behind an op's public functions, made at its first use.

    Raises:
        UnknownOpError: no such op.
    """
    return tgemm.of(op)


def call(op: str, *operands: torch.Tensor | None, otype: torch.dtype | None = None, **fields: Any) -> torch.Tensor:
    """Call an op by its name, as its public function would be; the way to an op without one.

    Args:
        op: name of the op.
        operands: in the op's order (`Op.operands`); absent ones are None, or left out at the end.
        otype: dtype of the output; the op's default if absent.
        fields: further arguments of the op's `shape_of`.

    Returns:
        A new tensor.

    Raises:
        UnknownOpError: no such op.
        OperandError: the operands do not form this op.
    """
    return tgemm.call(op, *operands, otype=otype, **fields)


def reload() -> None:
    """Read the environment, tables and backends again, and forget every bound launcher."""
    for used in tgemm.dispatchers:
        used.reload()

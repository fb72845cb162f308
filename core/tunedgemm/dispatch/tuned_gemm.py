"""TunedGemm: AITER's class, its default instance, and `call` for any op by name."""

from __future__ import annotations

import contextlib
import importlib
import os
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tunedgemm.backends.registry import Registry
from tunedgemm.dispatch.dispatcher import Dispatcher
from tunedgemm.dispatch.settings import BATCH_INVARIANT, Settings
from tunedgemm.ops import DEFAULT_OP, functions, op_named
from tunedgemm.ops.op import Function
from tunedgemm.process.forksafe import ForkSafeLock

_PACKAGE = __name__.partition(".")[0]


class TunedGemm:
    """A set of tables, with every op's public functions as attributes; AITER's ``TunedGemm``.

    Copies and pickles keep the registry, settings and files. `tgemm` and its functions are copied
    and pickled by reference.

    Args:
        registry: replaces the installed backends.
        settings: replace those of the environment.
        above: maps an op to tuned files that rank above all layers.
    """

    def __init__(
        self, registry: Registry | None = None, *, settings: Settings | None = None, above: Mapping[str, tuple[Path, ...]] | None = None
    ) -> None:
        self._configured = (registry, settings)
        self._above = dict(above or {})
        self._dispatchers: dict[str, Dispatcher] = {}
        self._lock = ForkSafeLock(awaited=True)
        self.dispatcher = self.of(DEFAULT_OP)
        _ = self.gemm_a16w16  # also sets its other spellings, such as `mm`

    def of(self, op: str) -> Dispatcher:
        """Return the dispatcher of an op, created at first use.

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
        """Pickle the configuration without launchers; `tgemm` by reference."""
        if self is tgemm:
            return _public, ("tgemm",)
        return _rebuilt, (type(self), *self._configured, self._files())

    def __copy__(self) -> TunedGemm:
        """Copy the configuration, without launchers; `tgemm` returns itself."""
        return self if self is tgemm else _rebuilt(type(self), *self._configured, self._files())

    def __deepcopy__(self, memo: dict[int, Any]) -> TunedGemm:
        """Copy like `copy.copy`; backends are shared."""
        return self.__copy__()

    @property
    def dispatchers(self) -> tuple[Dispatcher, ...]:
        """Return the dispatchers in use."""
        return tuple(self._dispatchers.values())

    def __getattr__(self, name: str) -> Function:
        """Return the public function of this name, of whichever op defines it."""
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
        """Add a tuned CSV file above all other layers of an op, for this instance only.

        Raises:
            TableError: the file is not a valid table of this op.
            UnknownOpError: no such op.
        """
        self.of(op).load(path)


def _public(name: str) -> Any:
    """Return a public name of the package; its first use registers `tgemm` with compilers."""
    return getattr(importlib.import_module(_PACKAGE), name)


def _rebuilt(kind: type[TunedGemm], registry: Registry | None, settings: Settings | None, above: dict[str, tuple[Path, ...]]) -> TunedGemm:
    """Rebuild an instance from the parts of `__reduce__`."""
    return kind(registry, settings=settings, above=above)


tgemm = TunedGemm()

#: Values of the variable before each active block of `batch_invariant`.
_blocks: list[str | None] = []
_blocks_lock = ForkSafeLock()


def dispatcher(op: str = DEFAULT_OP) -> Dispatcher:
    """Return the dispatcher behind an op's public functions, created at first use.

    Raises:
        UnknownOpError: no such op.
    """
    return tgemm.of(op)


def call(op: str, *operands: torch.Tensor | None, otype: torch.dtype | None = None, **fields: Any) -> torch.Tensor:
    """Call an op by its name, also one without a public function.

    Args:
        op: name of the op.
        operands: in the op's order (`Op.operands`); absent ones are None, or left out at the end.
        otype: output dtype; None for the op's default.
        fields: further keyword arguments of the op's `shape_of`.

    Returns:
        A new tensor.

    Raises:
        UnknownOpError: no such op.
        OperandError: the operands do not form this op.
    """
    return tgemm.call(op, *operands, otype=otype, **fields)


def set_batch_invariant(on: bool = True) -> None:
    """Turn batch-invariant mode on or off for `tgemm`, the public functions and later child processes.

    It sets ``TUNEDGEMM_BATCH_INVARIANT`` and reloads the dispatchers that it changes. Other
    instances of `TunedGemm` read the variable when they are made or reloaded.
    """
    os.environ[BATCH_INVARIANT] = "1" if on else "0"
    _follow_variable()


def _follow_variable() -> None:
    """Reload the dispatchers of `tgemm` whose mode the variable changes."""
    on = Settings.from_environment().batch_invariant
    for used in tgemm.dispatchers:
        if used.settings.batch_invariant != on:
            used.reload()


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Turn batch-invariant mode on inside the block, in all threads; see `set_batch_invariant`.

    Blocks may be nested and overlap: the mode is as before when the last one ends.
    """
    with _blocks_lock:
        _blocks.append(os.environ.get(BATCH_INVARIANT))
        set_batch_invariant()
    try:
        yield
    finally:
        with _blocks_lock:
            before = _blocks.pop()
            if not _blocks:
                os.environ.pop(BATCH_INVARIANT, None)
                os.environ.update({} if before is None else {BATCH_INVARIANT: before})
                _follow_variable()


def reload() -> None:
    """Reread the environment, tables and backends, and drop all bound launchers."""
    for used in tgemm.dispatchers:
        used.reload()

"""Watch the calls of a launcher: allocations, torch operations, swallowed exceptions.

Everything that passes torch's dispatcher is seen, also from C++.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tunedgemm.backends.launcher import Launcher

_GUARD = 512  # bytes before and after each allocation; a multiple of every alignment that kernels need
_CANARY = 0xA5
_aten = torch.ops.aten
_ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.empty_strided.default,
    _aten.new_empty_strided.default,
)


@classmethod  # type: ignore[misc]
def never_compiled(cls: type) -> bool:
    """Return False, so that torch does not import its compiler, which takes a second."""
    del cls
    return False


class Poisoned(TorchDispatchMode):
    """Turns each allocation into a NaN-filled view between canaries.

    Dtypes without NaN are filled with bytes 0xFF.
    """

    _should_skip_dynamo = never_compiled

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fresh = func(*args, **(kwargs or {}))
        if func not in _ALLOCATIONS or fresh.layout is not torch.strided or fresh.is_meta:
            return fresh
        extent = fresh.untyped_storage().nbytes()
        buffer = torch.full((extent + 2 * _GUARD,), 0xFF, dtype=torch.uint8, device=fresh.device)
        buffer[:_GUARD] = _CANARY
        buffer[_GUARD + extent :] = _CANARY
        self._buffers.append(buffer)
        typed = buffer[_GUARD : _GUARD + extent].view(fresh.dtype)
        return typed.as_strided(fresh.size(), fresh.stride(), _GUARD // fresh.element_size())

    def overwritten(self) -> bool:
        """Check whether a canary was overwritten."""
        return any(bool((end != _CANARY).any()) for buffer in self._buffers for end in (buffer[:_GUARD], buffer[-_GUARD:]))


class Traced(TorchDispatchMode):
    """Records the storages that operations allocate, to find those that stay alive."""

    _should_skip_dynamo = never_compiled

    def __init__(self) -> None:
        super().__init__()
        self._allocated: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        of_arguments = {storage._cdata for storage in storages_of([*args, *(kwargs or {}).values()])}
        for storage in storages_of(results if isinstance(results, tuple | list) else [results]):
            if storage._cdata not in of_arguments:  # neither a view of an argument nor the argument, changed in place
                self._allocated[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return results

    def made(self, tensor: torch.Tensor) -> bool:
        """Check that an operation allocated a tensor's storage, by torch's allocator.

        Storages of foreign memory (`from_blob`, numpy) are not resizable.
        """
        storage = tensor.untyped_storage()
        return storage._cdata in self._allocated and storage.resizable()

    def held(self) -> int:
        """Return the bytes of live storages."""
        return sum(size for reference, size in self._allocated.values() if not reference.expired())


def storages_of(values: Sequence[Any]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, and storages, among values."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    of_tensors = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
    return [*of_tensors, *(value for value in values if isinstance(value, torch.UntypedStorage))]


class Dispatched(TorchDispatchMode):
    """Records dispatched operations, except allocations and views."""

    _should_skip_dynamo = never_compiled

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func in _ALLOCATIONS):
            forms = [(tuple(arg.shape), arg.dtype) for arg in args if isinstance(arg, torch.Tensor)]
            self.operations.append((str(func), *forms))
        return func(*args, **(kwargs or {}))


def dispatched(launcher: Launcher, operands: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the torch operations of a call, with the sizes and dtypes of their operands."""
    with Dispatched() as mode, torch.no_grad():
        launcher.call(*operands)
    recorded: list[tuple[Any, ...]] = mode.operations
    return recorded


@contextlib.contextmanager
def swallowed_exceptions(found: list[str]) -> Iterator[None]:
    """Collect exceptions raised or caught by code outside torch and this package."""
    own = {"tunedgemm", "torch", *sys.stdlib_module_names}

    def trace(frame: Any, event: str, argument: Any) -> Any:
        module = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if event == "exception" and module not in own and not issubclass(argument[0], StopIteration | GeneratorExit):
            found.append(f"{argument[0].__name__}: {argument[1]}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)

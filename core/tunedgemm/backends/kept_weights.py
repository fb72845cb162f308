"""Copies of weights in another form, which live as long as their weights, within a limit.

A copy belongs to the storage of its weight and is freed with it, never before: a captured graph may
hold its address. So the limit evicts nothing. A model reads its weights in a cycle, of which an
eviction of the least recently used copy would always drop the next one. A weight beyond the limit
is refused, and its calls take the next kernel.

A write that torch counts renews the copy in its memory at the next call, which graphs follow. After
other writes, or for graphs that are replayed alone, call `renew`.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

import attrs

from tunedgemm.backends.launcher import WeightRefused
from tunedgemm.process.forksafe import ForkSafeLock
from tunedgemm.process.memory import is_out_of_memory
from tunedgemm.process.variables import read

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("tunedgemm")

#: The variable with the limit of all copies of a process; none are made without it.
LIMIT = "TUNEDGEMM_DEQUANTISED_BYTES"
#: Attribute of a weight's storage: its copies by key.
_ATTRIBUTE = "_tunedgemm_kept"
_lock = ForkSafeLock()

#: Computes the copy of a weight from the operands that define it.
Make = Callable[..., "torch.Tensor"]


@attrs.define(eq=False, slots=True, weakref_slot=True)
class _Copy:
    """A copy of a weight.

    Attributes:
        values: the copy.
        versions: versions of the operands that it was made of.
        place: offset, sizes and dtype of the weight in its storage.
        others: the other operands, alive so that no other tensor takes their addresses; only their
            places in the weight's storage, which they would keep alive.
        make: computes the copy.
        seconds: the time that it took at first.
    """

    values: torch.Tensor
    versions: tuple[int, ...]
    place: tuple[Any, ...]
    others: tuple[Any, ...]
    make: Make
    seconds: float


_used = [0]


def _count(nbytes: int) -> None:
    with _lock:
        _used[0] += nbytes


def limit() -> int:
    """Return the limit in bytes; 0 if no copies are made."""
    return int(read(LIMIT))


def used() -> int:
    """Return the bytes of all copies."""
    return _used[0]


def kept(operands: tuple[Any, ...], form: Hashable, nbytes: int, make: Make) -> torch.Tensor:
    """Return the copy of a weight, made or renewed if necessary.

    Args:
        operands: the contiguous weight, then others that define it; absent ones are None.
        form: distinguishes copies of one weight.
        nbytes: size of the copy.
        make: computes it from the operands.

    Raises:
        WeightRefused: it is missing or outdated in a graph capture, torch does not count writes to
            an operand, the limit is reached, or memory is short.
    """
    weight, given = operands[0], [operand for operand in operands if operand is not None]
    try:
        versions = tuple(operand._version for operand in given)
    except RuntimeError:
        raise WeightRefused("torch counts no writes to tensors made in inference mode") from None
    key = (form, _place(weight), *(None if operand is None else operand.data_ptr() for operand in operands))
    copy = getattr(weight.untyped_storage(), _ATTRIBUTE, {}).get(key)
    return copy.values if copy is not None and copy.versions == versions else _made(operands, key, nbytes, make)


def _made(operands: tuple[Any, ...], key: Any, nbytes: int, make: Make) -> torch.Tensor:
    """Make the copy of a weight, or renew it in its memory."""
    import torch

    weight, given = operands[0], [operand for operand in operands if operand is not None]
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        raise WeightRefused("a graph capture began before its first call")
    if any(not operand.is_cuda and operand.is_shared() for operand in given):
        raise WeightRefused("other processes may write to its shared memory")
    with _lock:
        versions = tuple(operand._version for operand in given)
        storage: Any = weight.untyped_storage()
        copies: dict[Any, _Copy] = storage.__dict__.setdefault(_ATTRIBUTE, {})
        copy = copies.get(key)
        if copy is None and (present := used()) + nbytes > (most := limit()):
            have = f"{present:,} of {most:,} bytes are in use"
            raise WeightRefused(f"{LIMIT}: {have}, and this weight needs {nbytes:,}; set a higher limit")
        if copy is None or copy.versions != versions:
            _synchronize(weight)
            start, values = time.perf_counter(), _computed(make, operands)
            if copy is not None:
                with torch.inference_mode(False):
                    copy.values.copy_(values)
            _synchronize(values)
            if copy is None:
                others = tuple(None if operand is None else _held(operand, storage) for operand in operands[1:])
                copy = copies[key] = _Copy(values, versions, key[1], others, make, time.perf_counter() - start)
                _count(values.nbytes)
                weakref.finalize(copy, _count, -values.nbytes).atexit = False
                _log.debug("dequantised a weight of %s in %.2f ms; %d bytes are kept", key[0][0], copy.seconds * 1e3, used())
            copy.versions = versions  # last: until then other threads wait for the lock
        return copy.values


def _computed(make: Make, operands: tuple[Any, ...]) -> torch.Tensor:
    """Compute a copy outside inference mode; a refusal without the memory."""
    import torch

    try:
        with torch.no_grad(), torch.inference_mode(False):
            return make(*operands)
    except Exception as error:
        if is_out_of_memory(error):
            raise WeightRefused("the device has no memory for a copy") from error
        raise


def _synchronize(values: torch.Tensor) -> None:
    """Wait for a copy, since other threads may read it on other streams."""
    import torch

    if values.is_cuda:
        torch.cuda.current_stream(values.device).synchronize()


def _place(operand: torch.Tensor) -> tuple[Any, ...]:
    return operand.storage_offset(), operand.shape, operand.dtype


def _held(operand: torch.Tensor, storage: Any) -> Any:
    return _place(operand) if operand.untyped_storage()._cdata == storage._cdata else operand.detach()


def _at(storage: Any, place: Any) -> Any:
    """Return the operand at a place of a storage; others unchanged."""
    import torch

    return torch.empty(0, dtype=place[2], device=storage.device).set_(storage, *place[:2]) if isinstance(place, tuple) else place


def renew(tensors: Iterable[Any]) -> None:
    """Renew the copies of these weights at once, after writes that torch did not count."""
    import torch

    for tensor in tensors if used() else ():
        try:
            storage: Any = torch.Tensor.untyped_storage(tensor)
        except (NotImplementedError, RuntimeError, TypeError):  # no memory, or no tensor
            continue
        with _lock, torch.no_grad(), torch.inference_mode(False):
            for copy in list(getattr(storage, _ATTRIBUTE, {}).values()):
                copy.values.copy_(copy.make(*(_at(storage, each) for each in (copy.place, *copy.others))))
                _synchronize(copy.values)


def cost(operands: Iterable[Any]) -> str:
    """Describe the copies of weights: the time that they took once, and their sizes."""
    copies: list[_Copy] = [
        copy for each in operands if each is not None for copy in getattr(each.untyped_storage(), _ATTRIBUTE, {}).values()
    ]
    return "; ".join(f"dequantised once in {copy.seconds * 1e3:.2f} ms, {copy.values.nbytes:,} bytes kept" for copy in copies)

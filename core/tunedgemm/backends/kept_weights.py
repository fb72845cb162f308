"""Copies of weights in another form, which live as long as their weights, within a limit.

A copy belongs to the storage of its weight and is freed with it, never before: a captured graph may
hold its address. So the limit evicts nothing. A model reads its weights in a cycle, of which an
eviction of the least recently used copy would always drop the next one. A weight beyond the limit
is refused, and its calls take the next kernel.

A copy whose other operands were freed, such as scales that new ones replaced, is dropped, since no
call can mean it. One that a capture has read stays until its weight is freed. Operands that are
parts of a larger storage count as freed with that.

A write that torch counts renews the copy in its memory at the next call, which graphs follow. After
other writes, or for graphs that are replayed alone, call `renew`.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import Counter
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
#: Most copies of a weight that are dropped. With scales that each call makes, each would decode it.
_MOST_DROPPED = 8
_lock = ForkSafeLock()

#: Computes the copy of a weight from the operands that define it.
Make = Callable[..., "torch.Tensor"]


@attrs.define(eq=False, slots=True, weakref_slot=True)
class _Copy:
    """A copy of a weight.

    Attributes:
        versions: versions of the operands that it was made of.
        places: offset, sizes and dtype of each operand in its storage, and a reference to that
            unless it is the weight's; the copy is dropped before other tensors take an address.
        make: computes the copy.
        values: the copy; None if it could not be computed.
        refusal: why it could not be computed from these versions; "" if it was.
        seconds: the time that it took at first.
        is_captured: whether a graph capture has read it.
    """

    versions: tuple[int, ...]
    places: tuple[Any, ...]
    make: Make
    values: torch.Tensor | None = None
    refusal: str = ""
    seconds: float = 0.0
    is_captured: bool = False

    def take(self, values: torch.Tensor | None) -> None:
        """Take computed values, in the memory of earlier ones."""
        import torch

        if self.values is None and values is not None:
            self.values = values
            _count(values.nbytes)
            weakref.finalize(self, _count, -values.nbytes).atexit = False
        elif self.values is not None and values is not None:
            with torch.inference_mode(False):
                self.values.copy_(values)


class _Copies(dict[Any, _Copy]):
    """The copies of the weights in a storage by key, and how many were dropped of each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: Counter[Any] = Counter()

    def drop(self, key: Any) -> None:
        """Drop a copy whose operands were freed; one that a graph reads stays without a key of calls."""
        copy = self.pop(key, None)
        if copy is not None and copy.is_captured:
            self[object()] = copy
        self.dropped[key[:2]] += copy is not None


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
        operands: the weight, then others that define it, all contiguous; absent ones are None.
        form: distinguishes copies of one weight.
        nbytes: size of the copy.
        make: computes it from the operands.

    Raises:
        WeightRefused: it is missing or outdated in a graph capture, or torch does not count writes
            to an operand. The limit is reached, memory is short, or the computation fails.
    """
    weight, given = operands[0], [operand for operand in operands if operand is not None]
    try:
        versions = tuple(operand._version for operand in given)
    except RuntimeError:
        raise WeightRefused("torch counts no writes to tensors made in inference mode") from None
    key = (form, _place(weight), *(None if operand is None else operand.data_ptr() for operand in operands))
    copy = getattr(weight.untyped_storage(), _ATTRIBUTE, {}).get(key)
    if copy is None or copy.versions != versions:
        copy = _made(operands, key, nbytes, make)
    if copy.values is None or copy.refusal:
        raise WeightRefused(copy.refusal)
    if not copy.is_captured and _is_capturing(weight):
        copy.is_captured = True
    return copy.values


def _is_capturing(weight: torch.Tensor) -> bool:
    import torch

    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _made(operands: tuple[Any, ...], key: Any, nbytes: int, make: Make) -> _Copy:
    """Make the copy of a weight, or renew it in its memory."""
    weight, given = operands[0], [operand for operand in operands if operand is not None]
    if _is_capturing(weight):
        raise WeightRefused("a graph capture began before its first call")
    if any(not operand.is_cuda and operand.is_shared() for operand in given):
        raise WeightRefused("other processes may write to its shared memory")
    with _lock:
        versions = tuple(operand._version for operand in given)
        storage: Any = weight.untyped_storage()
        copies: _Copies = storage.__dict__.setdefault(_ATTRIBUTE, _Copies())
        copy = copies.get(key)
        if copy is None:
            _check_room(nbytes, copies.dropped[key[:2]])
        if copy is None or copy.versions != versions:
            _synchronize(weight)
            start = time.perf_counter()
            values, refusal = _computed(make, operands)
            if copy is None:
                places = tuple(_held(operand, storage, weakref.ref(copies), key) for operand in operands)
                copy = copies[key] = _Copy((), places, make)
            copy.take(values)
            _synchronize(weight)
            copy.seconds, copy.refusal = copy.seconds or time.perf_counter() - start, refusal
            _log.debug("dequantised a weight of %s in %.2f ms; %d bytes are kept", key[0][0], copy.seconds * 1e3, used())
            copy.versions = versions  # last: until then other threads wait for the lock
        return copy


def _check_room(nbytes: int, dropped: int) -> None:
    """Check that a further copy may be made.

    Raises:
        WeightRefused: it is beyond the limit, or too many of the weight were dropped.
    """
    if (present := used()) + nbytes > (most := limit()):
        have = f"{present:,} of {most:,} bytes are in use"
        raise WeightRefused(f"{LIMIT}: {have}, and this weight needs {nbytes:,}; set a higher limit")
    if dropped >= _MOST_DROPPED:
        raise WeightRefused(f"{dropped} copies were dropped with its scales, which were freed; keep them between calls")


def _computed(make: Make, operands: tuple[Any, ...]) -> tuple[torch.Tensor | None, str]:
    """Compute a copy outside inference mode; return it, or None and why it cannot be computed."""
    import torch

    try:
        with torch.no_grad(), torch.inference_mode(False):
            return make(*operands), ""
    except Exception as error:
        if is_out_of_memory(error):
            raise WeightRefused("the device has no memory for a copy") from error
        fault = f"{type(error).__name__}: {error}"  # the error's frames would keep the weight alive
        _log.warning("a weight is not dequantised, and its calls take the next kernel: %s", fault)
        return None, f"decoding it failed: {fault}"


def _synchronize(values: torch.Tensor) -> None:
    """Wait for a copy, since other threads may read it on other streams."""
    import torch

    if values.is_cuda:
        torch.cuda.current_stream(values.device).synchronize()


def _place(operand: torch.Tensor) -> tuple[Any, ...]:
    return operand.storage_offset(), operand.shape, operand.dtype


def _held(operand: torch.Tensor | None, storage: Any, copies: weakref.ref[_Copies], key: Any) -> Any:
    """Return the place of an operand, and a reference to its storage that drops the copy with it."""
    if operand is None or operand.untyped_storage()._cdata == storage._cdata:
        return None if operand is None else _place(operand)
    return (*_place(operand), weakref.ref(operand.untyped_storage(), functools.partial(_drop, copies, key)))


def _drop(copies: weakref.ref[_Copies], key: Any, _freed: Any) -> None:
    if (present := copies()) is not None:
        present.drop(key)


def _operands(copy: _Copy, storage: Any) -> list[Any]:
    """Return the operands of a copy; none if some were freed."""
    import torch

    owners = [storage if place is None or len(place) == 3 else place[3]() for place in copy.places]
    if any(owner is None for owner in owners):
        return []
    return [
        None if place is None else torch.empty(0, dtype=place[2], device=owner.device).set_(owner, *place[:2])
        for place, owner in zip(copy.places, owners, strict=True)
    ]


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
                if copy.values is not None and (operands := _operands(copy, storage)):
                    copy.values.copy_(copy.make(*operands))
                    _synchronize(copy.values)


def cost(operands: Iterable[Any]) -> str:
    """Describe the copies of weights: the time that they took once, and their sizes."""
    copies: list[_Copy] = [
        copy for each in operands if each is not None for copy in list(getattr(each.untyped_storage(), _ATTRIBUTE, {}).values())
    ]
    given = [(copy.seconds, copy.values.nbytes) for copy in copies if copy.values is not None]
    return "; ".join(f"dequantised once in {seconds * 1e3:.2f} ms, {nbytes:,} bytes kept" for seconds, nbytes in given)

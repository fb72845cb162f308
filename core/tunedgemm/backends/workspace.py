"""Scratch memory for kernels: one growing buffer per (device, stream, thread), and zeroed semaphores.

Threads that launch on one stream must not share: another thread's kernel may run between two
kernels of a call, or between a memset and its kernel. While a graph is captured both come from the
graph's pool instead, because a replay on another stream must not share them. A captured memset
zeroes captured semaphores.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_Place = tuple[int, int, int]
_buffers: dict[_Place, torch.Tensor] = {}
_semaphores: dict[tuple[_Place, int], torch.Tensor] = {}
_ident = threading.get_ident


def _place(device: torch.device) -> _Place | None:
    """Return (device index, stream handle, thread), or None while that stream is being captured."""
    if device.type != "cuda":
        return -1, 0, _ident()
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    # Torch's public functions of these names create an object each time.
    return None if torch._C._cuda_isCurrentStreamCapturing() else (index, torch._C._cuda_getCurrentRawStream(index), _ident())


def workspace(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return scratch of at least *nbytes* bytes (uint8, undefined), shared by the thread's later calls.

    Those calls must be on the same stream.
    """
    return _buffer(_place(device), nbytes, device)


def semaphores(count: int, device: torch.device) -> torch.Tensor:
    """Return *count* int32 counters, zero at entry. The kernel must leave them zero outside graphs."""
    return _counters(_place(device), count, device)


def scratch(nbytes: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `workspace` and `semaphores` with one stream look-up, which is most of their cost."""
    place = _place(device)
    return _buffer(place, nbytes, device), _counters(place, count, device)


def _buffer(place: _Place | None, nbytes: int, device: torch.device) -> torch.Tensor:
    found = None if place is None else _buffers.get(place)
    if found is not None and found.numel() >= nbytes:
        return found
    import torch

    made = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if place is not None:
        _buffers[place] = made
    return made


def _counters(place: _Place | None, count: int, device: torch.device) -> torch.Tensor:
    key = None if place is None else (place, count)
    if key is not None and (found := _semaphores.get(key)) is not None:
        return found
    import torch

    made = torch.zeros(count, dtype=torch.int32, device=device)
    if key is not None:
        _semaphores[key] = made
    return made

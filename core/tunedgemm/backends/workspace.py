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

_StreamKey = tuple[int, int, int]
_buffers: dict[_StreamKey, torch.Tensor] = {}
_semaphores: dict[tuple[_StreamKey, int], torch.Tensor] = {}
_ident = threading.get_ident


def _stream_key(device: torch.device) -> _StreamKey | None:
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
    return _buffer(_stream_key(device), nbytes, device)


def semaphores(count: int, device: torch.device) -> torch.Tensor:
    """Return *count* int32 counters, zero at entry. The kernel must leave them zero outside graphs."""
    return _counters(_stream_key(device), count, device)


def scratch(nbytes: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `workspace` and `semaphores` with one stream look-up, which is most of their cost."""
    stream_key = _stream_key(device)
    return _buffer(stream_key, nbytes, device), _counters(stream_key, count, device)


def _buffer(stream_key: _StreamKey | None, nbytes: int, device: torch.device) -> torch.Tensor:
    buffer = None if stream_key is None else _buffers.get(stream_key)
    if buffer is not None and buffer.numel() >= nbytes:
        return buffer
    import torch

    buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if stream_key is not None:
        _buffers[stream_key] = buffer
    return buffer


def _counters(stream_key: _StreamKey | None, count: int, device: torch.device) -> torch.Tensor:
    key = None if stream_key is None else (stream_key, count)
    if key is not None and (buffer := _semaphores.get(key)) is not None:
        return buffer
    import torch

    buffer = torch.zeros(count, dtype=torch.int32, device=device)
    if key is not None:
        _semaphores[key] = buffer
    return buffer

"""Kernel workspaces: one growing buffer per (device, stream, thread), and zeroed semaphores.

Threads on one stream must not share them: another thread's kernel may run between two kernels of a
call, or between a memset and its kernel. During a graph capture both come from the graph's pool,
because a replay may run on another stream; a captured memset then zeroes the semaphores.
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
    """Return (device index, stream handle, thread); None while the stream is capturing."""
    if device.type != "cuda":
        return -1, 0, _ident()
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    # Torch's public functions of these names create an object each time.
    return None if torch._C._cuda_isCurrentStreamCapturing() else (index, torch._C._cuda_getCurrentRawStream(index), _ident())


def workspace(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return an undefined uint8 buffer of at least *nbytes*, which later calls reuse.

    It is shared by the calls of this thread on the current stream.
    """
    return _buffer(_stream_key(device), nbytes, device)


def semaphores(count: int, device: torch.device) -> torch.Tensor:
    """Return *count* zeroed int32 counters; outside graphs, the kernel must reset them to zero."""
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

"""Scratch memory for kernels: one growing buffer per (device, stream), and zeroed semaphores.

While a graph is captured both come from the graph's own pool instead, because a replay on another stream
must not share them; captured semaphores are zeroed by a captured memset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_buffers: dict[tuple[int, int], torch.Tensor] = {}
_semaphores: dict[tuple[int, int, int], torch.Tensor] = {}


def _place(device: torch.device) -> tuple[int, int] | None:
    """(device index, stream handle), or None while that stream is being captured."""
    import torch

    if device.type != "cuda":
        import threading

        return -1, threading.get_ident()
    index = torch.cuda.current_device() if device.index is None else device.index
    # Torch's own functions of these names make an object each time.
    return None if torch._C._cuda_isCurrentStreamCapturing() else (index, torch._C._cuda_getCurrentRawStream(index))


def workspace(nbytes: int, device: torch.device) -> torch.Tensor:
    """Scratch of at least *nbytes* bytes (uint8, contents undefined) that later calls on the stream may reuse."""
    import torch

    place = _place(device)
    if place is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    buffer = _buffers.get(place)
    if buffer is None or buffer.numel() < nbytes:
        buffer = _buffers[place] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return buffer


def semaphores(count: int, device: torch.device) -> torch.Tensor:
    """*count* int32 counters, zero at entry. The kernel must leave them zero outside graphs."""
    import torch

    place = _place(device)
    if place is None:
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (*place, count)
    if key not in _semaphores:
        _semaphores[key] = torch.zeros(count, dtype=torch.int32, device=device)
    return _semaphores[key]

"""Copy and overwrite tensors as bytes, since torch supports few operations on narrow dtypes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tunedgemm.ops.formats.scales import ShuffledScale, as_shuffled_scale
from tunedgemm.ops.formats.shuffle import ShuffledWeight, as_shuffled, plain_weight

if TYPE_CHECKING:
    import torch

#: Bytes before and after a moved tensor, which align it to exactly 16 bytes.
_MARGIN = 272


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the contents as contiguous bytes along the last dimension, in memory order."""
    import torch

    plain = plain_weight(tensor).detach()
    plain = plain if plain.dim() else plain.reshape(1)  # torch cannot view a scalar as bytes
    return plain.view(torch.uint8).contiguous() if plain.element_size() == 1 else plain.contiguous().view(torch.uint8)


def fingerprint(tensors: Iterable[torch.Tensor | None]) -> tuple[Any, ...]:
    """Return shapes and checksums of tensors; any change of a single value changes it."""
    import torch

    present = [tensor for tensor in tensors if tensor is not None]
    contents = [raw(tensor).reshape(-1) for tensor in present]
    sums = [(each if each.numel() % 4 else each.view(torch.int32)).sum(dtype=torch.int64) for each in contents]
    return (*(tensor.shape for tensor in present), *torch.stack(sums).tolist())


def duplicate(tensor: torch.Tensor, *, contiguous: bool = False) -> torch.Tensor:
    """Copy a tensor into new memory; shuffled weights and scales keep their type.

    Args:
        contiguous: make the copy contiguous; else it keeps the strides, unless elements overlap.
    """
    import torch

    if isinstance(tensor, ShuffledWeight):
        return as_shuffled(duplicate(tensor.plain), tensor.layout_name)
    if isinstance(tensor, ShuffledScale):
        return as_shuffled_scale(duplicate(tensor.plain))
    form = torch.contiguous_format if contiguous else torch.preserve_format
    if not contiguous and tensor.layout is torch.strided and _has_gaps(tensor):
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        overwrite(copy, tensor)
        return copy
    if tensor.element_size() > 1:
        return tensor.clone(memory_format=form)
    return tensor.detach().view(torch.uint8).clone(memory_format=form).view(tensor.dtype)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, with strides and type, into the middle of a NaN-filled storage."""
    import torch

    if isinstance(tensor, ShuffledWeight):
        return as_shuffled(moved(tensor.plain), tensor.layout_name)
    if isinstance(tensor, ShuffledScale):
        return as_shuffled_scale(moved(tensor.plain))
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    buffer = torch.full((extent * tensor.element_size() + 2 * _MARGIN,), 0xFF, dtype=torch.uint8, device=tensor.device)
    inner = buffer[_MARGIN : buffer.numel() - _MARGIN].view(tensor.dtype)
    copy = inner.as_strided(tensor.shape, tensor.stride(), _MARGIN // tensor.element_size())
    overwrite(copy, tensor)
    return copy


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Check for gaps between elements that do not overlap."""
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride < extent:
            return False
        extent = stride * size
    return extent > tensor.numel() > 0


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy *source*, of the same shape and dtype, into the memory of *target*.

    The version counter is not incremented, as by fused optimisers and other libraries' kernels.
    """
    import torch

    target, source = plain_weight(target).data, plain_weight(source).data
    if target.element_size() > 1:
        target.copy_(source)
    else:
        target.view(torch.uint8).copy_(source.view(torch.uint8))

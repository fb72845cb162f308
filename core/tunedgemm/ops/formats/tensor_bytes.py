"""Copy and overwrite the contents of tensors of any dtype, as bytes.

Torch has few operations for its narrowest types but viewing them as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tunedgemm.ops.formats.scales import ShuffledScale, as_shuffled_scale
from tunedgemm.ops.formats.shuffle import ShuffledWeight, as_shuffled, plain_weight

if TYPE_CHECKING:
    import torch

#: Bytes around a moved tensor, which is aligned to 16 bytes as operands are, and to no more.
_MARGIN = 272


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the contents as contiguous bytes, the last dimension longer; shuffled weights stay so."""
    import torch

    plain = plain_weight(tensor).detach()
    plain = plain if plain.dim() else plain.reshape(1)  # torch views no scalar as bytes
    return plain.view(torch.uint8).contiguous() if plain.element_size() == 1 else plain.contiguous().view(torch.uint8)


def fingerprint(tensors: Iterable[torch.Tensor | None]) -> tuple[Any, ...]:
    """Return the sizes of tensors and the sums of their contents, which any change of one number changes."""
    import torch

    present = [tensor for tensor in tensors if tensor is not None]
    contents = [raw(tensor).reshape(-1) for tensor in present]
    sums = [(each if each.numel() % 4 else each.view(torch.int32)).sum(dtype=torch.int64) for each in contents]
    return (*(tensor.shape for tensor in present), *torch.stack(sums).tolist())


def duplicate(tensor: torch.Tensor, *, contiguous: bool = False) -> torch.Tensor:
    """Copy a tensor into new memory; shuffled weights and scales stay so.

    Args:
        contiguous: contiguous, whatever the strides of *tensor*, else with its strides, unless
            elements share memory.
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
    """Copy a tensor, with its strides and type, into the middle of a storage of NaN."""
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
    """Check for memory between elements, none of which share any."""
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride < extent:
            return False
        extent = stride * size
    return extent > tensor.numel() > 0


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Put the contents of *source*, of the same shape and dtype, into the memory of *target*.

    Its version counter stays, as under fused optimisers and kernels of other libraries.
    """
    import torch

    target, source = plain_weight(target).data, plain_weight(source).data
    if target.element_size() > 1:
        target.copy_(source)
    else:
        target.view(torch.uint8).copy_(source.view(torch.uint8))
